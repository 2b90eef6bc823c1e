"""What a worker prints: whole lines, each once; and the last of them, whatever the worker died of.

Processes that write to the same pipe, file or terminal at the same time do not get into each
other's lines if each writes a line at once. Python's own streams write a line at once to a terminal
only, C's as well; ``take_output`` makes all of them do it.

A worker's stderr is a pipe to the parent. It is not a file in memory, which never blocks a writer:
``echo > /dev/stderr`` empties a file, nobody can wait for what comes, and nothing limits it. It is
read in the parent, which does not die with the worker: what is in the pipe then is still read.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import io
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from shmvec._core import Channel, buffer_c_lines, flush_c
from shmvec._processes.stacks import OURS, is_wanted

__all__ = ["WorkerStderr", "copy_stderr", "excerpt", "finish_output", "take_output"]


_LONGEST_LINE = 1 << 20  # that is kept until it is whole


def take_output(forked: bool, descriptors: Sequence[int]) -> None:
    """Orders the output of this process.

    Args:
        forked: Whether it is a fork, in which what the parent had not yet written lies as well.
        descriptors: What takes the place of stderr.
    """
    with _discarding(1) if forked else contextlib.nullcontext():
        buffer_c_lines()
    for name, number in (("stdout", 1), ("stderr", 2)):
        ours = vars(sys)[f"__{name}__"]
        current = vars(sys)[name]
        if ours is not None and ours is not current:
            _order(ours, forked)
        setattr(sys, name, _order(current, forked) or _anew(current, number))
    for descriptor in descriptors:
        _redirect(descriptor)
    if is_wanted():
        with contextlib.suppress(OSError, ValueError):  # there is no stderr
            # A crash in C says where in Python it was; not by 2, which envs silence.
            faulthandler.enable([2, *descriptors][-1])


def finish_output() -> None:
    """Writes what is not a whole line yet."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    flush_c()


def _order(stream: Any, forked: bool) -> Any:
    """Has a stream write line by line; None: this is none that does so here."""
    if not isinstance(stream, io.TextIOWrapper):
        # A buffer in memory, or what sends the text somewhere by the parent's threads (IPython). A
        # class of the user's own does as it likes, on streams that were ordered.
        return None if stream is None or isinstance(stream, io.TextIOBase) else stream
    try:
        number = stream.fileno()
        with _discarding(number) if forked else contextlib.nullcontext():
            io.TextIOWrapper.flush(stream)  # whatever the program has put in place of flush()
            stream.reconfigure(line_buffering=True, write_through=False)
    except (OSError, ValueError):  # it is closed, or in memory (pytest)
        return None
    with contextlib.suppress(AttributeError):
        stream._CHUNK_SIZE = _LONGEST_LINE  # type: ignore[attr-defined]
    return stream


def _anew(stream: Any, number: int) -> Any:
    """A stream of a descriptor in place of one that leads nowhere; that itself if there is none."""
    try:
        os.fstat(number)
    except OSError:
        return stream
    encoding = getattr(stream, "encoding", None) or "utf-8"
    errors = getattr(stream, "errors", None) or "backslashreplace"
    made = open(number, "w", buffering=1, encoding=encoding, errors=errors, closefd=False)
    made._CHUNK_SIZE = _LONGEST_LINE  # type: ignore[attr-defined]
    return made


@contextlib.contextmanager
def _discarding(number: int) -> Iterator[None]:
    """What is written to a descriptor meanwhile goes nowhere."""
    try:
        kept = os.dup(number)
    except OSError:  # it is closed
        yield
        return
    inheritable = os.get_inheritable(number)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, number, inheritable)
        yield
    finally:
        os.dup2(kept, number, inheritable)
        os.close(nowhere)
        os.close(kept)


def _redirect(descriptor: int) -> None:
    """Puts what a descriptor leads to in the place of stderr."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        # Where pytest captures, sys.stderr has a descriptor of its own for what 2 means.
        number = sys.stderr.fileno()
        if number > 2 and os.path.sameopenfile(number, 2):
            os.dup2(descriptor, number, inheritable=False)
    os.dup2(descriptor, 2)


_PIPE_BYTES = 1 << 18  # that a worker may write before it waits for this process
_LAST_BYTES = 1 << 16  # that are remembered
_HOLD_S = 0.05  # that a piece of a line waits for the rest
_PATIENCE_S = 1.0  # with a stderr that takes nothing
_PAUSE_S = 0.001
_MOST_LINES = 20
_MOST_BYTES = 4096
_LONGEST_SHOWN = 200
_FATAL = "Fatal Python error"
_UNENDED = re.compile(rf"(?<=[^\n]){_FATAL}: ")  # a line that it was written behind
_HEADS = ("Current thread 0x", "Stack (")  # not Python 3.14's "Current thread's C stack trace"


class WorkerStderr:
    """The stderr of one worker: a pipe, whose end is remembered and passed on to this process's.

    Attributes:
        reader: The end of the pipe that is read; -1: all who could write to it are gone.
        held: What is not passed on yet.
    """

    reader = _writer = -1

    def __init__(self, channel: Channel) -> None:
        """Sends the worker its end of the pipe."""
        self.reader, self._writer = os.pipe()
        os.set_blocking(self.reader, False)
        with contextlib.suppress(OSError):  # this user's pipes have much memory already
            fcntl.fcntl(self.reader, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self.held = bytearray()
        self._last = b""
        self._moved_at = 0.0  # when it was last passed on, or began to be held
        try:
            channel.put(0, b"", [self._writer])
        finally:
            os.close(self._writer)
            self._writer = -1
        with _copier.lock:
            _copier.pipes.append(self)

    def text(self) -> str:
        """The last lines so far; empty if there are none."""
        with _copier.lock:
            self.read()
            _copier.wake()
        return excerpt(self._last)

    def close(self) -> None:
        """Waits until what the worker, which has ended, has written is on stderr, if that takes it.

        What it has started may go on writing.
        """
        _copier.finish(self)

    def read(self) -> None:
        """Takes what is in the pipe now."""
        for _ in range(2):  # all that is there, and the pipe's end
            if self.reader < 0:
                return
            try:
                written = os.read(self.reader, _PIPE_BYTES)
            except BlockingIOError:
                return
            if not written:
                self.drop()
                return
            if not self.held:
                self._moved_at = time.monotonic()
            self.held += written
            self._last = (self._last + written)[-_LAST_BYTES:]

    def ready(self) -> bytes:
        """What may be passed on: lines, and a piece of one that has waited."""
        end = (
            self.held.rfind(b"\n", 0, select.PIPE_BUF) + 1  # a pipe takes so much in one piece
            or self.held.find(b"\n") + 1
            or self.held.rfind(b"\r") + 1  # a bar that shows progress
        )
        waited = time.monotonic() - self._moved_at >= _HOLD_S
        if not end and (waited or self.reader < 0 or len(self.held) >= _PIPE_BYTES):
            end = len(self.held)
        return bytes(self.held[:end])

    def passed(self, count: int) -> None:
        """Notes that so many bytes were passed on."""
        del self.held[:count]
        self._moved_at = time.monotonic()

    def drop(self) -> None:
        """Closes what is open of the pipe."""
        if self._writer >= 0:
            os.close(self._writer)
        if self.reader >= 0:
            os.close(self.reader)
        self.reader = self._writer = -1

    __del__ = drop


class _Copier:
    """A thread that copies what comes out of pipes to this process's stderr.

    It runs while there are pipes, and not during a fork: what forks is then a process without a
    thread of ours. It blocks all signals. A stderr that takes nothing makes it wait, without the
    lock: so others read from the pipes themselves, and wait for it only with a deadline.

    Attributes:
        pipes: Those that someone may still write to, or of which something is held.
        lock: Held by who uses the pipes. Nobody blocks who holds it.
    """

    def __init__(self) -> None:
        """There is no thread yet."""
        self._reset()
        os.register_at_fork(
            before=self._pause, after_in_parent=self._resume, after_in_child=self._forget
        )

    def _reset(self) -> None:
        self.lock = threading.RLock()  # again: a signal's handler may close the vector env
        self.pipes: list[WorkerStderr] = []
        self._copied = 0  # bytes
        self._patience_s = _PATIENCE_S
        self._thread: threading.Thread | None = None  # the last one
        self._alarm = -1  # an eventfd that wakes it; -1: it has ended
        self._paused = False

    def start(self) -> None:
        """Starts the thread, or wakes it if it runs."""
        with self.lock:
            self._paused = False
            if self._alarm >= 0 or not self.pipes:
                self.wake()
                return
            self._alarm = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._thread = threading.Thread(target=self._copy, name="shmvec stderr", daemon=True)
            before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            try:
                self._thread.start()  # it inherits the mask
            except BaseException:
                self._close_alarm()
                raise
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def wake(self) -> None:
        """Has the thread look at everything."""
        if self._alarm >= 0:
            os.eventfd_write(self._alarm, 1)

    def finish(self, pipe: WorkerStderr) -> None:
        """Takes what is in a pipe, and waits until it is passed on, while stderr takes anything."""
        with self.lock:
            pipe.read()
            self._tidy()
            self.start()
        copied, deadline = self._copied, time.monotonic() + self._patience_s
        # The thread, too, may run the __del__ of a vector env.
        while self._is_busy_with(pipe) and threading.current_thread() is not self._thread:
            if self._copied != copied:
                copied, deadline = self._copied, time.monotonic() + self._patience_s
            elif time.monotonic() > deadline:
                self._patience_s = 0.0  # all write to the same stderr
                return
            time.sleep(_PAUSE_S)
        self._patience_s = _PATIENCE_S

    def _is_busy_with(self, pipe: WorkerStderr) -> bool:
        """Whether some of it is held; after the last one the thread ends."""
        return bool(pipe.held) or (not self.pipes and self._alarm >= 0)

    def _tidy(self) -> None:
        self.pipes = [each for each in self.pipes if each.reader >= 0 or each.held]

    def _close_alarm(self) -> None:
        alarm, self._alarm = self._alarm, -1
        os.close(alarm)

    def _copy(self) -> None:
        while True:
            with self.lock:
                self._tidy()
                if self._paused or not self.pipes:
                    self._close_alarm()
                    return
                poll = select.poll()
                poll.register(self._alarm, select.POLLIN)
                for each in self.pipes:
                    if each.reader >= 0:
                        poll.register(each.reader, select.POLLIN)
                holds = any(each.held for each in self.pipes)
            readable = {number for number, _ in poll.poll(1000 * _HOLD_S if holds else None)}
            with self.lock:
                if self._alarm in readable:
                    os.eventfd_read(self._alarm)
                for each in self.pipes:
                    if each.reader in readable:
                        each.read()
            for each in self.pipes:
                self._pass_on(each)

    def _pass_on(self, pipe: WorkerStderr) -> None:
        while not self._paused:
            with self.lock:
                text = pipe.ready()
            if not text:
                return
            count = self._write(text)
            with self.lock:
                pipe.passed(count)
                self._copied += count
                if count < len(text):  # the rest of the line is the first to be written
                    self.pipes.sort(key=lambda each: each is not pipe)

    def _write(self, text: bytes) -> int:
        """Writes to stderr until a fork is about to come; returns how many bytes are done with."""
        done = 0
        poll = select.poll()
        poll.register(2, select.POLLOUT)
        poll.register(self._alarm, select.POLLIN)
        while done < len(text) and not self._paused:
            ready = {number for number, _ in poll.poll()}
            if self._alarm in ready:
                os.eventfd_read(self._alarm)
            if 2 in ready:
                try:
                    # A pipe with room at all has room for so much: this does not block.
                    done += os.write(2, text[done : done + select.PIPE_BUF])
                except BlockingIOError:  # somebody has made it so, and writes to it, too
                    continue
                except OSError:  # nobody reads it any more, or the disk is full
                    return len(text)
        return done

    def _pause(self) -> None:
        """Before a fork: ends the thread, if it can."""
        with self.lock:
            thread, self._paused = self._thread, self._paused or self._alarm >= 0
            self.wake()
        if thread is None or thread is threading.current_thread():
            return
        thread.join(_PATIENCE_S)
        # The kernel counts it for a moment longer, and Python warns of forks by that count.
        deadline = time.monotonic() + _PATIENCE_S
        while not thread.is_alive() and os.path.exists(f"/proc/self/task/{thread.native_id}"):
            if time.monotonic() > deadline:
                break
            os.sched_yield()

    def _resume(self) -> None:
        """After a fork."""
        if self._paused:
            self.start()

    def _forget(self) -> None:
        """In a fork: the pipes are its parent's."""
        for each in self.pipes:
            each.drop()
        if self._alarm >= 0:
            self._close_alarm()
        self._reset()


_copier = _Copier()
copy_stderr = _copier.start


def excerpt(written: bytes) -> str:
    """What of a worker's last output says why it has ended.

    The last lines; of faulthandler's words the first, where the crash is: no other threads, and not
    how the worker has come to the env.
    """
    whole = _UNENDED.sub("\n\\g<0>", written.decode(errors="replace").replace("\r", "\n"))
    lines = [
        line if len(line) <= _LONGEST_SHOWN else line[: _LONGEST_SHOWN - 1] + "…"
        for line in whole.splitlines()
    ]
    fatal = [number for number, line in enumerate(lines) if line.startswith(_FATAL)]
    if fatal:
        words = _crash_of(lines[fatal[-1] :])[:_MOST_LINES]
        lines = [*lines[: fatal[-1]], *words]
    text = "\n".join(lines[-_MOST_LINES:]).strip("\n").encode()
    return text[-_MOST_BYTES:].decode(errors="ignore")


def _crash_of(words: list[str]) -> list[str]:
    """What happened, and the stack of the thread in which it did, as far as it is the env's.

    Of a thread that runs no Python there is none: then that of the one that steps envs.
    """
    heads = [number for number, line in enumerate(words) if line.startswith(_HEADS)]
    ours = [number for number, line in enumerate(words) if OURS in line]
    if not heads and ours:
        heads = [number for number in range(ours[0]) if words[number].startswith("Thread ")][-1:]
    crash = [words[0]]
    for line in words[heads[0] :] if heads else words[1:]:
        if not line or OURS in line:
            break
        crash.append(line)
    return crash

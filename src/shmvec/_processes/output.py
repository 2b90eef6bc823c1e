"""Output of workers: whole lines, each once; and the last lines of a worker that has died.

Processes that write to the same pipe, file or terminal at the same time do not mix their lines if
each writes a whole line at once. Streams of Python and C do so on a terminal only; ``take_output``
makes them do so everywhere.

A worker's stderr is a pipe to the parent. A file in memory would never block a writer, but ``echo >
/dev/stderr`` empties it, its reader cannot wait for more, and its size has no limit. The parent
reads the pipe and does not die with the worker, so what a dead worker has written is still read.
Lines that several workers write alike are printed once and counted.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import io
import math
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shmvec._core import Channel, buffer_c_lines, flush_c, opened_pipe
from shmvec._processes.stacks import OURS, is_wanted

__all__ = ["WorkerStderr", "copy_stderr", "excerpt", "finish_output", "take_output"]


_LONGEST_LINE = 1 << 20  # that is held until it is complete


def take_output(forked: bool, descriptors: Sequence[int]) -> None:
    """Makes this worker write whole lines, and puts its stderr into the pipe to the parent.

    Args:
        forked: Whether this process is a fork, with a copy of the parent's unwritten output.
        descriptors: The pipe that takes the place of stderr, if any.
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
            # A crash in C then prints the Python stack; not to 2, which envs silence.
            faulthandler.enable([2, *descriptors][-1])


def finish_output() -> None:
    """Writes incomplete lines."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    flush_c()


def _order(stream: Any, forked: bool) -> Any:
    """Makes a stream write line by line; returns None if it cannot."""
    if not isinstance(stream, io.TextIOWrapper):
        # A buffer in memory, or a stream that needs the parent's threads (IPython): None. A class
        # of the user's own stays: the streams below it write line by line.
        return None if stream is None or isinstance(stream, io.TextIOBase) else stream
    try:
        number = stream.fileno()
        with _discarding(number) if forked else contextlib.nullcontext():
            io.TextIOWrapper.flush(stream)  # the program may have replaced stream.flush()
            stream.reconfigure(line_buffering=True, write_through=False)
    except (OSError, ValueError):  # the stream is closed, or in memory (pytest)
        return None
    with contextlib.suppress(AttributeError):
        stream._CHUNK_SIZE = _LONGEST_LINE  # type: ignore[attr-defined]
    return stream


def _anew(stream: Any, number: int) -> Any:
    """A new stream for a descriptor; the old stream if the descriptor is closed."""
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
    """A context in which everything written to a descriptor is discarded."""
    try:
        kept = os.dup(number)
    except OSError:  # the descriptor is closed
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
    """Makes stderr a copy of a descriptor."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        # Under pytest's capture, sys.stderr has a descriptor of its own for the same file as 2.
        number = sys.stderr.fileno()
        if number > 2 and os.path.sameopenfile(number, 2):
            os.dup2(descriptor, number, inheritable=False)
    os.dup2(descriptor, 2)


_PIPE_BYTES = 1 << 18  # that a worker may write before it must wait for the parent
_LAST_BYTES = 1 << 16  # that are remembered
_HOLD_S = 0.05  # for a piece of a line to wait for the rest
_PATIENCE_S = 1.0  # to wait for a stderr that takes nothing
_PAUSE_S = 0.001
_ALIKE_S = 1.0  # in which a line is counted that another worker has written
_MOST_ALIKE = 100  # lines that are remembered for that
_LONGEST_ALIKE = 1000
_MOST_LINES = 20
_MOST_BYTES = 4096
_LONGEST_SHOWN = 200
_FATAL = "Fatal Python error"
_UNENDED = re.compile(rf"(?<=[^\n]){_FATAL}: ")  # behind an unfinished line
_FRAME = b'  File "'
_HEADS = ("Current thread 0x", "Stack (")  # not Python 3.14's "Current thread's C stack trace"


class WorkerStderr:
    """The stderr of one worker: a pipe that is copied to this process's stderr.

    The last bytes are kept, for messages.

    Attributes:
        reader: The read end of the pipe; -1: closed, as it has no writer any more.
        held: Bytes that are not copied yet.
        worker: The worker, which stays the same one when its process is replaced.
        cut: Whether the last byte that was copied was in the middle of a line.
    """

    cut = False
    _crashed = False  # a report of a crash has begun
    _in_ours = False  # and so have the frames below the env's, in the stack of a thread

    def __init__(self, channel: Channel, worker: Hashable = None) -> None:
        """Sends the worker its end of the pipe."""
        self.worker = worker
        self._ends = opened_pipe()
        self.reader = self._ends[0].number
        os.set_blocking(self.reader, False)
        with contextlib.suppress(OSError):  # this user's pipes use too much memory already
            fcntl.fcntl(self.reader, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self.held = bytearray()
        self._last = b""
        self._moved_at = 0.0  # when bytes were last copied, or began to be held
        try:
            channel.put(0, b"", [self._ends[1].number])
        finally:
            self._ends[1].close()
        with _copier.lock:
            _copier.pipes.append(self)

    def text(self) -> str:
        """The last lines so far; empty without any."""
        with _copier.lock:
            self.read()
            _copier.wake()
        return excerpt(self._last)

    def close(self) -> None:
        """Waits until all output of the ended worker is on stderr, if that takes it.

        Processes that the worker has started may go on writing.
        """
        _copier.finish(self)

    def read(self) -> None:
        """Reads what is in the pipe now."""
        for _ in range(2):  # the content, then the end of the pipe
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

    def is_noise(self, line: bytes) -> bool:
        """Whether the next line is of a report of a crash, and not about the env."""
        self._crashed = self._crashed or _FATAL.encode() + b": " in line
        self._in_ours = line.startswith(_FRAME) and (self._in_ours or OURS.encode() in line)
        return self._crashed and (self._in_ours or line.startswith(b"Extension modules: "))

    def ready(self) -> bytes:
        """Bytes to copy now: lines, and a piece of a line that has waited long enough."""
        end = (
            self.held.rfind(b"\n", 0, select.PIPE_BUF) + 1  # a pipe takes so much in one piece
            or self.held.find(b"\n") + 1
            or self.held.rfind(b"\r") + 1  # a progress bar
        )
        waited = time.monotonic() - self._moved_at >= _HOLD_S
        if not end and (waited or self.reader < 0 or len(self.held) >= _PIPE_BYTES):
            end = len(self.held)
        return bytes(self.held[:end])

    def passed(self, count: int) -> None:
        """Removes so many bytes, which were copied."""
        if count:
            self.cut = self.held[count - 1] != ord("\n")
        del self.held[:count]
        self._moved_at = time.monotonic()

    def drop(self) -> None:
        """Closes both ends of the pipe."""
        self.reader = -1  # first: the number is free after the call
        for end in self._ends:
            end.close()


@dataclass
class _Line:
    """A line that was copied, and how often other workers have written it since.

    Attributes:
        worker: The one whose line was copied.
        until: When the count is printed, and the line forgotten.
        count: How often it was not copied.
    """

    worker: Hashable
    until: float
    count: int = 0


class _Copier:
    """A thread that copies the workers' pipes to this process's stderr.

    The thread runs while there are pipes, but not during a fork, and blocks all signals. If stderr
    takes nothing, it waits without the lock: so other threads can read the pipes themselves, and
    wait for this one only with a deadline.

    Attributes:
        pipes: Pipes that still have a writer, or bytes that are not copied yet.
        lock: Guards the pipes. No thread blocks while it holds the lock.
    """

    def __init__(self) -> None:
        """Prepares for forks; ``start`` starts the thread."""
        self._reset()
        os.register_at_fork(
            before=self._pause, after_in_parent=self._resume, after_in_child=self._forget
        )

    def _reset(self) -> None:
        self.lock = threading.RLock()  # reentrant: a signal's handler may close the vector env
        self.pipes: list[WorkerStderr] = []
        self._lines: dict[bytes, _Line] = {}
        self._counts: list[bytes] = []  # lines to print
        self._copied = 0  # bytes
        self._patience_s = _PATIENCE_S
        self._thread: threading.Thread | None = None  # the last one
        self._running = False  # another one does not run, or ends before it does anything
        self._alarm = -1  # an eventfd that wakes it
        self._paused = False

    def start(self) -> None:
        """Starts the thread, or wakes it if it runs."""
        with self.lock:
            self._paused = False
            if self._running or not (self.pipes or self._counts):
                self.wake()
                return
            if self._alarm < 0:
                self._alarm = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._thread = threading.Thread(target=self._copy, name="shmvec stderr", daemon=True)
            self._running = True
            try:
                self._thread.start()
            except BaseException:  # a signal's handler, too: then the thread may have begun
                self._thread, self._running = None, False
                raise

    def wake(self) -> None:
        """Wakes the thread to look at all pipes."""
        if self._alarm >= 0:
            os.eventfd_write(self._alarm, 1)

    def finish(self, pipe: WorkerStderr) -> None:
        """Reads a pipe, and waits until its content is copied, while stderr takes anything."""
        with self.lock:
            pipe.read()
            self._tidy()
            self._end_counts(math.inf)
            with contextlib.suppress(RuntimeError):  # no thread may be started
                self.start()
        copied, deadline = self._copied, time.monotonic() + self._patience_s
        # The thread itself may run the __del__ of a vector env.
        while self._is_busy_with(pipe) and threading.current_thread() is not self._thread:
            if self._copied != copied:
                copied, deadline = self._copied, time.monotonic() + self._patience_s
            elif time.monotonic() > deadline:
                self._patience_s = 0.0  # the next pipes share this stderr
                return
            time.sleep(_PAUSE_S)
        self._patience_s = _PATIENCE_S

    def _is_busy_with(self, pipe: WorkerStderr) -> bool:
        """Whether some of it is held, or counted; after the last one the thread ends."""
        return bool(pipe.held or self._counts) or (not self.pipes and self._running)

    def _tidy(self) -> None:
        self.pipes = [each for each in self.pipes if each.reader >= 0 or each.held]

    def _close_alarm(self) -> None:
        alarm, self._alarm = self._alarm, -1
        os.close(alarm)

    def _copy(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            with self.lock:
                if self._thread is not threading.current_thread():
                    return
                self._tidy()
                self._end_counts(time.monotonic() if self.pipes else math.inf)
                if self._paused or not (self.pipes or self._counts):
                    self._running = False
                    self._close_alarm()
                    return
                poll = select.poll()
                poll.register(self._alarm, select.POLLIN)
                for each in self.pipes:
                    if each.reader >= 0:
                        poll.register(each.reader, select.POLLIN)
                wait_s = _ALIKE_S if self._lines else None
                if self._counts:
                    wait_s = 0
                elif any(each.held for each in self.pipes):
                    wait_s = _HOLD_S
            readable = {number for number, _ in poll.poll(wait_s and 1000 * wait_s)}
            if self._alarm not in readable:
                time.sleep(_PAUSE_S)  # many lines are then read at once: a wake-up costs a step
            with self.lock:
                if self._alarm in readable:
                    os.eventfd_read(self._alarm)
                for each in self.pipes:
                    if each.reader in readable:
                        each.read()
            for each in self.pipes:
                self._pass_on(each)
            while self._counts and (count := self._write(self._counts[0])):
                with self.lock:
                    del self._counts[0]
                    self._copied += count

    def _pass_on(self, pipe: WorkerStderr) -> None:
        while not self._paused:
            with self.lock:
                ready = pipe.ready()
                text = self._without_repeats(pipe, ready)
                pipe.held[: len(ready)] = text
            if not ready:
                return
            count = self._write(text)
            with self.lock:
                pipe.passed(count)
                self._copied += count
                if count < len(text):  # the rest of this line goes first
                    self.pipes.sort(key=lambda each: each is not pipe)

    def _without_repeats(self, pipe: WorkerStderr, text: bytes) -> bytes:
        """The text without noise, and without lines of another worker, which are counted."""
        kept, until = [], time.monotonic() + _ALIKE_S
        counted = False  # whether the last line was
        for number, line in enumerate(io.BytesIO(text)):
            if pipe.is_noise(line):
                continue
            is_whole = line.endswith(b"\n") and not (number == 0 and pipe.cut)
            if is_whole and not line.isspace() and len(line) <= _LONGEST_ALIKE and pipe.reader >= 0:
                if line not in self._lines and len(self._lines) < _MOST_ALIKE:
                    self._lines[line] = _Line(pipe.worker, until)
                known = self._lines.get(line)
                if known and known.worker != pipe.worker:
                    known.count += 1
                    counted = True
                    continue
            if counted and line == b"\n":  # it ended a paragraph that is not printed
                continue
            counted = False
            kept.append(line)
        return b"".join(kept)

    def _end_counts(self, now: float) -> None:
        """Forgets the lines whose time is up, and has their counts printed."""
        for line, known in list(self._lines.items()):
            if known.until <= now:
                del self._lines[line]
                if known.count:
                    times = f" (×{known.count} more)\n"
                    self._counts.append(line.rstrip(b"\r\n") + times.encode())

    def _write(self, text: bytes) -> int:
        """Writes to stderr until a fork is announced; returns how many bytes are done with."""
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
                    # A writable pipe has room for so much: this does not block.
                    done += os.write(2, text[done : done + select.PIPE_BUF])
                except BlockingIOError:  # stderr was made non-blocking, and others write to it
                    continue
                except OSError:  # stderr has no reader any more, or the disk is full
                    return len(text)
        return done

    def _pause(self) -> None:
        """Ends the thread before a fork, if possible."""
        with self.lock:
            thread, self._paused = self._thread, self._paused or self._running
            self.wake()
        if thread is None or thread.ident is None or thread is threading.current_thread():
            return
        thread.join(_PATIENCE_S)
        # The kernel counts the thread a moment longer, and Python warns of forks by that count.
        deadline = time.monotonic() + _PATIENCE_S
        while not thread.is_alive() and os.path.exists(f"/proc/self/task/{thread.native_id}"):
            if time.monotonic() > deadline:
                break
            os.sched_yield()

    def _resume(self) -> None:
        """Restarts the thread after a fork."""
        if self._paused:
            self.start()

    def _forget(self) -> None:
        """Closes the pipes in a fork: they are its parent's."""
        for each in self.pipes:
            each.drop()
        if self._alarm >= 0:
            self._close_alarm()
        self._reset()


_copier = _Copier()
copy_stderr = _copier.start


def excerpt(written: bytes) -> str:
    """The part of a worker's last output that explains why it has ended: its last lines.

    Of a report by faulthandler the first lines, with the crash: without other threads, and without
    the frames below the env's.
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
    """The crash, and the env's part of the stack of the thread that crashed.

    A thread that runs no Python has no stack: then that of the thread that steps envs.
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

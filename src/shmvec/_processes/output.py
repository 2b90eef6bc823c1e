"""Writes workers' output as whole lines, each once, and keeps the last lines of each worker.

Processes that write to the same pipe, file or terminal at the same time do not mix their lines if
each writes a whole line at once. Streams of Python and C do so on a terminal only;
``redirect_output`` makes them do so everywhere.

A worker's stderr is a pipe to the parent. A file in memory would never block a writer, but ``echo >
/dev/stderr`` empties it, its reader cannot wait for more, and its size has no limit. The parent
reads the pipe and does not die with the worker, so what a dead worker has written is still read.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import io
import os
import select
import signal
import sys
import threading
import time
from itertools import takewhile
from typing import Any

from shmvec._core import Channel, Descriptor, buffer_c_lines, flush_c, open_pipe, write_lines
from shmvec._processes.stacks import MAX_LINES, OWN_PATH, may_use_faulthandler, shorten_lines

__all__ = [
    "WorkerStderr",
    "copy_stderr",
    "excerpt",
    "finish_copying",
    "flush_output",
    "pause_copying",
    "redirect_output",
]


# ---- in a worker -------------------------------------------------------------------------------

_MAX_LINE_BYTES = 1 << 20  # a stream writes longer lines in parts


def redirect_output(descriptor: int) -> None:
    """Makes this worker write whole lines, and write its stderr to a pipe to the parent."""
    buffer_c_lines()
    for name, number in (("stdout", 1), ("stderr", 2)):
        _buffer_lines(vars(sys)[f"__{name}__"])  # logging, or a stream around it, may use this
        current = vars(sys)[name]
        setattr(sys, name, _buffer_lines(current) or _reopen(current, number))
    _redirect_stderr(descriptor)
    if may_use_faulthandler():
        # A crash in C then prints the Python stack. It does not go to 2, which envs may silence.
        faulthandler.enable(descriptor)


def flush_output() -> None:
    """Flushes this process's streams, at its end or before it is forked."""
    streams: tuple[Any, ...] = sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__
    for stream in streams:
        with contextlib.suppress(Exception):
            type(stream).flush(stream)  # the program may have replaced stream.flush
    flush_c()


def _buffer_lines(stream: Any) -> Any:
    """Makes a stream write line by line, and returns it; returns None if the stream cannot."""
    if not isinstance(stream, io.TextIOWrapper):
        # A buffer in memory and IPython's stream, which needs the parent's threads, cannot. An
        # object of a user's class may stay, because the streams to which it writes do.
        return None if isinstance(stream, io.TextIOBase) else stream
    try:
        stream.fileno()
        stream.reconfigure(line_buffering=True, write_through=False)
    except (OSError, ValueError):  # the stream is closed, or in memory (pytest)
        return None
    with contextlib.suppress(AttributeError):
        stream._CHUNK_SIZE = _MAX_LINE_BYTES  # type: ignore[attr-defined]
    return stream


def _reopen(stream: Any, number: int) -> Any:
    """A new stream for a descriptor; the old stream if the descriptor is closed."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    errors = getattr(stream, "errors", None) or "backslashreplace"
    try:
        return _buffer_lines(open(number, "w", encoding=encoding, errors=errors, closefd=False))
    except OSError:
        return stream


def _redirect_stderr(descriptor: int) -> None:
    """Makes stderr a copy of a descriptor."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        # Under pytest's capture, sys.stderr has a descriptor of its own for the same file as 2.
        number = sys.stderr.fileno()
        if number > 2 and os.path.sameopenfile(number, 2):
            os.dup2(descriptor, number, inheritable=False)
    os.dup2(descriptor, 2)


# ---- in the parent -----------------------------------------------------------------------------

_PIPE_BYTES = 1 << 18  # a worker may write so much before it must wait for the parent
_TAIL_BYTES = 1 << 16  # kept of what each worker has written last
_MAX_FIRST_LINES = 100  # kept during a start, to find equal lines
PARTIAL_LINE_TIMEOUT_S = 0.05  # for the rest of a line to come
_STDERR_TIMEOUT_S = 1.0  # for a stderr that takes nothing
_POLL_INTERVAL_S = 0.001
_MAX_EXCERPT_BYTES = 4096
_FATAL_PREFIX = "Fatal Python error: "
# Not the prefix of Python 3.14's "Current thread's C stack trace".
_CRASHED_THREAD_PREFIXES = ("Current thread 0x", "Stack (")


class WorkerStderr:
    """The stderr of one worker: a pipe that is copied to this process's stderr.

    Attributes:
        reader: This process's end of the pipe; its number is -1 once the pipe has no writer.
        lines: Lines that are to be copied.
        partial_line: The beginning of a line whose end has not come.
        num_copied_bytes: The number of bytes that were copied.
    """

    def __init__(
        self, channel: Channel, worker: int, first_lines: dict[bytes, int] | None = None
    ) -> None:
        """Sends a worker its end of the pipe.

        Args:
            channel: The control channel to the worker.
            worker: The worker's index.
            first_lines: For each line of this start, the worker that was the first to write it;
                equal lines of other workers are not copied. None: all lines are.
        """
        self.lines = bytearray()
        self.partial_line = b""
        self.num_copied_bytes = 0
        self._worker = worker
        self._first_lines = first_lines
        self._partial_since = 0.0
        self._line_begun = False  # whether the beginning of the next line was copied
        self._tail = b""
        self.reader, writer = open_pipe()
        os.set_blocking(self.reader.number, False)
        with contextlib.suppress(OSError):  # this user's pipes use too much memory already
            fcntl.fcntl(self.reader.number, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        try:
            channel.put(0, b"", [writer.number])
        finally:
            writer.close()
        with _copier.lock:
            _copier.pipes.append(self)

    def tail(self) -> str:
        """The worker's last lines; empty if it has written none."""
        with _copier.lock:
            self.read()
            _copier.wake()
        return excerpt(self._tail)

    def end_deduplication(self) -> None:
        """Begins to copy lines also if other workers have written the same."""
        with _copier.lock:
            self.read()
            self._first_lines = None
            _copier.wake()

    def close(self) -> None:
        """Reads what an ended worker has written; what it has started may still write."""
        with _copier.lock:
            self.read()
            self.end_partial_line()
            _copier.wake()

    def read(self) -> None:
        """Reads what is in the pipe now."""
        for _ in range(2):  # the content, then the end of the pipe
            if self.reader.number < 0:
                return
            try:
                written = os.read(self.reader.number, _PIPE_BYTES)
            except BlockingIOError:
                return
            if not written:
                self.end_partial_line()
                self.reader.close()
                return
            self._tail = (self._tail + written)[-_TAIL_BYTES:]
            if not self.partial_line:
                self._partial_since = time.monotonic()
            lines, end, self.partial_line = (self.partial_line + written).rpartition(b"\n")
            self.lines += self._select_new(lines + end)

    def _select_new(self, lines: bytes) -> bytes:
        """Those of these whole lines that no other worker has written first."""
        first_lines = self._first_lines
        if first_lines is None:
            return lines
        new = []
        for line in io.BytesIO(lines):
            if len(first_lines) < _MAX_FIRST_LINES:
                first_lines.setdefault(line, self._worker)
            if self._line_begun or first_lines.get(line, self._worker) == self._worker:
                new.append(line)
            self._line_begun = False
        return b"".join(new)

    def end_partial_line(self, patience_s: float = 0.0) -> None:
        """Copies the beginning of a line, if it has waited so long for the rest."""
        is_late = time.monotonic() - self._partial_since >= patience_s
        if self.partial_line and (is_late or len(self.partial_line) >= _PIPE_BYTES):
            self.lines += self.partial_line
            self.partial_line = b""
            self._line_begun = True


class _Copier:
    """A thread that copies the workers' pipes to this process's stderr.

    The thread runs while there are pipes, but not during a fork, and blocks all signals. If stderr
    takes nothing, the thread waits without the lock, so that other threads can read the pipes
    themselves; they wait for this one only with a deadline.

    Attributes:
        pipes: Pipes that have a writer, or bytes that are not copied yet.
        lock: Guards the pipes. No thread blocks while it holds the lock.
    """

    def __init__(self) -> None:
        """Prepares for forks; ``start`` starts the thread."""
        self._reset()
        os.register_at_fork(
            before=self._before_fork,
            after_in_parent=self._after_fork,
            after_in_child=self._after_fork_in_child,
        )

    def _reset(self) -> None:
        self.lock = threading.RLock()  # reentrant: a signal's handler may close the vector env
        self.pipes: list[WorkerStderr] = []
        self._thread: threading.Thread | None = None  # the last one; others end at once
        self._running = False
        self._alarm = Descriptor(int, -1)  # an eventfd that wakes the thread
        self._paused = False
        self._resume_after_fork = False

    def start(self) -> None:
        """Starts the thread, or wakes it if it runs."""
        with self.lock:
            self._paused = self._resume_after_fork = False
            if self._running or not self.pipes:
                self.wake()
                return
            if self._alarm.number < 0:
                self._alarm = Descriptor(os.eventfd, 0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._thread = threading.Thread(target=self._run, name="shmvec stderr", daemon=True)
            self._running = True
            try:
                self._thread.start()
            except BaseException:  # if a signal's handler has raised it, the thread may have begun
                self._thread, self._running = None, False
                raise

    def wake(self) -> None:
        """Wakes the thread to look at all pipes."""
        with self.lock:  # otherwise the alarm might be closed meanwhile
            if self._alarm.number >= 0:
                os.eventfd_write(self._alarm.number, 1)

    def finish(self) -> None:
        """Waits until what was read so far is copied, as long as stderr takes something."""
        with self.lock:
            ends = [(pipe, pipe.num_copied_bytes + len(pipe.lines)) for pipe in self.pipes]
            with contextlib.suppress(RuntimeError):  # no thread may be started
                self.start()
        before, deadline = -1, 0.0
        while left := sum(max(0, end - pipe.num_copied_bytes) for pipe, end in ends):
            if left != before:
                before, deadline = left, time.monotonic() + _STDERR_TIMEOUT_S
            # The __del__ of a vector env may be run by the thread itself.
            elif time.monotonic() > deadline or threading.current_thread() is self._thread:
                return
            self.wake()  # interrupts a long copy, so that the thread counts what it has copied
            time.sleep(_POLL_INTERVAL_S)

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while self._should_continue():
            poll = select.poll()
            poll.register(self._alarm.number, select.POLLIN)
            with self.lock:
                for each in self.pipes:
                    if each.reader.number >= 0:
                        poll.register(each.reader.number, select.POLLIN)
                partial = any(each.partial_line for each in self.pipes)
                wait_ms = 1000 * PARTIAL_LINE_TIMEOUT_S if partial else None
                if any(each.lines for each in self.pipes):
                    wait_ms = 0.0
            readable = {number for number, _ in poll.poll(wait_ms)}
            if self._alarm.number in readable:
                os.eventfd_read(self._alarm.number)
            else:
                # A wake-up costs as much as a step, so many lines are read at once.
                time.sleep(_POLL_INTERVAL_S)
            for each in self.pipes:
                if not self._copy_pipe(each, each.reader.number in readable):
                    with self.lock:  # the rest of this pipe's line must be copied first
                        self.pipes.sort(key=lambda other: other is not each)
                    break

    def _should_continue(self) -> bool:
        """Whether the thread should go on; closes the alarm if not."""
        with self.lock:
            if self._thread is not threading.current_thread():
                return False
            self.pipes = [each for each in self.pipes if each.reader.number >= 0 or each.lines]
            if self._paused or not self.pipes:
                self._running = False
                self._alarm.close()
            return self._running

    def _copy_pipe(self, pipe: WorkerStderr, is_readable: bool) -> bool:
        """Copies what a pipe has until the alarm rings; returns whether all was copied."""
        if not (is_readable or pipe.lines or pipe.partial_line):
            return True
        with self.lock:
            if not pipe.lines:  # otherwise stderr is slow, and the worker must wait for it
                pipe.read()  # the rest of a line may have come during the last write
                pipe.end_partial_line(PARTIAL_LINE_TIMEOUT_S)
            lines = bytes(pipe.lines)
        count: int = write_lines(lines, self._alarm.number)
        with self.lock:
            del pipe.lines[:count]
            pipe.num_copied_bytes += count
        return count == len(lines)

    def pause(self) -> None:
        """Ends the thread, if possible, until ``start``."""
        with self.lock:
            thread, self._paused = self._thread, True
            self.wake()
        if thread is None or thread is threading.current_thread():
            return
        # Joining it would not do: Python warns of forks by the threads that the kernel counts.
        deadline = time.monotonic() + _STDERR_TIMEOUT_S
        while os.path.exists(f"/proc/self/task/{thread.native_id}"):
            if time.monotonic() > deadline:
                return
            time.sleep(_POLL_INTERVAL_S / 10)

    def _before_fork(self) -> None:
        with self.lock:
            self._resume_after_fork = self._resume_after_fork or self._running
        self.pause()

    def _after_fork(self) -> None:
        if self._resume_after_fork:
            self.start()

    def _after_fork_in_child(self) -> None:
        """Closes the pipes in a fork, since they are its parent's."""
        for each in self.pipes:
            each.reader.close()
        self._alarm.close()
        self._reset()


_copier = _Copier()
copy_stderr = _copier.start
pause_copying = _copier.pause
finish_copying = _copier.finish


def excerpt(written: bytes) -> str:
    """The last lines of a worker's output, which may explain why it has ended.

    Of a report by faulthandler they have the first lines, with the crash, without other threads
    and without the frames below the env's.
    """
    text = written.decode(errors="replace").replace("\r", "\n")
    before, fatal, report = text.rpartition(_FATAL_PREFIX)  # it may follow an incomplete line
    crash = (fatal + report).splitlines()
    crash = _crash_excerpt(crash)[:MAX_LINES] if fatal else crash
    lines = shorten_lines([*before.splitlines(), *crash][-MAX_LINES:])
    content = "\n".join(lines).strip("\n").encode()
    return content[-_MAX_EXCERPT_BYTES:].decode(errors="ignore")


def _crash_excerpt(report: list[str]) -> list[str]:
    """The crash, and the env's part of the stack of the thread that crashed.

    If that thread runs no Python, the stack is that of the thread that steps envs.
    """
    heads = [i for i, line in enumerate(report) if line.startswith(_CRASHED_THREAD_PREFIXES)]
    ours = [number for number, line in enumerate(report) if OWN_PATH in line]
    if not heads and ours:
        heads = [number for number in range(ours[0]) if report[number].startswith("Thread ")][-1:]
    stack = report[heads[0] :] if heads else report[1:]
    return [report[0], *takewhile(lambda line: line and OWN_PATH not in line, stack)]

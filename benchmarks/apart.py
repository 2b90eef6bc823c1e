"""A contender in a process of its own: what it imports, starts or sets is no other's.

Its interpreter and its path may be others: another build of shmvec, other versions of libraries, no
shmvec at all. So nothing is handed on but what makes it, as a pickle, with the modules that it may
not find there by value (`cloudpickle.register_pickle_by_value`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from typing import Any

import cloudpickle

from shmvec._commands.measuring import Slice

__all__ = ["Apart"]

# What its interpreter runs: functions that come as a pickle, for it may not find this file.
_CHILD = """
import sys
from multiprocessing.connection import Connection
import cloudpickle
pipe = Connection(int(sys.argv[1]))
serve, packed = cloudpickle.loads(pipe.recv_bytes())
serve(packed, pipe)
"""

_END_S = 30  # to close


class Apart:
    """A process with an object that has ``run`` and ``close``; it rests between its turns."""

    def __init__(
        self,
        start: Callable[[], Any],
        *,
        python: str = sys.executable,
        path: Sequence[str] | None = None,
        stopped: bool = False,
        patience: float = 300.0,
    ) -> None:
        """Begins to start it.

        Args:
            start: Makes the object, there.
            python: The interpreter. It needs cloudpickle.
            path: Where it looks for modules before it does in its own places. None: where this
                process does, if the interpreter is the same.
            stopped: Whether the process, and all that it starts, is stopped between turns: for
                those that go on working.
            patience: How many seconds it may take to start, and for a turn.
        """
        self._stopped, self._patience, self._ready = stopped, patience, False
        self._pipe, theirs = Pipe()
        if path is None:
            path = [entry for entry in sys.path if entry] if python == sys.executable else []
        self._process = subprocess.Popen(
            [python, "-c", _CHILD, str(theirs.fileno())],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            pass_fds=[theirs.fileno()],
            stdout=2,  # what it prints is no part of a table
        )
        theirs.close()
        with contextlib.suppress(BrokenPipeError):  # it has ended: ready() says so
            self._pipe.send_bytes(cloudpickle.dumps((_serve, cloudpickle.dumps(start))))

    def ready(self) -> Apart:
        """Waits until it has started; one that fails is ended.

        Raises:
            ImportError: Something is not installed.
            RuntimeError: It has failed, and why.
            TimeoutError: It takes too long.
        """
        if not self._ready:
            try:
                self._answer()
            except BaseException:
                self.close()
                raise
            self._ready = True
            self._signal(signal.SIGSTOP)
        return self

    def run(self, *arguments: Any) -> Any:
        """One turn: what the object's ``run`` returns."""
        self.ready()
        self._signal(signal.SIGCONT)
        self._pipe.send(arguments)
        try:
            return self._answer()
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, what: signal.Signals) -> None:
        if self._stopped and self._ready:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, what)

    def _kill(self) -> None:
        """Ends it, and what it has started, at once."""
        self._process.kill()
        with contextlib.suppress(ProcessLookupError):  # it is too young to have a group, or gone
            os.killpg(self._process.pid, signal.SIGKILL)

    def _answer(self) -> Any:
        if not self._pipe.poll(self._patience):
            self._kill()
            raise TimeoutError(f"no answer in {self._patience:.0f} s")
        try:
            error, answer = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            raise RuntimeError("its process has ended: see above") from None
        if error is not None:
            raise error(answer)
        return Slice(*answer) if isinstance(answer, tuple) else answer

    def close(self) -> None:
        """Ends it, and if that takes too long, with force; and whatever it has left behind."""
        self._pipe.close()
        self._signal(signal.SIGCONT)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
        finally:
            self._kill()
            self._process.wait()


def _serve(packed: bytes, pipe: Any) -> None:
    """In the process: runs turns until the pipe is closed."""
    os.setpgid(0, 0)
    warnings.simplefilter("ignore")  # of envs and peers; none of ours
    try:
        with contextlib.closing(cloudpickle.loads(packed)()) as contender:
            pipe.send((None, None))
            while True:
                try:
                    arguments = pipe.recv()
                except (EOFError, ConnectionError):
                    return
                turn = contender.run(*arguments)
                # A Slice goes as what it holds: here its class may be another one.
                pipe.send((None, tuple(turn) if isinstance(turn, tuple) else turn))
    except ImportError as error:
        pipe.send((ImportError, str(error)))
    except Exception as error:
        pipe.send((RuntimeError, f"{type(error).__name__}: {error}"))
        raise


cloudpickle.register_pickle_by_value(sys.modules[__name__])

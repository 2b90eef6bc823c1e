"""A contender in a process of its own: what it imports, starts or sets is nobody else's."""

from __future__ import annotations

import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable
from typing import Any

import cloudpickle

__all__ = ["Apart"]

_PATIENCE_S = 300  # to start, and for a turn


class Apart:
    """A process with an object that has ``run`` and ``close``; it rests between its turns."""

    def __init__(self, start: Callable[[], Any], *, stopped: bool = False) -> None:
        """Begins to start it.

        Args:
            start: Makes the object, there.
            stopped: Whether the process, and all that it starts, is stopped between turns: for
                those who go on working.
        """
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process: Any = context.Process(target=_serve, args=(theirs, cloudpickle.dumps(start)))
        self._process.start()
        theirs.close()
        self._stopped, self._ready = stopped, False

    def ready(self) -> Apart:
        """Waits until it has started.

        Raises:
            ImportError: Something is not installed.
        """
        if not self._ready:
            self._answer()
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
        if self._stopped and self._process.is_alive():
            os.killpg(self._process.pid, what)

    def _answer(self) -> Any:
        if not self._pipe.poll(_PATIENCE_S):
            raise TimeoutError("a contender does not answer")
        try:
            answer = self._pipe.recv()
        except EOFError:
            raise RuntimeError("a contender has failed: see above") from None
        if isinstance(answer, ImportError):
            raise answer
        return answer

    def close(self) -> None:
        """Ends it, and if that takes too long, with force: all that it has started."""
        self._pipe.close()
        self._signal(signal.SIGCONT)
        self._process.join(30)
        if self._process.is_alive():
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.join()


def _serve(pipe: Any, packed: bytes) -> None:
    """In the process: runs turns until the pipe is closed."""
    os.setpgid(0, 0)
    warnings.simplefilter("ignore")  # of envs and peers; none of ours
    try:
        contender = cloudpickle.loads(packed)()
    except ImportError as error:
        pipe.send(ImportError(str(error)))
        return
    try:
        pipe.send(None)
        while True:
            pipe.send(contender.run(*pipe.recv()))
    except (EOFError, BrokenPipeError):
        pass
    finally:
        contender.close()

"""``worker=``: wraps a worker function written for ``AsyncVectorEnv`` as an env.

Such a function owns an env and serves it over a pipe; users write one to change how episodes are
reset. Here it runs unchanged in a thread of a worker, and both ends of its pipe are in the same
process. The worker steps it like any env, and its results travel like all results.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from shmvec._options import NUM_WORKER_ARGUMENTS
from shmvec._processes.host import HostedEnv

if TYPE_CHECKING:
    from shmvec._processes.host import EnvFn

__all__ = ["FunctionEnv"]

_CLOSE_TIMEOUT_S = 10.0  # for the function to return once its env is closed


class FunctionEnv(HostedEnv):
    """One env behind a worker function: ``worker(index, env_fn, pipe, parent_pipe, ...)``.

    The function gets None for ``shared_memory`` (observations come over its pipe) and for
    ``semaphore`` (``max_concurrency`` limits the number of workers instead), and a queue for
    ``error_queue``.
    """

    def __init__(
        self, worker: Callable[..., None], index: int, env_fn: EnvFn, autoreset_mode: object
    ) -> None:
        """Starts the function's thread.

        Args:
            worker: The function.
            index: The env's index.
            env_fn: The function that makes the env: called once for the spaces, as
                ``AsyncVectorEnv`` does, and once by the worker function.
            autoreset_mode: Passed on to the worker function.
        """
        super().__init__(env_fn())
        self.env.close()
        self.env = None  # the function makes its own env

        self._index = index
        self._pipe, pipe = multiprocessing.Pipe()
        # Gymnasium's worker closes the parent's end. It gets a copy, as it would have in a fork.
        parent_pipe = Connection(os.dup(self._pipe.fileno()))
        self._errors: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._error: BaseException | None = None
        arguments = (index, env_fn, pipe, parent_pipe, None, self._errors, autoreset_mode, None)

        def run() -> None:
            try:
                worker(*arguments[:NUM_WORKER_ARGUMENTS])
            except BaseException as error:
                self._error = error
            finally:
                pipe.close()
                parent_pipe.close()

        self._thread = threading.Thread(target=run, name=f"worker of env {index}", daemon=True)
        self._thread.start()

    @property
    def unwrapped(self) -> Any:
        """This object, because the function's env cannot be reached from here."""
        return self

    def reset(self, **arguments: Any) -> Any:
        """Sends the function "reset", and returns its answer."""
        return self._ask("reset", {"seed": None, "options": None, **arguments})

    def step(self, action: Any) -> Any:
        """Sends the function "step", and returns its answer."""
        return self._ask("step", action)

    def get_wrapper_attr(self, name: str) -> Callable[..., Any]:
        """A function that has the worker function get or call the attribute."""
        return lambda *args, **kwargs: self._ask("_call", (name, args, kwargs))

    def set_wrapper_attr(self, name: str, value: Any) -> None:
        """Has the worker function set an attribute."""
        self._ask("_setattr", (name, value))

    def close(self) -> None:
        """Has the worker function close its env and return."""
        try:
            if self._thread.is_alive():
                self._ask("close", None)
                self._thread.join(_CLOSE_TIMEOUT_S)
        finally:
            self._pipe.close()

    def _ask(self, command: str, data: Any) -> Any:
        try:
            self._pipe.send((command, data))
            result, success = self._pipe.recv()
        except (EOFError, OSError):
            self._thread.join(_CLOSE_TIMEOUT_S)
            if self._error is not None:
                raise self._error from None
            raise RuntimeError(
                f"the custom worker of env {self._index} has returned and no longer answers, as "
                "Gymnasium's own does after an error of its env. Close the vector env"
            ) from None
        if not success:
            _, _, error, _ = self._errors.get(timeout=_CLOSE_TIMEOUT_S)
            raise error
        return result

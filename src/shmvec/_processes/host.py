"""Builds and closes the envs of one worker, and carries out commands on them.

Worker processes use this module, and so does the calling process for ``num_workers=0``; only the
``mailbox`` differs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import gymnasium as gym

from shmvec._core import MappedMemory, Recorder, Segment, WorkerLoop, end_forks
from shmvec._hints import of_action, of_env_fn, of_reset, of_thread
from shmvec._memory.layout import Layout, misfit
from shmvec._pickling import copied_from
from shmvec._processes.control import Attachment, Late, Report
from shmvec._processes.overlap import (
    Alarm,
    EnvThreads,
    Executor,
    Overlap,
    Result,
    called,
    copies_of,
    is_asynchronous,
    refuse_records,
)
from shmvec.faults import EnvTimeoutError, Failure, add_note

__all__ = ["Call", "EnvFn", "EnvHost", "HostedEnv", "Mailbox"]


EnvFn = Callable[[], gym.Env[Any, Any]]

_SPACES = ("observation_space", "action_space")


class Mailbox(Protocol):
    """The worker's end of a control channel."""

    def pack(self, message: Any) -> Any:
        """Makes a message ready to send; raises if it cannot be pickled."""

    def unpack(self, packed: Any) -> Any:
        """Returns the message that was packed."""

    def packer(self, lent: bool) -> Callable[[Any], Any]:
        """A function that packs the results of a request; ``lent``: into the depot, if it can."""

    def send(self, sequence: int, packed: Any) -> None:
        """Sends a message of a request."""

    def receive(self, sequence: int) -> tuple[Any, list[int]]:
        """Waits for the message of a request and the descriptors that come with it."""


@dataclass
class Call:
    """A command that each of some envs carries out.

    Attributes:
        name: What the caller called, for messages.
        run: A function of an env and its index.
        lent: Whether the depot is lent for the results.
        chosen: The envs, by index; None: all.
        for_copies: Whether it is for all copies of an env: see ``spare_envs``.
    """

    name: str
    run: Callable[[Any, int], Any]
    lent: bool = False
    chosen: Container[int] | None = None
    for_copies: bool = False

    def is_for(self, index: int) -> bool:
        """Whether an env carries it out."""
        return self.chosen is None or index in self.chosen


class EnvHost:
    """Builds the envs of a worker, carries out commands, and sends what does not fit the rings."""

    def __init__(
        self,
        index: int,
        first_env: int,
        mailbox: Mailbox,
        overlap: Overlap = None,
        spare_envs: int = 0,
        *,
        in_caller: bool = False,
        limit: Callable[[], object] = lambda: None,
    ) -> None:
        """Prepares a host for the envs ``first_env`` and up.

        Args:
            index: The worker's index.
            first_env: Index of its first env.
            mailbox: For messages from and to the parent.
            overlap: The option of this name.
            spare_envs: Likewise.
            in_caller: Whether this is the caller's process.
            limit: Limits the threads of libraries; called in each thread of an env.
        """
        self._limit = limit
        self._overlap, self._num_copies, self._in_caller = overlap, 1 + spare_envs, in_caller
        self._executor: Executor | None = None  # where envs live; None: in the calling thread
        self._copies: list[gym.Env[Any, Any]] = []  # those of each env, one after the other
        self.index = index
        self.first_env = first_env
        self.mailbox = mailbox
        self.envs: list[gym.Env[Any, Any]] = []
        self._loop: WorkerLoop | None = None
        self._layout: Layout | None = None

    def build(
        self, env_fns: Sequence[EnvFn], first_built: Callable[[], None] = lambda: None
    ) -> Report | Failure:
        """Builds the envs. After a failure those that were built are closed again.

        Args:
            env_fns: The functions that make the envs.
            first_built: Called once the first env is built.
        """
        seen: dict[int, tuple[int, Any]] = {}
        at_once = self._overlap not in (None, 1) or self._num_copies > 1
        # Coroutines live in the main thread. Of a function that makes an env that is known later.
        if at_once and not any(is_asynchronous(getattr(each, "func", each)) for each in env_fns):
            self._executor = EnvThreads(self._most(1), len(env_fns), self._limit)
        index = self.first_env
        try:
            for lane in range(len(env_fns) * self._num_copies):
                index = self.first_env + lane // self._num_copies
                env_fn = env_fns[lane // self._num_copies]
                env = self._there(lane, partial(self._made, env_fn, lane))
                end_forks()
                wrong = _what_is_wrong(env)
                if wrong:
                    raise TypeError(f"env_fns[{index}]() returned a {wrong}")
                self._copies.append(env)
                if self._in_caller and is_asynchronous(env):
                    raise TypeError(
                        f"env_fns[{index}]() returned a {type(env).__name__} whose step or reset "
                        "is a coroutine function: it needs a worker process (num_workers=1 or "
                        "more, without caller_steps)"
                    )
                itself = _unwrapped(env)
                if id(itself) in seen:
                    first_index = seen[id(itself)][0]
                    raise ValueError(
                        f"env_fns[{first_index}] and env_fns[{index}] returned the same env: the "
                        "same instance, instead of different objects, which would be stepped "
                        "twice. Make an env in each function: write `lambda: gym.make(...)`, not "
                        "`lambda: env`. (With num_workers=num_envs each has a process, and so a "
                        "copy, of its own.)"
                    )
                seen[id(itself)] = index, itself
                if self._num_copies > 1:
                    refuse_records(index, env)
                if lane % self._num_copies == 0:
                    self.envs.append(env)
                if lane == 0:
                    first_built()
        except BaseException as error:
            end_forks()
            failure = self._failure(index, "make", error)
            self.close()
            return failure
        first = self.envs[0]
        return Report(
            first.observation_space,
            first.action_space,
            dict(getattr(first, "metadata", None) or {}),
            getattr(first, "render_mode", None),
            [
                (self.first_env + lane // self._num_copies, which, getattr(env, which))
                for lane, env in enumerate(self._copies)
                for which in ("observation_space", "action_space")
                if getattr(env, which) != getattr(first, which)
            ],
        )

    def _most(self, default: int) -> int | None:
        """How many envs may be busy at once; None: that is learned."""
        if self._overlap is None:
            return default
        return self._overlap if isinstance(self._overlap, int) else None

    def _there(self, lane: int, call: Callable[[], Any]) -> Any:
        """Makes a call where a copy of an env lives."""
        return call() if self._executor is None else self._executor.run(lane, call)

    def _made(self, env_fn: EnvFn, lane: int) -> gym.Env[Any, Any]:
        """Calls an env_fn; returns its env."""
        try:
            return env_fn()
        except Exception as error:
            index = self.first_env + lane // self._num_copies
            if lane % self._num_copies:
                note = (
                    f"This is another copy of env {index}, which was built before: if a process "
                    "can hold only one, leave spare_envs out."
                )
                add_note(error, note)
            elif self.envs:
                note = (
                    f"Env {index} was not the first in its process: "
                    "envs of which a process can hold only one (emulators, simulators with global "
                    "state) need num_workers=num_envs."
                )
                add_note(error, note)
            with contextlib.suppress(Exception):
                add_note(error, of_env_fn(index, env_fn, error))
            raise

    def loop(
        self, segment: Segment, attachment: Attachment, descriptors: Sequence[int] = ()
    ) -> WorkerLoop:
        """Makes the step loop over these envs; maps the memory that comes with the descriptors."""
        self._layout = attachment.layout
        envs: Sequence[Any] = self.envs
        steppers: Sequence[Any] = self._copies
        if attachment.compile_wrappers:
            from shmvec._wrappers import compiled, summary_of  # which only what holds envs needs

            steppers = [compiled(env) for env in self._copies]
            words = list(map(summary_of, steppers[:: self._num_copies]))
        if any(map(is_asynchronous, self.envs)):
            if self._executor is not None:
                self._executor.end()
            from shmvec._processes.event_loop import EnvCoroutines  # others need no asyncio

            self._executor = EnvCoroutines(self._most(len(self.envs)), len(self.envs))
        executor = self._executor
        kind: type[WorkerLoop] = WorkerLoop
        if executor is not None:
            from shmvec._core import OverlappedLoop  # a module that others need not load

            copies = copies_of(self._copies, steppers, self._num_copies)
            kind, envs, steppers = OverlappedLoop, executor.replays, executor.replays
        self._loop = kind(
            segment,
            self.index,
            self.first_env,
            envs,
            self,
            attachment.layout.attach(segment),
            attachment.autoreset,
            attachment.limits != (None, None),
            attachment.mends,
            attachment.resets,
            steppers,
        )
        if attachment.compile_wrappers:
            self._loop.publish_words(words)
        if executor is not None:
            assert isinstance(self._loop, OverlappedLoop)
            in_step = attachment.autoreset.in_step
            executor.attach(self._loop, self.first_env, in_step, copies)
        for (name, size), descriptor in zip(attachment.kept, descriptors, strict=True):
            self._take(name, size, descriptor)
        return self._loop

    def serve(self, alarm: Alarm) -> None:
        """Serves requests until one to close, or until the parent is gone."""
        assert self._loop is not None
        if self._executor is not None:
            self._executor.serve(alarm)
        else:
            self._loop.serve(alarm.parent_alive, alarm.doze)

    def command(self, sequence: int) -> list[Any]:
        """Receives a command and carries it out."""
        call = self.received(sequence)
        return self.results_of(call, self._called(call))

    def received(self, sequence: int) -> Call:
        """Receives a command."""
        packed, descriptors = self.mailbox.receive(sequence)
        name, payload = self.mailbox.unpack(packed)
        if name in ("rollout", "log"):
            if payload:
                self._take(name, payload, descriptors[0])
            else:
                self._stop_logging()
            return Call(name, lambda env, index: None, chosen=())
        if name == "call":
            attribute, arguments, chosen, lent = payload

            def run(env: gym.Env[Any, Any], index: int) -> Any:
                found = _found(env, attribute)
                if not callable(found):
                    return found
                args, kwargs = ((), {}) if arguments is None else copied_from(arguments)
                return found(*args, **kwargs)

            return Call(attribute, run, lent, chosen)
        if name != "set_attr":
            raise RuntimeError(f"worker {self.index} was sent a command it does not know: {name!r}")
        attribute, values = payload

        def assign(env: gym.Env[Any, Any], index: int) -> None:
            env.set_wrapper_attr(attribute, copied_from(values[index]))

        return Call(f"set_attr({attribute!r})", assign, chosen=values, for_copies=True)

    def interrupt(self, limits: tuple[float | None, float | None]) -> None:
        """Raises EnvTimeoutError inside an env's step or reset that takes too long."""
        if self._executor is not None:
            self._executor.interrupt(limits)
            return
        busy = self._loop.busy() if self._loop is not None else None
        if busy is not None:
            env, operation, elapsed = busy
            limit = dict(zip(("step", "reset"), limits, strict=True)).get(operation)
            if limit is not None and elapsed > limit:
                raise EnvTimeoutError(env, operation, limit)

    def trace(self, sequence: int) -> None:
        """Receives memory for a trace; without room for it, nothing is recorded."""
        with contextlib.suppress(OSError):  # too little memory, or too many open files
            packed, (descriptor,) = self.mailbox.receive(sequence)
            self._take("trace", self.mailbox.unpack(packed), descriptor)

    def _stop_logging(self) -> None:
        """Has the loop log no steps any more."""
        assert self._loop is not None
        self._loop.take_log(None)

    def _take(self, name: str, size: tuple[Any, ...], descriptor: int) -> None:
        """Maps memory and has the loop write there."""
        nbytes, *parts = size
        try:
            memory = MappedMemory(descriptor, nbytes)
        finally:
            os.close(descriptor)
        assert self._loop is not None and self._layout is not None
        if name == "trace":
            self._loop.record(Recorder(memory, parts[0], parts[1], self.index, os.getpid()))
        elif name == "log":
            open_log, *sizes = parts
            self._loop.take_log(open_log(self._layout, memory, *sizes))
        else:
            self._loop.set_rollouts(self._layout.results_in(memory, *parts))

    def _called(self, call: Call) -> Callable[[int], Result]:
        """A function that has an env carry out a call: it returns the value, and the error."""

        def outcome(i: int) -> Result:
            assert self._loop is not None
            index = self.first_env + i
            self._loop.begin_call(index)
            result = called(partial(call.run, self.envs[i], index))
            self._loop.end_call(index)
            end_forks()
            return result

        return outcome

    def results_of(self, call: Call, outcome: Callable[[int], Result]) -> list[Any]:
        """A packed result or a Failure for each env, from what it has returned and raised."""
        pack = self.mailbox.packer(call.lent)
        results: list[Any] = [None] * len(self.envs)
        for i in range(len(self.envs)):
            index = self.first_env + i
            if not call.is_for(index):
                results[i] = pack(None)
                continue
            value, error = outcome(i)
            if error is None:  # pickling runs the user's code
                value, error = called(partial(pack, value))
            results[i] = value if error is None else self._failure(index, call.name, error)
            del value, error
        return results

    def misfit(self, env: int, observation: Any, error: Exception) -> Exception:
        """The error for an observation that does not fit its space."""
        assert self._layout is not None
        return misfit(env, self._layout.observation_space, observation, error)

    def late_arguments(self, sequence: int) -> list[tuple[int, Any]]:
        """Receives what has no room in a slab or ring: an env's action, or its seed and options."""
        packed, _ = self.mailbox.receive(sequence)
        arguments: list[tuple[int, Any]] = self.mailbox.unpack(packed)
        return arguments

    def send_late(
        self,
        sequence: int,
        messages: list[tuple[int, int, dict[str, Any]]],
        failures: list[tuple[int, str, BaseException]],
        results: list[Any] | None,
    ) -> None:
        """Sends the parent what does not fit the rings."""
        failed = [self._explained(*failure) for failure in failures]
        failed += [result for result in results or () if isinstance(result, Failure)]
        if results is not None:
            results = [None if isinstance(r, Failure) else r for r in results]
        packed = []
        for kind, env, message in messages:
            try:
                packed.append((kind, env, self.mailbox.pack(message)))
            except Exception as error:
                failed.append(self._failure(env, "info", error))
        self.mailbox.send(sequence, self.mailbox.pack(Late(packed, failed, results)))

    def close(self) -> list[Failure]:
        """Closes all envs, whatever some of them raise."""
        failures = []
        calls = {lane: env.close for lane, env in enumerate(self._copies)}
        executor, self._executor = self._executor, None
        results = executor.run_all(calls) if executor is not None else {}
        for lane, call in calls.items():
            _, error = results[lane] if executor is not None else called(call)
            if error is not None:
                index = self.first_env + lane // self._num_copies
                failures.append(self._failure(index, "close", error))
            end_forks()
        if executor is not None:
            executor.end()
        self.envs, self._copies = [], []
        self._loop = None  # breaks a cycle: the loop refers to this host
        return failures

    def _explained(self, env: int, operation: str, error: BaseException) -> Failure:
        """The failure of a step or reset, with a hint where one is known."""
        with contextlib.suppress(Exception):  # the env's code may raise, or the env is closed
            itself = self.envs[env - self.first_env]
            if operation == "reset":
                add_note(error, of_reset(env, itself, error))
            elif operation == "step" and not isinstance(error, EnvTimeoutError):
                assert self._loop is not None
                add_note(error, of_action(env, itself, self._loop.action_of(env)))
        return self._failure(env, operation, error)

    def _failure(self, env: int, operation: str, error: BaseException) -> Failure:
        if isinstance(self._executor, EnvThreads):
            add_note(error, of_thread(error))
        return Failure.of(error, env, self.index, operation)


def _found(env: gym.Env[Any, Any], attribute: str) -> Any:
    """The attribute of the outermost wrapper that has it."""
    try:
        return env.get_wrapper_attr(attribute)
    except AttributeError as missing:
        # Without a name, traceback does not look for similar ones among all attributes, which takes
        # Python 3.12 and later 15 ms. Some programs ask in each step whether an attribute is there.
        chain: list[BaseException] = [missing]
        for error in chain:
            if isinstance(error, AttributeError) and error.name == attribute:
                error.name = None
            earlier = error.__cause__ or error.__context__
            if earlier is not None and earlier not in chain:
                chain.append(earlier)
        raise


def _unwrapped(env: Any) -> Any:
    """The env without its wrappers; the env itself if it has no ``unwrapped``."""
    try:
        itself = env.unwrapped
    except Exception:  # the env need not be Gymnasium's
        itself = None
    return env if itself is None else itself


def _what_is_wrong(env: Any) -> str:
    """Why an object is no env that can be stepped; empty if it is one."""
    if isinstance(env, type):
        name = env.__name__
        return f"class, {name}, not an env: give {name} itself, or `lambda: {name}()`"
    kind = type(env).__name__
    needed = ("reset", "step", *_SPACES)
    missing = [name for name in needed if getattr(env, name, None) is None]
    if missing:
        hint = ""
        if set(missing) <= set(_SPACES) and isinstance(env, gym.Env):
            hint = (
                ". If it makes them in its first reset, give partial(HostedEnv.made_by, env_fn) "
                "in place of env_fn (shmvec.exchange.HostedEnv)"
            )
        return f"{kind} without {', '.join(missing)}; it must return a gymnasium.Env{hint}"
    for name in _SPACES:
        space = getattr(env, name)
        modules = {base.__module__.partition(".")[0] for base in type(space).__mro__}
        if "gym" in modules and not isinstance(space, gym.Space):
            return (
                f"{kind} whose {name}, {space}, is a space of gym, not of gymnasium. Make it with "
                "gymnasium.spaces; or wrap the env with shimmy's GymV26CompatibilityV0(env=env) "
                "or, if its step returns four values, GymV21CompatibilityV0(env=env)"
            )
    return ""


class HostedEnv:
    """An env of another interface, wrapped so that a worker can step it.

    It passes every call on to the env. Adapters for envs that are not Gymnasium's, or whose calls
    must be changed in the worker, derive from it and override methods. The ``env_fns`` make its
    instances, which never leave their worker.

    Attributes:
        env: The env.
        observation_space: The space of the observations that it returns.
        action_space: The space of the actions that it takes.
        metadata: The env's; ``{}`` where it has none.
        render_mode: The env's; None where it has none.
    """

    @classmethod
    def made_by(cls, env_fn: Callable[[], Any], **arguments: Any) -> Any:
        """Wraps an env whose spaces may exist only after its first reset.

        If they do not exist before, one env is reset to learn them, and closed; the worker steps
        another one, which has not been reset.

        Args:
            env_fn: The function that makes the env.
            **arguments: Further arguments for this class.

        Returns:
            An instance; or the object itself if it is no env, which the worker then refuses.

        Raises:
            ValueError: The env_fn made no other env.

        Example:
            >>> import gymnasium as gym
            >>> from functools import partial
            >>> from shmvec import ShmVectorEnv
            >>> from shmvec.exchange import HostedEnv
            >>> class Late(gym.Env):
            ...     def reset(self, *, seed=None, options=None):
            ...         self.observation_space = gym.spaces.Box(0, 1, (3,))
            ...         self.action_space = gym.spaces.Discrete(2)
            ...         return self.observation_space.sample(), {}
            >>> envs = ShmVectorEnv([partial(HostedEnv.made_by, Late)] * 2, num_workers=1)
            >>> envs.single_action_space
            Discrete(2)
            >>> envs.close()
        """
        env = env_fn()
        if not (hasattr(env, "reset") and hasattr(env, "step")):
            return env
        spaces = _spaces_of(env)
        if any(space is None for space in spaces):
            used = env
            try:
                used.reset()
                spaces = _spaces_of(used)
            finally:
                used.close()
            env = env_fn()
            if env is used:
                raise ValueError(
                    "the env_fn returned the same env twice, whose spaces exist only after its "
                    "first reset: it was reset to learn them, and closed. Make an env in the "
                    "function: write `lambda: gym.make(...)`, not `lambda: env`."
                )
        return cls(env, observation_space=spaces[0], action_space=spaces[1], **arguments)

    def __init__(self, env: Any, observation_space: Any = None, action_space: Any = None) -> None:
        """Takes the env, and the spaces where they are not the env's own."""
        self.env = env
        self.observation_space = (
            env.observation_space if observation_space is None else observation_space
        )
        self.action_space = env.action_space if action_space is None else action_space
        self.metadata: dict[str, Any] = getattr(env, "metadata", None) or {}
        self.render_mode: str | None = getattr(env, "render_mode", None)

    @property
    def unwrapped(self) -> Any:
        """The env without its wrappers; no two envs of a worker may have the same."""
        return getattr(self.env, "unwrapped", self.env)

    def reset(self, **arguments: Any) -> Any:
        """Resets the env."""
        return self.env.reset(**arguments)

    def step(self, action: Any) -> Any:
        """Steps the env."""
        return self.env.step(action)

    def render(self) -> Any:
        """Renders the env."""
        return self.env.render()

    def close(self) -> None:
        """Closes the env."""
        self.env.close()

    def get_wrapper_attr(self, name: str) -> Any:
        """The method or attribute for ``call`` and ``get_attr``."""
        find = getattr(self.env, "get_wrapper_attr", None)
        return getattr(self.env, name) if find is None else find(name)

    def set_wrapper_attr(self, name: str, value: Any) -> Any:
        """Sets an attribute for ``set_attr``."""
        return self.env.set_wrapper_attr(name, value)


def _spaces_of(env: Any) -> tuple[Any, Any]:
    """The spaces of an env; None for a space that does not exist yet."""
    found = []
    for name in ("observation_space", "action_space"):
        try:
            found.append(getattr(env, name))
        except Exception:
            found.append(None)
    return found[0], found[1]

"""Builds and closes the envs of one worker, and carries out commands on them.

Worker processes use this module, and so does the caller's process for its own envs, with another
``mailbox``.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from typing import Any, Protocol

import gymnasium as gym

from shmvec._core import Descriptor, MappedMemory, Recorder, Segment, WorkerLoop, end_forks
from shmvec._hints import action_hint, env_fn_hint, reset_hint, reward_hint, thread_hint
from shmvec._memory.layout import Layout, misfit_error
from shmvec._pickling import new_copy
from shmvec._processes.control import Attachment, LateParts, Report, ResetSettings
from shmvec._processes.overlap import (
    EnvThreads,
    Executor,
    Overlap,
    Result,
    is_asynchronous,
    try_call,
)
from shmvec.faults import EnvTimeoutError, Failure, add_note
from shmvec.spaces import reward_space_of

__all__ = ["Call", "EnvFn", "EnvHost", "HostedEnv", "Mailbox"]


EnvFn = Callable[[], gym.Env[Any, Any]]

_SPACES = ("observation_space", "action_space")
_NEEDS_WORKER_HINT = "it needs a worker process (num_workers=1 or more, without caller_steps)"
BUILD_TIMEOUT_S = 10.0  # for envs that are being built, once another one could not be


class Mailbox(Protocol):
    """The worker's end of a control channel."""

    def pack(self, message: Any) -> Any:
        """Makes a message ready to send; raises if it cannot be pickled."""

    def unpack(self, packed: Any) -> Any:
        """Returns the message that was packed."""

    def packer(self, uses_depot: bool) -> Callable[[Any], Any]:
        """A function that packs the results of a request, into the depot if that may be used."""

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
        uses_depot: Whether the results may be written to the depot.
        envs: The envs, by index; None: all.
    """

    name: str
    run: Callable[[Any, int], Any]
    uses_depot: bool = False
    envs: Container[int] | None = None

    def includes(self, index: int) -> bool:
        """Whether the env of this index carries it out."""
        return self.envs is None or index in self.envs


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
        limit_libraries: Callable[[], object] = lambda: None,
    ) -> None:
        """Prepares a host for the envs ``first_env`` and up.

        Args:
            index: The worker's index.
            first_env: Index of its first env.
            mailbox: For messages from and to the parent.
            overlap: The option of this name.
            spare_envs: Likewise.
            in_caller: Whether this is the caller's process.
            limit_libraries: Limits the threads of libraries; called in each thread of an env.
        """
        self._overlap, self._num_copies = overlap, 1 + spare_envs
        self._in_caller, self._limit_libraries = in_caller, limit_libraries
        self.index = index
        self.first_env = first_env
        self.mailbox = mailbox
        self.envs: list[Any] = []  # during the build: copies of the first env, of the second, …
        self._first_copies: list[Any] = []  # one of each env, for hints
        self.executor = Executor()
        self._awaits = False  # whether an env has coroutine functions
        self._loop: Any = None  # the WorkerLoop, while there is one
        self._layout: Layout

    def build(
        self, env_fns: Sequence[EnvFn], first_built: Callable[[], None] = lambda: None
    ) -> Report | Failure:
        """Builds the envs: the first one alone, then as many at once as may be busy at once.

        If one cannot be built, those that were built are closed again.

        Args:
            env_fns: The functions that make the envs.
            first_built: Called once the first env is built.
        """
        fns = [env_fn for env_fn in env_fns for _ in range(self._num_copies)]
        self._awaits = not self._in_caller and any(map(is_asynchronous, fns))
        self.executor = self._new_executor(len(fns), in_threads=self._num_copies > 1)
        self.envs = [None] * len(fns)
        built_envs: dict[int, tuple[int, Any]] = {}
        begin, end = 0, 1
        while begin < len(fns):
            failure = self._make_envs(dict(enumerate(fns[begin:end], begin)), built_envs)
            if failure is not None:
                self.close()
                return failure
            if begin == 0:
                first_built()
            begin, end = end, end + self.executor.build_concurrency
        first, spaces = self.envs[0], [_spaces_by_name(copy) for copy in self.envs]
        self._first_copies = self.envs[:: self._num_copies]
        if self._num_copies > 1:
            self._wrap_copies()
        return Report(
            **spaces[0],
            metadata=dict(getattr(first, "metadata", None) or {}),
            render_mode=getattr(first, "render_mode", None),
            differing_spaces=[
                (self._env_index(place), which, space)
                for place, described in enumerate(spaces)
                for which, space in described.items()
                if space != spaces[0][which]
            ],
        )

    def _env_index(self, place: int) -> int:
        """Index of the env of which a copy is at this place among the worker's."""
        return self.first_env + place // self._num_copies

    def _new_executor(self, num_envs: int, in_threads: bool = False) -> Executor:
        if self._awaits:
            from shmvec._processes.event_loop import EnvCoroutines  # only these need asyncio

            return EnvCoroutines(self._overlap or num_envs)
        if in_threads or self._overlap not in (None, 1):
            return EnvThreads(self._overlap or 1, num_envs, self._limit_libraries)
        return Executor(interrupts=self._num_copies == 1)

    def _make_envs(
        self, env_fns: Mapping[int, EnvFn], built_envs: dict[int, tuple[int, Any]]
    ) -> Failure | None:
        """Calls functions that make envs.

        Args:
            env_fns: The functions, by the places of the envs.
            built_envs: The index and the innermost env of each that was built, by the latter's id.
        """
        results = self.executor.run_all(env_fns, BUILD_TIMEOUT_S)
        for place, (env, _) in results.items():
            self.envs[place] = env
        for place, (env, error) in results.items():
            if error is None:
                error = try_call(partial(self._check_env, place, env, built_envs))[1]
            elif isinstance(error, Exception):
                self._add_hints(place, env_fns[place], error)
            if error is not None:
                return self._failure(self._env_index(place), "make", error)
        if self._awaits and not self.executor.awaits:
            self.executor.end()
            self.executor = self._new_executor(len(self.envs))
        return None

    def _check_env(self, place: int, env: Any, built_envs: dict[int, tuple[int, Any]]) -> None:
        """Raises an error for an object that is no env, or that was returned before."""
        index = self._env_index(place)
        defect = _find_defect(env, self._in_caller)
        if defect:
            raise TypeError(f"env_fns[{index}]() returned a {defect}")
        if is_asynchronous(env):
            if self._in_caller:
                raise TypeError(
                    f"env_fns[{index}]() returned a {type(env).__name__} whose step or reset is a "
                    f"coroutine function: {_NEEDS_WORKER_HINT}"
                )
            self._awaits = True
        base_env = _unwrapped(env)
        if id(base_env) in built_envs:
            raise ValueError(
                f"env_fns[{built_envs[id(base_env)][0]}] and env_fns[{index}] returned the same "
                "env: the same instance, instead of different objects, which would be stepped "
                "twice. Make an env in each function: write `lambda: gym.make(...)`, not "
                "`lambda: env`. (With num_workers=num_envs each has a process, and so a "
                "copy, of its own.)"
            )
        built_envs[id(base_env)] = index, base_env
        reward_space_of(env)  # it raises an error for some wrappers
        if self._num_copies > 1:
            from shmvec._processes.spare_envs import refuse_recording_wrappers

            refuse_recording_wrappers(index, env)

    def _add_hints(self, place: int, env_fn: EnvFn, error: Exception) -> None:
        """Adds hints to what an env_fn has raised."""
        index = self._env_index(place)
        if place % self._num_copies:
            note = (
                f"This is another copy of env {index}, which was built before: if a process "
                "can hold only one, leave spare_envs out."
            )
            add_note(error, note)
        elif place:
            note = (
                f"Env {index} was not the first in its process: "
                "envs of which a process can hold only one (emulators, simulators with global "
                "state) need num_workers=num_envs."
            )
            add_note(error, note)
        with contextlib.suppress(Exception):
            add_note(error, env_fn_hint(index, env_fn, error))

    def _wrap_copies(self) -> None:
        from shmvec._processes.spare_envs import CoroutineSpares, ThreadSpares

        copies, executor = self.envs, self.executor
        parts = [slice(i, i + self._num_copies) for i in range(0, len(copies), self._num_copies)]
        if isinstance(executor, EnvThreads):
            self.executor = self._new_executor(len(parts))  # the copies keep the old one's threads
            self.envs = [ThreadSpares(copies[part], executor.threads[part]) for part in parts]
        else:
            self.envs = [CoroutineSpares(copies[part]) for part in parts]

    def make_loop(
        self, segment: Segment, attachment: Attachment, descriptors: Sequence[int] = ()
    ) -> WorkerLoop:
        """Makes the step loop over these envs; maps the memory that comes with the descriptors."""
        self._layout = attachment.layout
        steppers, summaries = self.envs, None
        if attachment.compile_wrappers:
            from shmvec._wrappers import compile_env, summary_of  # only processes with envs need it

            if self._num_copies > 1:
                chains = [env.compile(compile_env) for env in self.envs]
            else:
                steppers = chains = [compile_env(env) for env in self.envs]
            summaries = list(map(summary_of, chains))
        resets = attachment.resets
        if resets is not None:
            resets = resets._replace(automatic=self._set_spare_options(resets.automatic))
        self._loop = self.executor.make_loop(
            self.envs,
            steppers,
            segment=segment,
            index=self.index,
            first_env=self.first_env,
            host=self,
            slabs=attachment.layout.attach(segment),
            autoreset=attachment.autoreset,
            has_time_limits=attachment.limits != (None, None),
            resets_failed_envs=attachment.mends,
            resets=resets,
        )
        if summaries is not None:
            self._loop.publish_words(summaries)
        for (name, size), descriptor in zip(attachment.shared, descriptors, strict=True):
            self._use_shared(name, size, descriptor)
        return self._loop

    def run_command(self, sequence: int) -> list[Any]:
        """Receives a command and carries it out."""
        call = self.receive_command(sequence)

        def run(i: int) -> Result:
            index = self.first_env + i
            self._loop.begin_call(index)
            result = try_call(partial(call.run, self.envs[i], index))
            self._loop.end_call(index)
            end_forks()
            return result

        return self.pack_results(call, run)

    def receive_command(self, sequence: int) -> Call:
        """Receives a command."""
        packed, descriptors = self.mailbox.receive(sequence)
        name, payload = self.mailbox.unpack(packed)
        if name in ("rollout", "log", "eventfd"):
            if payload:
                self._use_shared(name, payload, descriptors[0])
            else:
                self._loop.set_log(None)
            return Call(name, lambda env, index: None, envs=())
        if name == "call":
            attribute, arguments, chosen, lent = payload

            def run(env: gym.Env[Any, Any], index: int) -> Any:
                value = _find_attribute(env, attribute)
                if not callable(value):
                    return value
                args, kwargs = ((), {}) if arguments is None else new_copy(arguments)
                return value(*args, **kwargs)

            return Call(attribute, run, lent, chosen)
        if name != "set_attr":
            raise RuntimeError(f"worker {self.index} was sent the unknown command {name!r}")
        attribute, values = payload

        def assign(env: gym.Env[Any, Any], index: int) -> Any:
            result: Any = env.set_wrapper_attr(attribute, new_copy(values[index]))
            return result if inspect.isawaitable(result) else None

        return Call(f"set_attr({attribute!r})", assign, envs=values)

    def receive_trace(self, sequence: int) -> None:
        """Receives memory for a trace; if it cannot be mapped, nothing is recorded."""
        with contextlib.suppress(OSError):  # too little memory, or too many open files
            packed, (descriptor,) = self.mailbox.receive(sequence)
            self._use_shared("trace", self.mailbox.unpack(packed), descriptor)

    def _use_shared(self, name: str, size: tuple[Any, ...], descriptor: int) -> None:
        """Has the loop use what was shared: memory, which is mapped here, or an eventfd."""
        nbytes, *parts = size
        if name == "eventfd":
            self._loop.set_eventfd(Descriptor(int, descriptor))
            return
        try:
            memory = MappedMemory(descriptor, nbytes)
        finally:
            os.close(descriptor)
        if name == "trace":
            self._loop.record(Recorder(memory, parts[0], parts[1], self.index, os.getpid()))
        elif name == "log":
            open_log, *sizes = parts
            self._loop.set_log(open_log(self._layout, memory, *sizes))
        else:
            self._loop.set_rollouts(self._layout.map_results(memory, *parts))

    def pack_results(self, call: Call, run: Callable[[int], Result]) -> list[Any]:
        """A packed result or a Failure for each env; ``run`` has the env of a place do the call."""
        pack = self.mailbox.packer(call.uses_depot)
        results: list[Any] = [None] * len(self.envs)
        for i in range(len(self.envs)):
            index = self.first_env + i
            if not call.includes(index):
                results[i] = pack(None)
                continue
            value, error = run(i)
            if error is None:  # pickling runs the user's code
                value, error = try_call(partial(pack, value))
            results[i] = value if error is None else self._failure(index, call.name, error)
            del value, error
        return results

    def misfit_error(self, env: int, what: str, value: Any, error: Exception) -> Exception:
        """The error for an observation or a reward that does not fit its space."""
        layout = self._layout
        space = layout.observation_space if what == "observation" else layout.reward_space
        assert space is not None
        misfit = misfit_error(env, space, value, error, name=what)
        if what == "reward":
            add_note(misfit, reward_hint(value))
        return misfit

    def receive_arguments(self, sequence: int) -> list[tuple[int, Any]]:
        """Receives what does not fit a slab or ring: actions, or seeds and options, by env."""
        packed, _ = self.mailbox.receive(sequence)
        arguments: list[tuple[int, Any]] = self.mailbox.unpack(packed)
        return arguments

    def receive_reset_settings(self, sequence: int) -> ResetSettings:
        """Receives what was set for automatic resets."""
        return self._set_spare_options(self.receive_arguments(sequence))

    def _set_spare_options(self, settings: ResetSettings) -> ResetSettings:
        """Gives spare envs their options; returns the settings that are left to the loop."""
        if self._num_copies == 1:
            return settings
        for env, (_, options) in settings:
            self.envs[env - self.first_env].reset_options = options
        return [(env, (seed, None)) for env, (seed, _) in settings]

    def send_late(
        self,
        sequence: int,
        messages: list[tuple[int, int, dict[str, Any]]],
        failures: list[tuple[int, str, BaseException]],
        results: list[Any] | None,
    ) -> None:
        """Sends the parent what does not fit the rings."""
        failed = [self._explain_failure(*failure) for failure in failures]
        failed += [result for result in results or () if isinstance(result, Failure)]
        if results is not None:
            results = [None if isinstance(r, Failure) else r for r in results]
        packed = []
        for kind, env, message in messages:
            try:
                packed.append((kind, env, self.mailbox.pack(message)))
            except Exception as error:
                failed.append(self._failure(env, "info", error))
        self.mailbox.send(sequence, self.mailbox.pack(LateParts(packed, failed, results)))

    def close(self) -> list[Failure]:
        """Closes all envs; returns what they have raised."""
        close, failures = methodcaller("close"), []
        built = {i: partial(close, env) for i, env in enumerate(self.envs) if env is not None}
        for i, (_, error) in self.executor.run_all(built).items():
            if error is not None:
                failures.append(self._failure(self.first_env + i, "close", error))
        self.executor.end()
        self.envs, self._first_copies = [], []
        self.executor, self._loop = Executor(), None  # breaks the cycle from the loop to this host
        return failures

    def _explain_failure(self, env: int, operation: str, error: BaseException) -> Failure:
        """The failure of a step or reset, with a hint where one is known."""
        with contextlib.suppress(Exception):  # the env's code may raise, or the env is closed
            env_copy = self._first_copies[env - self.first_env]
            if operation == "reset":
                add_note(error, reset_hint(env, env_copy, error))
            elif operation == "step" and not isinstance(error, EnvTimeoutError):
                add_note(error, action_hint(env, env_copy, self._loop.action_of(env)))
        return self._failure(env, operation, error)

    def _failure(self, env: int, operation: str, error: BaseException) -> Failure:
        if self._overlap or self._num_copies > 1:
            add_note(error, thread_hint(error))
        return Failure.of(error, env, self.index, operation)


def _find_attribute(env: gym.Env[Any, Any], attribute: str) -> Any:
    """The attribute of the outermost wrapper that has it."""
    try:
        return env.get_wrapper_attr(attribute)
    except AttributeError as missing:
        # If the errors have a name, traceback looks for similar ones among all attributes, which
        # takes Python 3.12 and later 15 ms. Some programs ask in each step whether an attribute
        # exists.
        chain: list[BaseException] = [missing]
        for error in chain:
            if isinstance(error, AttributeError) and error.name == attribute:
                error.name = None
            cause = error.__cause__ or error.__context__
            if cause is not None and cause not in chain:
                chain.append(cause)
        raise


def _unwrapped(env: Any) -> Any:
    """The env without its wrappers; the env itself if it has no ``unwrapped``."""
    try:
        base_env = env.unwrapped
    except Exception:  # the env need not be Gymnasium's
        base_env = None
    return env if base_env is None else base_env


def _spaces_by_name(env: Any) -> dict[str, Any]:
    """The spaces of an env, by their names in a Report."""
    spaces = {name: getattr(env, name) for name in _SPACES}
    return {**spaces, "reward_space": reward_space_of(env)}


def _find_defect(env: Any, in_caller: bool) -> str:
    """Why an object is no env that can be stepped; empty if it is one."""
    if isinstance(env, type):
        name = env.__name__
        return f"class, {name}, not an env: give {name} itself, or `lambda: {name}()`"
    kind = type(env).__name__
    if inspect.iscoroutine(env):
        env.close()  # or it would be warned about
        if in_caller:
            return f"coroutine, not an env: {_NEEDS_WORKER_HINT}"
        return (
            "coroutine, not an env: give the coroutine function itself, or a partial of it, not a "
            "lambda that calls it"
        )
    required = ("reset", "step", *_SPACES)
    missing = [name for name in required if getattr(env, name, None) is None]
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
        reward_space: The space of its rewards, a Box of shape ``(k,)``; None: they are numbers.
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
        spaces = _read_spaces(env)
        if any(space is None for space in spaces):
            sample_env = env
            try:
                sample_env.reset()
                spaces = _read_spaces(sample_env)
            finally:
                sample_env.close()
            env = env_fn()
            if env is sample_env:
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
        self.reward_space = reward_space_of(env)
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


def _read_spaces(env: Any) -> tuple[Any, Any]:
    """The spaces of an env; None for a space that does not exist yet."""
    spaces = []
    for name in _SPACES:
        try:
            spaces.append(getattr(env, name))
        except Exception:
            spaces.append(None)
    return spaces[0], spaces[1]

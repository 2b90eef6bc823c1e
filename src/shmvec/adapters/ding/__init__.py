"""DI-engine's env managers: each env has a state, and is stepped by ``{env_id: action}``.

``SyncSubprocessEnvManager``, ``AsyncSubprocessEnvManager`` and ``SubprocessEnvManagerV2`` are those
of ``ding.envs``, over an ``Exchange``: methods, their arguments and results are those of
`DI-engine's env managers <https://github.com/opendilab/DI-engine/tree/main/ding/envs/env_manager>`_.
DI-engine need not be installed. They step Gymnasium envs, and DI-engine's own with Gymnasium's
spaces. docs/coming-from/di-engine.md says what differs.
"""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import create_empty_array

from shmvec._arguments import checked_env_fns
from shmvec.adapters.ding._config import (
    EnvManagerConfig,
    SyncEnvManagerConfig,
    checked_envs,
    checked_params,
    config_of,
    seeds_by_env,
)
from shmvec.adapters.ding._env import DiscreteRows, to_gymnasium_space
from shmvec.adapters.ding._machine import (
    BaseEnvTimestep,
    EnvState,
    EnvStateError,
    Machine,
    ManagerClosedError,
    Slot,
)
from shmvec.exchange import Exchange, HostedEnv, OwnsProcesses

__all__ = [
    "AsyncSubprocessEnvManager",
    "BaseEnvTimestep",
    "EnvManagerConfig",
    "EnvState",
    "EnvStateError",
    "ManagerClosedError",
    "SubprocessEnvManagerV2",
    "SyncEnvManagerConfig",
    "SyncSubprocessEnvManager",
    "create_env_manager",
    "get_env_manager_cls",
]

_CLOSE_TIMEOUT_S = 5.0


class AsyncSubprocessEnvManager(OwnsProcesses):
    """Steps envs, each with its own action and at its own pace, in worker processes.

    ``step`` sends actions to some envs, and returns the results of those that are ready first; a
    later step returns the rest. Envs whose episodes are over are reset in the background.

    A failure affects only its env: ``step`` raises the env's exception, with the worker's traceback
    as the cause, ``EnvTimeoutError`` or ``WorkerCrashError``, and the env is in ERROR until
    ``reset``; the others continue. (With ``faults=shmvec.FaultPolicy(...)`` in the configuration,
    the env is reset instead.) The exception's ``timesteps`` are those of the other envs.

    Methods raise ``ManagerClosedError`` before ``launch`` and after ``close``, ``EnvStateError`` if
    an env is in the wrong state, ``RuntimeError`` if a reset has failed ``max_retry`` times, and
    TypeError or ValueError if arguments are wrong; then nothing was sent.

    Example:
        >>> import gymnasium as gym
        >>> from shmvec.adapters.ding import AsyncSubprocessEnvManager
        >>> make_env = lambda: gym.make("CartPole-v1")
        >>> manager = AsyncSubprocessEnvManager([make_env] * 4, {"episode_num": 2})
        >>> manager.seed(0)
        >>> manager.launch()
        >>> while not manager.done:
        ...     actions = {env_id: 0 for env_id in manager.ready_obs}
        ...     timesteps = manager.step(actions)
        >>> manager.episode_count
        {0: 2, 1: 2, 2: 2, 3: 2}
        >>> manager.close()
    """

    config_type: type[EnvManagerConfig] = EnvManagerConfig

    def __init__(
        self, env_fn: Sequence[Callable[[], Any]], cfg: Mapping[str, Any] | None = None
    ) -> None:
        """Stores the envs' functions and the configuration; ``launch`` starts the envs.

        Args:
            env_fn: One function for each env.
            cfg: Changes to ``default_config()``: a dict, an EasyDict or a configuration.
        """
        self._machine: Machine | None = None
        self._env_fn = checked_env_fns(env_fn)
        self._config = config_of(self.config_type, cfg)
        self._slots = [Slot() for _ in self._env_fn]
        self._env_ref: Any = None
        self._action_seed: int | None = None

    @classmethod
    def default_config(cls) -> EnvManagerConfig:
        """All keys of the configuration, with their defaults."""
        return cls.config_type()

    # ---- properties that do not wait ---------------------------------------------------------

    @property
    def env_num(self) -> int:
        """Number of envs."""
        return len(self._env_fn)

    @property
    def closed(self) -> bool:
        """Whether there are no envs: before ``launch``, and after ``close``."""
        return self._machine is None or self._machine.exchange.closed

    @property
    def exchange(self) -> Exchange:
        """The ``Exchange``, for its ``processes``, ``restarts`` and ``stats``."""
        return self._require_machine().exchange

    @property
    def env_states(self) -> dict[int, EnvState]:
        """The state of each env."""
        return {env: slot.state for env, slot in enumerate(self._slots)}

    @property
    def episode_count(self) -> dict[int, int]:
        """How many episodes each env has played since ``launch``."""
        return {env: slot.episodes for env, slot in enumerate(self._slots)}

    @property
    def reset_infos(self) -> dict[int, dict[str, Any]]:
        """The info of each env's last reset."""
        return {env: slot.reset_info for env, slot in enumerate(self._slots)}

    @property
    def done(self) -> bool:
        """Whether all envs have played their episodes."""
        return all(slot.state is EnvState.DONE for slot in self._slots)

    def env_state_done(self, env_id: int) -> bool:
        """Whether an env has played its episodes."""
        return self._slots[env_id].state is EnvState.DONE

    @property
    def active_env(self) -> list[int]:
        """The envs in RUN."""
        return [env for env, slot in enumerate(self._slots) if slot.state is EnvState.RUN]

    @property
    def ready_env(self) -> list[int]:
        """The envs that can be stepped: in RUN, and not in flight."""
        return [] if self._machine is None else self._machine.ready

    @property
    def method_name_list(self) -> list[str]:
        """The methods of envs that the manager may call; override it to add some."""
        return ["reset", "step", "seed", "close", "enable_save_replay", "render"]

    @property
    def observation_space(self) -> gym.Space[Any]:
        """Observation space of one env."""
        return self._single_space("observation_space")  # type: ignore[no-any-return]

    @property
    def action_space(self) -> gym.Space[Any]:
        """Action space of one env; ``seed`` seeds it, too."""
        space = self._single_space("action_space")
        if self._action_seed is not None:
            space.seed(self._action_seed)
            self._action_seed = None
        return space  # type: ignore[no-any-return]

    @property
    def reward_space(self) -> gym.Space[Any]:
        """The env's own reward space, or the space of all numbers."""
        space = to_gymnasium_space(getattr(self._described_env().env, "reward_space", None))
        return gym.spaces.Box(-np.inf, np.inf, (), np.float64) if space is None else space

    @property
    def env_ref(self) -> Any:
        """An env in the calling process, ``env_fn[0]()``, made when first asked for."""
        if self._env_ref is None:
            self._env_ref = self._env_fn[0]()
        return self._env_ref

    def _described_env(self) -> Any:
        """``env_ref`` with its spaces; an env without spaces is reset to get them, then closed."""
        reference = [self.env_ref]
        return HostedEnv.made_by(lambda: reference.pop() if reference else self._env_fn[0]())

    def _single_space(self, name: str) -> Any:
        if self._machine is None:
            return to_gymnasium_space(getattr(self._described_env(), name))
        space = getattr(self._machine.exchange, f"single_{name}")
        return space.space if isinstance(space, DiscreteRows) else space

    # ---- properties that may wait ------------------------------------------------------------

    @property
    def ready_obs(self) -> Any:
        """The next observation of each env that is ready, as ``{env_id: observation}``.

        Waits until at least one env is ready. It is empty at once if all envs are DONE, in ERROR or
        in NEED_RESET, or if results of steps must be taken first, by ``step({})``. If it raises
        because a reset has failed too often, another call waits for the other envs.
        """
        return {env: self._slots[env].observation for env in self._wait_for_ready()}

    @property
    def ready_obs_id(self) -> list[int]:
        """The envs of ``ready_obs``; waits like that."""
        return self._wait_for_ready()

    @property
    def ready_imgs(self) -> dict[int, Any]:
        """A frame of each env that is ready, ``{env_id: array}``; waits for all envs in flight.

        The envs must have been made with ``render_mode="rgb_array"``.
        """
        machine = self._require_machine()
        machine.wait_for_all()
        ready = self.ready_env
        return dict(zip(ready, machine.call(ready, "shmvec_render"), strict=True))

    def random_action(self) -> dict[int, Any]:
        """A sample of the action space for each env that is ready."""
        space = self.action_space
        return {env: space.sample() for env in self._wait_for_ready()}

    def _wait_for_ready(self) -> list[int]:
        machine = self._require_machine()
        machine.process_answers(1, -math.inf)  # takes answers, and does not wait
        while True:
            machine.raise_reset_errors()
            ready = self.ready_env
            waits = any(slot.state is EnvState.RESET for slot in self._slots)
            if ready or not waits or machine.undelivered:
                return ready
            machine.process_answers(1, math.inf)

    # ---- launch, reset, close ----------------------------------------------------------------

    def launch(self, reset_param: Mapping[int, dict[str, Any] | None] | None = None) -> None:
        """Starts the workers, builds the envs and resets them; again only if an env is in ERROR.

        Args:
            reset_param: For each env, keyword arguments of its ``reset``.
        """
        any_failed = any(slot.state is EnvState.ERROR for slot in self._slots)
        if not (self.closed or any_failed):
            raise EnvStateError("please first close the env manager: it is launched already")
        if reset_param is not None:
            checked_params(reset_param, self.env_num)
            if len(reset_param) != self.env_num:
                raise ValueError(
                    f"launch() needs reset_param of all {self.env_num} envs, or none; got those of "
                    f"{sorted(reset_param)}"
                )
        if not self.closed:
            self.close()
        self._machine = Machine(self._env_fn, self._config, self._slots)
        try:
            self.reset(reset_param)
        except BaseException:
            self.close()
            raise

    def reset(self, reset_param: Mapping[int, dict[str, Any] | None] | None = None) -> None:
        """Resets envs, in parallel, and waits for them.

        Envs in flight are waited for first, and their results are discarded. If a reset fails, that
        env is in ERROR; the others are reset.

        Args:
            reset_param: Which envs to reset, and keyword arguments of their ``reset``, which
                automatic resets use as well. None in place of an env's arguments: no arguments.
                None in place of the mapping: all envs, with their last arguments.
        """
        machine = self._require_machine()
        if reset_param is None:
            reset_param = {env: slot.param for env, slot in enumerate(self._slots)}
        params = checked_params(reset_param, self.env_num)
        if not params:
            return
        machine.reset(params)
        while any(self._slots[env].state is EnvState.RESET for env in params):
            machine.process_answers(1, math.inf)
        machine.raise_reset_errors(params)

    def close(self) -> None:
        """Closes the envs and ends the workers. A second call does nothing.

        An env in a step gets 5 seconds to finish it.
        """
        machine, self._machine = self._machine, None
        reference, self._env_ref = self._env_ref, None
        if machine is not None:
            machine.end()
        try:
            if reference is not None:
                reference.close()
        finally:
            if machine is not None:
                machine.exchange.close(timeout=_CLOSE_TIMEOUT_S)

    def seed(
        self,
        seed: int | Sequence[int | None] | Mapping[int, int | None],
        dynamic_seed: bool | None = None,
    ) -> None:
        """Sets the seeds of the envs' next ``reset`` or ``launch``, which uses them once.

        Args:
            seed: An int: env ``i`` gets ``seed + i``. A list: one for each env. A dict: for some.
            dynamic_seed: Whether every reset, also an automatic one, gets another seed:
                ``seed + 100 * n``, where the seed determines each ``n``. An env that has a method
                ``seed`` gets both arguments instead.
        """
        seeds = seeds_by_env(seed, self.env_num)
        if dynamic_seed is not None and not isinstance(dynamic_seed, (bool, np.bool_)):
            raise TypeError(f"dynamic_seed must be a bool or None, got {dynamic_seed!r}")
        for env, value in seeds.items():
            slot = self._slots[env]
            slot.seed, slot.unconfirmed_seed = value, None
            slot.dynamic_seed = None if dynamic_seed is None else bool(dynamic_seed)
        if 0 in seeds:
            self._action_seed = seeds[0]

    def enable_save_replay(self, replay_path: str | Sequence[str]) -> None:
        """Sets where envs save replays, from their next ``reset`` or ``launch`` on.

        An env that has a method ``enable_save_replay`` gets the path. Others are wrapped in
        Gymnasium's ``RecordVideo``, which needs ``render_mode="rgb_array"`` and moviepy, and writes
        "env-<id>-episode-<n>.mp4".

        Args:
            replay_path: One folder for all, or one for each env.
        """
        paths = [replay_path] * self.env_num if isinstance(replay_path, str) else list(replay_path)
        if len(paths) != self.env_num:
            raise ValueError(f"there are {len(paths)} replay paths for {self.env_num} envs")
        for slot, path in zip(self._slots, paths, strict=True):
            slot.replay_path = str(path)

    # ---- step --------------------------------------------------------------------------------

    def step(self, actions: Any) -> Any:
        """Steps envs, and returns those that are ready first.

        Args:
            actions: ``{env_id: action}``, of envs in ``ready_env``. Empty: only takes results.

        Returns:
            ``{env_id: timestep}``, in the order in which they were ready: of ``wait_num`` envs or,
            after ``step_wait_timeout``, of the ready ones. At least one of them is not done, unless
            no env is in flight. Envs of earlier steps are included.
        """
        machine = self._require_machine()
        envs = self._checked_envs(actions)
        machine.raise_reset_errors()
        if envs:
            machine.step(dict(zip(envs, actions.values(), strict=True)))
        wanted, timeout = self._step_limits()
        deadline = time.monotonic() + timeout
        while stepping := len(machine.stepping):
            missing = wanted - len(machine.undelivered)
            if missing > 0 and time.monotonic() < deadline:
                machine.process_answers(int(min(missing, stepping)), deadline)
            elif machine.has_usable_result():
                break
            else:
                machine.process_answers(1, math.inf)
        timesteps = machine.deliver()
        if not timesteps:
            machine.raise_reset_errors()
        return timesteps

    def _checked_envs(self, actions: Any) -> list[int]:
        """The envs to step."""
        machine = self._require_machine()
        if not isinstance(actions, Mapping) or not set(machine.ready).issuperset(actions):
            envs = checked_envs("actions", actions, self.env_num)
            states = ", ".join(
                f"{env}: {self._slots[env].state.name}"
                + (" (in flight)" if machine.is_in_flight(env) else "")
                for env in envs
            )
            raise EnvStateError(
                f"current env states are: {{{states}}}, please check whether the requested env is "
                "in reset or done. Nothing was sent to any env."
            )
        return list(map(int, actions))

    def _step_limits(self) -> tuple[float, float]:
        """The number of results that a step waits for, and seconds after which it takes fewer."""
        timeout = self._config.step_wait_timeout
        return self._config.wait_num, math.inf if timeout is None else timeout

    def _require_machine(self) -> Machine:
        if self._machine is None or self.closed:
            raise ManagerClosedError("env manager is closed, please launch() it first")
        return self._machine

    # ---- attributes of the envs --------------------------------------------------------------

    if not TYPE_CHECKING:  # for type checkers a misspelt name would be an attribute

        def __getattr__(self, key: str) -> Any:
            """The attribute of each env, as a list; a method if ``method_name_list`` has it."""
            return self._attribute(key)

    def _attribute(self, key: str) -> Any:
        machine = self.__dict__.get("_machine")
        if key.startswith("__"):
            raise AttributeError(key)
        if machine is None or self.closed:
            raise AttributeError(
                f"{type(self).__name__} has no attribute {key!r}; attributes of its envs are "
                "available only after launch()"
            )
        attributes = machine.call(range(self.env_num), "shmvec_read", key)
        if not any(is_method for is_method, _ in attributes):
            return [value for _, value in attributes]
        if key not in self.method_name_list:
            raise RuntimeError(
                f"env getattr doesn't support method({key}), please override method_name_list"
            )
        return partial(self._call, key)

    def _call(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        machine = self._require_machine()
        return machine.call(range(self.env_num), "shmvec_env_method", name, args, kwargs)


class SyncSubprocessEnvManager(AsyncSubprocessEnvManager):
    """An env manager whose ``step`` returns the results of all envs that it steps, in order.

    Example:
        >>> import gymnasium as gym
        >>> from shmvec.adapters.ding import SyncSubprocessEnvManager
        >>> manager = SyncSubprocessEnvManager([lambda: gym.make("CartPole-v1")] * 2)
        >>> manager.seed([3, 4])
        >>> manager.launch()
        >>> timesteps = manager.step({1: 0, 0: 1})
        >>> [(env_id, float(timestep.reward)) for env_id, timestep in timesteps.items()]
        [(1, 1.0), (0, 1.0)]
        >>> manager.env_states[0].name
        'RUN'
        >>> manager.close()
    """

    config_type: type[EnvManagerConfig] = SyncEnvManagerConfig

    def step(self, actions: Any) -> Any:
        """Steps envs and waits for all of them; see ``AsyncSubprocessEnvManager.step``."""
        timesteps = super().step(actions)
        order = [env for env in actions if env in timesteps]
        return {env: timesteps.pop(env) for env in order} | timesteps

    def _step_limits(self) -> tuple[float, float]:
        return math.inf, math.inf


# ---- the pipeline's manager ------------------------------------------------------------------


@functools.cache
def _treetensor() -> Any:
    """The package treetensor, or None; it is imported late, because it imports torch."""
    with warnings.catch_warnings():  # its own imports warn
        warnings.simplefilter("ignore")
        try:
            import treetensor.numpy
        except ImportError:  # `Record` replaces its trees
            return None
    return treetensor.numpy


class Record(dict[str, Any]):
    """A dict whose entries are also attributes, like a tree of treetensor's."""

    def __getattr__(self, key: str) -> Any:
        """The entry of this key."""
        try:
            return self[key]
        except KeyError:
            raise AttributeError(key) from None


class SubprocessEnvManagerV2(SyncSubprocessEnvManager):
    """The synchronous manager for DI-engine's task pipeline.

    Trees (records, and observations that are dicts) are treetensor's if that is installed,
    otherwise ``Record``, with the same attributes.

    Example:
        >>> import gymnasium as gym
        >>> from shmvec.adapters.ding import SubprocessEnvManagerV2
        >>> manager = SubprocessEnvManagerV2([lambda: gym.make("CartPole-v1")] * 3)
        >>> manager.launch()
        >>> manager.ready_obs.shape
        (3, 4)
        >>> records = manager.step([0, 1, 0])
        >>> [int(record.env_id) for record in records], float(records[0].reward)
        ([0, 1, 2], 1.0)
        >>> manager.close()
    """

    _offered_envs: Sequence[int] | None = None  # those of the last ready_obs

    @property
    def ready_obs(self) -> Any:
        """The next observations of all envs that are ready, stacked: ``(n, ...)``.

        Waits as ``AsyncSubprocessEnvManager.ready_obs`` does; ``n`` is 0 if no env will be ready.
        """
        observations = [self._slots[env].observation for env in self._wait_for_ready()]
        if not observations:
            return create_empty_array(self.observation_space, 0)
        return _stack(observations)

    def step(self, actions: Any) -> Any:
        """Steps the envs whose observations the last ``ready_obs`` has returned.

        Args:
            actions: One for each of them, in the order of ``ready_obs_id``: an array or a list.

        Returns:
            A record for each env: ``obs``, ``reward``, ``done``, ``info``, ``env_id``. As in
            DI-engine, keys of infos become identifiers ("TimeLimit_truncated"), and strings are
            left out.
        """
        self._require_machine()
        if isinstance(actions, Mapping):
            raise TypeError("step() takes one action for each env that is ready, not a dict")
        ready = self.ready_env
        envs, self._offered_envs = self._offered_envs, None
        if envs is None or not set(envs) <= set(ready):
            envs = ready
        actions = list(actions)
        if len(actions) != len(envs):
            raise ValueError(
                f"there are {len(actions)} actions for the {len(envs)} envs that are ready, "
                f"{list(envs)}. Nothing was sent to any env."
            )
        timesteps = super().step(dict(zip(envs, actions, strict=True)))
        return [
            _to_tree(dict(obs=obs, reward=reward, done=done, info=_readable_info(info), env_id=env))
            for env, (obs, reward, done, info) in timesteps.items()
        ]

    def _wait_for_ready(self) -> list[int]:
        self._offered_envs = ready = super()._wait_for_ready()
        return list(ready)


def _to_tree(value: Any) -> Any:
    """Makes a dict, and all dicts in it, trees."""
    if not isinstance(value, dict):
        return value
    tnp = _treetensor()
    return Record({k: _to_tree(v) for k, v in value.items()}) if tnp is None else tnp.array(value)


def _stack(observations: Sequence[Any]) -> Any:
    first = observations[0]
    if isinstance(first, dict):
        tnp = _treetensor()
        if tnp is not None:
            return tnp.stack([_to_tree(observation) for observation in observations])
        return Record({key: _stack([each[key] for each in observations]) for key in first})
    if isinstance(first, tuple):
        return tuple(_stack(parts) for parts in zip(*observations, strict=True))
    return np.stack(observations)


def _readable_info(info: dict[str, Any]) -> dict[str, Any]:
    """An info in DI-engine's form: keys are identifiers, and there are no strings."""
    return {
        ("_" + key if key[:1].isdigit() else key).replace(".", "_"): value
        for key, value in info.items()
        if not isinstance(value, str)
    }


_MANAGERS: dict[str, type[AsyncSubprocessEnvManager]] = {
    "async_subprocess": AsyncSubprocessEnvManager,
    "subprocess": SyncSubprocessEnvManager,
    "subprocess_v2": SubprocessEnvManagerV2,
}


def get_env_manager_cls(cfg: Mapping[str, Any]) -> type[AsyncSubprocessEnvManager]:
    """The class that ``cfg["type"]`` names: "subprocess", "async_subprocess", "subprocess_v2"."""
    kind = cfg.get("type")
    if kind not in _MANAGERS:
        raise KeyError(f"cfg['type'] must be one of {', '.join(_MANAGERS)}; got {kind!r}")
    return _MANAGERS[kind]


def create_env_manager(
    manager_cfg: Mapping[str, Any], env_fn: Sequence[Callable[[], Any]]
) -> AsyncSubprocessEnvManager:
    """Makes the env manager that a configuration describes, with its ``type``.

    Example:
        >>> import gymnasium as gym
        >>> from shmvec.adapters.ding import create_env_manager
        >>> cfg = {"type": "subprocess", "episode_num": 1}
        >>> manager = create_env_manager(cfg, [lambda: gym.make("CartPole-v1")] * 2)
        >>> manager.env_num, manager.closed
        (2, True)
    """
    return get_env_manager_cls(manager_cfg)(env_fn, manager_cfg)

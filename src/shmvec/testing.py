"""Tests for users: whether an env may run in parallel, and Gymnasium's ``VectorEnv`` contract.

:func:`check_env_fn` finds out what goes wrong when an env runs together with others.

Derive from :class:`VectorEnvContract` in a test module, define how your vector env is made, and
pytest runs the contract on it. The contract is what both ``SyncVectorEnv`` and ``AsyncVectorEnv``
of Gymnasium do, and nothing that only one of them does. (The idea comes from dm_env's
``EnvironmentTestMixin``.) This module needs pytest.

Example:
    >>> from shmvec import ShmVectorEnv
    >>> from shmvec.testing import VectorEnvContract
    >>> class TestMine(VectorEnvContract):
    ...     def make_vector_env(self, env_fns, **kwargs):
    ...         return ShmVectorEnv(env_fns, num_workers=0, **kwargs)
    >>> TestMine().test_spaces()
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from shmvec._autoreset import Autoreset, AutoresetMode
from shmvec._commands.check import CheckReport, Finding, check

__all__ = ["CheckReport", "ContractEnv", "Finding", "VectorEnvContract", "check_env_fn"]

# Before 1.4 Gymnasium checked some arguments by assertions.
_ERROR_TYPES = {error: (error, AssertionError) for error in (TypeError, ValueError)}

_EnvFns = Sequence[Callable[[], gym.Env[Any, Any]]]

_BOX = spaces.Box(-1, 1, (2, 3), np.float32)
_SPACES: dict[str, gym.Space[Any]] = {
    "Box": _BOX,
    "Box of bytes": spaces.Box(0, 255, (4,), np.uint8),
    "Box of one number": spaces.Box(-1, 1, (), np.float64),
    "Discrete": spaces.Discrete(5, start=-2),
    "MultiDiscrete": spaces.MultiDiscrete([3, 4]),
    "MultiBinary": spaces.MultiBinary(3),
    "Dict": spaces.Dict({"a": spaces.Discrete(3), "b": _BOX}),
    "Tuple": spaces.Tuple([spaces.Discrete(3), _BOX]),
    "nested": spaces.Dict({"a": spaces.Tuple([_BOX, spaces.Dict({"b": spaces.MultiBinary(2)})])}),
}


def check_env_fn(
    env_fn: Callable[[], gym.Env[Any, Any]],
    *,
    beside: Callable[[], gym.Env[Any, Any]] | None = None,
    contexts: Sequence[str] | None = None,
    steps: int = 50,
    time_limit: float = 20.0,
) -> CheckReport:
    """Checks whether an env may run in parallel: ``python -m shmvec check`` in code.

    Envs are made and stepped in workers, with the same seeds and actions: alone, two and four in
    one process, two processes at once, and under each start method. Their results are compared bit
    for bit. An env that crashes or hangs is a finding, too.

    Args:
        env_fn: Makes one env. If its ``render_mode`` returns frames, these are compared, too.
        beside: Makes the other env of each process, if envs of two kinds are to share one (two
            robots may draw with each other's textures). None: ``env_fn``.
        contexts: Start methods to try; the first is the one that you mean to use, and a failure
            with another one is a note. None: all, the program's default first.
        steps: How many steps each env makes, at most; an env alone stops after a second.
        time_limit: Seconds that envs get each time they are made and stepped.

    Returns:
        The report. ``report.ok`` says whether nothing is wrong, ``report.wrong`` has the findings
        that are, and ``print(report)`` shows the table.

    Raises:
        TypeError: ``env_fn`` or ``beside`` is no function.
        ValueError: There is no such start method.

    Example:
        >>> import gymnasium as gym
        >>> from shmvec.testing import check_env_fn
        >>> report = check_env_fn(lambda: gym.make("CartPole-v1"), contexts=["fork"], steps=10)
        >>> report.ok, report.wrong
        (True, [])
    """
    for name, function in {"env_fn": env_fn, "beside": beside or env_fn}.items():
        if not callable(function):
            raise TypeError(
                f"{name} must be a function that makes an env, for example "
                f"`lambda: gym.make(...)`; got {function!r}"
            )
    return check(env_fn, beside=beside, contexts=contexts, steps=steps, time_limit=time_limit)


class ContractEnv(gym.Env[Any, Any]):
    """An env of sampled observations, deterministic given the seed; it records its inputs.

    Attributes:
        actions: The actions of all steps.
        options: The options of all resets.
        value: An attribute that tests set.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 7}

    def __init__(
        self,
        observation_space: gym.Space[Any] = _BOX,
        action_space: gym.Space[Any] = _SPACES["Discrete"],
        length: int = 3,
        infos: Sequence[dict[str, Any]] = ({},),
        fails_at: int | None = None,
    ) -> None:
        """Makes the env.

        Args:
            observation_space: The observation space; a copy of it is sampled.
            action_space: The action space.
            length: Steps of an episode; odd episodes are terminated, even ones truncated.
            infos: The infos that are returned one after the other.
            fails_at: The step at which it raises LookupError.
        """
        self.observation_space = copy.deepcopy(observation_space)
        self.action_space = action_space
        self.length = length
        self.infos = infos
        self.fails_at = fails_at
        self.render_mode = "rgb_array"
        self.episode = self.count = self.num_infos = self.value = 0
        self.actions: list[Any] = []
        self.options: list[Any] = []

    def _info(self) -> dict[str, Any]:
        self.num_infos += 1
        return dict(self.infos[self.num_infos % len(self.infos)])

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begins an episode, and records the options."""
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.options.append(options)
        self.count = 0
        self.episode += 1
        return self.observation_space.sample(), self._info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Makes a step, and records the action."""
        self.actions.append(copy.deepcopy(action))
        self.count += 1
        if self.count == self.fails_at:
            raise LookupError("this env was made to fail")
        over = self.count >= self.length
        terminated = over and self.episode % 2 == 1
        reward = float(self.np_random.random())
        return self.observation_space.sample(), reward, terminated, over != terminated, self._info()

    def render(self) -> Any:
        """A tiny picture that shows the number of steps."""
        return np.full((2, 2, 3), self.count, np.uint8)

    def add(self, number: int, *, to: str) -> int:
        """A method to call."""
        return int(getattr(self, to)) + number


class _Reference(VectorEnv[Any, Any, Any]):
    """Makes the reference results, by plain envs that are stepped one after the other."""

    def __init__(self, env_fns: _EnvFns, mode: AutoresetMode) -> None:
        self.envs = [env_fn() for env_fn in env_fns]
        self.num_envs = len(self.envs)
        self.autoreset = Autoreset.of(mode)
        self.space = self.envs[0].observation_space
        self.batched_actions = batch_space(self.envs[0].action_space, self.num_envs)
        self.over = [False] * self.num_envs
        self.last: list[Any] = [None] * self.num_envs

    def _batch(self) -> Any:
        arrays: Any = create_empty_array(self.space, self.num_envs)
        return concatenate(self.space, self.last, arrays)

    def reset(self, *, seed: Any = None, options: Any = None, mask: Any = None) -> tuple[Any, Any]:
        infos: dict[str, Any] = {}
        for i, env in enumerate(self.envs):
            if mask is None or mask[i]:
                env_seed = None if seed is None else seed + i
                self.last[i], info = env.reset(seed=env_seed, options=options)
                self.over[i] = False
                infos = self._add_info(infos, info, i)
        return self._batch(), infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, Any]:
        rewards, ends = np.zeros(self.num_envs), np.zeros((2, self.num_envs), np.bool_)
        infos: dict[str, Any] = {}
        for i, action in enumerate(iterate(self.batched_actions, actions)):
            if self.over[i]:
                self.last[i], info = self.envs[i].reset()
                self.over[i] = False
            else:
                self.last[i], rewards[i], ends[0, i], ends[1, i], info = self.envs[i].step(action)
                if self.autoreset.in_next_step:
                    self.over[i] = bool(ends[:, i].any())
                elif self.autoreset.in_step and ends[:, i].any():
                    final = {"final_obs": self.last[i], "final_info": info}
                    infos = self._add_info(infos, final, i)
                    self.last[i], info = self.envs[i].reset()
            infos = self._add_info(infos, info, i)
        return self._batch(), rewards, ends[0], ends[1], infos


def _are_equal(mine: Any, reference: Any) -> bool:
    """Whether both are equal in types, dtypes, shapes, keys and values."""
    if isinstance(reference, dict):
        return mine.keys() == reference.keys() and all(
            _are_equal(mine[key], reference[key]) for key in reference
        )
    if isinstance(reference, (list, tuple)):
        return len(mine) == len(reference) and all(map(_are_equal, mine, reference))
    if isinstance(reference, np.ndarray):
        if mine.dtype != reference.dtype or mine.shape != reference.shape:
            return False
        if reference.dtype == object:
            return all(map(_are_equal, mine.ravel(), reference.ravel()))
        return bool(np.array_equal(mine, reference))
    return type(mine) is type(reference) and bool(mine == reference)


def _check_results(mine: Any, reference: Any, when: str) -> None:
    names = ["observations", "rewards", "terminations", "truncations", "infos"]
    if len(reference) == 2:
        names = ["observations", "infos"]
    assert len(mine) == len(names), f"{when} must return {names}"
    for name, value, expected in zip(names, mine, reference, strict=True):
        assert _are_equal(value, expected), (
            f"{name} of {when} differ from those of the envs stepped one by one:\n"
            f"{value!r}\nnot\n{expected!r}"
        )


class VectorEnvContract:
    """The contract. Derive a class whose name begins with "Test", with a ``make_vector_env``."""

    def make_vector_env(self, env_fns: _EnvFns, **kwargs: Any) -> VectorEnv[Any, Any, Any]:
        """Makes the vector env under test.

        Args:
            env_fns: One function for each env.
            **kwargs: ``copy``, ``observation_mode`` and ``autoreset_mode``, as for Gymnasium's
                ``SyncVectorEnv``.
        """
        raise NotImplementedError("define make_vector_env, which makes your vector env")

    @contextmanager
    def _open_vector_env(self, env_fns: _EnvFns, **kwargs: Any) -> Iterator[Any]:
        """Makes a vector env, and closes it at the end of the block."""
        envs = self.make_vector_env(env_fns, **kwargs)
        try:
            yield envs
        finally:
            envs.close()

    def _compare(self, env_fns: _EnvFns, steps: int = 8, **kwargs: Any) -> None:
        """Steps the vector env and the reference; all results must be equal."""
        mode = kwargs.setdefault("autoreset_mode", AutoresetMode.NEXT_STEP)
        reference = _Reference(env_fns, mode)
        reference.batched_actions.seed(3)
        with self._open_vector_env(env_fns, **kwargs) as envs:
            _check_results(envs.reset(seed=11), reference.reset(seed=11), "reset")
            for step in range(steps):
                actions = reference.batched_actions.sample()
                mine, expected = envs.step(actions), reference.step(actions)
                _check_results(mine, expected, f"step {step}")
                over = expected[2] | expected[3]
                if over.any() and not Autoreset.of(mode).by_worker:
                    mine = envs.reset(options={"reset_mask": over.copy()})
                    _check_results(mine, reference.reset(mask=over, options={}), "the masked reset")
            actions_seen = [env.get_wrapper_attr("actions") for env in reference.envs]
            assert _are_equal(list(envs.get_attr("actions")), actions_seen), "actions differ"

    # ---- attributes --------------------------------------------------------------------------

    def test_spaces(self) -> None:
        """Single spaces are the env's, batched ones as ``batch_space`` makes them."""
        with self._open_vector_env([ContractEnv] * 3) as envs:
            env = ContractEnv()
            assert isinstance(envs, VectorEnv)
            assert envs.num_envs == 3
            assert envs.single_observation_space == env.observation_space
            assert envs.single_action_space == env.action_space
            assert envs.observation_space == batch_space(env.observation_space, 3)
            assert envs.action_space == batch_space(env.action_space, 3)

    def test_attributes(self) -> None:
        """Metadata has the autoreset mode; ``spec`` can be assigned; there is no wrapper."""
        with self._open_vector_env([ContractEnv] * 2) as envs:
            assert envs.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
            assert envs.metadata["render_fps"] == 7
            assert envs.render_mode == "rgb_array"
            assert envs.unwrapped is envs
            assert envs.spec is None
            envs.spec = gym.spec("CartPole-v1")
            assert "CartPole-v1" in repr(envs) and "num_envs=2" in repr(envs)

    def test_closing(self) -> None:
        """A second ``close`` is harmless."""
        envs = self.make_vector_env([ContractEnv] * 2)
        envs.reset()
        assert not envs.closed
        envs.close()
        assert envs.closed
        envs.close()

    # ---- reset and step ----------------------------------------------------------------------

    def test_results(self) -> None:
        """Results have the right shapes and dtypes."""
        with self._open_vector_env([ContractEnv] * 3) as envs:
            observations, infos = envs.reset(seed=0)
            assert observations in envs.observation_space and type(infos) is dict
            observations, rewards, terminations, truncations, infos = envs.step([0, 1, 2])
            assert observations in envs.observation_space and type(infos) is dict
            assert rewards.shape == (3,) and rewards.dtype == np.float64
            for ends in (terminations, truncations):
                assert ends.shape == (3,) and ends.dtype == np.bool_

    @pytest.mark.parametrize("name", _SPACES)
    def test_observation_spaces(self, name: str) -> None:
        """Observations of any space arrive as they were returned."""
        self._compare([partial(ContractEnv, _SPACES[name], length=n) for n in (2, 3, 5)])

    @pytest.mark.parametrize("name", _SPACES)
    def test_action_spaces(self, name: str) -> None:
        """Actions of any space arrive as they were given."""
        self._compare([partial(ContractEnv, action_space=_SPACES[name], length=n) for n in (2, 3)])

    @pytest.mark.parametrize("mode", AutoresetMode)
    @pytest.mark.parametrize("name", ["Box", "Discrete", "nested"])
    def test_autoreset_modes(self, mode: AutoresetMode, name: str) -> None:
        """NEXT_STEP, SAME_STEP with final observations and infos, DISABLED with a reset mask."""
        infos: list[dict[str, Any]] = [{"a": 1, "b": {"c": 2.5}}, {"a": 2}, {"s": "text"}]
        env_fns = [partial(ContractEnv, _SPACES[name], length=n, infos=infos) for n in (1, 2, 4)]
        self._compare(env_fns, autoreset_mode=mode)

    def test_the_step_after_an_end_is_a_reset(self) -> None:
        """NEXT_STEP: the action is ignored, the reward is 0, and the info is the reset's."""
        with self._open_vector_env([partial(ContractEnv, length=1)] * 2) as envs:
            envs.reset(seed=0)
            assert envs.step([0, 1])[2].all()
            _, rewards, terminations, truncations, _ = envs.step([1, 2])
            assert not rewards.any() and not terminations.any() and not truncations.any()
            assert [len(actions) for actions in envs.get_attr("actions")] == [1, 1]

    @pytest.mark.parametrize("seed", [7, [7, None, 9], [1, 1, 1]], ids=str)
    def test_seeds(self, seed: Any) -> None:
        """An int seeds env i with seed + i; a list has a seed for each env."""
        with self._open_vector_env([ContractEnv] * 3) as envs:
            observations, _ = envs.reset(seed=seed)
            seeds = [seed + i for i in range(3)] if isinstance(seed, int) else seed
            for observation, value in zip(observations, seeds, strict=True):
                if value is not None:
                    assert _are_equal(observation, ContractEnv().reset(seed=value)[0])
            expected = [value for value in seeds if value is not None]
            pairs = zip(envs.np_random_seed, seeds, strict=True)
            assert [got for got, value in pairs if value is not None] == expected
            assert len(envs.np_random) == 3
            with pytest.raises(_ERROR_TYPES[ValueError]):
                envs.reset(seed=[1, 2])

    def test_options_reach_the_envs(self) -> None:
        """Envs get the options without the reset mask."""
        with self._open_vector_env([ContractEnv] * 2) as envs:
            envs.reset(options={"level": 3})
            mask = np.array([False, True])
            envs.reset(options={"level": 4, "reset_mask": mask})
            assert envs.get_attr("options") == ([{"level": 3}], [{"level": 3}, {"level": 4}])

    def test_bad_reset_masks(self) -> None:
        """A wrong type or dtype raises TypeError; a wrong shape, or no True value, ValueError."""
        with self._open_vector_env([ContractEnv] * 2) as envs:
            envs.reset()
            for mask, error in (
                ([True, False], TypeError),
                (np.array([1, 0]), TypeError),
                (np.array([True]), ValueError),
                (np.array([False, False]), ValueError),
            ):
                with pytest.raises(_ERROR_TYPES[error]):
                    envs.reset(options={"reset_mask": mask})

    @pytest.mark.parametrize("kind", [list, tuple, np.array])
    def test_containers_of_actions(self, kind: Callable[[Any], Any]) -> None:
        """Actions may come as a list, a tuple or an array."""
        with self._open_vector_env([ContractEnv] * 3) as envs:
            envs.reset()
            envs.step(kind([0, 1, 2]))
            assert envs.get_attr("actions") == ([0], [1], [2])

    def test_results_are_fresh(self) -> None:
        """With ``copy=True`` results never change, and changing them harms nothing."""
        with self._open_vector_env([partial(ContractEnv, infos=[{"a": 1}])] * 2) as envs:
            results = [envs.reset(seed=0)]
            copies = [copy.deepcopy(results[0])]
            for _ in range(6):
                results.append(envs.step([0, 0]))
                copies.append(copy.deepcopy(results[-1]))
            assert _are_equal(results, copies)
            for result in results:
                result[0][...] = 0
                result[-1].clear()
            assert envs.step([0, 0])[0].any()

    def test_without_copies(self) -> None:
        """With ``copy=False`` the values are the same, if they are read before the next step."""
        self._compare([partial(ContractEnv, length=n) for n in (2, 3)], copy=False)

    # ---- infos -------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        "infos",
        [
            [{"a": 1, "b": 2.5, "c": True}],
            [{"a": np.float32(1.5), "b": np.int16(3)}, {"b": np.int16(4)}],
            [{"s": "text"}, {"s": "other"}, {}],
            [{"n": None}, {"o": [1, 2]}, {"t": (1, "x")}],
            [{"array": np.arange(6.0).reshape(2, 3)}, {"bytes": np.zeros(3, np.uint8)}],
            [{"outer": {"inner": {"a": 1}, "b": "x"}}, {"outer": {"b": "y"}}],
        ],
        ids=["numbers", "NumPy numbers", "texts", "objects", "arrays", "nested"],
    )
    def test_infos(self, infos: list[dict[str, Any]]) -> None:
        """Infos are a dict of arrays with masks, as ``VectorEnv._add_info`` makes it."""
        rotated = [infos, infos[1:] + infos[:1], infos[2:] + infos[:2]]
        self._compare([partial(ContractEnv, infos=i) for i in rotated])

    # ---- calls -------------------------------------------------------------------------------

    def test_call(self) -> None:
        """``call`` and ``get_attr`` return a tuple with one result for each env."""
        with self._open_vector_env([ContractEnv] * 2) as envs:
            envs.reset()
            envs.set_attr("value", [10, 20])
            assert envs.call("add", 5, to="value") == (15, 25)
            assert envs.call("value") == envs.get_attr("value") == (10, 20)
            envs.set_attr("value", 3)
            assert envs.get_attr("value") == (3, 3)
            with pytest.raises(ValueError):
                envs.set_attr("value", [1, 2, 3])

    def test_render(self) -> None:
        """``render`` returns a tuple of frames."""
        with self._open_vector_env([ContractEnv] * 2) as envs:
            envs.reset()
            envs.step([0, 0])
            frames = envs.render()
            assert isinstance(frames, tuple) and len(frames) == 2
            assert all(frame.shape == (2, 2, 3) and (frame == 1).all() for frame in frames)

    # ---- spaces that differ, errors, wrappers ------------------------------------------------

    def test_observation_modes(self) -> None:
        """Bounds may differ in mode "different", and with a pair of spaces."""
        boxes = [spaces.Box(0, high, (2,), np.float32) for high in (1, 2)]
        env_fns = [partial(ContractEnv, box) for box in boxes]
        self._compare(env_fns, observation_mode="different")
        batched = spaces.Box(0, 2, (2, 2), np.float32)
        with self._open_vector_env(env_fns, observation_mode=(batched, boxes[1])) as envs:
            assert envs.observation_space == batched
            assert envs.single_observation_space == boxes[1]
            assert envs.reset()[0] in batched
        with pytest.raises(ValueError):
            self.make_vector_env(env_fns, observation_mode="neither")

    @pytest.mark.filterwarnings("ignore:.*(Received the following error|Traceback|Raising the)")
    def test_an_exception_of_an_env_arrives(self) -> None:
        """An env's exception is raised with its type and message."""
        with self._open_vector_env([ContractEnv, partial(ContractEnv, fails_at=2)]) as envs:
            envs.reset()
            envs.step([0, 0])
            with pytest.raises(LookupError, match="made to fail"):
                envs.step([0, 0])

    def test_wrappers(self) -> None:
        """Gymnasium's vector wrappers work on top."""
        envs = RecordEpisodeStatistics(self.make_vector_env([partial(ContractEnv, length=2)] * 2))
        try:
            envs.reset(seed=0)
            envs.step([0, 0])
            infos = envs.step([0, 0])[4]
            assert infos["episode"]["l"].tolist() == [2, 2]
            assert infos["_episode"].all()
        finally:
            envs.close()

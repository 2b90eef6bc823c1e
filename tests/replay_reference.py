"""What a replay must hold: a plain list of what the caller has seen, and envs that number it.

Nothing here knows shmvec: the reference is fed with what a vector env returns.
"""

import contextlib
import os
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import batch_space

DEADLINE_S = 30.0
START, STEP, BROKEN = "start", "step", "broken"  # BROKEN: a step from an observation not known
FIELDS = [
    "observations", "actions", "rewards", "next_observations", "terminations", "truncations",
    "discounts",
]  # fmt: skip
ENDS = [(True, False), (False, True), (True, True)]  # terminated, truncated: by turns
KINDS = ["box", "image", "discrete", "dict", "tuple"]  # of observations
ACTIONS = {
    "discrete": gym.spaces.Discrete(5, start=3),
    "box": gym.spaces.Box(-1, 1, (2,), np.float32),
    "dict": gym.spaces.Dict(z=gym.spaces.Discrete(9), a=gym.spaces.Box(-1, 1, (3,), np.float64)),
}
_CODES = gym.spaces.Discrete(1 << 22)
_OBSERVATIONS = {
    "box": gym.spaces.Box(-np.inf, np.inf, (6,), np.float64),
    "image": gym.spaces.Box(0, 255, (4, 3, 2), np.uint8),
    "discrete": _CODES,
    "dict": gym.spaces.Dict(
        who=gym.spaces.Discrete(64), what=gym.spaces.Box(0, np.inf, (2, 2), np.float32)
    ),
    "tuple": gym.spaces.Tuple((_CODES, gym.spaces.Box(0, 1 << 20, (3,), np.int32))),
}


class Numbered(gym.Env):
    """Numbers its observations, whatever their space: the number says which transition it is.

    Box observations also hold the step of the episode, the action before, a draw and, where one
    index has several envs in its life, what tells these apart: "process" or "copy". So a
    transition of them can be judged by itself.
    """

    def __init__(self, index, kind="box", actions="discrete", lengths=(3, 6, 1), life=None):
        self.index, self.kind, self.lengths, self.life = index, kind, lengths, life
        self.observation_space = deepcopy(_OBSERVATIONS[kind])
        self.action_space = deepcopy(ACTIONS[actions])
        self.number = self.episode = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode += 1
        self.count = 0
        return self._observation(-1), {"episode": self.episode}

    def step(self, action):
        self.count += 1
        terminated = truncated = False
        if self.count >= self.lengths[(self.episode + self.index) % len(self.lengths)]:
            terminated, truncated = ENDS[(self.episode + self.index) % 3]
        observation = self._observation(action)
        return observation, reward_of(self.number), terminated, truncated, {"count": self.count}

    def _observation(self, action):
        self.number += 1
        if self.kind == "box":
            life = {None: 0, "process": os.getpid(), "copy": id(self) >> 4}[self.life]
            action = float(np.asarray(action).flat[0]) if not isinstance(action, dict) else 0
            draw = self.np_random.random()
            return np.array([self.index, self.number, life, self.count, action, draw])
        if self.kind == "image":
            pixels = np.full((4, 3, 2), self.number % 251, np.uint8)
            pixels.flat[:3] = self.index, self.number >> 8, self.number & 255
            return pixels
        code = self.index << 16 | self.number
        if self.kind == "discrete":
            return code
        if self.kind == "dict":
            return {"who": self.index, "what": np.full((2, 2), self.number, np.float32)}
        return (code, np.full(3, self.number, np.int32))


def reward_of(number):
    """The reward of the step that has returned the observation of this number."""
    return number % 11 - 0.5


def key_of(observation, stacked=False):
    """Which env's observation it is, and its number; of a stack, those of the newest frame."""
    return keys_of(mapped(lambda part: np.asarray(part)[None], observation), stacked)[0]


def keys_of(observations, stacked=False):
    """The keys of batched observations."""
    if stacked:
        observations = mapped(lambda part: part[:, -1], observations)
    if isinstance(observations, dict):
        parts = observations["who"], observations["what"][:, 0, 0]
    elif isinstance(observations, tuple):
        parts = observations[0] >> 16, observations[0] & 0xFFFF
    elif observations.dtype == np.uint8:
        rows = observations.reshape(len(observations), -1).astype(int)
        parts = rows[:, 0], rows[:, 1] << 8 | rows[:, 2]
    elif observations.dtype == np.float64:
        parts = observations[:, :3].T  # the process, too
    else:
        parts = observations >> 16, observations & 0xFFFF
    return list(zip(*(np.asarray(part).astype(int).tolist() for part in parts), strict=True))


def mapped(function, arrays):
    """Nested values, to each of which the function was applied."""
    if isinstance(arrays, dict):
        return {key: mapped(function, part) for key, part in arrays.items()}
    if isinstance(arrays, tuple):
        return tuple(mapped(function, part) for part in arrays)
    return function(arrays)


def stacked(values):
    """Nested values of which each leaf is an array with a row for each of these."""
    first = values[0]
    if isinstance(first, dict):
        return {key: stacked([value[key] for value in values]) for key in first}
    if isinstance(first, tuple):
        return tuple(stacked([value[i] for value in values]) for i in range(len(first)))
    return np.array(values)


def at(arrays, index):
    """One index of nested arrays."""
    if isinstance(arrays, dict):
        return {key: at(part, index) for key, part in arrays.items()}
    if isinstance(arrays, tuple):
        return tuple(at(part, index) for part in arrays)
    return arrays[index]


def differing(ours, theirs):
    """Rows in which nested arrays differ; all of them, where dtypes or shapes do."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        pairs = [(ours[key], theirs[key]) for key in theirs]
    elif isinstance(theirs, tuple):
        assert isinstance(ours, tuple)
        pairs = list(zip(ours, theirs, strict=True))
    else:
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        return set(np.nonzero(ours != theirs)[0].tolist())
    return set().union(*(differing(*pair) for pair in pairs))


def info_of(infos, row):
    """The info of one env, out of Gymnasium's dict of arrays."""
    found = {}
    for key, value in infos.items():
        if not key.startswith("_") and key != "env_id" and infos[f"_{key}"][row]:
            found[key] = info_of(value, row) if isinstance(value, dict) else value[row]
    return found


@dataclass
class Record:
    """What an env has returned once."""

    kind: str
    observation: Any
    action: Any = None
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False

    @property
    def ends(self):
        return self.terminated or self.truncated


@dataclass
class Transition:
    """What a sample of it must be."""

    env: int
    observation: Any
    action: Any
    reward: float
    next_observation: Any
    terminated: bool
    truncated: bool
    discount: float
    required: bool  # whether it must be among those that can be sampled


class Reference:
    """Plain lists of what each env has returned since the replay began.

    Args:
        num_envs: Number of envs.
        mode: The value of the autoreset mode.
        capacity, n_step, discount, frame_stack: As the replay's.
        over: Envs whose episodes were over when it began.
    """

    def __init__(
        self, num_envs, mode, capacity, *, n_step=1, discount=0.99, frame_stack=1, over=None
    ):
        self.mode, self.n_step, self.discount, self.frames = mode, n_step, discount, frame_stack
        self.depth = -(-capacity // num_envs)
        self.logs = [[] for _ in range(num_envs)]
        self.over = [False] * num_envs if over is None else [bool(flag) for flag in over]
        self.known = [False] * num_envs

    # ---- what the caller sees ----------------------------------------------------------------

    def started(self, env, observation):
        """An episode begins with this observation."""
        self.logs[env].append(Record(START, deepcopy(observation)))
        self.over[env], self.known[env] = False, True

    def stepped(self, env, action, observation, reward, terminated, truncated, info):
        """What a step has returned for an env."""
        over = bool(terminated or truncated)
        if "fault" in info:  # that step is missing
            if self.mode == "SameStep" or not truncated:
                self.started(env, observation)
            else:
                self.over[env] = True
            return
        if self.mode == "NextStep" and self.over[env]:
            assert reward == 0 and not over
            self.started(env, observation)
            return
        final = info["final_obs"] if self.mode == "SameStep" and over else observation
        record = Record(
            STEP if self.known[env] else BROKEN,
            deepcopy(final),
            deepcopy(action),
            float(reward),
            bool(terminated),
            bool(truncated),
        )
        self.logs[env].append(record)
        self.over[env], self.known[env] = over, True
        if self.mode == "SameStep" and over:
            self.started(env, observation)

    def forget(self, envs=None):
        """What comes next does not follow from what was there."""
        for env in range(len(self.logs)) if envs is None else envs:
            self.known[env] = False

    # ---- what must be there ------------------------------------------------------------------

    def transitions(self):
        """All transitions that may be sampled, by the key of their first observation."""
        found = {}
        for env, log in enumerate(self.logs):
            oldest = len(log) - self.depth  # the oldest record that is kept
            # What is about to be overwritten is not drawn.
            margin = min(64, self.depth // 8) + 2 + self.n_step + self.frames
            for place in range(max(oldest, 0) + 1, len(log)):
                transition = self._transition(env, log, place)
                if transition is not None:
                    if place < oldest + margin or self._frames_lacking(log, place - 1):
                        transition.required = False
                    key = key_of(log[place - 1].observation, self.frames > 1)
                    assert key not in found
                    found[key] = transition
        return found

    def _transition(self, env, log, place):
        """The one that begins with this record; None if none does, or its steps are to come."""
        if log[place].kind != STEP:
            return None
        total, steps = 0.0, 0
        last = log[place]
        while not (steps and last.ends) and steps < self.n_step:
            if place + steps == len(log):
                return None
            if log[place + steps].kind != STEP:
                break  # a reset in the middle, or a fault: fewer steps are summed
            last = log[place + steps]
            total += self.discount**steps * last.reward
            steps += 1
        return Transition(
            env,
            log[place - 1].observation,
            log[place].action,
            total,
            last.observation,
            last.terminated,
            last.truncated,
            0.0 if last.terminated else self.discount**steps,
            required=True,
        )

    def _frames_lacking(self, log, place):
        """Whether the frames of this record's observation go back to before the replay began."""
        for earlier in range(place, max(-1, place - self.frames), -1):
            if log[earlier].kind == START:
                return False
            if log[earlier].kind == BROKEN:
                return self.frames > 1
        return False

    # ---- comparisons -------------------------------------------------------------------------

    def check(self, batch, transitions=None):
        """Asserts that each row of a batch is a transition; returns the keys of those found."""
        transitions = self.transitions() if transitions is None else transitions
        keys = keys_of(batch.observations, self.frames > 1)
        unknown = set(keys) - transitions.keys()
        assert not unknown, f"no transition begins with {sorted(unknown)[:5]}"
        found = sorted(set(keys))
        places = {key: place for place, key in enumerate(found)}
        rows = np.array([places[key] for key in keys])
        of = {
            name: mapped(
                lambda part: part[rows], stacked([getattr(transitions[key], name) for key in found])
            )
            for name in Transition.__dataclass_fields__
        }
        for ours, theirs in [
            (batch.observations, of["observation"]),
            (batch.actions, of["action"]),
            (batch.next_observations, of["next_observation"]),
            (batch.terminations, of["terminated"]),
            (batch.truncations, of["truncated"]),
            (np.abs(batch.rewards - of["reward"]) > 1e-5, np.zeros(len(rows), bool)),
            (np.abs(batch.discounts - of["discount"]) > 1e-5, np.zeros(len(rows), bool)),
        ]:
            wrong = differing(ours, theirs)
            for row in wrong:
                raise AssertionError(
                    f"{len(wrong)} rows are wrong, such as row {row}: {at_row(batch, row)}, "
                    f"which should be {transitions[keys[row]]}"
                )
        return set(found)

    def check_all(self, replay):
        """Asserts that what can be sampled is what the caller has seen; returns how many it is."""
        transitions = self.transitions()
        required = {key for key, transition in transitions.items() if transition.required}
        if not required:
            with contextlib.suppress(RuntimeError):
                self.check(replay.sample(100), transitions)
                assert transitions
            return 0
        # So many that a transition which is missing is not there: e ** -30 is 1e-13.
        found = self.check(replay.sample(30 * len(transitions)), transitions)
        assert required <= found, f"{sorted(required - found)[:5]} are never drawn"
        if self.n_step == self.frames == 1:
            assert len(replay) == len(found)
        return len(found)


def at_row(batch, row):
    """A row of a batch, for messages."""
    names = [*FIELDS, "indices"]
    return {name: at(getattr(batch, name), row) for name in names}


def assert_typed(batch, size, envs, stacked=None):
    """Asserts dtypes and shapes of a batch, for envs of these spaces."""
    for space, values in [
        (envs.single_observation_space, batch.observations),
        (envs.single_observation_space, batch.next_observations),
        (envs.single_action_space, batch.actions),
    ]:
        assert values in batch_space(space, size) or size == 0
    for array, dtype in [
        (batch.terminations, np.bool_),
        (batch.truncations, np.bool_),
        (batch.discounts, np.float32),
        (batch.indices, np.int64),
        (batch.weights, np.float32),
    ]:
        assert array.dtype == dtype and array.shape == (size,)
    assert batch.rewards.dtype.kind == "f" and batch.rewards.shape == (size,)


def assert_whole(batch):
    """Asserts that each row, a Box of `Numbered` and one step, was a step of one env."""
    before, after = batch.observations, batch.next_observations
    assert np.array_equal(before[:, [0, 2]], after[:, [0, 2]])  # the env and its process
    assert np.array_equal(before[:, [1, 3]] + 1, after[:, [1, 3]])  # the number and the count
    assert np.array_equal(after[:, 4], batch.actions)
    assert np.array_equal(batch.rewards, reward_of(after[:, 1]).astype(batch.rewards.dtype))
    assert ((before[:, 5] != after[:, 5]) & (after[:, 5] > 0)).all()


class Caller:
    """Steps and resets a vector env in some way; the reference sees what is returned.

    Args:
        envs: The vector env.
        reference: The reference.
        seed: Of actions, masks and what else is chosen.
    """

    def __init__(self, envs, reference, seed=0):
        self.envs, self.reference = envs, reference
        self.rng = np.random.default_rng(seed)
        self.space = envs.single_action_space
        self.space.seed(seed)
        self.batches = {}
        self.asked = {}  # env in flight: its action; None: a reset
        self.pipeline = None

    def actions(self, count):
        """Actions for so many envs, batched."""
        if count not in self.batches:
            self.batches[count] = batch_space(self.space, count)
            self.batches[count].seed(int(self.rng.integers(1 << 30)))
        return self.batches[count].sample()

    def mask(self):
        mask = self.rng.random(self.envs.num_envs) < 0.5
        mask[self.rng.integers(len(mask))] = True
        return mask

    def reset(self, mask=None, **how):
        if mask is not None:
            how["options"] = {"reset_mask": mask}
        observations, _ = self.envs.reset(**how)
        for env in range(self.envs.num_envs) if mask is None else np.flatnonzero(mask):
            self.reference.started(env, at(observations, env))

    def saw(self, env_ids, actions, results, rows=None):
        """What a step of these envs has returned, in rows of the same order, or in these."""
        *arrays, infos = results
        for place, env in enumerate(env_ids):
            row = place if rows is None else rows[place]
            self.reference.stepped(
                env,
                at(actions, place),
                *(at(array, row) for array in arrays),
                info_of(infos, row),
            )
        if self.reference.mode == "Disabled" and any(self.reference.over):
            self.reset(np.array(self.reference.over))

    def lockstep(self, actions=None):
        actions = self.actions(self.envs.num_envs) if actions is None else actions
        self.saw(range(self.envs.num_envs), actions, self.envs.step(actions))

    def masked(self, actions=None):
        actions = self.actions(self.envs.num_envs) if actions is None else actions
        mask = self.mask()
        results = self.envs.step(actions, mask=mask)
        chosen = np.flatnonzero(mask)
        self.saw(chosen, at(actions, chosen), results, chosen)

    def some(self, actions=None):
        """Some envs, named in any order."""
        chosen = self.rng.permutation(np.flatnonzero(self.mask()))
        actions = self.actions(len(chosen)) if actions is None else at(actions, chosen)
        results = self.envs.step(actions, chosen)
        env_ids = results[-1]["env_id"].tolist()
        places = [chosen.tolist().index(env) for env in env_ids]
        self.saw(env_ids, at(actions, places), results)

    def rolled(self):
        rollout = self.envs.rollout(int(self.rng.integers(1, 6)))
        for t in range(rollout.length):
            actions = self.actions(self.envs.num_envs)
            infos = rollout.step(actions)
            self._saw_index(rollout, t, infos)
        rollout.release()

    def _saw_index(self, rollout, t, infos):
        """An index of a rollout, whose infos these are."""
        arrays = rollout.observations, rollout.rewards, rollout.terminations, rollout.truncations
        results = (*(at(array, t + 1) for array in arrays), infos)
        self.saw(range(self.envs.num_envs), at(rollout.actions, t), results)

    def partial(self, actions=None):
        """Receives a batch, and sends most of its envs new actions."""
        if not self.asked:
            self.envs.async_reset()
            self.asked = dict.fromkeys(range(self.envs.num_envs))
        least = min(self.envs.batch_size, len(self.asked))
        *arrays, infos = self.envs.recv(min_envs=least, timeout=DEADLINE_S)
        env_ids = infos["env_id"].tolist()
        for row, env in enumerate(env_ids):
            action = self.asked.pop(env)
            values = [at(array, row) for array in arrays]
            if action is None:
                self.reference.started(env, values[0])
            else:
                self.reference.stepped(env, action, *values, info_of(infos, row))
        if self.reference.mode == "Disabled":
            over = [env for env in env_ids if self.reference.over[env]]
            if over:
                self.envs.async_reset(env_id=over)
                self.asked.update(dict.fromkeys(over))
        idle = [env for env in range(self.envs.num_envs) if env not in self.asked]
        chosen = [env for env in idle if self.rng.random() < 0.9]
        if not chosen and len(self.asked) < self.envs.batch_size:
            chosen = idle
        if chosen:
            actions = self.actions(len(chosen)) if actions is None else at(actions, chosen)
            self.envs.send(actions, chosen)
            self.asked.update({env: at(actions, row) for row, env in enumerate(chosen)})

    def piped(self):
        """Collects by a pipeline, which was made for these envs."""
        rollout = self.pipeline.collect(int(self.rng.integers(1, 6)))
        for t in range(rollout.length):
            self._saw_index(rollout, t, rollout.infos[t + 1])
        rollout.release()

    def resets_some(self):
        self.reset(self.mask())


@contextlib.contextmanager
def closing(*things):
    """Closes them at the end, the last one first."""
    with contextlib.ExitStack() as stack:
        for thing in things:
            stack.callback(thing.close)
        yield

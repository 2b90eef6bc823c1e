"""Stable-Baselines3's ``ReplayBuffer`` over a ``shmvec.Replay``: only actions are copied."""

from __future__ import annotations

import contextlib
import os
import weakref
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
from stable_baselines3.common.vec_env import (
    VecCheckNan,
    VecEnv,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
    VecTransposeImage,
    VecVideoRecorder,
)

from shmvec.replay import Replay

__all__ = ["ShmReplayBuffer"]

_TRANSPARENT_WRAPPERS = (VecCheckNan, VecMonitor, VecVideoRecorder)  # they change no results
_SPARE_RECORDS = 80  # for each env, more than a replay may drop early
_STATE_FILE = "sb3.npz"
_replays: weakref.WeakKeyDictionary[VecEnv, weakref.ref[Replay]] = weakref.WeakKeyDictionary()


class _Kwargs(dict[str, Any]):
    """Arguments of a buffer; they are left out of a saved model, since envs cannot be pickled."""

    def __reduce__(self) -> Any:
        return dict, ()


class ShmReplayBuffer(ReplayBuffer):
    """The replay buffer of an off-policy algorithm, whose steps the workers of the envs record.

    It is for DQN, SAC, TD3 and others. Samples are those of SB3's ``ReplayBuffer`` and
    ``DictReplayBuffer`` for the same steps, so the model learns the same. The buffer itself has
    only the algorithm's actions, and the index of each step in the replay. Observations are stored
    once; with ``VecFrameStack`` and ``FrameStackObservation``, each frame once.

    A new buffer closes the previous one of the same envs, so a notebook's cell that makes the model
    can be run again. Steps that were lost with a worker are not sampled. If episodes have fewer
    than 16 steps on average, the oldest steps may be dropped before the buffer is full. Final
    observations are as the envs returned them; SB3 normalises them by ``VecNormalize`` and back.

    Attributes:
        replay: The :class:`shmvec.Replay`.
        actions: ``(buffer_size, num_envs, ...)``, as the algorithm stores them.
        indices: int64 ``(buffer_size, num_envs)``: indices of the steps in the replay; -1: lost.

    Example:
        >>> from stable_baselines3 import DQN
        >>> from stable_baselines3.common.env_util import make_vec_env
        >>> from shmvec.adapters.sb3 import ShmReplayBuffer, ShmVecEnv
        >>> env = make_vec_env(
        ...     "CartPole-v1",
        ...     n_envs=4,
        ...     vec_env_cls=ShmVecEnv,
        ...     vec_env_kwargs={"start_method": "fork", "num_workers": 2},
        ... )
        >>> model = DQN(
        ...     "MlpPolicy",
        ...     env,
        ...     buffer_size=10_000,
        ...     replay_buffer_class=ShmReplayBuffer,
        ...     replay_buffer_kwargs=ShmReplayBuffer.of(env),
        ...     device="cpu",
        ... )
        >>> _ = model.learn(400)
        >>> model.replay_buffer.replay
        Replay(400 transitions, capacity=10,952)
        >>> env.close()
    """

    pos: int
    full: bool

    def __init__(
        self,
        buffer_size: int,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        device: Any = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        envs: Any = None,
        saved: str | os.PathLike[str] | None = None,
        on_disk: str | os.PathLike[str] | None = None,
    ) -> None:
        """Begins to record the envs; the algorithm calls it.

        Args:
            buffer_size: Number of steps, of all envs together.
            observation_space: The algorithm's.
            action_space: The algorithm's.
            device: The device of samples.
            n_envs: Number of envs.
            optimize_memory_usage: Must be False: observations are stored once anyway.
            handle_timeout_termination: Whether a truncated episode is not "done".
            envs: The algorithm's envs: a ShmVecEnv, with or without SB3's wrappers.
            saved: A folder that :meth:`save` has written; the buffer continues with it.
            on_disk: As for :class:`shmvec.Replay`.

        Raises:
            ValueError: ``envs`` is missing, or they are not the algorithm's.
            TypeError: The envs are no ShmVecEnv, or have a wrapper that may change observations or
                rewards and is not known.
            OSError: There is not enough memory.
        """
        super(ReplayBuffer, self).__init__(
            buffer_size, observation_space, action_space, device, n_envs=n_envs
        )
        if envs is None:
            raise ValueError(
                "ShmReplayBuffer needs the envs: replay_buffer_kwargs=ShmReplayBuffer.of(env), "
                "also for a model that is loaded: load(path, env, replay_buffer_kwargs=...)"
            )
        if optimize_memory_usage:
            raise ValueError(
                "ShmReplayBuffer stores observations once: leave optimize_memory_usage out"
            )
        self.optimize_memory_usage = False
        self.handle_timeout_termination = handle_timeout_termination
        self.buffer_size = max(buffer_size // n_envs, 1)
        if not isinstance(envs, VecEnv):
            raise TypeError(f"ShmReplayBuffer records a ShmVecEnv, got {type(envs).__name__}")
        if envs.observation_space != observation_space:
            with contextlib.suppress(AssertionError):  # observations are no images
                envs = VecTransposeImage(envs)  # as algorithms do
        if envs.observation_space != observation_space or envs.num_envs != n_envs:
            raise ValueError(f"these are not the envs of the algorithm: {envs}")
        self._wrappers = _wrapper_chain(envs)
        frames, padding = _frame_stack(envs.unwrapped, self._wrappers)
        before = _replays.get(envs.unwrapped)
        if before is not None and (replay := before()) is not None:
            replay.close()
        if saved is None:
            depth = self.buffer_size + self.buffer_size // 16 + _SPARE_RECORDS + 2 * frames
            self.replay = Replay(
                envs.unwrapped,
                depth * n_envs,
                frame_stack=frames,
                padding=padding,
                on_disk=on_disk,
            )
        else:
            self.replay = Replay.load(saved, envs.unwrapped, on_disk=on_disk)
        _replays[envs.unwrapped] = weakref.ref(self.replay)
        is_stacked = any(isinstance(wrapper, VecFrameStack) for wrapper in self._wrappers)
        self._num_stacked = frames if is_stacked else 1
        action_dtype = self._maybe_cast_dtype(action_space.dtype)
        self.actions = np.zeros((self.buffer_size, n_envs, self.action_dim), action_dtype)
        self.indices = np.full((self.buffer_size, n_envs), -1, np.int64)
        self._last_indices = np.full(n_envs, -1, np.int64)  # index of each env's last step
        self._num_recorded = self.replay.recorded
        if saved is not None:
            self._load(Path(saved))

    @staticmethod
    def of(envs: Any, **options: Any) -> dict[str, Any]:
        """The ``replay_buffer_kwargs`` for these envs, with which a model can be saved.

        Args:
            envs: The algorithm's env.
            **options: Other arguments, such as ``saved`` and ``handle_timeout_termination``.
        """
        return _Kwargs(envs=envs, **options)

    def add(
        self,
        obs: Any,
        next_obs: Any,
        action: npt.NDArray[Any],
        reward: npt.NDArray[Any],
        done: npt.NDArray[Any],
        infos: list[dict[str, Any]],
    ) -> None:
        """Stores the index of the last step in the replay, and its actions.

        Raises:
            RuntimeError: It is no step of these envs.
        """
        recorded, latest = self.replay.recorded, self.replay.latest()
        if recorded == self._num_recorded:
            raise RuntimeError(
                "this is no step of the envs that ShmReplayBuffer records, or another model's "
                "buffer records them now: make a model with a buffer for each ShmVecEnv, and give "
                "set_env() no other one"
            )
        is_new = latest > self._last_indices  # else the step was lost
        self.indices[self.pos] = np.where(is_new, latest, -1)
        self._last_indices, self._num_recorded = np.maximum(self._last_indices, latest), recorded
        self.actions[self.pos] = np.asarray(action).reshape(self.n_envs, self.action_dim)
        self.pos += 1
        if self.pos == self.buffer_size:
            self.full, self.pos = True, 0

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """Draws steps at random, by NumPy's global generator as SB3 does.

        Args:
            batch_size: Number of steps.
            env: Normalises observations and rewards. None: they are not normalised.

        Returns:
            SB3's ``ReplayBufferSamples``, or ``DictReplayBufferSamples``.

        Raises:
            RuntimeError: There are no steps.
        """
        bound = self.buffer_size if self.full else self.pos
        if bound == 0:
            raise RuntimeError("there is nothing to sample yet: step the envs first")
        rows, envs = self._draw(bound, batch_size)
        missing = np.flatnonzero(~self.replay.holds(self.indices[rows, envs]))
        if missing.size and not self.replay.holds(self.indices[:bound].ravel()).any():
            raise RuntimeError("there is nothing to sample: no step is recorded any more")
        while missing.size:
            rows[missing], envs[missing] = self._draw(bound, missing.size)
            missing = missing[~self.replay.holds(self.indices[rows[missing], envs[missing]])]
        return self._samples(rows, envs, env)

    def _get_samples(self, batch_inds: npt.NDArray[Any], env: VecNormalize | None = None) -> Any:
        """Steps at these positions, each of a random env."""
        return self._samples(batch_inds, np.random.randint(self.n_envs, size=len(batch_inds)), env)

    def _draw(self, bound: int, size: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        return np.random.randint(bound, size=size), np.random.randint(self.n_envs, size=size)

    def _samples(self, rows: npt.NDArray[Any], envs: npt.NDArray[Any], env: Any) -> Any:
        batch = self.replay.at(self.indices[rows, envs])
        dones = batch.terminations
        if not self.handle_timeout_termination:
            dones = dones | batch.truncations
        observations, next_observations = (
            self._to_tensors(self._normalize_obs(self._transform_observations(part), env))
            for part in (batch.observations, batch.next_observations)
        )
        kind = DictReplayBufferSamples if isinstance(observations, dict) else ReplayBufferSamples
        return kind(
            observations,
            self.to_torch(self.actions[rows, envs], copy=False),
            next_observations,
            self.to_torch(dones.astype(np.float32)[:, None], copy=False),
            self.to_torch(self._normalize_reward(batch.rewards[:, None], env), copy=False),
        )

    def _transform_observations(self, observations: Any) -> Any:
        """Applies the wrappers to observations of the envs."""
        count = len(observations) if isinstance(observations, np.ndarray) else 0
        if self._num_stacked > 1:  # wrappers below VecFrameStack see frames
            observations = observations.reshape(-1, *observations.shape[2:])
        for wrapper in self._wrappers:
            if isinstance(wrapper, VecTransposeImage):
                observations = wrapper.transpose_observations(observations)
            elif isinstance(wrapper, VecFrameStack):
                stack: Any = wrapper.stacked_obs
                axis = 1 if stack.channels_first else observations.ndim - 1
                frames = observations.reshape(count, self._num_stacked, *observations.shape[1:])
                observations = np.moveaxis(frames, 1, axis).reshape(count, *stack.stacked_shape)
        if isinstance(observations, dict):
            shapes: Any = self.obs_shape
            return {key: self._reshape(part, shapes[key]) for key, part in observations.items()}
        return self._reshape(observations, self.obs_shape)

    @staticmethod
    def _reshape(array: npt.NDArray[Any], shape: Any) -> npt.NDArray[Any]:
        return np.ascontiguousarray(array.reshape(len(array), *shape))

    def _to_tensors(self, observations: Any) -> Any:
        if isinstance(observations, dict):
            return {key: self.to_torch(part, copy=False) for key, part in observations.items()}
        return self.to_torch(observations, copy=False)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Saves the buffer; a model with ``saved=folder`` continues with it.

        Raises:
            OSError: The folder cannot be written.
        """
        self.replay.save(folder)
        state: dict[str, Any] = {"pos": self.pos, "full": self.full, "newest": self._last_indices}
        with (Path(folder) / _STATE_FILE).open("wb") as file:
            np.savez(file, actions=self.actions, indices=self.indices, **state)

    def _load(self, folder: Path) -> None:
        with np.load(folder / _STATE_FILE) as arrays:
            if arrays["actions"].shape != self.actions.shape:
                raise ValueError(
                    f"{folder} holds a buffer of {arrays['actions'].shape[:2]} steps and envs, not "
                    f"{self.actions.shape[:2]}: buffer_size must be the same"
                )
            self.actions, self.indices = arrays["actions"], arrays["indices"]
            self._last_indices = arrays["newest"]
            self.pos, self.full = int(arrays["pos"]), bool(arrays["full"])

    def __getstate__(self) -> Any:
        """Raises TypeError: the replay is too large, and the envs cannot be pickled."""
        raise TypeError(
            "ShmReplayBuffer cannot be pickled, as save_replay_buffer() would do: call "
            "model.replay_buffer.save(folder), and continue with "
            "replay_buffer_kwargs=ShmReplayBuffer.of(env, saved=folder)"
        )


def _wrapper_chain(envs: Any) -> list[Any]:
    """The wrappers that change observations, the innermost first."""
    wrappers: list[Any] = []
    while envs is not envs.unwrapped:
        if isinstance(envs, VecNormalize):
            if wrappers:
                raise TypeError(
                    f"SB3's buffers need VecNormalize outside of {type(wrappers[-1]).__name__}"
                )
        elif isinstance(envs, VecTransposeImage | VecFrameStack):
            wrappers.append(envs)
        elif not isinstance(envs, _TRANSPARENT_WRAPPERS):
            raise TypeError(
                f"ShmReplayBuffer does not know how {type(envs).__name__} changes observations and "
                "rewards: wrap each env in its function instead, or use SB3's own buffer"
            )
        envs = envs.venv
    return wrappers[::-1]


def _frame_stack(envs: Any, wrappers: list[Any]) -> tuple[int, str]:
    """The number of frames of an observation, and the kind of frames before an episode."""
    stacks = [wrapper for wrapper in wrappers if isinstance(wrapper, VecFrameStack)]
    shape = envs.observation_space.shape
    if not stacks:
        if envs.has_attr("stack_size") and envs.has_attr("padding_type"):
            frames, padding = envs.get_attr("stack_size", 0)[0], envs.get_attr("padding_type", 0)[0]
            if padding in ("reset", "zero") and shape and len(shape) > 1 and shape[0] == frames:
                return frames, padding
        return 1, "reset"
    frames = stacks[0].stacked_obs.n_stack
    if len(stacks) > 1 or (shape and len(shape) > 1 and shape[0] == frames):
        raise TypeError(
            "ShmReplayBuffer cannot tell a stack from a frame here: use gymnasium's "
            "FrameStackObservation in the envs' functions instead of VecFrameStack"
        )
    return frames, "zero"

"""The base of what stands for an env in its worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["HostedEnv"]


class HostedEnv:
    """Is stepped by the core in the place of an env, to which it hands everything on.

    Adapters whose system's envs are not Gymnasium's, or who must know what happens in the worker,
    derive from it and override what they do otherwise. Instances are made by the ``env_fns`` and
    never leave their worker.

    Attributes:
        env: The env.
        observation_space: That of what the core is told.
        action_space: That of what the core is given.
        metadata: The env's; ``{}`` where it has none.
        render_mode: The env's; None where it has none.
    """

    @classmethod
    def made_by(cls, env_fn: Callable[[], Any], **arguments: Any) -> Any:
        """Stands for an env whose spaces may exist only after its first reset.

        If they do not exist before it, one env is reset to learn them, and closed; what is stepped
        is another one, which the core finds as it was made.

        Args:
            env_fn: Makes the env.
            **arguments: Of this class.

        Returns:
            An instance; or the env itself if it is none, of which the core says what is wrong.

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
        """Takes the env, and spaces if they are not those of the env."""
        self.env = env
        self.observation_space = (
            env.observation_space if observation_space is None else observation_space
        )
        self.action_space = env.action_space if action_space is None else action_space
        self.metadata: dict[str, Any] = getattr(env, "metadata", None) or {}
        self.render_mode: str | None = getattr(env, "render_mode", None)

    @property
    def unwrapped(self) -> Any:
        """What a worker may not have twice: the env, without its wrappers."""
        return getattr(self.env, "unwrapped", self.env)

    def reset(self, **arguments: Any) -> Any:
        """Resets the env."""
        return self.env.reset(**arguments)

    def step(self, action: Any) -> Any:
        """Steps the env."""
        return self.env.step(action)

    def render(self) -> Any:
        """What the env renders."""
        return self.env.render()

    def close(self) -> None:
        """Closes the env."""
        self.env.close()

    def get_wrapper_attr(self, name: str) -> Any:
        """What ``call`` and ``get_attr`` find."""
        return self.env.get_wrapper_attr(name)

    def set_wrapper_attr(self, name: str, value: Any) -> Any:
        """What ``set_attr`` does."""
        return self.env.set_wrapper_attr(name, value)


def _spaces_of(env: Any) -> tuple[Any, Any]:
    """The spaces of an env; None for one that it does not have yet, however it says so."""
    found = []
    for name in ("observation_space", "action_space"):
        try:
            found.append(getattr(env, name))
        except Exception:
            found.append(None)
    return found[0], found[1]

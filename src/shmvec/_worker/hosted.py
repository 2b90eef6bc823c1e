"""The base of what stands for an env in its worker."""

from __future__ import annotations

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

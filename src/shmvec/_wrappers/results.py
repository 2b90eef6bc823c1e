"""Unpacks results of methods in Python, so that errors are Python's own."""

from __future__ import annotations

from typing import Any

__all__ = ["unpack_reward", "unpack_step"]


def unpack_step(result: Any) -> tuple[Any, Any, Any, Any, Any]:
    """The five results of a step; raises what wrappers raise if it has returned something else."""
    observation, reward, terminated, truncated, info = result
    return observation, reward, terminated, truncated, info


def unpack_reward(result: Any) -> tuple[Any, dict[Any, Any]]:
    """A reward and its infos; raises what MuJoCo envs raise if they are something else."""
    reward, infos = result
    return reward, {**infos}

"""What methods have returned, unpacked in Python: errors of it are then Python's own."""

from __future__ import annotations

from typing import Any

__all__ = ["rewarded", "unpacked"]


def unpacked(result: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Five values, or the error that wrappers raise where a step returns something else."""
    observation, reward, terminated, truncated, info = result
    return observation, reward, terminated, truncated, info


def rewarded(result: Any) -> tuple[Any, dict[Any, Any]]:
    """A reward and its infos, or the error that MuJoCo envs raise where it is something else."""
    reward, infos = result
    return reward, {**infos}

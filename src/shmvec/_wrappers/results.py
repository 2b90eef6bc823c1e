"""What a step has returned, unpacked in Python: errors of it are then those that wrappers raise."""

from __future__ import annotations

from typing import Any

__all__ = ["unpacked"]


def unpacked(result: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Five values, or the error that wrappers raise where a step returns something else."""
    observation, reward, terminated, truncated, info = result
    return observation, reward, terminated, truncated, info

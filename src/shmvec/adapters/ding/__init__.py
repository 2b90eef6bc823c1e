"""DI-engine's env managers: envs with states of their own, stepped by ``{env_id: action}``.

``SyncSubprocessEnvManager``, ``AsyncSubprocessEnvManager`` and ``SubprocessEnvManagerV2`` as in
``ding.envs``, over an ``Exchange``. DI-engine need not be installed. What is stepped are Gymnasium
envs, or DI-engine's own with Gymnasium's spaces. docs/coming-from/di-engine.md says what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shmvec.adapters.ding.config import EnvManagerConfig, SyncEnvManagerConfig
from shmvec.adapters.ding.manager import AsyncSubprocessEnvManager, SyncSubprocessEnvManager
from shmvec.adapters.ding.records import SubprocessEnvManagerV2
from shmvec.adapters.ding.states import (
    BaseEnvTimestep,
    EnvState,
    EnvStateError,
    ManagerClosedError,
)

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

_MANAGERS: dict[str, type[AsyncSubprocessEnvManager]] = {
    "async_subprocess": AsyncSubprocessEnvManager,
    "subprocess": SyncSubprocessEnvManager,
    "subprocess_v2": SubprocessEnvManagerV2,
}


def get_env_manager_cls(cfg: Mapping[str, Any]) -> type[AsyncSubprocessEnvManager]:
    """The class that a configuration names: "subprocess", "async_subprocess", "subprocess_v2".

    Raises:
        KeyError: ``cfg["type"]`` is none of them.
    """
    kind = cfg.get("type")
    if kind not in _MANAGERS:
        raise KeyError(f"cfg['type'] must be one of {', '.join(_MANAGERS)}; got {kind!r}")
    return _MANAGERS[kind]


def create_env_manager(
    manager_cfg: Mapping[str, Any], env_fn: Sequence[Callable[[], Any]]
) -> AsyncSubprocessEnvManager:
    """Makes the env manager that a configuration describes.

    Args:
        manager_cfg: Its ``type``, and what differs from the defaults.
        env_fn: One function for each env.

    Raises:
        KeyError: There is no such type.

    Example:
        >>> import gymnasium as gym
        >>> from shmvec.adapters.ding import create_env_manager
        >>> cfg = {"type": "subprocess", "episode_num": 1}
        >>> manager = create_env_manager(cfg, [lambda: gym.make("CartPole-v1")] * 2)
        >>> manager.env_num, manager.closed
        (2, True)
    """
    return get_env_manager_cls(manager_cfg)(env_fn, manager_cfg)

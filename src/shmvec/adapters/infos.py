"""A ``ShmVectorEnv`` that leaves infos as their envs returned them, for systems that have it so."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from shmvec.vector_env import ShmVectorEnv

__all__ = ["InfosByEnv"]


class InfosByEnv(ShmVectorEnv):
    """Its infos are ``{env: info}``: not gathered in arrays, which have one dtype for all envs."""

    def _add_info(
        self, vector_infos: dict[Any, Any], env_info: dict[str, Any], env_num: int
    ) -> dict[Any, Any]:
        """Adds what one env has said; what is told of a fault follows what its reset said."""
        if self.num_workers == 0:  # what is too long for the ring is the env's own dict
            env_info = deepcopy(env_info)
        if env_num in vector_infos:
            vector_infos[env_num].update(env_info)
        else:  # itself: it may be of a class of the user's
            vector_infos[env_num] = env_info
        return vector_infos

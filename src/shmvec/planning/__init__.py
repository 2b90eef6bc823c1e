"""Planning from states: step many (state, action) pairs in parallel, wherever they lead."""

from shmvec.planning.promise import Promise
from shmvec.planning.states import EnvState
from shmvec.planning.vector_env import PlanningVectorEnv

__all__ = ["EnvState", "PlanningVectorEnv", "Promise"]

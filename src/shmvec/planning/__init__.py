"""Planning from states: step many (state, action) pairs in parallel, wherever they lead."""

from shmvec.planning.promise import Promise
from shmvec.planning.vector_env import PlanningVectorEnv
from shmvec.states import EnvState

__all__ = ["EnvState", "PlanningVectorEnv", "Promise"]

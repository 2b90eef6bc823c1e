"""Planning from states: step many (state, action) pairs in parallel, wherever they lead."""

from shmvec.planning.vector_env import PlanningVectorEnv
from shmvec.planning.workers import Promise
from shmvec.states import StateAccess

__all__ = ["PlanningVectorEnv", "Promise", "StateAccess"]

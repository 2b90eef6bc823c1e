"""Planning from states: steps many (state, action) pairs in parallel, from any states."""

from shmvec.planning.vector_env import PlanningVectorEnv
from shmvec.planning.workers import Promise
from shmvec.states import StateAccess

__all__ = ["PlanningVectorEnv", "Promise", "StateAccess"]

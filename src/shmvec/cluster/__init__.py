"""Beyond one machine: vector envs and policies on the nodes of a cluster, joined by Ray.

``pip install 'shmvec[cluster]'`` brings Ray; what runs with ``local=True`` needs none.
"""

from shmvec.cluster.collector import Collector, CollectorStats, RunnerStats
from shmvec.cluster.fragments import Fragment
from shmvec.cluster.vector_env import ClusterVectorEnv

__all__ = ["ClusterVectorEnv", "Collector", "CollectorStats", "Fragment", "RunnerStats"]

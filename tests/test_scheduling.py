"""Cores, splits and budgets."""

import os
import sys
import time

import gymnasium as gym
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import deep

from shmvec import ShmVectorEnv
from shmvec import _cores as scheduling
from shmvec._cores import split_evenly, usable_cores, wait_budgets


@given(st.integers(1, 200), st.integers(1, 50))
def test_split(num_envs, num_workers):
    num_workers = min(num_workers, num_envs)
    ranges = split_evenly(num_envs, num_workers)
    assert [env for envs in ranges for env in envs] == list(range(num_envs))
    sizes = {len(envs) for envs in ranges}
    assert len(ranges) == num_workers and max(sizes) - min(sizes) <= 1


@pytest.mark.deep
@given(st.integers(1, 200), st.integers(1, 50), st.integers(1, 20))
def test_split_among_pinned_workers(num_envs, num_workers, cores):
    """Workers that share a core share its envs: no core has more than another, but for one env."""
    num_workers = min(num_workers, num_envs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
        ranges = split_evenly(num_envs, num_workers, pinned=True)
    assert [env for envs in ranges for env in envs] == list(range(num_envs))
    sizes = [len(envs) for envs in ranges]
    by_core = [sizes[core::cores] for core in range(min(cores, num_workers))]
    assert len(ranges) == num_workers and min(sizes) > 0
    assert max(map(sum, by_core)) - min(map(sum, by_core)) <= 1
    assert all(max(sharing) - min(sharing) <= 1 for sharing in by_core)


@pytest.mark.deep
def test_usable_cores_follow_the_affinity():
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.deep
@pytest.mark.skipif(usable_cores() < 2, reason="there is no core to take away")
def test_a_vector_env_follows_changes_of_its_affinity():
    """One worker and a core to spare: it may pause. On one core none may."""
    allowed = os.sched_getaffinity(0)
    envs = ShmVectorEnv([lambda: gym.make("CartPole-v1")], num_workers=1)

    def step_until(pauses):
        deadline = time.monotonic() + 100
        while time.monotonic() < deadline:
            before = envs.stats()
            for _ in range(100):
                envs.step([0])
            spent = envs.stats() - before
            if pauses == (spent.parent.pause_s > 0) == (spent.workers[0].pause_s > 0):
                return
        pytest.fail(f"still {spent}")

    def allow(cores):
        for process in (0, envs.processes[0].pid):
            os.sched_setaffinity(process, cores)

    try:
        envs.reset(seed=0)
        step_until(pauses=True)
        allow({min(allowed)})
        step_until(pauses=False)
        allow(allowed)
        step_until(pauses=True)
    finally:
        os.sched_setaffinity(0, allowed)
        envs.close()


@pytest.mark.deep
def test_cores_of_the_workers_count():
    allowed = os.sched_getaffinity(0)
    envs = ShmVectorEnv([lambda: gym.make("CartPole-v1")], num_workers=1)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert usable_cores(envs.processes) == len(allowed)
    finally:
        os.sched_setaffinity(0, allowed)
        envs.close()
    assert usable_cores(envs.processes) == len(allowed)  # of those that have ended none


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000"}, 1.5),
        *deep(
            ({"cpu.max": "max 100000"}, None),
            ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
            ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5),
            ({"cpu.max": "nonsense"}, None),
            ({}, None),
        ),
    ],
)
def test_cgroup_quota(tmp_path, monkeypatch, files, quota):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert scheduling.cgroup_quota(tmp_path, tmp_path / "none") == quota
    monkeypatch.setattr(scheduling, "cgroup_quota", lambda: quota)
    assert usable_cores() >= 1
    if quota == 0.5:
        assert usable_cores() == 1


@pytest.mark.deep
@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("SLURM_CPUS_PER_TASK", "3", 3),
        ("SLURM_CPUS_PER_TASK", "100", 8),
        ("SLURM_CPUS_PER_TASK", "0", 8),
        ("SLURM_CPUS_PER_TASK", "many", 8),
        ("LOCAL_WORLD_SIZE", "1", 8),
        ("LOCAL_WORLD_SIZE", "3", 2),
        ("LOCAL_WORLD_SIZE", "100", 1),
        ("LOCAL_WORLD_SIZE", "", 8),
    ],
)
def test_cores_that_others_leave_to_this_process(monkeypatch, variable, value, expected):
    monkeypatch.setattr(scheduling, "cgroup_quota", lambda: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setenv(variable, value)
    assert usable_cores() == expected


@pytest.mark.deep
@pytest.mark.parametrize(("bound_to", "expected"), [(2, 2), (4, 2), (8, 2), (1, 1)])
def test_ranks_that_are_bound_are_not_given_a_share_of_their_share(monkeypatch, bound_to, expected):
    """Four ranks on eight cores: bound to two each, two to the same four, or not at all."""
    cores = {0: set(range(bound_to)), os.getppid(): set(range(8))}
    monkeypatch.setattr(scheduling, "cgroup_quota", lambda: None)
    monkeypatch.setattr(os, "sched_getaffinity", cores.__getitem__)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert usable_cores() == expected


@pytest.mark.deep
def test_a_quota_is_that_of_all_ranks(monkeypatch):
    monkeypatch.setattr(scheduling, "cgroup_quota", lambda: 6)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert usable_cores() == 2


@pytest.mark.deep
@pytest.mark.parametrize(
    ("resources", "expected"),
    [({"CPU": 2.0, "GPU": 1.0}, 2), ({"CPU": 0.5}, 1), ({"CPU": 99.0}, 8), ({}, 8), (None, 8)],
)
def test_cores_of_an_actor_of_ray(monkeypatch, resources, expected):
    """As Ray 2 says it; a process that is no actor gets an exception."""

    class Ray:
        @staticmethod
        def is_initialized():
            return True

        @staticmethod
        def get_runtime_context():
            assert resources is not None
            return Ray

        @staticmethod
        def get_assigned_resources():
            return resources

    monkeypatch.setattr(scheduling, "cgroup_quota", lambda: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setitem(sys.modules, "ray", Ray)
    assert usable_cores() == expected


@pytest.mark.deep
def test_nobody_pauses_without_a_core_to_spare(monkeypatch):
    for cores in (1, 2, 16):
        monkeypatch.setattr(scheduling, "allowed_cores", lambda cores=cores: set(range(cores)))
        for num_workers in (1, 2, 8, 16, 100):
            budgets = wait_budgets(num_workers, cores)
            pauses = budgets.parent[0] > 0, budgets.worker[0] > 0
            assert pauses == (num_workers < cores,) * 2
            assert budgets.homing == (num_workers == cores)
            assert (budgets.worker[2] > 0) == (budgets.cores > 0) == (num_workers > cores)


@pytest.mark.deep
def test_no_homing_under_a_quota(monkeypatch):
    """Else all containers of a machine would wake their workers on its first cores."""
    monkeypatch.setattr(scheduling, "allowed_cores", lambda: set(range(64)))
    assert not wait_budgets(2, cores=2).homing


@pytest.mark.deep
def test_the_tightest_quota_around_a_process_counts(tmp_path):
    membership = tmp_path / "membership"
    membership.write_text("0::/user/job\n")
    (tmp_path / "user" / "job").mkdir(parents=True)
    (tmp_path / "user" / "job" / "cpu.max").write_text("400000 100000")
    assert scheduling.cgroup_quota(tmp_path, membership) == 4
    (tmp_path / "user" / "cpu.max").write_text("250000 100000")
    assert scheduling.cgroup_quota(tmp_path, membership) == 2.5
    membership.write_text("0::/\n")
    (tmp_path / "cpu.max").write_text("max 100000")
    assert scheduling.cgroup_quota(tmp_path, membership) is None


@pytest.mark.deep
def test_a_quota_of_version_1_counts_where_the_process_is(tmp_path):
    membership = tmp_path / "membership"
    membership.write_text("2:memory:/other\n1:cpu,cpuacct:/job\n0::/\n")
    (tmp_path / "cpu" / "job").mkdir(parents=True)
    (tmp_path / "cpu" / "job" / "cpu.cfs_quota_us").write_text("150000")
    (tmp_path / "cpu" / "job" / "cpu.cfs_period_us").write_text("100000")
    assert scheduling.cgroup_quota(tmp_path, membership) == 1.5

"""Limits: of memory, of what an env may do with it, and of what a policy mends."""

import dataclasses
import signal
import subprocess

import numpy as np
import pytest
from echoing import Echo
from scripts import succeeds

from shmvec import FaultPolicy, ShmVectorEnv


class Interrupted(Echo):
    """Ctrl-C comes in the middle of an operation."""

    def __init__(self, operation):
        super().__init__()
        self.operation = operation

    def _interrupt(self, operation):
        if self.operation == operation:
            self.operation = None
            signal.raise_signal(signal.SIGINT)

    def reset(self, **arguments):
        self._interrupt("reset")
        return super().reset(**arguments)

    def step(self, action):
        self._interrupt("step")
        return super().step(action)


CALLS = {
    "step": lambda envs: envs.step([1, 1]),
    "step of some": lambda envs: envs.step([1, 1], mask=np.array([True, False])),
    "recv": lambda envs: (envs.send([1, 1]), envs.recv()),
    "reset": lambda envs: envs.reset(seed=1),
}


@pytest.mark.parametrize("on_error", ["reset", "restart"])
@pytest.mark.parametrize("what", CALLS)
def test_ctrl_c_in_an_env_in_this_process_is_not_mended(what, on_error):
    operation = "reset" if what == "reset" else "step"
    policy = FaultPolicy(on_error=on_error, backoff_s=0)
    make = [lambda: Interrupted(None), lambda: Interrupted(None)]
    envs = ShmVectorEnv(make, num_workers=0, faults=policy)
    try:
        envs.reset(seed=0)
        envs.set_attr("operation", operation, env_id=[0])
        with pytest.raises(KeyboardInterrupt):
            CALLS[what](envs)
        assert not any(dataclasses.astuple(envs.stats().faults))
    finally:
        envs.close(terminate=True)


def test_what_an_env_does_to_the_memory_it_has_inherited_does_not_end_the_parent():
    succeeds("""
        import os
        from echoing import Echo
        from shmvec import ShmVectorEnv

        class Truncating(Echo):
            def step(self, action):
                if action == 9:
                    for name in os.listdir("/proc/self/fd"):
                        path = f"/proc/self/fd/{name}"
                        try:
                            target = os.readlink(path)
                            if "memfd:" in target or "/dev/shm/" in target:
                                os.ftruncate(int(name), 0)
                        except OSError:
                            pass  # it may not
                return super().step(action)

        envs = ShmVectorEnv([Truncating] * 2, num_workers=2)
        envs.reset(seed=0)
        for n in (9, 1, 2):
            observations, *_ = envs.step([n, n])
            assert observations[:, 1].tolist() == [n, n]
        envs.close()
    """)


def unshared(command):
    """A shell's command in which mounts are its own."""
    return ["unshare", "--map-root-user", "--mount", "sh", "-c", command]


def may_mount():
    try:
        return subprocess.run(
            unshared("mount -t tmpfs none /sys/fs/cgroup"), capture_output=True, timeout=20
        )
    except OSError:
        return None


@pytest.fixture
def limited():
    """Mounts of one's own in which all cgroups have a limit."""
    done = may_mount()
    if done is None or done.returncode != 0:
        pytest.skip("there are no mounts of one's own here")


def test_memory_beyond_the_cgroups_limit_is_an_error_with_the_numbers(limited):
    succeeds("""
        import os, subprocess
        if "inside" not in os.environ:
            limit = "echo 5000000 > max && echo 3000000 > current"
            mount = "mount -t tmpfs none /sys/fs/cgroup && cd /sys/fs/cgroup"
            names = "mv max memory.max && mv current memory.current"
            again = 'exec "$@"'
            command = f"{mount} && {limit} && {names} && cd / && {again}"
            with open("/proc/self/cmdline") as line:
                arguments = line.read().split("\\0")[:-1]
            done = subprocess.run(
                ["unshare", "--map-root-user", "--mount", "sh", "-c", command, "sh", *arguments],
                env={**os.environ, "inside": "yes"},
            )
            sys.exit(done.returncode)

        from echoing import Echo
        from shmvec import ShmVectorEnv

        ShmVectorEnv([Echo] * 2, num_workers=2).close()
        try:
            ShmVectorEnv([lambda: Echo(size=200_000)] * 2, num_workers=2)
        except OSError as error:
            assert "2,000,000" in str(error), error
        else:
            raise AssertionError("it would be killed")
    """)

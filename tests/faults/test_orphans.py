"""A parent that is killed takes its workers with it, and what these have started."""

import selectors
import time

import pytest
from processes import gone
from scripts import DEADLINE_S, running

STUCK = """
    import ctypes, os, subprocess, time
    from echoing import Echo
    from shmvec import ShmVectorEnv

    def helpers():
        # As simulators do: a fork of the worker, and a command.
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        return child, subprocess.Popen(["sleep", "60"]).pid

    def stick(how):
        os.write(1, " ".join(map(str, (os.getpid(), *helpers()))).encode() + b"\\n")
        while how == "in Python":
            pass
        if how == "in C":
            ctypes.PyDLL(None).sleep(60)  # holds the GIL
        time.sleep(60)

    class InStep(Echo):
        def step(self, action):
            stick(["in Python", "in C", "asleep"][action])

    class InReset(Echo):
        def reset(self, *, seed=None, options=None):
            stick(["in Python", "in C", "asleep"][options])

    def building(how):
        def make():
            stick(how)
        return make
"""

WAYS = {
    "step": """
        envs = ShmVectorEnv([InStep] * 3, num_workers=3, context={context!r})
        envs.reset()
        envs.step([0, 1, 2])
    """,
    "reset": """
        envs = ShmVectorEnv([InReset] * 3, num_workers=3, context={context!r})
        envs.reset(options=[0, 1, 2])
    """,
    "env_fn": """
        makes = [building(how) for how in ("in Python", "in C", "asleep")]
        ShmVectorEnv(makes, num_workers=3, context={context!r})
    """,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_a_killed_parent_takes_its_workers_and_what_they_have_started_with_it(context, way):
    with running(STUCK, WAYS[way].format(context=context)) as parent:
        workers, helpers = [], []
        for line in lines(parent, 3):
            worker, *started = map(int, line.split())
            workers.append(worker)
            helpers += started
        parent.kill()
        parent.wait(DEADLINE_S)
        # One second is promised; the machine may be busy.
        assert gone(workers, deadline_s=3), "workers are left"
        assert gone(helpers, deadline_s=1), "what their envs have started is left"


def test_helpers_of_idle_workers_go_with_a_killed_parent():
    body = """
        class Helped(Echo):
            def __init__(self):
                super().__init__()
                os.write(1, " ".join(map(str, (os.getpid(), *helpers()))).encode() + b"\\n")

        envs = ShmVectorEnv([Helped] * 2, num_workers=2, context="fork")
        envs.reset()
        print("waits", flush=True)
        time.sleep(60)
    """
    with running(STUCK, body) as parent:
        *told, _ = lines(parent, 3)
        parent.kill()
        parent.wait(DEADLINE_S)
        assert gone([int(pid) for line in told for pid in line.split()], deadline_s=3)


def lines(process, count):
    """So many lines of what it prints."""
    until = time.monotonic() + DEADLINE_S
    text = ""
    with selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        while text.count("\n") < count:
            left = until - time.monotonic()
            assert left > 0 and ready.select(left), f"it has only said: {text}"
            read = process.stdout.buffer.read1(1000).decode()
            assert read, f"it has ended: {text}\n{process.stderr.read()}"
            text += read
    return text.splitlines()

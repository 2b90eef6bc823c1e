"""A parent that is killed takes its workers with it, and what these have started."""

import selectors
import time

import families
import pytest
from processes import gone, wait_until_dozing
from scripts import DEADLINE_S, running
from tables import paired

# Three workers say what they have started, and then that they are where they stay.
STUCK = """
    import ctypes, time
    from families import Starting
    from shmvec import ShmVectorEnv

    def say(*words):
        os.write(1, " ".join(map(str, words)).encode() + b"\\n")

    def stick(how):
        say("there")
        while how == 0:  # in Python
            pass
        if how == 1:  # in C, with the GIL
            ctypes.PyDLL(None).sleep(300)
        time.sleep(300)

    class Stuck(Starting):
        def __init__(self):
            super().__init__()
            say(*self.started())

        def step(self, action):
            stick(action)

        def reset(self, *, seed=None, options=None):
            if options is not None:
                stick(options)
            return super().reset(seed=seed)

    def building(how):
        def make():
            Stuck()
            stick(how)
        return make

    def made():
        envs = ShmVectorEnv([Stuck] * 3, num_workers=3, context=CONTEXT)
        envs.reset()
        return envs
"""

MOMENTS = {
    "in a step": "made().step([0, 1, 2])",
    "in a reset": "made().reset(options=[0, 1, 2])",
    "dozing": """
        envs = made()
        say("there\\n" * 2 + "there")
        time.sleep(300)
    """,
    "while they are made": """
        make = [building(how) for how in (2, 0, 1)]  # the first is waited for while it computes
        ShmVectorEnv(make, num_workers=3, context=CONTEXT)
    """,
}


@pytest.mark.parametrize("context, moment", paired(["fork", "spawn", "forkserver"], MOMENTS))
def test_a_killed_parent_takes_its_workers_and_what_they_have_started_with_it(context, moment):
    script = (part.replace("CONTEXT", repr(context)) for part in (STUCK, MOMENTS[moment]))
    with running(*script) as parent:
        said = [line.split() for line in lines(parent, 6)]
        workers, started = [], []
        for worker, *pids in (line for line in said if line != ["there"]):
            workers.append(int(worker))
            started += map(int, pids)
        assert (len(workers), len(started)) == (3, 3 * len(families.WAYS))
        families.check_lives(workers + started)
        if moment == "dozing":
            wait_until_dozing(workers)
        parent.kill()
        parent.wait(DEADLINE_S)
        # One second is promised, a busy machine takes longer; by themselves they would stay.
        assert gone(workers, deadline_s=60), "workers are left"
        families.check_gone(started)
        assert parent.stderr.read() == ""


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

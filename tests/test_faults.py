"""What happens when processes die or waits are interrupted, on either side."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from envs import Counter, Failing
from gymnasium.error import ClosedEnvironmentError

from shmvec import ShmVectorEnv, WorkerCrashError

DEADLINE_S = 20


def make_counter():
    return Counter(99)


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize(("how", "words"), [("kill", "killed by SIGKILL"), ("exit", "exit code 3")])
def test_a_worker_dies_in_a_step(context, how, words):
    make = [make_counter, make_counter, lambda: Failing("step", how)]
    envs = ShmVectorEnv(make, num_workers=2, context=context)
    envs.reset()
    envs.step([0, 0, 0])
    start = time.monotonic()
    with pytest.raises(WorkerCrashError, match=rf"worker 1 \(envs 2 to 2\) {words}"):
        envs.step([0, 0, 0])
    assert time.monotonic() - start < DEADLINE_S
    assert envs.closed
    with pytest.raises(ClosedEnvironmentError):
        envs.step([0, 0, 0])
    envs.close()


def test_a_worker_dies_between_steps():
    envs = ShmVectorEnv([make_counter] * 2, num_workers=2)
    envs.reset()
    os.kill(envs.processes[1].pid, signal.SIGKILL)
    with pytest.raises(WorkerCrashError, match="worker 1"):
        envs.step([0, 0])


def test_a_worker_dies_in_a_call():
    envs = ShmVectorEnv([lambda: Failing("step", "kill", at=1)] * 2, num_workers=2)
    envs.reset()
    with pytest.raises(WorkerCrashError):
        envs.call("_fail")


def test_close_ends_a_worker_that_hangs():
    class Hanging(Counter):
        def step(self, action):
            threading.Event().wait()

    envs = ShmVectorEnv([make_counter, Hanging], num_workers=2)
    envs.reset()
    processes = envs.processes
    envs._loop.post_step([0, 0])  # as if Ctrl-C had interrupted the wait for it
    envs.close(timeout=0.2)
    assert not any(process.is_alive() for process in processes)


def test_close_kills_a_worker_that_ignores_sigterm():
    class Deaf(Counter):
        def step(self, action):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            threading.Event().wait()

    envs = ShmVectorEnv([Deaf], num_workers=1)
    envs.reset()
    processes = envs.processes
    envs._loop.post_step([0])
    envs.close(timeout=0.2)
    assert processes[0].exitcode in (-signal.SIGKILL, -signal.SIGTERM)


def test_ctrl_c_interrupts_a_step_and_its_results_are_dropped():
    class Slow(Counter):
        def step(self, action):
            if action == 3:
                time.sleep(0.5)
            return super().step(action)

    envs = ShmVectorEnv([lambda: Slow(99), make_counter], num_workers=2)
    envs.reset(seed=1)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        envs.step([3, 0])
    timer.join()
    observations, rewards, *_ = envs.step([1, 1])
    assert observations[:, :2].tolist() == [[2, 1], [2, 1]] and rewards.tolist() == [2, 2]
    envs.close()


def test_what_an_interrupted_step_raised_is_dropped_but_a_death_is_not():
    envs = ShmVectorEnv([lambda: Failing("step", SystemExit(5), at=1), make_counter])
    envs.reset()
    envs._loop.post_step([0, 0])  # as if Ctrl-C had interrupted the wait for it
    assert envs.reset(seed=2)[0][:, 0].tolist() == [0, 0]
    envs.close()
    envs = ShmVectorEnv([lambda: Failing("step", "kill", at=1), make_counter], num_workers=2)
    envs.reset()
    envs._loop.post_step([0, 0])
    with pytest.raises(WorkerCrashError):
        envs.reset()
    envs.close()


def run_script(body: str) -> subprocess.Popen:
    script = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    return subprocess.Popen(
        [sys.executable, "-c", script + textwrap.dedent(body)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def gone(pids, deadline_s):
    until = time.monotonic() + deadline_s
    while time.monotonic() < until:
        if not any(Path(f"/proc/{pid}").exists() and "Z" not in state(pid) for pid in pids):
            return True
        time.sleep(0.01)
    return False


def state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_workers_end_with_a_killed_parent(context):
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    parent = run_script(f"""
        from envs import Counter
        import shmvec, time
        if __name__ == "__main__":
            envs = shmvec.ShmVectorEnv([Counter] * 3, num_workers=3, context={context!r})
            envs.reset()
            print(*[process.pid for process in envs.processes], flush=True)
            time.sleep(60)
    """)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 3, parent.communicate(timeout=DEADLINE_S)[1]
    parent.kill()
    parent.wait(DEADLINE_S)
    assert gone(pids, deadline_s=1.0)
    assert parent.communicate(timeout=DEADLINE_S) == ("", "")
    assert set(os.listdir("/dev/shm")) <= before if before else True


def test_ctrl_c_ends_a_script_without_a_word_from_the_workers():
    parent = run_script("""
        from envs import Counter
        import shmvec
        if __name__ == "__main__":
            envs = shmvec.ShmVectorEnv([Counter] * 3, num_workers=3)
            envs.reset()
            try:
                print(*[process.pid for process in envs.processes], flush=True)
                while True:
                    envs.step([0, 0, 0])
            except KeyboardInterrupt:
                envs.close()
                print("closed", flush=True)
    """)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    for pid in [*pids, parent.pid]:  # a terminal sends it to the whole group
        os.kill(pid, signal.SIGINT)
    out, err = parent.communicate(timeout=DEADLINE_S)
    assert (out, err) == ("closed\n", "")
    assert gone(pids, deadline_s=1.0)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_an_env_that_is_open_at_exit(context):
    parent = run_script(f"""
        from envs import Counter
        import shmvec
        if __name__ == "__main__":
            envs = shmvec.ShmVectorEnv([Counter] * 2, num_workers=2, context={context!r})
            envs.reset()
            print(*[process.pid for process in envs.processes], flush=True)
    """)
    out, err = parent.communicate(timeout=DEADLINE_S)
    assert err == "" and parent.returncode == 0
    assert gone([int(pid) for pid in out.split()], deadline_s=1.0)

"""A call that Ctrl-C or a signal's handler breaks off, at any moment: the next one is right."""

import pytest
from scripts import succeeds
from tables import first

# What follows an interrupted call, and what it must show. `n` is another number each time.
RECV = """
        envs = ShmVectorEnv([Echo] * 4, num_workers=2, batch_size=2{options})
        envs.reset(seed=0)
        envs.recv()

        def interrupted(n):
            envs.send([n, n, n, n])
            envs.recv()
            envs.recv()

        def check(n):
            try:
                while True:
                    _, rewards, _, _, infos = envs.recv(min_envs=1)
                    assert infos["action"].tolist() == rewards.tolist()
            except NoAsyncCallError:
                pass  # none is in flight any more
            envs.send([n, n + 1, n + 2, n + 3])
            for _ in range(2):
                observations, rewards, _, _, infos = envs.recv()
                expected = [n + env for env in infos["env_id"]]
                assert [each[1] for each in observations] == expected
                assert rewards.tolist() == infos["action"].tolist() == expected
    """

CALLS = {
    "call": """
        envs = ShmVectorEnv([Echo] * 4, num_workers=2)
        interrupted = lambda n: envs.call("echo", n)

        def check(n):
            assert envs.call("echo", n) == (n,) * 4
    """,
    "call of large results": """
        envs = ShmVectorEnv([Echo] * 4, num_workers=2)
        interrupted = lambda n: envs.call("echo", bytes([n % 256]) * 300_000)

        def check(n):
            large = n.to_bytes(2, "big") * 50_000
            assert envs.call("echo", large) == (large,) * 4
    """,
    "set_attr": """
        envs = ShmVectorEnv([Echo] * 4, num_workers=2)
        interrupted = lambda n: envs.set_attr("mark", [n, n + 1, n + 2, n + 3])

        def check(n):
            envs.set_attr("mark", -n)
            assert envs.get_attr("mark") == (-n,) * 4
            assert envs.call("echo", n) == (n,) * 4
    """,
    "seeded reset": """
        envs = ShmVectorEnv([Echo] * 4, num_workers=2)
        interrupted = lambda n: envs.reset(seed=n)

        def check(n):
            observations, _ = envs.reset(seed=[None, n, n, n])
            assert observations[1:].tolist() == [[0, -1, drawn(n)]] * 3
            observations, rewards, *_ = envs.step([n] * 4)
            assert observations[:, :2].tolist() == [[1, n]] * 4 and rewards.tolist() == [n] * 4
    """,
    "call without workers": """
        envs = ShmVectorEnv([Echo] * 4, num_workers=0)
        interrupted = lambda n: envs.call("echo", n)

        def check(n):
            assert envs.call("echo", n) == (n,) * 4
    """,
    "step": """
        envs = ShmVectorEnv([Echo] * 4, num_workers=2)
        envs.reset(seed=0)
        interrupted = lambda n: envs.step([n] * 4)
        last = 0

        def check(n):
            global last
            observations, rewards, _, _, infos = envs.step([n, n + 1, n + 2, n + 3])
            count = int(observations[0, 0])
            assert count >= last + 1
            assert observations[:, :2].tolist() == [[count, n + i] for i in range(4)]
            assert rewards.tolist() == infos["action"].tolist() == [n, n + 1, n + 2, n + 3]
            last = count
    """,
    "step with messages": """
        envs = ShmVectorEnv([Echo] * 4, num_workers=2, shared_memory=False)
        envs.reset(seed=0)
        interrupted = lambda n: envs.step([n] * 4)

        def check(n):
            observations, rewards, *_ = envs.step([n, n + 1, n + 2, n + 3])
            count = observations[0][0]
            assert [list(each[:2]) for each in observations] == [[count, n + i] for i in range(4)]
            assert rewards.tolist() == [n, n + 1, n + 2, n + 3]
    """,
    "step with faults mended": """
        envs = ShmVectorEnv(
            [Echo] * 4, num_workers=2, faults=FaultPolicy(on_crash="restart", on_error="reset")
        )
        envs.reset(seed=0)
        interrupted = lambda n: envs.step([n] * 4)

        def check(n):
            observations, rewards, _, _, infos = envs.step([n, n + 1, n + 2, n + 3])
            count = int(observations[0, 0])
            assert observations[:, :2].tolist() == [[count, n + i] for i in range(4)]
            assert rewards.tolist() == infos["action"].tolist() == [n, n + 1, n + 2, n + 3]
    """,
    "send and recv": RECV.replace("{options}", ""),
    "send and recv with messages": RECV.replace("{options}", ", shared_memory=False"),
    "step of some": """
        envs = ShmVectorEnv([Echo] * 4, num_workers=2)
        envs.reset(seed=0)
        envs.step([0] * 4)
        mask = np.array([True, False, True, True])
        interrupted = lambda n: envs.step([n] * 4, mask=mask)

        def check(n):
            observations, rewards, _, _, infos = envs.step([n, n, n + 2, n + 3], mask=mask)
            count = int(observations[0, 0])
            expected = [[count, n], [1, 0], [count, n + 2], [count, n + 3]]
            assert observations[:, :2].tolist() == expected
            assert rewards.tolist() == infos["action"].tolist() == [n, 0, n + 2, n + 3]
    """,
    "steps of rollouts": """
        envs = ShmVectorEnv([Echo] * 4, num_workers=2)
        envs.reset(seed=0)

        def interrupted(n):
            rollout = envs.rollout(4 + n % 2)  # now and then its memory is new
            for _ in range(4):
                rollout.step([n] * 4)

        def check(n):
            rollout = envs.rollout(4)
            first = rollout.observations[0, 0, 0]
            for step in range(4):
                infos = rollout.step([n + step] * 4)
                assert infos["action"].tolist() == [n + step] * 4
            counts = [[first + step] * 4 for step in range(5)]
            assert rollout.observations[:, :, 0].tolist() == counts
            assert rollout.rewards[1:].tolist() == [[n + step] * 4 for step in range(4)]
            observations, rewards, *_ = envs.step([n, n + 1, n + 2, n + 3])
            assert observations[:, :2].tolist() == [[first + 5, n + i] for i in range(4)]
            assert rewards.tolist() == [n, n + 1, n + 2, n + 3]
    """,
}


START = """
    import numpy as np
    from gymnasium.error import NoAsyncCallError
    from echoing import Echo, Moments, Signals, drawn
    from shmvec import FaultPolicy, ShmVectorEnv
"""


@pytest.mark.deep
@pytest.mark.parametrize("what", CALLS)
def test_after_signals_at_random_moments_each_next_call_returns_its_own_results(what):
    body = """
        signals = Signals(seed=1)
        for n in range(10, 110):
            signals.during(lambda: interrupted(n))
            check(n)
        assert signals.num_raised > 20, signals.num_raised
        envs.close()
    """
    succeeds(START, CALLS[what], body)


@pytest.mark.parametrize("what", first(CALLS))
def test_after_an_exception_at_many_moments_the_next_call_returns_its_own_results(what):
    body = """
        interrupted(1)
        moments, n = Moments(3, keeps=True), 10
        while moments.interrupt(lambda: interrupted(n)):
            check(n)
            n += 1
        assert n > 13, n
        envs.close()
    """
    succeeds(START, CALLS[what], body)


@pytest.mark.deep
def test_close_comes_to_its_end_after_an_exception_at_any_moment():
    body = """
        moments, n, went_on = Moments(stride=11), 0, True
        np.unique([1])  # imports what it needs
        while went_on:
            envs = ShmVectorEnv([Echo] * 2, num_workers=2)
            went_on = moments.interrupt(lambda: envs.reset(seed=n))
            envs.close()
            n += 1
        assert n > 5, n
    """
    succeeds(START, body)


@pytest.mark.deep
def test_after_an_exception_at_any_moment_of_a_fork_ctrl_c_interrupts():
    """While a worker is forked, Ctrl-C has another handler."""
    body = """
        import signal
        from shmvec._processes.worker_process import WorkerProcess

        moments, n = Moments(stride=2), 0
        while moments.interrupt(WorkerProcess(target=int).fork):
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                n += 1
                continue
            raise AssertionError(f"Ctrl-C is lost after {n} forks")
        assert n > 20, n
    """
    succeeds(START, body)


@pytest.mark.deep
@pytest.mark.parametrize("size", [100_000, 2_000_000], ids=["within", "above the socket's buffer"])
def test_ctrl_c_while_a_late_message_is_awaited(size):
    """It comes whenever the worker pickles what it is about to send."""
    succeeds(f"""
        import os, signal, time
        from echoing import Echo, is_lost
        from shmvec import ShmVectorEnv

        waiting, wait = os.pipe()

        class Interrupting:
            def __reduce__(self):
                os.read(waiting, 1)
                time.sleep(0.05)  # by then it waits for us
                os.kill(os.getppid(), signal.SIGINT)
                return str, ()

        class Late(Echo):
            def step(self, action):
                result = super().step(action)
                if action == 7:
                    result[-1]["bulk"] = "x" * {size}, Interrupting()
                return result

        def handler(number, frame):
            global armed, came
            if armed and not is_lost(frame):
                armed = False
                came += 1
                raise KeyboardInterrupt

        def attempt(call):
            global armed
            try:
                armed = True
                os.write(wait, b"x")
                return call()
            except KeyboardInterrupt:
                return "interrupted"
            finally:
                armed = False

        armed, came = False, 0
        signal.signal(signal.SIGINT, handler)
        envs = ShmVectorEnv([Late] * 2, num_workers=2, context="fork")
        envs.reset(seed=0)
        assert attempt(lambda: envs.step([7, 8])) == "interrupted"
        for n in range(9):
            assert attempt(lambda: envs.call("echo", n)) in ((n, n), "interrupted")
        assert came < 9
        observations, *_ = envs.step([1, 2])
        assert observations[:, :2].tolist() == [[2, 1], [2, 2]]
        envs.close()
    """)


@pytest.mark.deep
def test_ctrl_c_of_another_thread_at_any_moment():
    succeeds("""
        import os, random, signal, threading
        from echoing import Echo, duration, is_lost
        from shmvec import ShmVectorEnv

        def handler(number, frame):
            global armed, came
            if armed and not is_lost(frame):
                armed = False
                came += 1
                raise KeyboardInterrupt

        def interrupt():
            pause = random.Random(3)
            while not over.wait(pause.uniform(0, 3 * seconds)):
                os.kill(os.getpid(), signal.SIGINT)

        armed, came, over = False, 0, threading.Event()
        signal.signal(signal.SIGINT, handler)
        envs = ShmVectorEnv([Echo] * 4, num_workers=2)
        seconds = duration(lambda: envs.call("echo", 0))
        thread = threading.Thread(target=interrupt, daemon=True)
        thread.start()
        n = 0
        while n < 100 or came < 20:
            try:
                armed = True
                envs.call("echo", "to be broken off")
                armed = False
            except KeyboardInterrupt:
                pass
            n += 1
            assert envs.call("echo", n) == (n,) * 4
        over.set()
        thread.join()
        envs.close()
    """)

"""Parent and worker never both block in a send, whatever is on its way between them."""

import pytest
from scripts import succeeds
from tables import deep

# Observations that no ring holds, and actions that none holds but every pipe takes at once.
BULKY = """
    import multiprocessing, signal, threading, time
    import gymnasium as gym
    import numpy as np
    from shmvec import FaultPolicy, ShmVectorEnv

    class Bulky(gym.Env):
        observation_space = gym.spaces.Sequence(gym.spaces.Discrete(256))
        action_space = gym.spaces.Sequence(gym.spaces.Discrete(256))

        def __init__(self, index=0):
            self.index = index

        def reset(self, *, seed=None, options=None):
            return (self.index,) * 2, {}

        def step(self, action):
            size = 1_000_000 if len(action) > 10 else 10
            return np.full(size, action[0], np.uint8), float(len(action)), False, False, {}

    ENVS = 62  # as many as fill a ring whose size is a power of two
    SIZE = 30_000

    def action(n):
        return np.full(SIZE, n, np.uint8)
"""


@pytest.mark.deep
def test_many_late_actions_and_large_observations():
    succeeds(
        BULKY,
        """
        envs = ShmVectorEnv([Bulky] * ENVS, num_workers=1, batch_size=1, shared_memory=False)
        envs.async_reset()
        for _ in range(ENVS):
            envs.recv()
        for turn in range(3):
            for env in range(ENVS):
                envs.send([action(env + turn)], [env])
            for _ in range(ENVS):
                (observation,), (reward,), _, _, infos = envs.recv()
                assert reward == SIZE and len(observation) == 1_000_000
                assert observation[0] == observation[-1] == infos["env_id"][0] + turn
        envs.close()
        """,
    )


@pytest.mark.deep
def test_many_late_actions_in_one_call():
    succeeds(
        BULKY,
        """
        envs = ShmVectorEnv([Bulky] * ENVS, num_workers=2, batch_size=2, shared_memory=False)
        envs.async_reset()
        for _ in range(ENVS // 2):
            envs.recv()
        envs.send([action(env) for env in range(ENVS)])
        for _ in range(ENVS // 2):
            observations, rewards, _, _, infos = envs.recv()
            assert rewards.tolist() == [SIZE] * 2
            assert [each[-1] for each in observations] == infos["env_id"].tolist()
        envs.close()
        """,
    )


# The worker hangs in its first step, and reads nothing.
HANGING = """
    class Hanging(Bulky):
        def step(self, action):
            entered.release()
            assert go_on.wait(60)
            return super().step(action)

    entered = multiprocessing.get_context("fork").Semaphore(0)
    go_on = multiprocessing.get_context("fork").Event()
    envs = ShmVectorEnv(
        [Hanging] * ENVS, num_workers=1, batch_size=1, shared_memory=False, context="fork"
    )
    envs.async_reset()
    for _ in range(ENVS):
        envs.recv()
"""


@pytest.mark.deep
def test_send_and_recv_with_a_time_limit_return_though_the_worker_reads_nothing():
    succeeds(
        BULKY,
        HANGING,
        """
        for env in range(ENVS):
            envs.send([action(env)], [env])
        assert entered.acquire(timeout=60)
        try:
            envs.recv(timeout=0.2)
        except multiprocessing.TimeoutError:
            go_on.set()
            for _ in range(ENVS):
                (observation,), *_, infos = envs.recv()
                assert observation[0] == observation[-1] == infos["env_id"][0]
            envs.close()
        else:
            raise AssertionError("there can be no result")
        """,
    )


@pytest.mark.deep
def test_ctrl_c_is_heeded_though_the_worker_reads_nothing():
    succeeds(
        BULKY,
        HANGING,
        """
        asked = []

        def interrupt():
            seen = -1
            while seen < len(asked) or not asked:  # until it waits for something
                seen = len(asked)
                time.sleep(0.2)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        try:
            for env in range(ENVS):
                asked.append(env)
                envs.send([action(env)], [env])
            envs.recv()
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("it was not interrupted")
        envs.close(terminate=True)
        """,
    )


@pytest.mark.deep
@pytest.mark.parametrize("size", [1_000_000])
def test_several_requests_of_one_worker_with_large_infos(size):
    """After a restart an env between two others is not stepped: they are asked one by one."""
    succeeds(
        f"""
        import gymnasium as gym
        import numpy as np
        from shmvec import FaultPolicy, ShmVectorEnv

        class Env(gym.Env):
            observation_space = gym.spaces.Box(0, 1, (1,), np.float64)
            action_space = gym.spaces.Discrete(2)

            def reset(self, *, seed=None, options=None):
                return np.zeros(1), {{"bulk": "x" * {size}}}

            def step(self, action):
                return np.zeros(1), 1.0, bool(action), False, {{"bulk": "y" * {size}}}

        policy = FaultPolicy(on_crash="restart")
        envs = ShmVectorEnv([Env] * 5, num_workers=1, faults=policy)
        envs.reset()
        for turn in range(3):
            envs.step([1, 0, 1, 0, 1])
            envs.restart()
            _, _, terminations, truncations, infos = envs.step([0] * 5)
            assert truncations.tolist() == [False, True, False, True, False]
            assert [infos["bulk"][env][0] for env in (0, 2, 4)] == ["x"] * 3
            assert len(infos["bulk"][4]) == {size}
            envs.reset()
        envs.close()
        """
    )


@pytest.mark.parametrize("size", [30_000, *deep(3_000_000)])
def test_commands_and_results_of_any_size_both_ways(size):
    """The worker still sends the last result when it is sent the next value."""
    succeeds(
        f"""
        from echoing import Echo
        from shmvec import ShmVectorEnv

        envs = ShmVectorEnv([Echo] * 16, num_workers=2)
        value = b"x" * {size}
        for n in range(5):
            try:
                envs.call_async("echo", value)
                envs.call_wait(timeout=0)
            except Exception as error:
                assert type(error).__name__ == "TimeoutError", repr(error)
            assert envs.call("echo", (n, value)) == ((n, value),) * 16
        envs.close()
        """
    )

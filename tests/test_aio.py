"""``shmvec.aio``: envs that tasks of an event loop await."""

import asyncio
import os
import signal
import sys
import threading
import time
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, ResetNeeded
from processes import gone, run_script
from tables import first

import shmvec
from shmvec import EnvTimeoutError, FaultPolicy, WorkerCrashError, aio
from shmvec.exchange import AutoresetMode, Exchange

DEADLINE = 60.0
GO, END, RAISE, STOP, DIE, BULK, WAIT, EXIT, OWN, SEALED = range(10)
RESTART = FaultPolicy(on_crash="restart", backoff_s=0.0)


class Sealed:
    """Can be unpickled only in the process that has made it."""

    def __init__(self, home):
        if home != os.getpid():
            raise ImportError("no such module here")

    def __reduce__(self):
        return Sealed, (os.getpid(),)


class Told(gym.Env):
    """Does what its action says; observes its index, its steps, and the seed of its episode."""

    observation_space = gym.spaces.Box(-1, 1 << 30, (3,), np.float64)
    action_space = gym.spaces.Discrete(10)
    render_mode = "ansi"

    def __init__(self, index=0, folder=None):
        self.index, self.folder, self.steps, self.seed = index, folder, 0, -1

    def _observe(self):
        return np.array([self.index, self.steps, self.seed], np.float64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.seed = 0, -1 if seed is None else seed
        return self._observe(), {"options": options}

    def step(self, action):
        self.steps += 1
        if action == RAISE:
            raise KeyError(f"of env {self.index}")
        if action == STOP:
            raise StopIteration
        if action == EXIT:
            raise SystemExit(3)
        if action == DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == WAIT:
            self.wait()
        infos = {
            BULK: {"bulk": "x" * 300_000},
            OWN: {"fault": "its own"},
            SEALED: {"sealed": Sealed(os.getpid())},
        }
        info = infos.get(int(action), {})
        return self._observe(), 1.0, action == END, False, info

    def wait(self):
        """Until the test, which may not touch what workers have, makes a file."""
        until = time.monotonic() + DEADLINE
        while not (self.folder / f"go{self.index}").exists() and time.monotonic() < until:
            time.sleep(0.001)
        return "waited"

    def render(self):
        return f"env {self.index} after {self.steps}"


def told(number, folder=None, **options):
    fns = [lambda i=i: Told(i, folder) for i in range(number)]
    return aio.make(fns, **{"num_workers": 2, **options})


def run(main):
    return asyncio.run(asyncio.wait_for(main, DEADLINE))


async def started(folder, *envs):
    """Until so many requests of these envs can only be with their workers."""
    for _ in envs:
        await asyncio.sleep(0)  # their tasks ask,
    await asyncio.sleep(0)  # and that is sent


def test_equal_to_single_envs():
    """Also bit by bit, infos included; each task resets its env itself."""

    def actions():
        return np.random.default_rng(5).integers(0, 2, 120)

    async def episodes(env, seed):
        results = [await env.reset(seed=seed)]
        for action in actions():
            results.append(await env.step(action))
            if results[-1][2] or results[-1][3]:
                results.append(await env.reset())
        return results

    def expected(seed):
        env = gym.make("CartPole-v1", max_episode_steps=30)
        results = [env.reset(seed=seed)]
        for action in actions():
            results.append(env.step(action))
            if results[-1][2] or results[-1][3]:
                results.append(env.reset())
        return results

    async def main():
        fns = [lambda: gym.make("CartPole-v1", max_episode_steps=30)] * 5
        async with aio.make(fns, num_workers=2) as envs:
            assert envs[2].observation_space == gym.make("CartPole-v1").observation_space
            return await asyncio.gather(*(episodes(env, 10 + env.index) for env in envs))

    for index, results in enumerate(run(main())):
        wanted = expected(10 + index)
        assert len(results) == len(wanted)
        for ours, theirs in zip(results, wanted, strict=True):
            assert np.array_equal(ours[0], theirs[0]) and ours[0].dtype == theirs[0].dtype
            assert ours[1:] == theirs[1:]
            assert list(map(type, ours[2:])) == list(map(type, theirs[2:]))
            assert ours[0].flags.owndata and ours[0].flags.c_contiguous


def test_what_is_asked_in_one_turn_is_sent_at_once(monkeypatch):
    asked = []
    for method in (Exchange.ask, Exchange.ask_reset):

        def counted(self, envs, *rest, method=method, **options):
            asked.append((method.__name__, sorted(envs)))
            return method(self, envs, *rest, **options)

        monkeypatch.setattr(Exchange, method.__name__, counted)

    async def main():
        async with told(6) as envs:
            await asyncio.gather(*(env.reset(seed=env.index, options={}) for env in envs))
            await asyncio.gather(*(env.step(GO) for env in envs))
            await asyncio.gather(envs[4].reset(), *(env.step(GO) for env in list(envs)[:3]))

    run(main())
    everyone = list(range(6))
    assert asked[:2] == [("ask_reset", everyone), ("ask", everyone)]
    assert sorted(asked[2:]) == [("ask", [0, 1, 2]), ("ask_reset", [4])]


def test_the_answer_to_a_cancelled_call_is_discarded(tmp_path):
    async def main():
        async with told(3, tmp_path, num_workers=3) as envs:
            await asyncio.gather(*(env.reset(seed=env.index) for env in envs))
            env = envs[1]
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(env.step(WAIT), 0.05)
            after = asyncio.ensure_future(env.step(GO))  # which waits for the env
            # Meanwhile the others step.
            for _ in range(3):
                await asyncio.gather(envs[0].step(GO), envs[2].step(GO))
            assert not after.done()
            with pytest.raises(AlreadyPendingCallError, match="env 1 is in a step"):
                await env.render()
            (tmp_path / "go1").touch()
            observation, reward, *_ = await after
            assert observation.tolist() == [1, 2, 1] and reward == 1.0  # the second step
            # What is cancelled before it is sent is not sent.
            never = asyncio.ensure_future(env.step(GO))
            await asyncio.sleep(0)
            never.cancel()
            assert (await env.step(GO))[0].tolist() == [1, 3, 1]
            # An episode that a discarded answer ended is over all the same.
            ending = asyncio.ensure_future(env.step(END))
            await started(tmp_path, ending)
            ending.cancel()
            with pytest.raises(ResetNeeded, match="episode of env 1 is over"):
                await env.step(GO)

    run(main())


def test_errors_are_raised_in_the_task_that_awaits():
    async def main():
        async with told(4) as envs:
            await asyncio.gather(*(env.reset() for env in envs))
            results = await asyncio.gather(
                envs[0].step(GO),
                envs[1].step(RAISE),
                envs[2].step("west"),
                envs[3].step(STOP),
                return_exceptions=True,
            )
            assert results[0][0].tolist() == [0, 1, -1]
            assert isinstance(results[1], KeyError) and results[1].args == ("of env 1",)
            assert "in step" in str(results[1].__cause__)  # the worker's traceback
            assert isinstance(results[2], TypeError | ValueError)
            assert "sent" in str(results[2])
            assert isinstance(results[3], RuntimeError)  # as a coroutine's does
            assert isinstance(results[3].__cause__, StopIteration)
            for env, steps in zip(envs, (2, 2, 1, 2), strict=True):
                assert (await env.step(GO))[0][1] == steps
            with pytest.raises(SystemExit, match="3"):
                await envs[1].step(EXIT)
            with pytest.raises(SystemExit, match="3"):
                await envs[1].call("step", EXIT)
            assert (await envs[1].step(GO))[0][1] == 5

    run(main())


def test_an_answer_that_cannot_be_read_is_lost():
    async def main():
        async with told(3) as envs:
            await asyncio.gather(*(env.reset() for env in envs))
            with pytest.raises(RuntimeError, match=r"envs \[1\].*no such module") as caught:
                await envs[1].step(SEALED)
            assert isinstance(caught.value.__cause__, ImportError)
            with pytest.raises(ImportError):
                await envs[1].call("step", SEALED)
            results = await asyncio.gather(*(env.step(GO) for env in envs))
            assert [result[0][1] for result in results] == [1, 3, 1]

    run(main())


def test_an_episode_that_is_over():
    async def main(**options):
        async with told(2, num_workers=1, **options) as envs:
            await envs[0].reset(seed=3)
            assert (await envs[0].step(END))[2]
            try:
                results = await envs[0].step(GO)
            except ResetNeeded:
                results = None
            observation, info = await envs[0].reset(seed=9, options={"a": [1]})
            assert observation.tolist() == [0, 0, 9] and info == {"options": {"a": [1]}}
            assert (await envs[0].step(GO))[0].tolist() == [0, 1, 9]
            return results

    assert run(main()) is None
    assert run(main(autoreset_mode=AutoresetMode.NEXT_STEP))[0].tolist() == [0, 0, -1]


def test_calls(tmp_path):
    async def main():
        async with told(4, tmp_path) as envs:
            await asyncio.gather(*(env.reset() for env in envs))
            waiting = asyncio.ensure_future(envs[0].call("wait"))
            # Its worker's other env, and the other worker, take calls and steps besides.
            others = asyncio.gather(envs[1].step(GO), envs[1 + 1].render(), envs[3].step(BULK))
            await started(tmp_path, waiting)
            (tmp_path / "go0").touch()
            assert await waiting == "waited"
            step, picture, bulk = await others
            assert step[0].tolist() == [1, 1, -1] and picture == "env 2 after 0"
            assert len(bulk[4]["bulk"]) == 300_000
            assert await envs[3].set_attr("steps", 40) is None
            assert await envs[3].get_attr("steps") == 40
            with pytest.raises(AttributeError, match="nowhere"):
                await envs[3].get_attr("nowhere")
            with pytest.raises(Exception, match="pickle"):
                await envs[3].call("render", (number for number in range(3)))
            assert await envs[3].render() == "env 3 after 40"
            assert sum(worker.steps for worker in envs.stats().workers) == 2

    run(main())


@pytest.mark.parametrize("num_workers", first([2, 0]))
def test_any_spaces(num_workers):
    class Nested(gym.Env):
        observation_space = gym.spaces.Dict(
            x=gym.spaces.Box(0, 9, (2,)), y=gym.spaces.Text(9), z=gym.spaces.Discrete(5)
        )
        action_space = gym.spaces.Tuple([gym.spaces.Discrete(5), gym.spaces.Box(0, 9, (2,))])

        def reset(self, *, seed=None, options=None):
            return {"x": np.zeros(2, np.float32), "y": "none", "z": 0}, {}

        def step(self, action):
            place, x = action
            return {"x": x, "y": "abc", "z": place}, 0.5, False, True, {"x": x}

    async def main():
        async with aio.make([Nested] * 3, num_workers=num_workers) as envs:
            await asyncio.gather(*(env.reset() for env in envs))
            x = np.arange(2, dtype=np.float32)
            results = await asyncio.gather(*(env.step((env.index, x + env.index)) for env in envs))
            for index, result in enumerate(results):
                observation, reward, terminated, truncated, info = result
                assert np.array_equal(observation["x"], x + index) and observation["z"] == index
                assert observation["y"] == "abc" and np.array_equal(info["x"], x + index)
                assert (reward, terminated, truncated) == (0.5, False, True)
            await envs[2].reset()
            with pytest.raises(ValueError, match=r"actions: \[0\] must be a tuple of 2"):
                await envs[2].step((1,))

    run(main())


# ---- faults ----------------------------------------------------------------------------------


def test_a_worker_that_dies_closes_the_envs():
    async def main():
        async with told(4, hang_warning_s=None) as envs:
            await asyncio.gather(*(env.reset() for env in envs))
            pids = [process.pid for process in envs.processes]
            results = await asyncio.gather(
                envs[0].step(DIE), envs[1].step(GO), envs[3].step(GO), return_exceptions=True
            )
            assert isinstance(results[0], WorkerCrashError)
            assert "SIGKILL" in str(results[0])
            with pytest.raises(ClosedEnvironmentError, match="A crash has closed it"):
                await envs[3].step(GO)
            assert envs.closed and gone(pids, DEADLINE)

    run(main())


def test_a_worker_that_dies_is_replaced():
    """The loop has no reason to wake but the death, and then what the replacement answers."""

    async def main():
        async with told(4, faults=RESTART, hang_warning_s=None) as envs:
            await asyncio.gather(*(env.reset(seed=5) for env in envs))
            doomed = envs.processes[0]
            results = await asyncio.gather(envs[0].step(DIE), envs[2].step(GO), envs[3].step(GO))
            assert results[0][3] and results[0][4]["fault"]["type"] == "WorkerCrashError"
            assert results[1][0].tolist() == [2, 1, 5]
            with pytest.raises(ResetNeeded):
                await envs[0].step(GO)
            # The other env of that worker says so in its next answer.
            _, _, terminated, truncated, info = await envs[1].step(GO)
            assert truncated and not terminated and "fault" in info
            for env in envs:
                await env.reset(seed=6)
            for step in range(1, 20):
                results = await asyncio.gather(*(env.step(GO) for env in envs))
                assert [result[0].tolist() for result in results] == [
                    [index, step, 6] for index in range(4)
                ]
            assert envs.processes[0] is not doomed
            # One that dies while nothing is asked is replaced, too.
            envs.processes[1].kill()
            until = time.monotonic() + DEADLINE
            while envs.stats().faults.restarts < 2:
                assert time.monotonic() < until
                await asyncio.sleep(0.01)
            assert (await envs[3].step(GO))[3]
            # A call is lost with its worker.
            with pytest.raises(WorkerCrashError, match="env 2 died in this call"):
                await envs[2].call("step", DIE)

    run(main())


def test_a_fault_that_a_discarded_answer_reported_is_reported(tmp_path):
    async def main():
        async with told(1, num_workers=1, faults=RESTART) as envs:
            await envs[0].reset()
            step = asyncio.ensure_future(envs[0].step(DIE))
            await started(tmp_path, step)
            step.cancel()
            _, info = await envs[0].reset(seed=3)
            assert info["fault"]["type"] == "WorkerCrashError" and info["options"] is None
            assert (await envs[0].step(GO))[4] == {}
            # That is not what the env itself calls a fault.
            step = asyncio.ensure_future(envs[0].step(OWN))
            await started(tmp_path, step)
            step.cancel()
            assert (await envs[0].step(GO))[4] == {}

    run(main())


def test_an_env_that_takes_too_long(tmp_path):
    """By default its task alone is told, and again; the env may come back."""

    async def main():
        async with told(
            4, tmp_path, num_workers=1, overlap=4, step_timeout=1.0, hang_warning_s=None
        ) as envs:
            await asyncio.gather(*(env.reset() for env in envs))
            slow = [asyncio.ensure_future(envs[index].step(WAIT)) for index in (0, 2)]
            assert (await envs[1].step(GO))[0].tolist() == [1, 1, -1]
            for index, step in zip((0, 2), slow, strict=True):
                with pytest.raises(EnvTimeoutError, match=rf"env {index} has been in step\(\)"):
                    await step
            with pytest.raises(EnvTimeoutError):  # its next call waits for it first
                await envs[2].step(GO)
            assert (await envs[3].step(GO))[0].tolist() == [3, 1, -1]
            (tmp_path / "go0").touch()
            (tmp_path / "go2").touch()
            assert (await envs[2].step(GO))[0].tolist() == [2, 2, -1]
            assert (await envs[0].step(GO))[0].tolist() == [0, 2, -1]

    run(main())


def test_an_env_that_takes_too_long_is_replaced(tmp_path):
    async def main():
        faults = replace(RESTART, on_timeout="restart", step_timeout=1.0)
        async with told(2, tmp_path, faults=faults, hang_warning_s=None) as envs:
            await asyncio.gather(*(env.reset() for env in envs))
            _, _, _, truncated, info = await envs[1].step(WAIT)
            assert truncated and info["fault"]["type"] == "EnvTimeoutError"
            await envs[1].reset(seed=4)
            assert (await envs[1].step(GO))[0].tolist() == [1, 1, 4]
            assert (await envs[0].step(GO))[0].tolist() == [0, 1, -1]

    run(main())


# ---- the end ---------------------------------------------------------------------------------


def test_close_in_the_middle(tmp_path):
    async def main():
        async with told(2, tmp_path) as envs:
            await asyncio.gather(*(env.reset() for env in envs))
            pids = [process.pid for process in envs.processes]
            step = asyncio.ensure_future(envs[0].step(WAIT))
            await started(tmp_path, step)
            closing = asyncio.ensure_future(envs.close())
            with pytest.raises(ClosedEnvironmentError, match="closed while this call"):
                await step
            with pytest.raises(ClosedEnvironmentError):
                await envs[1].step(GO)
            assert repr(envs) == "AwaitableEnvs(closed)"
            (tmp_path / "go0").touch()  # close() waits for the env, and the loop goes on
            await closing
            assert gone(pids, DEADLINE)
        await envs.close()

    run(main())


def test_a_close_after_the_end_of_the_loop(tmp_path):
    envs, loop = told(2, tmp_path), asyncio.new_event_loop()
    loop.set_exception_handler(lambda *context: None)  # it tells of tasks that it has not ended
    loop.run_until_complete(envs.__aenter__())
    pids = [process.pid for process in envs.processes]
    step = loop.create_task(envs[0].step(WAIT))
    loop.run_until_complete(started(tmp_path, step))
    loop.close()
    run(envs.close(terminate=True))
    assert gone(pids, DEADLINE)
    assert not step.done()


def test_without_workers_envs_belong_to_the_thread_of_the_loop():
    threads = set()

    class Bound(Told):
        def __init__(self):
            super().__init__()
            threads.add(threading.get_ident())

        def close(self):
            threads.add(threading.get_ident())

    async def main():
        async with aio.make([Bound], num_workers=0) as envs:
            await envs[0].reset()

    run(main())
    assert threads == {threading.get_ident()}


def test_a_close_that_is_cancelled_kills(tmp_path):
    async def main():
        envs = told(2, tmp_path)
        await envs.__aenter__()
        await asyncio.gather(*(env.reset() for env in envs))
        pids = [process.pid for process in envs.processes]
        step = asyncio.ensure_future(envs[0].step(WAIT))
        await started(tmp_path, step)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(envs.close(), 0.1)
        assert gone(pids, DEADLINE)
        assert isinstance(step.exception(), ClosedEnvironmentError)

    run(main())


def test_a_start_that_is_cancelled_leaves_nothing(tmp_path):
    def slow():
        (tmp_path / f"pid{os.getpid()}").touch()
        Told(0, tmp_path).wait()

    async def main():
        async def start():
            async with aio.make([slow], num_workers=1):
                raise AssertionError("it cannot start")

        task = asyncio.ensure_future(start())
        while not list(tmp_path.glob("pid*")):
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())
    (process,) = tmp_path.glob("pid*")
    assert gone([process.name[3:]], DEADLINE)


@pytest.mark.parametrize("hangs", first([False, True]))
def test_interrupted_program(tmp_path, hangs):
    """The first Ctrl-C closes the envs; where one hangs, the second one kills the workers."""
    if hangs and sys.version_info < (3, 11):
        pytest.skip("asyncio.run does not cancel the task by Ctrl-C, but ends its loop")
    script = run_script(f"""
        import asyncio, pathlib, sys
        from test_aio import started, told

        async def say(envs):
            while not envs.closed:
                await asyncio.sleep(0.001)
            print("closing", flush=True)

        async def main():
            folder = pathlib.Path({str(tmp_path)!r})
            async with told(2, folder) as envs:
                await asyncio.gather(*(env.reset() for env in envs))
                closing = asyncio.ensure_future(say(envs))
                for turn in range(10**9):
                    steps = asyncio.gather(*(env.step({WAIT if hangs else GO}) for env in envs))
                    if turn == 0:
                        await started(folder, *envs)
                        print(*(process.pid for process in envs.processes), flush=True)
                    await steps

        asyncio.run(main())
    """)
    try:
        pids = script.stdout.readline().split()
        script.send_signal(signal.SIGINT)
        if hangs:
            assert script.stdout.readline() == "closing\n"
            script.send_signal(signal.SIGINT)
        output, errors = script.communicate(timeout=DEADLINE)
        assert script.returncode == -signal.SIGINT, errors
        assert "KeyboardInterrupt" in errors and "ClosedEnvironmentError" not in errors, errors
        # The second one may be raised in the task that prints, which nobody awaits.
        assert (hangs or "never retrieved" not in errors) and "ResourceWarning" not in errors
        assert len(pids) == 2 and gone(pids, DEADLINE)
    finally:
        script.kill()
        script.communicate()


def test_misuse():
    envs = told(2)
    assert repr(envs) == "AwaitableEnvs(not started)"
    with pytest.raises(RuntimeError, match="not started"):
        envs.stats()
    with pytest.raises(TypeError, match=r"takes no copy: .*Of ShmVectorEnv's options it takes"):
        told(2, copy=False)
    with pytest.raises(TypeError, match="num_worker"):
        told(2, num_worker=2)
    with pytest.raises(TypeError, match="cannot be pickled"):
        import pickle

        pickle.dumps(envs)

    async def main():
        async with envs:
            assert len(envs) == 2 and envs[1].index == 1
            with pytest.raises(IndexError):
                envs[2]
            with pytest.raises(RuntimeError, match="started before"):
                await envs.__aenter__()

            async def elsewhere():
                await envs[0].reset()

            with pytest.raises(RuntimeError, match="another event loop"):
                await asyncio.to_thread(asyncio.run, elsewhere())

    run(main())

    async def refused():
        async with told(2, num_workers=-1):
            pass

    with pytest.raises(ValueError, match="num_workers"):
        run(refused())
    assert shmvec.aio is aio

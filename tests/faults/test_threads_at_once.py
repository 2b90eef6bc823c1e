"""Threads of the program that use vector envs at the same time: refused or served, never mixed up.

On a free-threaded Python they do run at the same time: there for longer, by hand, with
``SHMVEC_THREADS_SECONDS=10``, the time of each part. Parts share a process: its start takes longer.
"""

import os

import pytest
from scripts import succeeds

SECONDS = float(os.environ.get("SHMVEC_THREADS_SECONDS", "0.2"))

START = f"""
    import contextlib, gc, os, random, re, sys, sysconfig, threading, time, warnings
    import numpy as np
    from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
    from echoing import Echo
    from shmvec import ShmVectorEnv
    from shmvec._core import Guard, exclusive

    SECONDS = {SECONDS}
    REFUSED = re.compile("one (thread )?at a time|been asked already|take the answers")
    over = threading.Event()
    wrong = []

    def run(*bodies, enough):
        "Each in a thread, again and again, until the time is up or something is wrong."
        def repeat(body, ready):
            try:
                ready.wait(60)
                while not over.is_set():
                    body()
            except BaseException as error:
                wrong.append(error)
                over.set()

        over.clear()
        ready = threading.Barrier(len(bodies) + 1)
        threads = [
            threading.Thread(target=repeat, args=(body, ready), daemon=True) for body in bodies
        ]
        for thread in threads:
            thread.start()
        ready.wait(60)
        over.wait(SECONDS)
        until = time.monotonic() + 60
        while not enough() and time.monotonic() < until and not over.wait(0.01):
            pass  # the machine is busy
        over.set()
        end(threads)
        assert enough()

    def end(threads):
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "it hangs"
        if wrong:
            raise wrong[0]

    def is_refusal(error):
        kinds = AlreadyPendingCallError, NoAsyncCallError
        return isinstance(error, kinds) or bool(REFUSED.search(str(error)))

    sys.setswitchinterval(1e-5)
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        assert not sys._is_gil_enabled()
"""


@pytest.mark.deep
def test_guards_leases_and_processes():
    of_all_who_enter_one_is_inside = """
        inside, counts = [], [0, 0, 0]

        class Guarded:
            guard = Guard()

            @exclusive
            def use(self, me):
                inside.append(me)
                time.sleep(0)
                assert inside == [me], inside
                counts[me] += 1
                assert inside.pop() == me

        def body(me):
            def use():
                try:
                    guarded.use(me)
                except AlreadyPendingCallError:
                    pass
                time.sleep(random.uniform(0, 1e-4))
            return use

        guarded = Guarded()
        run(*map(body, range(3)), enough=lambda: min(counts) > 0)
        assert not inside
        guarded.use(0)
    """
    released_by_several = """
        from shmvec._core.memory import Lender

        lender = Lender(np.zeros(64, np.uint8), 8)
        held = [lender.lease(0, 4)]

        def release():
            held[0].release()
            held[0].released

        def renew():
            held[0].release()
            lease = lender.lease(0, 4)
            for _ in range(9):
                assert all(lender.is_leased(row, 1) for row in range(4))  # it is free so far
            held[0] = lease

        run(release, release, renew, enough=lambda: True)
        held[0].release()
        assert not lender.is_leased(0, 8)
    """
    released_while_others_look = """
        from shmvec._processes.worker_process import ProcessHandle

        handles = [ProcessHandle(os.getpid(), None)]

        def look():  # as multiprocessing does with all processes, whatever starts one
            handles[0].has_ended(0.0)

        def renew():
            last, handles[0] = handles[0], ProcessHandle(os.getpid(), None)
            last.close()

        run(look, look, renew, enough=lambda: True)
    """
    succeeds(
        START,
        of_all_who_enter_one_is_inside,
        released_by_several,
        released_while_others_look,
        lasting=3 * SECONDS,
    )


@pytest.mark.deep
def test_one_vector_env():
    """What is served is all of one call; arrays live as long as somebody has them."""
    every_way_to_step = """
        def alike(observations, rewards):
            actions = observations[:, 1]
            assert (actions == actions[0]).all() and (rewards == actions).all(), (actions, rewards)
            return actions[0]

        def step(n):
            observations, rewards, *_, infos = envs.step([n] * 4)
            assert alike(observations, rewards) == n and (infos["action"] == n).all()

        def some(n):
            mask = np.array([True, False, True, True])
            observations, rewards, *_ = envs.step([n] * 4, mask=mask)
            assert observations[mask, 1].tolist() == rewards[mask].tolist() == [n] * 3

        def begin(n):
            envs.step_async([n] * 4)

        def finish(n):
            observations, rewards, *_ = envs.step_wait()
            alike(observations, rewards)

        def call(n):
            assert envs.call("echo", n) == (n,) * 4

        def reset(n):
            observations, _ = envs.reset(seed=n)
            assert observations[:, :2].tolist() == [[0, -1]] * 4

        def roll(n):
            rollout = envs.rollout(2)
            for _ in range(2):
                rollout.step([n] * 4)
            assert (rollout.rewards[1:] == n).all()

        def watch(n):
            stats = envs.stats()
            assert len(stats.workers) == 2
            envs.exchange.num_in_flight, envs.exchange.in_flight(3)

        functions = step, some, begin, finish, call, reset, roll, watch
        calls = {function.__name__: function for function in functions}
        served = dict.fromkeys(calls, 0)
        counter = iter(range(1, 10**9))

        def body(seed):
            chosen = random.Random(seed)

            def make_one():
                name = chosen.choice(list(calls))
                try:
                    calls[name](chosen.randrange(1_000_000))
                except Exception as error:
                    if not is_refusal(error) and "cannot be continued" not in str(error):
                        raise
                    time.sleep(0)
                else:
                    served[name] += 1
            return make_one

        envs = ShmVectorEnv([Echo] * 4, num_workers=2)
        envs.reset(seed=0)
        run(*map(body, range(3)), enough=lambda: sum(served.values()) > 10)
        if envs.exchange.num_in_flight:
            finish(0)
        reset(7)
        for n in range(5):
            step(n)
        envs.close()
    """
    one_sends_and_another_receives = """
        envs = ShmVectorEnv([Echo] * 4, num_workers=2, batch_size=2)
        envs.reset(seed=0)
        envs.recv()
        free, sent = list(range(4)), {}

        def send():
            if not free:
                return time.sleep(0)
            env = free.pop()
            sent[env] = random.randrange(1_000_000)
            try:
                envs.send([sent[env]], [env])
            except (AlreadyPendingCallError, ValueError) as error:
                assert is_refusal(error), error
                free.append(env)

        def receive():
            try:
                observations, rewards, *_, infos = envs.recv(timeout=1)
            except Exception as error:
                if not is_refusal(error):
                    raise
                return time.sleep(0)
            taken = infos["env_id"].tolist()
            assert rewards.tolist() == observations[:, 1].tolist() == [sent[env] for env in taken]
            free.extend(taken)
            received.append(len(taken))

        received = []
        run(send, receive, enough=lambda: sum(received) > 10)
        envs.close()
    """
    # Those that own a block of shared memory, and those that hold a lease of theirs.
    dropped_by_others = """
        import queue

        SIZE = 70_000  # enough for a block
        handed = queue.Queue(6)
        kept = []

        def check_and_drop():
            try:
                array, n = handed.get(timeout=0.05)
            except queue.Empty:
                return
            assert (array[..., 1] == n).all(), (array[..., 1], n)
            kept.append(array)
            if len(kept) > 2:
                with_it = kept.pop(0)
                del with_it
            assert (array[..., 1] == n).all(), (array[..., 1], n)

        def put(array, n):
            try:
                handed.put((array, n), timeout=0.05)
            except queue.Full:
                pass

        def step():
            n = random.randrange(1_000_000)
            put(owned.step([n] * 2)[0], n)

        def roll():
            n = random.randrange(1_000_000)
            rollout = rolled.rollout(2)
            rollout.step([n] * 2)
            rollout.step([n] * 2)
            put(rollout.observations[1:].copy() if len(kept) > 1 else rollout.observations[1:], n)

        def lease():
            n = random.randrange(1_000_000)
            leased.send([n] * 2)
            array = leased.recv()[0]
            assert (array[..., 1] == n).all()
            if n % 3:
                put(array, n)
            else:
                leased.release(array)

        owned = ShmVectorEnv([lambda: Echo(SIZE)] * 2, num_workers=2)
        rolled = ShmVectorEnv([Echo] * 2, num_workers=1)
        leased = ShmVectorEnv([Echo] * 2, num_workers=1, batch_size=2, copy=False, num_buffers=24)
        for envs in (owned, rolled, leased):
            envs.reset(seed=0)

        def tolerant():
            try:
                roll()
            except BufferError:
                time.sleep(0)

        run(step, tolerant, lease, check_and_drop, check_and_drop, enough=lambda: len(kept) > 1)
        for envs in (owned, rolled, leased):
            envs.close()
    """
    succeeds(
        START,
        every_way_to_step,
        one_sends_and_another_receives,
        dropped_by_others,
        lasting=3 * SECONDS,
    )


@pytest.mark.deep
def test_vector_envs_of_their_own():
    made_used_and_closed = """
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads

        def body():
            envs = ShmVectorEnv([Echo] * 2, num_workers=1, context=context)
            try:
                envs.reset(seed=3)
                for n in range(30):
                    observations, rewards, *_ = envs.step([n] * 2)
                    assert observations[:, 1].tolist() == rewards.tolist() == [n] * 2
                    assert (observations[:, 0] == n + 1).all()
                assert envs.stats().workers[0].steps == 60
            finally:
                envs.close()
            made.append(context)

        made = []
        for context in ("fork", "forkserver"):
            run(body, body, body, enough=lambda: context in made)
    """
    # What was never closed goes with a cycle, while others step and collect.
    forgotten = """
        warnings.simplefilter("ignore", ResourceWarning)

        def forget():
            cycle = [ShmVectorEnv([Echo] * 2, num_workers=1, context="forkserver")]
            cycle.append(cycle)
            cycle[0].reset(seed=0)

        def step():
            n = random.randrange(1_000_000)
            observations, rewards, *_ = envs.step([n] * 2)
            assert observations[:, 1].tolist() == rewards.tolist() == [n] * 2

        def descendants(pid):
            found = set()
            with contextlib.suppress(OSError):  # it ends meanwhile
                for task in os.listdir(f"/proc/{pid}/task"):
                    with open(f"/proc/{pid}/task/{task}/children") as file:
                        for child in file.read().split():
                            found |= {child, *descendants(child)}
            return found

        envs = ShmVectorEnv([Echo] * 2, num_workers=1, context="forkserver")
        envs.reset(seed=0)
        before = descendants("self")
        run(forget, gc.collect, step, enough=lambda: True)
        gc.collect()
        envs.close()
        until = time.monotonic() + 60  # what was forgotten is ending
        while not descendants("self") < before and time.monotonic() < until:
            time.sleep(0.01)
        assert descendants("self") < before, (descendants("self"), before)
    """
    succeeds(START, made_used_and_closed, forgotten, lasting=3 * SECONDS)


def test_closed_while_it_steps():
    """By two threads at once, at any moment."""
    body = """
        def close():
            close_together.wait(60)
            time.sleep(random.uniform(0, 0.002))
            envs.close(terminate=rounds % 2 == 0)

        def step():
            n = 0
            try:
                while True:
                    n += 1
                    try:
                        observations, rewards, *_ = envs.step([n] * 4)
                    except AlreadyPendingCallError:
                        continue
                    assert observations[:, 1].tolist() == rewards.tolist()
                    stepped.set()
            except ClosedEnvironmentError:
                pass

        def watch():
            try:
                while True:
                    envs.stats()
                    envs.exchange.num_in_flight, envs.exchange.in_flight(0)
            except ClosedEnvironmentError:
                pass

        def once(body):
            def whole():
                try:
                    body()
                except BaseException as error:
                    wrong.append(error)
            return threading.Thread(target=whole, daemon=True)

        descriptors, rounds = None, 0
        until = time.monotonic() + SECONDS
        while time.monotonic() < until or rounds < 4:
            rounds += 1
            stepped, close_together = threading.Event(), threading.Barrier(2)
            envs = ShmVectorEnv([Echo] * 4, num_workers=2, context="forkserver")
            envs.reset(seed=0)
            processes = envs.processes
            threads = [once(step), once(step), once(watch), once(close), once(close)]
            for thread in threads[:3]:
                thread.start()
            assert stepped.wait(60) or wrong
            for thread in threads[3:]:
                thread.start()
            end(threads)
            assert envs.closed and not any(process.is_alive() for process in processes)
            del envs, processes, threads
            until_closed = time.monotonic() + 60
            while True:
                gc.collect()
                found = len(os.listdir("/proc/self/fd"))
                descriptors = descriptors or found
                if found <= descriptors or time.monotonic() > until_closed:
                    break
                time.sleep(0.01)
            assert found <= descriptors, (found, descriptors)
    """
    succeeds(START, body, lasting=SECONDS)

"""Envs that do to their process what they must not: it goes well, or is a clear error."""

import pytest
from scripts import succeeds
from tables import paired

HOSTILE = """
    import faulthandler, gc, mmap, pickle, socket, time
    from contextlib import suppress
    from multiprocessing import resource_tracker
    from pathlib import Path
    import cloudpickle
    from envs import Counter
    from scripts import session_of
    from stepping import partial
    from shmvec import FaultPolicy, ShmVectorEnv, WorkerCrashError

    faulthandler.enable()
    faulthandler.dump_traceback_later(100, exit=True)

    def descriptors(*kinds):
        others = {"0", "1", "2", str(resource_tracker._resource_tracker._fd)}  # not the library's
        for name in set(os.listdir("/proc/self/fd")) - others:
            with suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{name}")
                is_stderr = target == os.readlink("/proc/self/fd/2")  # by another number
                if any(kind in target for kind in kinds) and not is_stderr:
                    yield int(name)

    class Hostile(Counter):
        trick_in = "step"

        def __init__(self, index):
            super().__init__(99, offset=10 * index)
            self.play("make")

        def reset(self, **arguments):
            self.play("reset")
            return super().reset(**arguments)

        def step(self, action):
            if self.count == 1:
                self.play("step")
            *results, info = super().step(action)
            if action == 3:
                info["late"] = "x" * 300_000  # does not fit a ring
            if action == 2:
                info["odd"] = {self.count}  # is pickled
            return *results, info

        def call(self):
            self.play("call")
            return self.offset

        def play(self, where):
            if self.offset == 0 and where == where_to_play and not played.exists():
                played.write_text("")
                trick()

    def made(policy="raise", **options):
        policy = FaultPolicy(on_crash=policy, max_restarts=2, backoff_s=0)
        return ShmVectorEnv(
            [lambda: Hostile(0), lambda: Hostile(1)],
            num_workers=2,
            faults=policy,
            context="fork",
            **options,
        )

    def check(results, count, action=1):
        observations, rewards, _, truncations, infos = results
        assert observations[:, :2].tolist() == [[count, action]] * 2, observations
        assert rewards.tolist() == [count, count + 10] and not truncations.any(), rewards
        assert infos["count"].tolist() == [count] * 2 and "fault" not in infos, infos
        if action == 3:
            assert [len(late) for late in infos["late"]] == [300_000] * 2
        if action == 2:
            assert list(infos["odd"]) == [{count}] * 2, infos

    def check_clear(error):
        assert error.workers == (0,) and "still running" not in str(error), error

    def ours():
        mine = Path("/proc/self/cmdline").read_bytes()
        for pid in session_of(os.getpid()):
            with suppress(OSError):
                if pid != os.getpid() and Path(f"/proc/{pid}/cmdline").read_bytes() == mine:
                    yield pid

    def check_none_left():
        until = time.monotonic() + 60
        while left := list(ours()):
            assert time.monotonic() < until, f"processes are left: {left}"
            time.sleep(0.01)
"""


def hostile(tmp_path, where, trick, body):
    return succeeds(
        HOSTILE,
        f"where_to_play, played = {where!r}, Path({str(tmp_path / 'played')!r})\n",
        trick,
        body,
        "check_none_left()\n",
    )


# ---- memory ------------------------------------------------------------------------------------

SHRINK = """
    def trick():
        for descriptor in descriptors("memfd", "/dev/shm"):
            with suppress(OSError):
                os.ftruncate(descriptor, 0)
        for mapping in gc.get_objects():
            if isinstance(mapping, mmap.mmap):
                with suppress(BufferError, OSError, ValueError):
                    mapping.resize(mmap.PAGESIZE)
"""


@pytest.mark.deep
@pytest.mark.parametrize("how", ["step", "rollout"])
def test_memory_that_an_env_shrinks(how, tmp_path):
    """The parent would be killed by SIGBUS."""
    begin = "" if how == "step" else "rollout = envs.rollout(4)"
    step = "envs.step([1, 1])" if how == "step" else "rolled(rollout)"
    hostile(
        tmp_path,
        "step",
        SHRINK,
        f"""
        def rolled(rollout):
            infos = rollout.step([1, 1])
            arrays = (rollout.observations, rollout.rewards, rollout.terminations)
            return *(part[rollout.steps] for part in (*arrays, rollout.truncations)), infos

        envs = made()
        envs.reset(seed=0)
        {begin}
        for turn in range(1, 5):
            check({step}, turn)
        check(envs.step([1, 1]), 5)
        assert played.exists()
        envs.close()
        """,
    )


@pytest.mark.deep
def test_memory_of_another_vector_env_that_an_env_shrinks(tmp_path):
    """A fork inherits it."""
    hostile(
        tmp_path,
        "step",
        SHRINK,
        """
        other = ShmVectorEnv([lambda: Counter(99)] * 2, num_workers=1)
        other.reset(seed=0)
        envs = made()
        envs.reset(seed=0)
        for turn in range(1, 5):
            check(envs.step([1, 1]), turn)
            assert other.step([1, 1])[1].tolist() == [turn] * 2
        assert played.exists()
        envs.close()
        other.close()
        """,
    )


# ---- forks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "where, slow", paired(["make", "reset", "step", "call"], ["child", "parent"])
)
def test_an_env_that_returns_from_a_fork_of_its_own(where, slow, tmp_path):
    hostile(
        tmp_path,
        where,
        f"""
        def trick():
            if (os.fork() == 0) == ({slow!r} == "child"):
                time.sleep(0.1)
        """,
        """
        envs = None
        try:
            envs = made()
            envs.reset(seed=0)
            for turn in range(1, 20):
                check(envs.step([3, 3]), turn, action=3)
                assert envs.call("call") == (0, 10)
                envs.set_attr("mark", turn)
                assert envs.get_attr("mark") == (turn, turn)
        except WorkerCrashError as error:
            check_clear(error)
        finally:
            if envs is not None:
                envs.close()
        assert played.exists()
        """,
    )


# ---- messages ----------------------------------------------------------------------------------

TRICKS = {
    "pickle returns nonsense": """
        def trick():
            pickle.dumps = cloudpickle.dumps = lambda *args, **kwargs: b"nonsense"
    """,
    "pickle returns something else": """
        def trick():
            something = pickle.dumps(("something", None))
            pickle.dumps = cloudpickle.dumps = lambda *args, **kwargs: something
    """,
    "pickle raises": """
        def trick():
            def refuse(*args, **kwargs):
                raise RuntimeError("not now")
            pickle.loads = pickle.dumps = cloudpickle.dumps = cloudpickle.loads = refuse
    """,
    "closed": """
        def trick():
            for descriptor in descriptors("socket:", "pipe:"):
                os.close(descriptor)
    """,
    "replaced": """
        def trick():
            nothing = os.open("/dev/null", os.O_RDWR)
            for descriptor in descriptors("socket:", "pipe:"):
                os.dup2(nothing, descriptor)
    """,
    "nonsense": """
        def trick():
            for descriptor in descriptors("socket:", "pipe:"):
                with suppress(OSError):
                    os.write(descriptor, b"\\0\\0\\0\\4abcd" * 100)
    """,
    "half a message": """
        def trick():
            for descriptor in descriptors("socket:", "pipe:"):
                with suppress(OSError):
                    os.write(descriptor, b"\\0\\0\\1")
    """,
    "a message of somebody else": """
        def trick():
            message = pickle.dumps(("something", None))
            for descriptor in descriptors("socket:", "pipe:"):
                with suppress(OSError):
                    os.write(descriptor, len(message).to_bytes(4, "big") + message)
    """,
}


STEPPED = """
    envs = made()
    try:
        envs.reset(seed=0)
        for turn in range(1, 5):
            USE
        envs.close()
    except WorkerCrashError as error:
        check_clear(error)
    finally:
        envs.close(terminate=True)
    assert played.exists()
"""

USES = {
    "close": STEPPED.replace("USE", "check(envs.step([1, 1]), turn)"),
    "a pickled info": STEPPED.replace("USE", "check(envs.step([2, 2]), turn, action=2)"),
    "call": STEPPED.replace(
        "USE", "check(envs.step([1, 1]), turn); assert envs.call('call') == (0, 10)"
    ),
    "a late info": STEPPED.replace("USE", "check(envs.step([3, 3]), turn, action=3)"),
    "a late info in a partial batch": STEPPED.replace(
        "USE", "check(partial(envs, [3, 3]), turn, action=3)"
    ),
    "a restart": """
        envs = made("restart")
        envs.reset(seed=0)
        for _ in range(2):
            envs.step([1, 1])
        with suppress(WorkerCrashError):
            envs.call("call")
        envs.step([3, 3])
        assert envs.call("call") == (0, 10)
        count = envs.step([3, 3])[0][1, 0]
        assert count == 4
        observations, infos = envs.reset(seed=1)
        assert not observations[:, 0].any()
        check(envs.step([3, 3]), 1, action=3)
        assert envs.stats().faults.restarts <= 1
        assert played.exists()
        envs.close()
    """,
}


@pytest.mark.parametrize("trick, use", paired(TRICKS, USES))
def test_an_env_that_breaks_what_messages_need(trick, use, tmp_path):
    hostile(tmp_path, "step", TRICKS[trick], USES[use])

"""actorcritic's MultiEnv and SubprocessEnv: their interface."""

import multiprocessing
import signal
import threading
import time
from contextlib import closing, suppress
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from actorcritic_envs import (
    AGAIN,
    Alone,
    Mortal,
    Together,
    Twice,
    counters,
    kill,
    multi_env,
    process_of,
    started,
    wait_for,
)
from echoing import is_lost
from envs import Counter, Scripted, Spaces
from equality import equal, same
from gymnasium.utils.env_checker import check_env
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import infos, leaves
from tables import crossed, deep

from shmvec.adapters.actorcritic import MultiEnv, SubprocessEnv, create_subprocess_envs
from shmvec.faults import restart_seed

SPLITS = pytest.mark.parametrize("num_workers", [2, *deep(0)])


# ---- create_subprocess_envs ------------------------------------------------------------------


def test_create_subprocess_envs_builds_all_in_parallel(tmp_path):
    def build(i):
        (tmp_path / str(i)).touch()
        for other in range(3):
            wait_for(tmp_path / str(other))
        return Counter()

    with multi_env([partial(build, i) for i in range(3)]):
        assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "2"}


# ---- SubprocessEnv.start / initialize --------------------------------------------------------


def test_start_does_not_block_and_initialize_does(tmp_path):
    def slow():
        wait_for(tmp_path / "go")
        return Counter()

    with closing(SubprocessEnv(slow)) as env:
        env.start()
        env.start()
        assert process_of(env).is_alive()
        threading.Timer(0.05, (tmp_path / "go").touch).start()
        env.initialize()
        env.initialize()
        assert env.observation_space == Counter().observation_space
        assert env.action_space == Counter().action_space


USES = pytest.mark.parametrize(
    ("name", "use"),
    [
        ("reset()", lambda env: env.reset()),
        *deep(
            ("step()", lambda env: env.step(0)),
            ("render()", lambda env: env.render()),
            ("observation_space", lambda env: env.observation_space),
            ("action_space", lambda env: env.action_space),
        ),
    ],
)


@USES
def test_using_an_env_too_early_says_which_call_is_missing(name, use):
    env = SubprocessEnv(Counter)
    with pytest.raises(ValueError) as raised:
        use(env)
    assert str(raised.value) == (
        f"The subprocess is not started yet. Call 'start()' and 'initialize()' before '{name}'."
    )
    env.start()
    with closing(env):
        with pytest.raises(ValueError) as raised:
            use(env)
        assert str(raised.value) == (
            f"The subprocess is not initialized yet. Call 'initialize()' before '{name}'."
        )


@pytest.mark.deep
@USES
def test_using_an_env_after_close_is_an_error(name, use):
    with started(Counter, num_workers=0) as env:
        pass
    for call in (use, lambda env: env.start(), lambda env: env.initialize()):
        with pytest.raises(ValueError, match="closed already"):
            call(env)


@pytest.mark.deep
def test_initialize_before_start_says_so():
    with pytest.raises(ValueError, match=r"Call 'start\(\)' before 'initialize\(\)'"):
        SubprocessEnv(Counter).initialize()


# ---- SubprocessEnv.step / reset / render / close, spaces -------------------------------------


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_it_is_a_gymnasium_env():
    with started(lambda: gym.make("CartPole-v1", render_mode="rgb_array")) as env:
        check_env(env, skip_render_check=True, skip_close_check=True)
        assert env.spec.id == "CartPole-v1"
        assert env.render_mode == "rgb_array" and env.metadata["render_fps"] == 50
    assert env.spec is None and env.metadata == {} and str(env)


@pytest.mark.deep
def test_render_returns_what_the_env_renders():
    with started(partial(Mortal, "", "/nowhere")) as env:
        env.reset()
        env.step(0)
        assert (env.render(), env.render("human"), env.render_mode) == (1, 1, "rgb_array")


@SPLITS
def test_each_handle_can_be_stepped_alone(num_workers):
    envs = create_subprocess_envs(counters(3), num_workers=num_workers)
    with closing(MultiEnv(envs)):
        alone = [env_fn() for env_fn in counters(3)]
        for i in (2, 0, 1):
            assert same(envs[i].reset(seed=i), alone[i].reset(seed=i))
        for i in (1, 1, 0, 2, 1, 0):
            mine, theirs = envs[i].step(2), alone[i].step(2)
            np.testing.assert_array_equal(mine[0], theirs[0])
            assert mine[1:] == theirs[1:]


@pytest.mark.deep
@pytest.mark.parametrize(
    "space",
    [
        gym.spaces.Dict(a=gym.spaces.Box(0, 1, (2,)), b=gym.spaces.Discrete(3)),
        gym.spaces.Tuple((gym.spaces.Discrete(3), gym.spaces.Box(0, 1, (2,)))),
    ],
    ids=["dict", "tuple"],
)
def test_dict_and_tuple_spaces(space):
    with started(partial(Spaces, space, space), num_workers=0) as env:
        alone = Spaces(space, space)
        observation, theirs = env.reset(seed=1)[0], alone.reset(seed=1)[0]
        assert env.observation_space.contains(observation)
        assert str(observation) == str(theirs)
        action = env.action_space.sample()
        assert env.observation_space.contains(env.step(action)[0])
        received = env.group.exchange.call("actions")[0][0]
        assert space.contains(received)


@pytest.mark.deep
def test_a_step_after_the_end_says_which_call_is_missing():
    with started(partial(Counter, length=1), num_workers=0) as env:
        env.reset()
        assert env.step(0)[2] is True
        with pytest.raises(ValueError, match=r"episode is over. Call 'reset\(\)'"):
            env.step(0)
        env.reset()
        assert env.step(0)[1] == 1


@pytest.mark.deep
def test_reset_passes_seed_and_options_on():
    with started(Counter) as env:
        alone = Counter()
        assert same(env.reset(seed=7, options={"a": 1}), alone.reset(seed=7))
        assert env.group.exchange.call("received") == [[{"a": 1}]]


# ---- dead subprocess recreated (more of it in test_actorcritic_faults.py) --------------------


@pytest.mark.parametrize("killed", ["within", *deep("before")])
def test_a_dead_subprocess_is_recreated_and_a_step_repeated(killed, tmp_path):
    envs = create_subprocess_envs(
        [Counter, partial(Mortal, "step" if killed == "within" else "", tmp_path / "died")],
        faults=AGAIN,
    )
    with closing(MultiEnv(envs)):
        for env in envs:
            env.reset(seed=3, options={"level": 5})
            env.step(1)
        if killed == "before":
            kill(envs[1])
        observation, reward, terminated, truncated, info = envs[1].step(2)
        # The first step of a new episode, which had the options of the old one.
        assert observation[:2].tolist() == [1, 2]
        assert (reward, terminated, truncated, info["count"]) == (1, False, False, 1)
        assert info["reset_observation"][:2].tolist() == [0, -1]
        assert info["reset_info"] == {"reset": 1}
        assert info["fault"]["type"] == "WorkerCrashError" and info["fault"]["restarts"] == 1
        assert "SIGKILL" in info["fault"]["message"]
        assert envs[1].group.exchange.call("received", envs=[1]) == [[{"level": 5}]]
        alone = Counter()
        alone.reset(seed=restart_seed(3, 1))
        np.testing.assert_array_equal(observation, alone.step(2)[0])
        assert "fault" not in envs[1].step(2)[4]
        assert envs[0].step(1)[4]["count"] == 2  # the other has not noticed


# ---- MultiEnv(envs) --------------------------------------------------------------------------


@SPLITS
def test_lists_in_and_lists_out(num_workers):
    env_fns = counters(3)
    with multi_env(env_fns, num_workers=num_workers) as envs:
        alone = Alone(env_fns, seed=5)
        observations = envs.reset(seed=5)
        assert isinstance(observations, list)
        np.testing.assert_array_equal(observations, alone.observations)
        assert envs.reset_infos == [{"reset": 1}] * 3
        assert envs.observation_space == Counter().observation_space
        assert envs.action_space == Counter().action_space
        assert [type(env) for env in envs.envs] == [SubprocessEnv] * 3
        results = envs.step([1, 2, 3])
        assert all(isinstance(result, list) and len(result) == 3 for result in results)
        expected = alone.step([1, 2, 3])
        np.testing.assert_array_equal(results[0], [row[0] for row in expected])
        for column in (1, 2, 3):
            assert results[column] == [row[column] for row in expected]


@pytest.mark.deep
@settings(max_examples=20, suppress_health_check=list(HealthCheck), deadline=None)
@given(
    observations=leaves,
    actions=leaves,
    lengths=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=4),
    per_env=st.lists(st.lists(infos(), min_size=1, max_size=3), min_size=1, max_size=3),
    skipped=st.lists(st.sets(st.integers(0, 3)), min_size=6, max_size=6),
    seed=st.integers(0, 99),
)
def test_envs_do_what_they_do_alone(observations, actions, lengths, per_env, skipped, seed):
    env_fns = [
        partial(Scripted, observations, actions, length, per_env[i % len(per_env)])
        for i, length in enumerate(lengths)
    ]
    alone = Alone(env_fns, seed)
    with multi_env(env_fns, num_workers=0) as envs:
        assert equal(envs.reset(seed=seed), alone.observations)
        actions.seed(seed)
        for out in skipped:
            chosen = [None if i in out else actions.sample() for i in range(len(env_fns))]
            results = envs.step(chosen)
            for i, row in enumerate(alone.step(chosen)):
                mine = [column[i] for column in results]
                assert equal(mine, list(row)), f"\n{mine}\n{row}"


@pytest.mark.deep
@pytest.mark.parametrize("several_groups, wrapped", crossed([False, True], [False, True]))
def test_envs_are_stepped_in_parallel(several_groups, wrapped):
    barrier = multiprocessing.Barrier(3)
    env_fns = [partial(Together, barrier)] * 3
    if several_groups:
        envs = [SubprocessEnv(env_fn) for env_fn in env_fns]
        for env in envs:
            env.start()
        for env in envs:
            env.initialize()
    else:
        envs = create_subprocess_envs(env_fns)
    if wrapped:
        envs = [gym.wrappers.FrameStackObservation(env, 2) for env in envs]
    with closing(MultiEnv(envs)) as together:
        together.reset()
        for _ in range(3):
            assert together.step([1, 1, 1])[2] == [False] * 3


def test_unequal_spaces_raise():
    envs = create_subprocess_envs([Counter, Counter, partial(Counter, size=6)])
    with closing(MultiEnv(envs[:2])), closing(envs[2]):
        with pytest.raises(ValueError, match="observation_space of env 2 .* of env 0"):
            MultiEnv(envs)
    spaces = [gym.spaces.Discrete(2), gym.spaces.Discrete(3)]
    env_fns = [partial(Spaces, spaces[0], space) for space in spaces]
    envs = create_subprocess_envs(env_fns, num_workers=0)
    with closing(envs[0]), closing(envs[1]):
        with pytest.raises(ValueError, match="action_space of env 1 is Discrete"):
            MultiEnv(envs)


@pytest.mark.deep
def test_wrong_actions_are_refused_before_anything_is_sent_to_any_of_several_groups():
    envs = [SubprocessEnv(Counter, num_workers=0) for _ in range(2)]
    for env in envs:
        env.start()
        env.initialize()
    with closing(MultiEnv(envs)) as together:
        together.reset()
        for actions in ([1], [1, 1, 1], [1, 0.5], [1, [1, 2]], [1, "a"]):
            with pytest.raises((ValueError, TypeError), match="wrong actions"):
                together.step(actions)
        assert [info["count"] for info in together.step([1, 1])[3]] == [1, 1]


@pytest.mark.deep
def test_reset_takes_seeds_and_options_for_each_env():
    with multi_env(counters(2), num_workers=0) as envs:
        first = envs.reset(seed=4, options=[{"a": 1}, None])
        np.testing.assert_array_equal(first, envs.reset(seed=[4, 5]))
        assert envs.envs[0].group.exchange.call("received") == [[{"a": 1}, None], [None, None]]
        with pytest.raises(ValueError, match="length"):
            envs.reset(seed=[1])
        with pytest.raises(ValueError, match="number of envs, 2"):
            envs.reset(options=[{}])


# ---- None action -----------------------------------------------------------------------------


@SPLITS
def test_a_none_action_skips_its_env_and_its_results_are_none(num_workers):
    with multi_env(counters(3), num_workers=num_workers) as envs:
        envs.reset()
        observations, rewards, terminals, infos = envs.step([1, None, 2])
        assert (observations[1], rewards[1], terminals[1], infos[1]) == (None,) * 4
        assert rewards == [1, None, 21]
        assert envs.step([None] * 3) == ([None] * 3,) * 4
        assert envs.step([1, 1, 1])[1] == [2, 11, 22]


# ---- auto reset ------------------------------------------------------------------------------


@SPLITS
def test_reset_comes_with_the_next_step_and_its_observation_is_in_infos(num_workers):
    env_fns = [partial(Counter, length=length) for length in (2, 3, 9)]
    with multi_env(env_fns, num_workers=num_workers) as envs:
        envs.reset()
        envs.step([1, 1, 1])
        observations, _, terminals, infos = envs.step([1, 1, 1])
        assert terminals == [True, False, False]
        assert observations[0][0] == 2  # the terminal one
        assert "reset_observation" not in infos[0]
        envs.step([None, 1, 1])  # and stays as long as it is left out
        observations, rewards, terminals, infos = envs.step([3, 3, 3])
        assert [row[:2].tolist() for row in observations] == [[1, 3], [1, 3], [4, 3]]
        assert rewards == [1, 1, 4] and terminals == [False] * 3
        for info in infos[:2]:
            assert info["reset_observation"][:2].tolist() == [0, -1]
            assert info["reset_info"] == {"reset": 2} and info["count"] == 1
        assert "reset_info" not in infos[2]
        assert all("reset_info" not in info for info in envs.step([1, 1, 1])[3])


@pytest.mark.parametrize(
    ("terminates", "limit", "expected"), [(2, 2, [False]), *deep((9, 2, [True]), (2, 9, []))]
)
def test_terminal_is_either_and_infos_say_which(terminates, limit, expected):
    def make():
        return gym.wrappers.TimeLimit(Counter(length=terminates), limit)

    with multi_env([make], num_workers=0) as envs:
        envs.reset()
        envs.step([0])
        _, _, terminals, (info,) = envs.step([0])
        assert terminals == [True]
        assert [info[key] for key in info if key == "TimeLimit.truncated"] == expected


# ---- envs in wrappers ------------------------------------------------------------------------


@pytest.mark.deep
def test_wrapped_envs_do_what_they_do_alone():
    env_fns = [partial(Counter, length=length) for length in (3, 4, 5)]
    wrapped = [Twice(env) for env in create_subprocess_envs(env_fns)]
    alone = Alone([lambda make=make: Twice(make()) for make in env_fns], seed=2)
    with closing(MultiEnv(wrapped)) as envs:
        assert envs.envs == wrapped
        np.testing.assert_array_equal(envs.reset(seed=2), alone.observations)
        for step in range(8):
            actions = [None if (step + i) % 4 == 0 else i for i in range(3)]
            results = envs.step(actions)
            for i, row in enumerate(alone.step(actions)):
                assert equal([column[i] for column in results], list(row))
    assert [env.closed for env in wrapped] == [1, 1, 1]
    assert not multiprocessing.active_children()


@pytest.mark.deep
def test_wrapped_envs_survive_a_death():
    wrapped = [Twice(env) for env in create_subprocess_envs(counters(2))]
    with closing(MultiEnv(wrapped)) as envs:
        envs.reset()
        envs.step([1, 1])
        kill(wrapped[1].env)
        _, rewards, _, _ = envs.step([1, 1])
        assert rewards == [3 + 4, 11 + 12]


@pytest.mark.deep
def test_calls_of_wrapped_envs_come_to_an_end_whenever_ctrl_c_comes():
    armed = False

    def ctrl_c(number, frame):
        if armed and not is_lost(frame):  # else it comes after the call
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, ctrl_c)
    envs = create_subprocess_envs([partial(Counter, 10**9)] * 3, num_workers=0)
    with closing(MultiEnv([Twice(env) for env in envs])) as together:
        together.reset()
        try:
            for microseconds in range(1, 3000, 25):
                with suppress(KeyboardInterrupt):
                    armed = True
                    signal.setitimer(signal.ITIMER_REAL, 1e-6 * microseconds)
                    together.step([1, 2, 3])
                    armed = False
        finally:
            armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        together.reset()
        assert together.step([1, 2, 3])[1] == [1 + 2] * 3
    until = time.monotonic() + 60
    while threading.active_count() > 1:  # one that copies stderr in a test before may be ending
        assert time.monotonic() < until, threading.enumerate()
        time.sleep(0.01)

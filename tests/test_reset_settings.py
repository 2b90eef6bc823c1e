"""`set_reset_options` and `set_reset_seeds`: what automatic resets of envs are called with."""

import os
import signal
import threading
import time
from contextlib import closing
from copy import deepcopy
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from envs import Coroutines
from gymnasium.error import ClosedEnvironmentError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tables import deep, row

import shmvec
from shmvec import FaultPolicy, Pipeline, ShmVectorEnv
from shmvec._processes.host import EnvHost
from shmvec.exchange import Exchange
from shmvec.faults import derived_seed, restart_seed

DEADLINE = 100.0
MODES = ["NextStep", "SameStep"]
RESTART = FaultPolicy(on_crash="restart", on_error="reset", backoff_s=0)
SETTINGS = {
    "workers": {"num_workers": 2},
    "this process": {"num_workers": 0},
    "caller steps": {"num_workers": 2, "caller_steps": True},
    "threads": {"num_workers": 2, "overlap": 2},
    "coroutines": {"num_workers": 2, "wrapper": Coroutines},
    "messages": {"num_workers": 2, "shared_memory": False},
    "faults": {"num_workers": 2, "faults": RESTART},
}
OTHERS = "caller steps", "coroutines", "messages", "faults"
BIG = 2**80 + 5


class Told(gym.Env):
    """Its observations say what it was reset with, how often it was stepped since, and a draw."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (5,), np.float64)
    action_space = gym.spaces.Discrete(4)

    def __init__(self, length=3):
        self.length, self.resets = length, 0

    def reset(self, **arguments):
        seed, options = arguments.get("seed"), arguments.get("options")
        super().reset(seed=seed)
        self.count = 0
        self.resets += 1
        self.told = self.seen(seed, options)
        if options is not None:
            options["level"] = 99  # a copy of the env's own
        return self._observation(), {}

    @staticmethod
    def seen(seed, options):
        """Seed and options as the observations show them."""
        level = -1 if options is None else options.get("level", 0)
        return -1 if seed is None else seed % 1009, level

    def step(self, action):
        self.count += 1
        return self._observation(), float(action), self.count >= self.length, False, {}

    def _observation(self):
        return np.array([*self.told, self.count, self.np_random.random(), self.resets])


class Expected:
    """What an env does that takes its settings with each step: the meaning of both methods."""

    def __init__(self, length, mode):
        self.env, self.mode = Told(length), mode
        self.options = self.seed = self.known = None
        self.over = False

    def reset(self, **arguments):
        self.over = False
        return self.env.reset(**arguments)[0]

    def ask(self):
        """Notes what holds for the env's next automatic reset: what was set before it is asked."""
        self.known = self.seed, self.options

    def _automatic(self):
        seed, options = self.known
        if self.seed is seed:
            self.seed = None  # it is used; a seed that was set since is not
        return self.reset(seed=seed and seed[0], options=deepcopy(options))

    def step(self, action):
        if self.over:
            return self._automatic(), 0.0, False
        observation, reward, over, _, _ = self.env.step(action)
        if over and self.mode == "SameStep":
            observation = self._automatic()
        else:
            self.over = over
        return observation, reward, over


class Pair:
    """A vector env and what is expected of it."""

    def __init__(self, mode, lengths=(2, 3, 1, 4), wrapper=None, **options):
        fns = [partial(Told, length) for length in lengths]
        wrapped = [lambda fn=fn: wrapper(fn()) for fn in fns] if wrapper else fns
        self.envs = ShmVectorEnv(wrapped, autoreset_mode=mode, **options)
        self.expected = [Expected(length, mode) for length in lengths]
        self.close = self.envs.close
        self.everyone = list(range(len(lengths)))

    def reset(self, seed=7, options=None):
        observations, _ = self.envs.reset(seed=seed, options=options)
        for env, each in enumerate(self.expected):
            told = {"seed": None if seed is None else seed + env, "options": deepcopy(options)}
            assert observations[env].tolist() == each.reset(**told).tolist(), env

    def set_options(self, options, envs=None):
        self.envs.set_reset_options(options, envs)
        for i, env in enumerate(self.everyone if envs is None else envs):
            self.expected[env].options = options[i] if isinstance(options, list) else options

    def set_seeds(self, seeds, envs=None):
        self.envs.set_reset_seeds(seeds, envs)
        for i, env in enumerate(self.everyone if envs is None else envs):
            seed = seeds[i] if isinstance(seeds, list) else seeds and seeds + env
            self.expected[env].seed = None if seed is None else (seed,)

    def send(self, envs):
        for env in envs:
            self.expected[env].ask()
        self.envs.send([env % 4 for env in envs], envs)

    def recv(self, count):
        observations, rewards, terminations, truncations, infos = self.envs.recv(
            min_envs=count, timeout=DEADLINE
        )
        for i, env in enumerate(infos["env_id"].tolist()):
            observation, reward, over = self.expected[env].step(env % 4)
            assert observations[i].tolist() == observation.tolist(), env
            assert (rewards[i], terminations[i], truncations[i]) == (reward, over, False), env

    def step(self):
        for each in self.expected:
            each.ask()
        observations, rewards, terminations, _, _ = self.envs.step([0, 1, 2, 3])
        for env, each in enumerate(self.expected):
            observation, reward, over = each.step(env)
            assert observations[env].tolist() == observation.tolist(), env
            assert (rewards[env], terminations[env]) == (reward, over), env


@pytest.mark.parametrize("setting", [*list(SETTINGS)[:2], "threads", *deep(*OTHERS)])
def test_they_hold_for_the_automatic_resets_of_each_setting(setting):
    for mode in MODES:
        with row(mode), closing(Pair(mode, **SETTINGS[setting])) as pair:
            pair.set_options({"level": 1})  # not for a reset that is asked for
            pair.reset(options={"level": 7})
            for _ in range(5):
                pair.step()
            pair.set_options([{"level": 2}, None, {}, {"level": 3}])
            pair.set_seeds([11, None, 2**63 - 1, BIG])
            for _ in range(9):
                pair.step()
            pair.set_seeds(20)
            pair.set_options({"level": 4}, [1, 3])
            pair.reset(seed=None)
            for _ in range(3):
                pair.step()
            pair.send([2, 0])
            pair.set_options(None, [0])
            pair.set_seeds([5, BIG + 1], [0, 2])
            pair.send([3])
            pair.set_seeds(None, [3])
            pair.recv(3)
            for _ in range(6):
                pair.step()


levels = st.none() | st.just({}) | st.builds(dict, level=st.integers(1, 9))
seeds = st.none() | st.integers(0, 99) | st.sampled_from([2**63 - 1, 2**63, BIG])


def check_any_calls(data, names):
    """Draws a setting and calls in any order; compares all that is returned."""
    setting = data.draw(st.sampled_from(names), label="setting")
    lengths = data.draw(st.lists(st.integers(1, 3), min_size=4, max_size=4), label="lengths")
    mode = data.draw(st.sampled_from(MODES), label="mode")
    some = st.lists(st.sampled_from(range(4)), min_size=1, max_size=4, unique=True)
    with closing(Pair(mode, lengths, **SETTINGS[setting])) as pair:
        in_flight = set()

        def arguments(values, for_all):
            envs = data.draw(st.none() | some)
            size = 4 if envs is None else len(envs)
            of_each = st.lists(values, min_size=size, max_size=size)
            return data.draw(for_all | of_each), envs

        def settle():
            pair.recv(len(in_flight)) if in_flight else None
            in_flight.clear()

        pair.reset()
        for _ in range(data.draw(st.integers(1, 20), label="calls")):
            call = data.draw(st.sampled_from(["step", "step", "send", "options", "seeds", "reset"]))
            if call == "options":
                pair.set_options(*arguments(levels, levels))
            elif call == "seeds":
                pair.set_seeds(*arguments(seeds, st.none() | st.integers(1, 99)))
            elif call == "send":
                envs = [env for env in data.draw(some) if env not in in_flight]
                if envs:
                    pair.send(envs)
                    in_flight.update(envs)
            else:
                settle()
                pair.step() if call == "step" else pair.reset(*data.draw(st.tuples(seeds, levels)))
        settle()


def property_test(examples, *names):
    common = settings(deadline=None, max_examples=examples, suppress_health_check=list(HealthCheck))
    return common(given(st.data())(lambda data: check_any_calls(data, names)))


def test_any_calls_are_as_the_plain_meaning_in_this_process():
    property_test(20, "this process")()


@pytest.mark.deep
def test_any_calls_are_as_the_plain_meaning():
    property_test(80, *SETTINGS)()


def test_rollouts_and_pipelines_reset_envs_with_them():
    def policy(observations, env_ids):
        return np.zeros(len(env_ids), np.int64)

    for mode in MODES:
        with ShmVectorEnv([partial(Told, 2)] * 4, num_workers=2, autoreset_mode=mode) as envs:
            envs.reset(seed=7)
            envs.set_reset_options({"level": 5})
            envs.set_reset_seeds(40)
            rollout = envs.rollout(2)
            rollout.step([0] * 4)
            envs.set_reset_options({"level": 6}, [1])  # each step tells what was set before it
            rollout.step([0] * 4)
            if mode == "NextStep":
                rollout = envs.rollout(1)
                rollout.step([0] * 4)
            expected = [[40, 5], [41, 6], [42, 5], [43, 5]]
            assert rollout.observations[-1, :, :2].tolist() == expected
            pipeline = Pipeline(envs, policy, groups=2)
            envs.set_reset_options({"level": 8})
            collected = pipeline.collect(6)
            levels = collected.observations[-1, :, 1]
            assert levels.tolist() == [8] * 4
            for number, transitions in enumerate(pipeline):
                if number == 3:  # while groups are in flight
                    envs.set_reset_options({"level": 9})
                if number == 20:
                    assert (transitions.observations[:, 1] == 9).all()
                    break
            pipeline.drop()


class Held(Told):
    """Its second step waits for a file."""

    def __init__(self, path):
        super().__init__(2)
        self.path = path

    def step(self, action):
        until = time.monotonic() + DEADLINE
        while self.count == 1 and not self.path.exists() and time.monotonic() < until:
            time.sleep(0.001)
        return super().step(action)


def test_another_thread_sets_them_while_a_step_is_under_way(tmp_path):
    """They are for the request after that, and nobody waits: the step ends after they are set."""
    with ShmVectorEnv(
        [partial(Held, tmp_path / "go"), Told], num_workers=2, autoreset_mode="SameStep"
    ) as envs:
        envs.reset(seed=7)
        envs.step([0, 0])
        results = []
        thread = threading.Thread(target=lambda: results.append(envs.step([0, 0])))
        thread.start()
        while not envs.exchange.num_in_flight:
            assert thread.is_alive()
        envs.set_reset_options({"level": 4})
        envs.set_reset_seeds([3, 4])
        (tmp_path / "go").touch()
        thread.join(DEADLINE)
        assert results[0][0][0, :2].tolist() == [-1, -1]  # it was reset as before
        for _ in range(2):
            observations, *_ = envs.step([0, 0])
        assert observations[0, :2].tolist() == [3, 4]
        assert observations[1, :2].tolist() == [4, 4]


# ---- restarts ------------------------------------------------------------------------------------


class Dies(Told):
    """Its process is killed, or it raises, in its reset of this number, once."""

    def __init__(self, path, at, how, length=2):
        super().__init__(length)
        self.path, self.at, self.how = path, at, how

    def reset(self, **arguments):
        if self.resets + 1 == self.at and not self.path.exists():
            self.path.touch()
            if self.how == "raises":
                raise LookupError("this reset")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().reset(**arguments)


@pytest.mark.parametrize(
    "mode, how, seed, options",
    [
        ("NextStep", "dies", 11, {}),
        ("SameStep", "dies", BIG, {}),
        ("NextStep", "raises", BIG, {"num_workers": 0}),
        ("SameStep", "raises", 11, {}),
        *deep(
            ("NextStep", "dies", 11, {"overlap": 2}),
            ("SameStep", "dies", 11, {"overlap": 2}),
            ("SameStep", "raises", 11, {"overlap": 2}),
        ),
    ],
)
def test_a_reset_that_was_lost_is_repeated_with_them(mode, how, seed, options, tmp_path):
    # The first env's reset, of the same request, was made before that, with its seed.
    fns = [partial(Told, 2), partial(Dies, tmp_path / "died", 2, how), partial(Told, 99)]
    options = {"num_workers": 2, **options}
    with ShmVectorEnv(fns, faults=RESTART, autoreset_mode=mode, **options) as envs:
        envs.reset(seed=7)
        envs.set_reset_options({"level": 3})
        envs.set_reset_seeds([10, seed, 13])
        for _ in range(3 if mode == "NextStep" else 2):
            observations, *_ = envs.step([0] * 3)
        told = [Told.seen(seed, {"level": 3}) for seed in (10, seed)]
        assert observations[:2, :3].tolist() == [[*each, 0] for each in told]
        for _ in range(3 if mode == "NextStep" else 2):
            observations, *_ = envs.step([0] * 3)
        assert observations[:2, :3].tolist() == [[-1, 3, 0]] * 2  # a seed is for one reset


@pytest.mark.parametrize("mode", MODES)
def test_a_worker_that_replaces_another_one_has_them(mode):
    with ShmVectorEnv([partial(Told, 3)] * 4, num_workers=2, autoreset_mode=mode) as envs:
        envs.reset(seed=7)
        envs.set_reset_options({"level": 3})
        envs.set_reset_seeds([50, BIG, None, 53])
        envs.step([0] * 4)
        envs.set_reset_seeds([51], [0])  # no request has told of it
        envs.restart([0])
        told = []
        for _ in range(8):
            observations, *_ = envs.step([0] * 4)
            told += observations[observations[:, 2] == 0, :2].tolist()
        assert [51, 3] in told and [53, 3] in told and [BIG % 1009, 3] in told
        assert [50, 3] not in told
        told = [each for each in told if each[0] in (51, 53, BIG % 1009)]
        assert len(told) == 3  # each seed once


def test_a_seed_that_was_used_is_not_used_again_by_a_successor():
    with ShmVectorEnv([partial(Told, 1)] * 2, num_workers=2, faults=RESTART) as envs:
        envs.reset(seed=7)
        envs.set_reset_seeds([50, 51])
        for _ in range(2):
            observations, *_ = envs.step([0] * 2)
        assert observations[:, 0].tolist() == [50, 51]
        envs.processes[0].kill()
        seen = []
        for _ in range(6):
            observations, *_ = envs.step([0] * 2)
            seen.append(observations[0, 0])
        assert restart_seed(7, 1) % 1009 in seen and seen.count(50) <= 1  # of the step cut off


# ---- envs reset ahead ----------------------------------------------------------------------------


class AsyncTold(Told):
    async def reset(self, **arguments):
        return super().reset(**arguments)

    async def step(self, action):
        return super().step(action)


@pytest.mark.parametrize("kind", [Told, *deep(AsyncTold)])
def test_with_spare_envs_options_are_those_of_the_first_copy_that_is_not_reset(kind):
    with ShmVectorEnv([partial(kind, 2)] * 2, num_workers=1, spare_envs=1) as envs:

        def next_episode():
            for _ in range(3):
                observations, *_ = envs.step([0, 0])
            assert observations[:, 2].tolist() == [0, 0]
            return observations[:, :2].tolist()

        def derived(number, since=0, seeds=(7, 8)):
            return [derived_seed(seed, 0, number - since) % 1009 for seed in seeds]

        envs.set_reset_options({"level": 1})
        envs.reset(seed=7, options={"level": 5})
        # The copies of the next episode were reset as that one began.
        assert next_episode() == [[seed, 1] for seed in derived(1)]
        envs.set_reset_options([{"level": 2}, None])
        assert next_episode() == [[seed, 1] for seed in derived(2)]
        assert next_episode() == [[derived(3)[0], 2], [derived(3)[1], -1]]
        envs.set_reset_seeds([20, 30])  # for the next episode, which is reset anew
        assert next_episode() == [[20, 2], [30, -1]]
        assert next_episode() == [
            [derived(5, 4, [20])[0], 2],
            [derived(5, 4, [30])[0], -1],
        ]
        # A reset that is asked for has no options of theirs.
        observations, _ = envs.reset()
        assert observations[:, 1].tolist() == [-1, -1]


# ---- interrupts ----------------------------------------------------------------------------------


def test_ctrl_c_loses_no_options_in_this_process(monkeypatch):
    received = EnvHost.receive_arguments

    def interrupted(self, sequence):
        monkeypatch.undo()
        received(self, sequence)
        raise KeyboardInterrupt

    with ShmVectorEnv([partial(Told, 1)] * 2, num_workers=0, autoreset_mode="SameStep") as envs:
        envs.reset(seed=7)
        envs.set_reset_options({"level": 3})
        monkeypatch.setattr(EnvHost, "receive_arguments", interrupted)
        with pytest.raises(KeyboardInterrupt):
            envs.step([0, 0])
        observations, *_ = envs.step([0, 0])
        assert observations[:, 1].tolist() == [3, 3]


def test_a_step_that_is_refused_tells_no_env():
    with closing(Pair("NextStep", num_workers=2)) as pair:
        pair.reset()
        pair.set_options({"level": 3})
        pair.set_seeds([1, 2, 3, BIG])
        with pytest.raises(ValueError, match="Nothing was sent"):
            pair.envs.step([0, 1])
        for _ in range(8):
            pair.step()


# ---- bad input -----------------------------------------------------------------------------------


def test_bad_input_is_refused():
    with ShmVectorEnv([Told] * 3, num_workers=1) as envs:
        refused = [
            (ValueError, "its length must be the number of envs, 3", [[{}, {}]], {}),
            (ValueError, "env_id must be in 0 to 2", [{}], {"env_id": [3]}),
            (ValueError, "names an env twice", [{}], {"env_id": [1, 1]}),
            (TypeError, "options must be a dict", ["level"], {}),
            (TypeError, "options must be a dict", [[{}, 3, {}]], {}),
            (ValueError, "'reset_mask'", [{"reset_mask": np.array([True] * 3)}], {}),
            (Exception, "pickle", [{"lock": threading.Lock()}], {}),
        ]
        for error, said, arguments, names in refused:
            with pytest.raises(error, match=said):
                envs.set_reset_options(*arguments, **names)
        with pytest.raises(ValueError, match="num_envs=3 but got length=2"):
            envs.set_reset_seeds([1, 2])
        with pytest.raises(TypeError, match="the seed of env 1 must be an int"):
            envs.set_reset_seeds([1, "a", 3])
        with pytest.raises(ValueError, match="env_id must be in 0 to 2"):
            envs.set_reset_seeds(1, env_id=[-1])
        envs.reset(seed=7)
        for _ in range(4):
            observations, *_ = envs.step([0] * 3)
        assert observations[:, :2].tolist() == [[-1, -1]] * 3
    for call in (envs.set_reset_options, envs.set_reset_seeds):
        with pytest.raises(ClosedEnvironmentError):
            call(None)


def test_envs_that_no_step_resets_are_refused():
    with ShmVectorEnv([Told], num_workers=0, autoreset_mode="Disabled") as envs:
        with pytest.raises(ValueError, match=r"set_reset_options\(\).*reset\(options=\.\.\.\)"):
            envs.set_reset_options({"level": 1})
        with pytest.raises(ValueError, match=r"set_reset_seeds\(\).*reset\(seed=\.\.\.\)"):
            envs.set_reset_seeds(1)


def test_options_are_copied_as_they_are_set():
    options = {"level": 1}
    for num_workers in (0, 1):
        with ShmVectorEnv([partial(Told, 1)] * 2, num_workers=num_workers) as envs:
            envs.reset(seed=7)
            envs.set_reset_options(options)
            options["level"] = 2
            for _ in range(4):
                observations, *_ = envs.step([0, 0])
            assert observations[:, 1].tolist() == [1, 1]
            options["level"] = 1


def test_an_exchange_has_them_too():
    with closing(Exchange([partial(Told, 1)] * 3, num_workers=2)) as exchange:
        exchange.ask_reset(seeds=[1, 2, 3])
        exchange.take()
        exchange.set_reset_options({"level": 4}, [2, 0])
        exchange.set_reset_seeds([8, None], [2, 0])
        for _ in range(2):
            exchange.ask(None, [0, 0, 0])
            answers = exchange.take()
        assert answers.observations[:, :2].tolist() == [[-1, 4], [-1, -1], [8, 4]]


def test_they_are_reached_through_gymnasiums_wrappers():
    envs = shmvec.make_vec("CartPole-v1", 2, num_workers=0)
    wrapped = gym.wrappers.vector.RecordEpisodeStatistics(envs)
    with closing(wrapped):
        wrapped.reset(seed=1)
        wrapped.unwrapped.set_reset_options({"low": -0.001, "high": 0.001})
        over = np.zeros(2, bool)
        while not over.any():
            *_, over, _, _ = wrapped.step([0, 0])
        observations, *_ = wrapped.step([0, 0])
        assert (abs(observations[over]) <= 0.001).all()

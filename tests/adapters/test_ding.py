"""DI-engine's env managers: configuration, resets, seeds and steps."""

import copy
import pickle
from contextlib import closing

import gymnasium as gym
import numpy as np
import pytest
from ding_envs import (
    ARRAY,
    END,
    INFINITE,
    KINDS,
    KINDS_AND_WORKERS,
    MANAGERS,
    TRUNCATE,
    WAIT,
    WORKERS,
    Obedient,
    OfDIEngine,
    Sampled,
    gate,
    manager,
    obedient,
)
from equality import equal, same, sync_env
from gymnasium.vector.utils import iterate
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import deep

from shmvec.adapters.ding import (
    AsyncSubprocessEnvManager,
    BaseEnvTimestep,
    EnvManagerConfig,
    EnvState,
    EnvStateError,
    ManagerClosedError,
    SyncEnvManagerConfig,
    SyncSubprocessEnvManager,
    create_env_manager,
    get_env_manager_cls,
)
from shmvec.exchange import AutoresetMode

# ---- config and defaults ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", [AsyncSubprocessEnvManager, *deep(*MANAGERS[1:])])
def test_config_and_defaults(kind):
    cfg = kind.default_config()
    asynchronous = kind is AsyncSubprocessEnvManager
    assert dict(cfg) == {
        "episode_num": INFINITE,
        "max_retry": 1,
        "retry_type": "reset",
        "auto_reset": True,
        "step_timeout": None,
        "reset_timeout": None,
        "retry_waiting_time": 0.1,
        "shared_memory": True,
        "copy_on_get": True,
        "context": "fork",
        "wait_num": 2 if asynchronous else INFINITE,
        "step_wait_timeout": 0.01 if asynchronous else None,
        "connect_timeout": 60,
        "reset_inplace": False,
        "num_workers": None,
        "faults": None,
    }
    assert type(cfg) is (EnvManagerConfig if asynchronous else SyncEnvManagerConfig)
    cfg.episode_num = 3
    cfg["max_retry"] = 2
    assert (cfg["episode_num"], cfg.max_retry) == (3, 2)
    assert kind.default_config().episode_num == INFINITE
    assert kind(obedient(1), cfg).env_num == 1


@pytest.mark.deep
def test_config_may_be_a_dict_an_easydict_or_a_configuration():
    class EasyDict(dict):  # as the real one: keys are attributes
        __getattr__ = dict.__getitem__

    for cfg in ({"episode_num": 1}, EasyDict(episode_num=1), SyncEnvManagerConfig(episode_num=1)):
        with closing(SyncSubprocessEnvManager(obedient(2), cfg)) as envs:
            envs.launch()
            envs.step({0: END, 1: END})
            assert envs.done


@pytest.mark.deep
def test_config_takes_keys_of_the_program(caplog):
    """As DI-engine's own, in which programs keep what they like."""
    cfg = SyncSubprocessEnvManager.default_config()
    cfg.update(type="subprocess", import_names=[], env_fn=[Obedient])
    cfg.env_cfg = [{"scale": 0.1}]
    assert cfg["env_cfg"] == [{"scale": 0.1}] and cfg.env_fn == [Obedient] and len(cfg) == 20
    copied = copy.deepcopy(cfg)
    assert copied.pop("env_fn") == [Obedient] and "env_fn" not in copied and "env_fn" in cfg
    assert SyncSubprocessEnvManager(obedient(1), cfg).env_num == 1
    assert not caplog.records
    cfg.episode_nums = 3
    SyncSubprocessEnvManager(obedient(1), cfg)
    assert "no 'episode_nums'. Did you mean 'episode_num'?" in caplog.text
    with pytest.raises(KeyError):
        cfg["no such key"]
    del cfg["max_retry"]
    assert cfg.max_retry == 1
    with pytest.raises(TypeError, match="must be a dict"):
        SyncSubprocessEnvManager(obedient(1), 3)


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("episode_num", 0, ValueError),
        *deep(
            ("episode_num", 1.5, TypeError),
            ("max_retry", -1, ValueError),
            ("max_retry", INFINITE, ValueError),
            ("retry_type", "again", ValueError),
            ("auto_reset", "yes", TypeError),
            ("step_timeout", 0, ValueError),
            ("step_timeout", "long", TypeError),
            ("reset_timeout", -1, ValueError),
            ("connect_timeout", 0.0, ValueError),
            ("step_wait_timeout", -0.1, ValueError),
            ("retry_waiting_time", None, TypeError),
            ("retry_waiting_time", -1, ValueError),
            ("wait_num", 0, ValueError),
            ("wait_num", None, TypeError),
            ("context", "thread", ValueError),
            ("shared_memory", 1, TypeError),
            ("faults", "restart", TypeError),
        ),
    ],
)
def test_config_values_are_checked(key, value, error):
    with pytest.raises(error, match=key):
        AsyncSubprocessEnvManager(obedient(1), {key: value})


@pytest.mark.deep
def test_create_env_manager_and_the_types():
    for name, kind in zip(
        ["async_subprocess", "subprocess", "subprocess_v2"], MANAGERS, strict=True
    ):
        assert get_env_manager_cls({"type": name}) is kind
        cfg = {"type": name, "cfg_type": "XDict", "import_names": [], "episode_num": 3}
        made = create_env_manager(cfg, obedient(2))
        assert type(made) is kind and made.env_num == 2
        assert cfg["type"] == name
    with pytest.raises(KeyError, match="async_subprocess, subprocess, subprocess_v2"):
        create_env_manager({"type": "base"}, obedient(2))


@pytest.mark.deep
def test_shared_memory_off_takes_any_space():
    def make():
        env = Obedient()
        return gym.wrappers.TransformObservation(
            env, tuple, gym.spaces.Sequence(gym.spaces.Box(-np.inf, np.inf, (), np.float64))
        )

    with manager(env_fns=[make] * 2, shared_memory=False) as envs:
        envs.launch()
        assert isinstance(envs.ready_obs[1], tuple)
        assert len(envs.step({0: 0, 1: 0})[1].obs) == 4


@pytest.mark.deep
@pytest.mark.parametrize("copy_on_get", [True, False])
def test_copy_on_get(copy_on_get):
    """Copies stay; views may be overwritten by later steps, but not while they are ready_obs."""
    with manager(AsyncSubprocessEnvManager, num_envs=4, wait_num=4, copy_on_get=copy_on_get,
                 step_wait_timeout=None, num_workers=2) as envs:  # fmt: skip
        envs.seed(0)
        envs.launch()
        first = envs.ready_obs
        kept = {env: observation.copy() for env, observation in first.items()}
        for _ in range(3):
            for env in (1, 2, 3):
                if env in envs.ready_obs:
                    envs.step({env: 0})
        assert same(envs.ready_obs[0], kept[0])
        if copy_on_get:
            assert all(same(first[env], kept[env]) for env in kept)


# ---- launch, reset, close --------------------------------------------------------------------


@WORKERS
def test_launch_reset_close(num_workers):
    with manager(num_workers=num_workers) as envs:
        assert envs.closed and not envs.done
        with pytest.raises(ManagerClosedError):
            envs.reset()
        envs.launch({env: {"stat": f"launch {env}"} for env in range(4)})
        assert not envs.closed
        assert envs.stats == [[f"launch {env}"] for env in range(4)]
        assert set(envs.env_states.values()) == {EnvState.RUN}
        with pytest.raises(EnvStateError, match="first close"):
            envs.launch()
        envs.reset({2: {"stat": "again"}, 0: None})
        assert envs.resets == [2, 1, 2, 1]
        assert envs.stats[2][-1] == "again" and envs.stats[0][-1] is None
        envs.reset()
        assert [stats[-1] for stats in envs.stats] == [None, "launch 1", "again", "launch 3"]
        envs.close()
        envs.close()
        assert envs.closed
        assert set(envs.env_states.values()) == {EnvState.VOID}
        envs.launch()
        assert envs.stats == [[None]] * 4


@pytest.mark.deep
@KINDS
def test_reset_param_is_remembered_for_automatic_resets(kind):
    with manager(kind, num_envs=2, wait_num=2, step_wait_timeout=None) as envs:
        envs.launch({0: {"stat": "a"}, 1: {"options": {"b": 1}}})
        for _ in range(3):
            while len(envs.ready_obs) < 2:
                pass
            envs.step({0: END, 1: END})
            while len(envs.ready_obs) < 2:
                pass
        assert envs.stats == [["a"] * 4, [None] * 4]
        assert envs.reset_infos[1]["options"] == {"b": 1}


@pytest.mark.deep
def test_reset_waits_for_envs_in_flight_and_drops_their_steps():
    door = gate()
    with manager(AsyncSubprocessEnvManager, env_fns=obedient(2, gate=door), num_workers=2,
                 wait_num=1) as envs:  # fmt: skip
        envs.launch()
        assert list(envs.step({0: WAIT, 1: 0})) == [1]
        assert envs.ready_env == [1]
        door.set()
        envs.reset({0: {}})
        assert envs.ready_env == [0, 1]
        assert envs.asked == [1, 1] and envs.resets == [2, 1]
        assert envs.step({}) == {}
        assert envs.ready_obs[0][2] == 0


@pytest.mark.deep
def test_close_ends_envs_that_hang():
    with manager(AsyncSubprocessEnvManager, env_fns=obedient(2, gate=gate()), num_workers=2,
                 wait_num=1) as envs:  # fmt: skip
        envs.launch()
        envs.step({0: WAIT, 1: 0})
        processes = envs.exchange.processes
        envs.close()
        assert processes[0].exitcode < 0


@pytest.mark.deep
def test_launch_that_fails_can_be_repeated():
    def broken():
        raise OSError("no simulator")

    with manager(env_fns=[Obedient, broken]) as envs:
        with pytest.raises(OSError, match="no simulator"):
            envs.launch()
        assert envs.closed
    with manager(num_envs=2, retry_waiting_time=0) as envs:
        with pytest.raises(RuntimeError, match="Env 1 reset has exceeded"):
            envs.launch({0: {}, 1: {"stat": "error"}})
        assert envs.closed and set(envs.env_states.values()) == {EnvState.VOID}
        envs.launch()
        assert envs.ready_env == [0, 1]


@pytest.mark.deep
@pytest.mark.parametrize("call", ["launch", "reset"])
@pytest.mark.parametrize(
    ("param", "error", "message"),
    [
        ({0: {}, 1: {}, 7: {}, 3: {}}, ValueError, "env_id must be in 0 to 3"),
        ([{}, {}], TypeError, "dict"),
        ({0: {}, 1: 3, 2: {}, 3: {}}, TypeError, "env 1 must be a dict"),
        ({"a": {}}, TypeError, "env_id must be integers"),
    ],
)
def test_bad_reset_params_are_refused_before_anything_is_sent(call, param, error, message):
    with manager() as envs:
        if call == "reset":
            envs.launch()
        with pytest.raises(error, match=message):
            getattr(envs, call)(param)
        if call == "reset":
            assert envs.resets == [1] * 4
            envs.reset({})
            assert envs.resets == [1] * 4
        else:
            with pytest.raises(ValueError, match="all 4 envs"):
                envs.launch({0: {}})
            assert envs.closed


# ---- seed ------------------------------------------------------------------------------------


def alone(seed):
    return Obedient().reset(seed=seed)[0][3]


@WORKERS
def test_seed_int_list_dict(num_workers):
    with manager(num_workers=num_workers) as envs:
        envs.seed(7)
        envs.launch()
        assert envs.seeds == [[7], [8], [9], [10]]
        assert envs.ready_obs[2][3] == alone(9)
        envs.reset()  # it is used once
        assert envs.seeds[0] == [7, None]
        envs.seed([np.int64(1), 2, None, 4])
        envs.reset({0: {}, 2: {}})
        assert (envs.seeds[0][-1], envs.seeds[2][-1]) == (1, None)
        envs.seed({0: 5})
        envs.reset()
        assert [seeds[-1] for seeds in envs.seeds] == [5, 2, None, 4]


@pytest.mark.deep
def test_seed_is_used_by_the_next_reset_be_it_automatic():
    with manager(num_envs=2) as envs:
        envs.launch()
        envs.seed(3)
        envs.step({0: END, 1: 0})
        while 0 not in envs.ready_obs:
            pass
        assert envs.seeds == [[None, 3], [None]]
        envs.reset()
        assert envs.seeds == [[None, 3, None], [None, 4]]


@pytest.mark.deep
def test_seed_of_reset_param_comes_first():
    with manager(num_envs=2) as envs:
        envs.seed(3)
        envs.launch({0: {"seed": 11}, 1: {}})
        assert envs.seeds == [[11], [4]]


def dynamic(seed, count):
    """The seeds that DI-engine's envs give themselves."""
    random = np.random.RandomState(seed)
    return [seed + 100 * random.randint(1, 1000) for _ in range(count)]


@pytest.mark.deep
@pytest.mark.parametrize("inplace", [True, False])
def test_dynamic_seed_is_another_one_for_every_reset(inplace):
    with manager(num_envs=2, reset_inplace=inplace) as envs:
        envs.seed(3, dynamic_seed=True)
        envs.launch()
        for _ in range(3):
            while len(envs.ready_obs) < 2:
                pass
            envs.step({0: END, 1: END})
        envs.reset()
        resets = 4 if not inplace else 5
        assert envs.seeds[0][:resets] == dynamic(3, resets)
        assert envs.seeds[1][:resets] == dynamic(4, resets)
        envs.seed(3, dynamic_seed=False)
        envs.reset()
        envs.reset()
        assert envs.seeds[0][-2:] == [3, None]


@pytest.mark.deep
def test_dynamic_seed_is_passed_on_to_envs_that_seed_themselves():
    with manager(env_fns=[OfDIEngine] * 2) as envs:
        envs.seed(3, dynamic_seed=False)
        envs.launch()
        assert envs.seeded == [[(3, False)], [(4, False)]]
        envs.reset()
        envs.seed({1: 9})
        envs.reset()
        assert envs.seeded == [[(3, False)], [(4, False), (9, True)]]


@pytest.mark.deep
def test_seed_reaches_the_action_space():
    with manager(num_envs=2) as envs:
        envs.seed(3)
        envs.launch()
        space = gym.spaces.Discrete(100, seed=3)
        assert envs.random_action() == {0: space.sample(), 1: space.sample()}


@pytest.mark.deep
@pytest.mark.parametrize(
    ("seed", "error", "message"),
    [
        ([1, 2], ValueError, "length must match num_envs=4"),
        ({9: 1}, ValueError, "env_id must be in 0 to 3"),
        ({0: "x"}, TypeError, "env 0"),
        ("x", ValueError, "seed must be an int"),
        (1.5, TypeError, "seed must be an int"),
        ([1, -2, 3, 4], ValueError, "must not be negative"),
        (-1, ValueError, "negative"),
    ],
)
def test_seed_is_validated(seed, error, message):
    with manager() as envs:
        envs.seed(1)
        with pytest.raises(error, match=message):
            envs.seed(seed)
        with pytest.raises(TypeError, match="dynamic_seed"):
            envs.seed(1, dynamic_seed=3)
        envs.launch()
        assert envs.seeds == [[1], [2], [3], [4]]


# ---- ready_env, ready_obs, ready_obs_id, ready_imgs ------------------------------------------


@pytest.mark.parametrize("kind", [AsyncSubprocessEnvManager, *deep(SyncSubprocessEnvManager)])
def test_ready_env_ready_obs_ready_obs_id(kind):
    door = gate()
    with manager(kind, env_fns=obedient(3, gate=door), num_workers=3, wait_num=2,
                 step_wait_timeout=None) as envs:  # fmt: skip
        envs.launch()
        assert envs.ready_env == envs.ready_obs_id == list(envs.ready_obs) == [0, 1, 2]
        assert all(obs.shape == (4,) for obs in envs.ready_obs.values())
        if kind is AsyncSubprocessEnvManager:
            envs.step({0: WAIT, 1: 0, 2: 0})
            assert envs.ready_env == envs.ready_obs_id == [1, 2]
            assert envs.active_env == [0, 1, 2]
            door.set()
            envs.step({})
            assert envs.ready_env == [0, 1, 2]


@pytest.mark.deep
def test_ready_obs_waits_until_at_least_one_is_ready():
    with manager(num_envs=3, num_workers=3) as envs:
        envs.launch()
        for _ in range(20):
            envs.step({env: END for env in envs.ready_obs})
            assert len(envs.ready_obs) >= 1
        assert sum(envs.resets) - 3 == sum(envs.asked)


@pytest.mark.deep
def test_ready_imgs_with_a_render_mode():
    with manager(env_fns=obedient(2, render_mode="rgb_array")) as envs:
        envs.launch()
        envs.step({1: 0})
        frames = envs.ready_imgs
        assert sorted(frames) == [0, 1]
        assert (frames[1] == 11).all() and frames[0].shape == (2, 3, 3)
        envs.step({0: END, 1: END})
        assert envs.ready_imgs.keys() == {0, 1}
    with manager(env_fns=obedient(2, render_mode="depth_array")) as envs:
        envs.launch()
        with pytest.raises(ValueError, match="made with render_mode='depth_array'"):
            _ = envs.ready_imgs
        with manager(num_envs=1) as closed, pytest.raises(ManagerClosedError):
            _ = closed.ready_imgs


# ---- step ------------------------------------------------------------------------------------


@pytest.mark.deep
@KINDS_AND_WORKERS
def test_step_returns_timesteps_by_env_id(kind, num_workers):
    with manager(kind, num_workers=num_workers, wait_num=4, step_wait_timeout=None) as envs:
        envs.seed(0)
        envs.launch()
        timesteps = envs.step({2: 1, 0: 3})
        assert set(timesteps) == {0, 2}
        if kind is SyncSubprocessEnvManager:
            assert list(timesteps) == [2, 0]
        step = timesteps[0]
        assert type(step) is BaseEnvTimestep
        assert (step.obs, step.reward, step.done, step.info) == tuple(step)
        assert step.obs[:3].tolist() == [0, 1, 1] and step.reward == 3.0 and step.done is False
        assert same(envs.ready_obs[0], step.obs)
        assert envs.asked == [1, 0, 1, 0]


class Both(Obedient):
    """Ends at the limit, and by itself."""

    def step(self, action):
        *results, _, _, info = super().step(action)
        return *results, True, True, info


def test_done_is_terminated_or_truncated_and_info_says_which():
    with manager(env_fns=[*obedient(3), Both]) as envs:
        envs.launch()
        steps = envs.step({0: TRUNCATE, 1: END, 2: 0, 3: 0})
        assert [step.done for step in steps.values()] == [True, True, False, True]
        assert steps[3].info["TimeLimit.truncated"] is False
        assert steps[0].info["TimeLimit.truncated"] is True
        assert steps[1].info["TimeLimit.truncated"] is False
        assert "TimeLimit.truncated" not in steps[2].info
        assert steps[0].obs[:3].tolist() == [0, 1, 1]  # the last observation of the episode


@pytest.mark.deep
def test_rewards_that_are_arrays():
    with manager(num_envs=2, reset_inplace=True) as envs:
        envs.launch()
        steps = envs.step({0: ARRAY, 1: 1})
        assert steps[0].reward.tolist() == [1.0, 0.0] and steps[1].reward == 1.0
        for _ in range(2):
            envs.step({0: 0})
        last = envs.step({0: ARRAY})[0]
        assert last.done and last.reward.tolist() == [1.0, 0.0] and last.info["final_obs"][2] == 4


@pytest.mark.deep
def test_numbers_may_be_arrays_of_one():
    """As policies of DI-engine give them."""
    with manager(num_envs=2) as envs:
        envs.launch()
        steps = envs.step({0: np.array([3]), 1: np.array(4)})
        assert [step.reward for step in steps.values()] == [3.0, 4.0]
    space = gym.spaces.Dict(kind=gym.spaces.Discrete(3), value=gym.spaces.Box(-1, 1, (1,)))
    with manager(env_fns=[lambda: Sampled(5, gym.spaces.Discrete(2), space)] * 2) as envs:
        envs.launch()
        action = {"kind": np.array([2]), "value": np.array([0.5], np.float32)}
        given = envs.step({0: action, 1: action})[1].info["given"]
        assert given["kind"] == 2 and given["value"].shape == (1,)
        with pytest.raises(ValueError, match=r"must be a dict .* places in the envs \[1\]"):
            envs.step({1: 3})
        assert envs.count == [1, 1]


@pytest.mark.deep
@pytest.mark.parametrize("shared_memory", [True, False])
def test_actions_of_another_shape_are_handed_on(shared_memory):
    box = gym.spaces.Box(-1, 1, (1,), np.float32)
    env_fns = [lambda: Sampled(5, gym.spaces.Discrete(2), box)] * 2
    with manager(env_fns=env_fns, shared_memory=shared_memory) as envs:
        envs.launch()
        steps = envs.step({1: np.zeros(3, np.float32), 0: np.ones(3, np.float32)})
        assert [step.info["given"].tolist() for step in steps.values()] == [[0] * 3, [1] * 3]


@pytest.mark.deep
@pytest.mark.parametrize("shared_memory", [True, False])
def test_envs_of_di_engine_get_numbers_as_they_were_given(shared_memory):
    """Some of them take nothing but arrays."""
    with manager(env_fns=[OfDIEngine] * 4, shared_memory=shared_memory) as envs:
        envs.launch()
        assert envs.action_space == OfDIEngine.action_space
        envs.step({0: np.array([2]), 1: np.array(1), 2: 1, 3: np.int32(2)})
        assert [np.shape(action) for action in envs.action] == [(1,), (), (), ()]
        assert [type(action) for action in envs.action] == [np.ndarray] * 2 + [np.int64] * 2
        assert [int(np.ravel(action)[0]) for action in envs.action] == [2, 1, 1, 2]
        for action, error in (([1, 2], ValueError), (0.5, TypeError), ("x", TypeError)):
            with pytest.raises(
                error, match=r"no integer, as Discrete\(3\) needs. Nothing was sent"
            ):
                envs.step({1: action})


@pytest.mark.deep
@pytest.mark.parametrize(
    ("actions", "error", "message"),
    [
        ([1, 2], TypeError, "dict"),
        ({9: 0}, ValueError, "env_id must be in 0 to 3"),
        ({-1: 0}, ValueError, "env_id must be in 0 to 3"),
        ({0: 0, 1: 0, 2: 0}, EnvStateError, r"0: RUN, 1: NEED_RESET, 2: RUN"),
        ({"0": 1}, TypeError, "env_id must be integers"),
    ],
)
def test_only_envs_in_run_are_stepped_and_bad_actions_are_refused(actions, error, message):
    with manager(auto_reset=False) as envs:
        with pytest.raises(ManagerClosedError):
            envs.step({0: 0})
        envs.launch()
        envs.step({1: END})
        with pytest.raises(error, match=message):
            envs.step(actions)
        assert envs.asked == [0, 1, 0, 0]
        assert list(envs.step({0: 0, 2: 0})) == [0, 2]


@pytest.mark.deep
def test_an_env_in_flight_is_not_stepped_again():
    door = gate()
    with manager(AsyncSubprocessEnvManager, env_fns=obedient(2, gate=door), num_workers=2,
                 wait_num=1) as envs:  # fmt: skip
        envs.launch()
        envs.step({0: WAIT, 1: 0})
        with pytest.raises(EnvStateError, match=r"0: RUN \(in flight\)"):
            envs.step({0: 0})
        door.set()
        assert list(envs.step({})) == [0]


def test_async_step_returns_when_wait_num_are_ready():
    door = gate()
    with manager(AsyncSubprocessEnvManager, env_fns=obedient(4, gate=door), num_workers=4,
                 wait_num=2, step_wait_timeout=None) as envs:  # fmt: skip
        envs.launch()
        got = list(envs.step({0: WAIT, 1: WAIT, 2: 0, 3: 0}))
        assert sorted(got) == [2, 3]
        door.set()
        while len(got) < 4:  # the rest come with a later step
            got += envs.step({})
        assert sorted(got) == [0, 1, 2, 3]


@pytest.mark.deep
def test_async_step_returns_when_the_time_is_up():
    door = gate()
    with manager(AsyncSubprocessEnvManager, env_fns=obedient(4, gate=door), num_workers=4,
                 wait_num=4, step_wait_timeout=0.05) as envs:  # fmt: skip
        envs.launch()
        got = list(envs.step({0: WAIT, 1: 0, 2: WAIT, 3: 0}))
        while len(got) < 2:
            got += envs.step({})
        assert sorted(got) == [1, 3]
        door.set()
        while len(got) < 4:
            got += envs.step({})
        assert sorted(got) == [0, 1, 2, 3]


@pytest.mark.deep
def test_async_step_returns_at_least_one_that_is_not_done():
    door = gate()
    with manager(AsyncSubprocessEnvManager, env_fns=obedient(3, gate=door), num_workers=3,
                 wait_num=1, step_wait_timeout=0.0) as envs:  # fmt: skip
        envs.launch()
        door.set()
        steps = envs.step({0: END, 1: END, 2: WAIT})
        assert not steps[2].done
        while len(steps) < 3:
            steps |= envs.step({})
        while len(envs.ready_obs) < 3:
            pass
        steps = envs.step(dict.fromkeys(range(3), END))  # or all are finished
        assert len(steps) == 3 and all(step.done for step in steps.values())


# ---- equality with envs that are stepped alone -----------------------------------------------

SPACES = [
    gym.spaces.Discrete(9),
    gym.spaces.Box(-1, 1, (2, 3), np.float32),
    gym.spaces.Dict(a=gym.spaces.MultiBinary(3), b=gym.spaces.Tuple([gym.spaces.Discrete(3)])),
    gym.spaces.Tuple([gym.spaces.Box(0, 255, (4,), np.uint8), gym.spaces.Text(5)]),
]


@pytest.mark.deep
@settings(max_examples=15, deadline=None)
@given(
    kind=st.sampled_from([SyncSubprocessEnvManager, AsyncSubprocessEnvManager]),
    num_envs=st.integers(1, 5),
    num_workers=st.sampled_from([0, 2, 5]),
    observed=st.sampled_from(SPACES),
    given_=st.sampled_from(SPACES),
    inplace=st.booleans(),
    shared=st.booleans(),
    copy=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_every_env_is_as_if_stepped_alone(
    kind, num_envs, num_workers, observed, given_, inplace, shared, copy, seed
):
    fns = [lambda i=i: Sampled(i, observed, given_) for i in range(num_envs)]
    twins = [sync_env([fn], AutoresetMode.DISABLED, observation_mode="same") for fn in fns]
    actions = pickle.loads(pickle.dumps(given_))
    actions.seed(seed)

    def first(twin, batch):
        return pickle.loads(pickle.dumps(next(iterate(twin.observation_space, batch))))

    cfg = {
        "num_workers": min(num_workers, num_envs), "reset_inplace": inplace,
        "shared_memory": shared, "copy_on_get": copy, "wait_num": 2,
    }  # fmt: skip
    with closing(kind(fns, cfg)) as envs:
        envs.seed(seed)
        envs.launch()
        now = [first(twin, twin.reset(seed=seed + i)[0]) for i, twin in enumerate(twins)]
        sent = {}
        for _ in range(12):
            ready = envs.ready_obs
            assert all(equal(ready[env], now[env]) for env in ready)
            chosen = {env: actions.sample() for env in ready}
            sent.update(chosen)
            for env, step in envs.step(chosen).items():
                twin = twins[env].envs[0]
                obs, reward, terminated, truncated, info = twin.step(sent[env])
                obs = pickle.loads(pickle.dumps(obs))
                done = terminated or truncated
                assert equal(step.info.pop("given"), info["given"])
                assert (step.reward, step.done) == (reward, done)
                if done:
                    assert step.info["TimeLimit.truncated"] is (truncated and not terminated)
                    now[env] = twin.reset()[0]
                    assert equal(step.info["final_obs"] if inplace else step.obs, obs)
                    assert not inplace or equal(step.obs, now[env])
                else:
                    now[env] = obs
                    assert equal(step.obs, obs)
    for twin in twins:
        twin.close()

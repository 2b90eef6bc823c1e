"""DI-engine's env managers: the arrows of the table in the docs that are no failures."""

import re
from contextlib import closing
from pathlib import Path

import pytest
from ding_envs import ABNORMAL, END, gate, obedient
from tables import deep

from shmvec.adapters.ding import (
    AsyncSubprocessEnvManager,
    EnvState,
    EnvStateError,
    SyncSubprocessEnvManager,
)

VOID, INIT, RUN, RESET, DONE, ERROR, NEED_RESET = EnvState


def manager(num_envs=2, kind=SyncSubprocessEnvManager, gate=None, **cfg):
    return closing(kind(obedient(num_envs, gate=gate), {"num_workers": num_envs, **cfg}))


class Watched(SyncSubprocessEnvManager):
    """Notes the states when it is asked to reset."""

    def reset(self, reset_param=None):
        self.__dict__.setdefault("seen", []).append(self.env_states)
        super().reset(reset_param)


@pytest.mark.deep
def test_the_states_are_those_of_di_engine():
    assert [(state.name, state.value) for state in EnvState] == [
        ("VOID", 0), ("INIT", 1), ("RUN", 2), ("RESET", 3), ("DONE", 4), ("ERROR", 5),
        ("NEED_RESET", 6),
    ]  # fmt: skip


@pytest.mark.deep
def test_void_to_init_by_launch_and_init_to_run():
    with manager(kind=Watched) as envs:
        assert envs.env_states == {0: VOID, 1: VOID}
        envs.launch()
        assert envs.seen == [{0: INIT, 1: INIT}]
        assert envs.env_states == {0: RUN, 1: RUN}


@pytest.mark.deep
def test_run_to_reset_to_run_at_an_episodes_end():
    door = gate()
    with manager(gate=door) as envs:
        door.set()
        envs.launch({0: {"stat": "gate"}, 1: {}})
        door.clear()
        assert envs.step({0: END, 1: 0})[0].done
        assert envs.env_states == {0: RESET, 1: RUN}
        assert list(envs.ready_obs) == [1]
        with pytest.raises(EnvStateError, match="0: RESET"):
            envs.step({0: 0})
        door.set()
        while 0 not in envs.ready_obs:
            pass
        assert envs.env_states == {0: RUN, 1: RUN}


def test_run_to_run_if_reset_is_in_place():
    with manager(reset_inplace=True) as envs:
        envs.seed(0)
        envs.launch()
        step = envs.step({0: END, 1: 0})[0]
        assert step.done and envs.env_states == {0: RUN, 1: RUN}
        assert envs.ready_obs[0] is step.obs
        assert step.obs[:3].tolist() == [0, 2, 0] and step.info["final_obs"][:3].tolist() == [
            0, 1, 1,
        ]  # fmt: skip
        assert envs.reset_infos[0] == {"stat": None, "options": None}


@pytest.mark.deep
def test_reset_inplace_with_auto_reset_false_is_refused():
    with pytest.raises(ValueError, match="reset_inplace is unavailable"):
        manager(reset_inplace=True, auto_reset=False)


@pytest.mark.deep
def test_run_to_reset_if_the_reset_in_place_fails():
    with manager(reset_inplace=True, max_retry=2, retry_waiting_time=0) as envs:
        envs.launch({0: {"stat": "error later"}, 1: {}})
        step = envs.step({0: END, 1: 0})[0]
        assert step.done and step.obs[:3].tolist() == [0, 1, 1] and "final_obs" not in step.info
        assert envs.env_states == {0: RESET, 1: RUN}
        while 0 not in envs.ready_obs:
            pass
        assert envs.env_states == {0: RUN, 1: RUN} and envs.resets == [3, 1]


def test_run_to_need_reset_to_run_if_auto_reset_is_off():
    with manager(auto_reset=False, episode_num=2) as envs:
        envs.launch()
        envs.step({0: END, 1: 0})
        assert envs.env_states == {0: NEED_RESET, 1: RUN}
        with pytest.raises(EnvStateError, match="0: NEED_RESET"):
            envs.step({0: 0})
        assert envs.resets == [1, 1]
        envs.reset({0: {}})
        assert envs.env_states == {0: RUN, 1: RUN}
        envs.step({0: END, 1: END})
        assert envs.env_states == {0: DONE, 1: NEED_RESET}


@pytest.mark.parametrize("inplace", [False, *deep(True)])
def test_run_to_done_after_episode_num_episodes(inplace):
    with manager(episode_num=2, reset_inplace=inplace) as envs:
        envs.launch()
        assert (envs.env_num, envs.active_env, envs.done) == (2, [0, 1], False)
        envs.step({0: END})
        while 0 not in envs.ready_obs:
            pass
        envs.step({0: END, 1: END})
        assert envs.env_states[0] is DONE and envs.env_state_done(0)
        assert envs.episode_count == {0: 2, 1: 1}
        with pytest.raises(EnvStateError, match="0: DONE"):
            envs.step({0: 0})
        while 1 not in envs.ready_obs:
            pass
        assert envs.active_env == [1] and not envs.done
        envs.step({1: END})
        assert envs.done and envs.ready_env == envs.active_env == envs.ready_obs_id == []
        assert envs.ready_obs == envs.step({}) == {}


@pytest.mark.deep
def test_done_to_run_by_reset_for_one_more_episode():
    with manager(episode_num=1) as envs:
        envs.launch()
        envs.step({0: END, 1: END})
        envs.reset({0: {}})
        assert envs.env_states == {0: RUN, 1: DONE} and not envs.done
        envs.step({0: END})
        assert envs.done and envs.episode_count == {0: 2, 1: 1}
        envs.close()
        envs.launch()
        assert envs.episode_count == {0: 0, 1: 0}


@pytest.mark.deep
def test_every_state_to_void_by_close():
    door = gate()
    with manager(6, AsyncSubprocessEnvManager, door, episode_num=2, auto_reset=True, wait_num=5,
                 step_wait_timeout=None) as envs:  # fmt: skip
        door.set()
        envs.launch({env: {"stat": "gate"} if env == 1 else {} for env in range(6)})
        envs.step({2: END})
        while 2 not in envs.ready_obs:
            pass
        door.clear()
        envs.step({1: END, 2: END, 3: ABNORMAL, 4: 0, 5: 0})
        assert list(envs.env_states.values()) == [RUN, RESET, DONE, ERROR, RUN, RUN]
        door.set()
        envs.close()
        assert set(envs.env_states.values()) == {VOID}


@pytest.mark.deep
def test_the_table_in_the_docs_has_all_states():
    page = Path(__file__).parents[2] / "docs" / "coming-from" / "di-engine.md"
    arrows = re.findall(r"^\| ([A-Z_]+|any) \| ([A-Z_]+) \|", page.read_text(), re.M)
    assert {name for arrow in arrows for name in arrow} == {"any", *EnvState.__members__}

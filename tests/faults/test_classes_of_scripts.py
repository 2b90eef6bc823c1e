"""Classes that a script defines: what workers return and raise is of the script's own classes."""

import pytest
from scripts import succeeds

pytestmark = pytest.mark.deep

SCRIPT = """
    import enum
    import gymnasium as gym
    import numpy as np
    from shmvec import ShmVectorEnv

    class Mode(enum.Enum):
        FAST = 1

    class State:
        made = 0

        class Part:
            pass

        def __init__(self, mode=Mode.FAST):
            self.mode, self.part = mode, State.Part()
            self.picture = np.zeros(50_000)

    class Lost(Exception):
        def __init__(self, first, second):
            super().__init__(first, second)

    class Custom(gym.spaces.Discrete):
        pass

    class Env(gym.Env):
        observation_space = Custom(3)
        action_space = gym.spaces.Discrete(3)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            assert (options or {}).get("mode", Mode.FAST) is Mode.FAST
            return 0, {"mode": Mode.FAST}

        def step(self, action):
            if action == 2:
                raise Lost(1, 2)
            return 0, 0.0, False, False, {}

        def take(self, state):
            assert type(state) is State and type(state.part) is State.Part
            assert state.mode is Mode.FAST and self.mode is Mode.FAST
            return state

    def raises(call, *args):
        try:
            call(*args)
        except Lost as error:
            return error
        raise AssertionError("nothing was raised")

    def check(**options):
        envs = ShmVectorEnv([Env] * 2, **options)
        assert type(envs.single_observation_space) is Custom
        _, infos = envs.reset(options={"mode": Mode.FAST})
        assert infos["mode"][0] is Mode.FAST
        envs.set_attr("mode", Mode.FAST)
        State.made = 7
        for state in envs.call("take", State()):
            assert type(state) is State and type(state.part) is State.Part
            assert state.mode is Mode.FAST
        assert State.made == 7
        assert raises(envs.step, [0, 2]).args == (1, 2)
        envs.close()
"""


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_forked_workers_have_the_classes_of_the_script(num_workers):
    succeeds(SCRIPT, f"    check(num_workers={num_workers}, context='fork')\n")


def test_a_class_that_the_script_has_defined_later_goes_by_value():
    later = """
    envs = ShmVectorEnv([Env] * 2, num_workers=2, context="fork")

    class Speed(enum.Enum):
        SLOW = 2

    class Later:
        value = 3

        def __call__(self):
            return self.value

    envs.set_attr("function", Later())
    assert envs.call("function") == (3, 3)
    envs.set_attr("speed", Speed.SLOW)
    assert envs.get_attr("speed") == (Speed.SLOW, Speed.SLOW)
    envs.close()
    """
    succeeds(SCRIPT, later)

"""Classes that cannot be imported are the same ones in the parent and all its workers."""

import re
import sys
import textwrap
from contextlib import closing
from types import ModuleType

import pytest
from envs import Counter
from processes import run_script
from tables import deep

from shmvec import ShmVectorEnv

CLASSES = """
class Token:
    made = 0

    def __init__(self):
        type(self).made += 1

    def count(self):
        global total
        total += 1

class Mistake(Exception):
    pass
"""

SCRIPT = """
    import gymnasium as gym
    import numpy as np
    from shmvec import ShmVectorEnv
    from shmvec.states import StateAccess

    total = 0

    CLASSES

    def inside():
        CLASSES

        return Token, Mistake

    def check(Token, Mistake, context):
        class Env(gym.Env):
            observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
            action_space = gym.spaces.Discrete(2)
            token = None

            def reset(self, *, seed=None, options=None):
                self.token = Token()
                return np.zeros(1, np.float32), {"token": self.token}

            def step(self, action):
                return np.zeros(1, np.float32), 0.0, False, False, {"token": Token()}

            def give(self):
                return {"tokens": [self.token]}

            def holds_one(self):
                return type(self.token) is Token

            def fail(self):
                raise Mistake("so")

            def take_state(self):
                return StateAccess(self, True).get()

            def set_state_of(self, state):
                StateAccess(self, True).set(state)

        global total
        total = 0
        envs = ShmVectorEnv([Env] * 2, num_workers=2, context=context)
        method = Token.count
        infos = envs.reset()[1], envs.step([0, 0])[4]
        tokens = [token for info in infos for token in info["token"]]
        tokens += [token for given in envs.call("give") for token in given["tokens"]]
        assert len(tokens) == 6 and all(type(token) is Token for token in tokens), tokens
        # It is still as it was, and knows its globals.
        assert Token.made == 0 and Token.count is method
        tokens[0].count()
        assert total == 1

        states = envs.call("take_state")
        envs.call_some([0], "set_state_of", states[1])
        envs.set_attr("token", [tokens[0]] * 2)
        assert envs.call("holds_one") == (True, True)
        try:
            envs.call("fail")
        except Mistake as error:
            assert error.args == ("so",)
            assert f'File "{check.__code__.co_filename}"' in str(error.__cause__)
        envs.close()

    if __name__ == "__main__":
        check(Token, Mistake, {context!r})
        check(*inside(), {context!r})
        print("all are the same")
"""


@pytest.mark.parametrize("context", ["forkserver", *deep("fork", "spawn")])
def test_classes_of_scripts_and_functions_are_the_same_everywhere(context, tmp_path):
    text = re.sub(r"( +)CLASSES", lambda found: textwrap.indent(CLASSES, found[1]), SCRIPT)
    script = run_script(text.replace("{context!r}", repr(context)))
    output, errors = script.communicate(timeout=250)
    assert output == "all are the same\n", errors
    assert "Error" not in errors


class Base:
    known = []

    def __init_subclass__(cls):
        Base.known.append(cls.__name__)


@pytest.mark.parametrize("context", ["fork", *deep("spawn", "forkserver")])
def test_classes_that_are_known_are_not_made_twice(context):
    class Answer(Base):
        pass

    class Env(Counter):
        def answers(self):
            return [Answer()]

    Base.known.clear()
    with closing(ShmVectorEnv([Env] * 2, context=context, num_workers=2)) as envs:
        for _ in range(3):
            assert all(type(answer) is Answer for (answer,) in envs.call("answers"))
    assert Base.known == []


@pytest.mark.deep
def test_classes_that_have_another_name_where_they_are_said_to_be(monkeypatch):
    elsewhere = ModuleType("elsewhere")
    monkeypatch.setitem(sys.modules, "elsewhere", elsewhere)
    exec(
        "from collections import namedtuple\n"
        "Point = namedtuple('P', 'x y')\n"
        "class Kept:\n    class Inner:\n        pass\n"
        "first = Kept\n"
        "class Kept:\n    pass\n",
        vars(elsewhere),
    )
    nameless = {}
    exec("Nameless = type('Nameless', (), {})", nameless)  # it has no __module__ at all
    kinds = [elsewhere.first, elsewhere.first.Inner, nameless["Nameless"]]

    class Env(Counter):
        def answers(self):
            return [elsewhere.Point(1, 2), *(kind() for kind in kinds)]

    with closing(ShmVectorEnv([Env] * 2, context="fork", num_workers=2)) as envs:
        for answer in envs.call("answers"):
            assert [type(each) for each in answer] == [elsewhere.Point, *kinds]

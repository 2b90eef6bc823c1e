"""What AsyncVectorEnv of Gymnasium 1.4.0 gets wrong: each reproduced there, each right here.

docs/differences.md lists them. Hangs are bounded by the deadline that every test has.
"""

import builtins
import json
import re
import sys
import threading
import traceback
import warnings
from contextlib import closing
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from envs import Counter, Failing, Scripted, TwoArguments, Unpicklable
from equality import same
from gymnasium.vector import SyncVectorEnv
from tables import deep, first, paired

from shmvec import RemoteTraceback, ShmVectorEnv

WORKERS = pytest.mark.parametrize("num_workers", [2, *deep(0)])
SHARED = pytest.mark.parametrize("shared_memory", [True, *deep(False)])


@WORKERS
@SHARED
@pytest.mark.parametrize(
    "space",
    first([gym.spaces.Text(6), gym.spaces.OneOf([gym.spaces.Discrete(50), gym.spaces.Text(5)])]),
    ids=["Text", "OneOf"],
)
def test_text_and_one_of_are_updated_in_shared_memory(num_workers, shared_memory, space):
    make = [lambda: Scripted(space, gym.spaces.Discrete(2), [9])] * 3
    envs = ShmVectorEnv(make, shared_memory=shared_memory, num_workers=num_workers)
    with closing(envs), closing(SyncVectorEnv(make)) as sync:
        assert same(envs.reset(seed=1), sync.reset(seed=1))
        seen = set()
        for _ in range(4):
            mine = envs.step([0, 0, 0])
            assert same(mine, sync.step([0, 0, 0]))
            seen.add(str(mine[0]))
        assert len(seen) == 4


@pytest.mark.deep
@WORKERS
@SHARED
def test_a_reset_clears_the_autoreset_flag(num_workers, shared_memory):
    envs = ShmVectorEnv(
        [lambda: Counter(1)] * 2, shared_memory=shared_memory, num_workers=num_workers
    )
    with closing(envs):
        envs.reset()
        assert envs.step([0, 0])[2].all()
        envs.reset()
        assert envs.step([0, 0])[0][:, 0].tolist() == [1, 1]  # a step, not another reset


class Frozen(Exception):
    """Nothing can be set, nor read, by the ways of its class."""

    args = __dict__ = property()

    def __setattr__(self, name, value):
        raise AttributeError("frozen")


@pytest.mark.deep
@WORKERS
def test_an_exception_that_cannot_be_pickled_does_not_hang(num_workers):
    class Holding(Exception):
        """Its argument cannot be pickled, either."""

    make = [
        lambda: Failing("step", Unpicklable("x"), at=2),
        lambda: Failing("step", Holding(threading.Lock()), at=4),
        lambda: Failing("step", Frozen("y"), at=6),
    ]
    with closing(ShmVectorEnv(make, num_workers=num_workers)) as envs:
        envs.reset()
        envs.step([0, 0, 0])
        with pytest.raises(Unpicklable, match="x"):  # its type and arguments can be
            envs.step([0, 0, 0])
        envs.step([0, 0, 0])
        with pytest.raises(RuntimeError, match="env 1 raised .* cannot be pickled: .*Holding"):
            envs.step([0, 0, 0])
        envs.step([0, 0, 0])
        with pytest.raises(Frozen, match="y"):
            envs.step([0, 0, 0])


class Slots(Exception):
    """Has a slot, and a constructor that makes another argument of its own."""

    __slots__ = ("code",)

    def __init__(self, code):
        super().__init__(f"code {code}")
        self.code = code


class Missing(FileNotFoundError):
    """Is made of other arguments than its members."""

    def __init__(self, *, path):
        super().__init__(2, "missing", path)


class Status(SystemExit):
    """The program's status was 0 where the code was lost."""

    def __init__(self, *, code):
        super().__init__(code)


class Once(Exception):
    """Its constructor acts, and so must not be called a second time."""

    def __init__(self, made):
        super().__init__(made)
        if made.pop():
            sys.exit(3)

    def __reduce__(self):
        sys.exit(4)


def exceptions():
    """One of each class of the standard library's builtins, and others, with all it can have."""
    arguments = {
        UnicodeDecodeError: ("ascii", b"\xff", 0, 1, "no"),
        UnicodeEncodeError: ("ascii", "\xe9", 0, 1, "no"),
        UnicodeTranslateError: ("\xe9", 0, 1, "no"),
        BlockingIOError: (11, "busy", 5),
        **dict.fromkeys([SyntaxError, IndentationError, TabError], ("bad", ("f.py", 2, 3, "a b"))),
    }
    found = [Slots(3), TwoArguments(7, "so"), json.JSONDecodeError("bad", "{", 1)]
    found += [
        ValueError("100 % of %d and %s"),
        Missing(path="a file"),
        Status(code=9),
        Once([True, False]),
    ]
    for kind in vars(builtins).values():
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            continue
        if "Group" in kind.__name__:
            given = ("all", [ValueError(1), Missing(path="k")])
        elif issubclass(kind, OSError):
            given = arguments.get(kind, (2, "missing", "a file", None, "another"))
        else:
            given = arguments.get(kind, (9,))
        error = kind(*given)
        for name in ("name", "path", "print_file_and_line", "end_lineno"):
            if hasattr(error, name):
                setattr(error, name, name)
        error.own = [1]
        error.__notes__ = ["a note"]
        found.append(error)
    return found


def look(error):
    """What an exception shows; an AttributeError's obj is not sent."""
    names = {name for name in dir(error) if name.strip("_") == name} - {"obj", "exceptions"}
    shown = {name: repr(getattr(error, name, None)) for name in names}
    shown = {name: text for name, text in shown.items() if " method " not in text}
    return type(error), str(error), repr(error.args), error.__notes__[:1], shown


@WORKERS
def test_every_exception_is_what_it_was(num_workers):
    class Raises(Counter):
        def step(self, action):
            error = exceptions()[self.count]
            super().step(action)
            raise error

    options = {"num_workers": min(1, num_workers), "log_errors": False}
    with closing(ShmVectorEnv([Raises], **options)) as envs:
        envs.reset()
        for expected in exceptions():
            if not hasattr(expected, "__notes__"):
                expected.__notes__ = []
            with pytest.raises(type(expected)) as caught:
                envs.step([0])
            caught.value.__dict__.setdefault("__notes__", [])
            assert look(caught.value) == look(expected)
            assert isinstance(caught.value.__cause__, RemoteTraceback)


@pytest.mark.deep
@WORKERS
def test_infos_that_gymnasium_cannot_gather_do_no_harm(num_workers):
    class Odd(Counter):
        def step(self, action):
            observation, reward, terminated, truncated, _ = super().step(action)
            info = {"a": {1, 2, 3} if action == 2 else np.zeros(int(action))}
            return observation, reward, terminated, truncated, info

    envs = ShmVectorEnv([Odd] * 3, num_workers=num_workers)
    envs.reset()
    envs.step([1, 1, 1])
    with pytest.raises((TypeError, ValueError)):
        envs.step([1, 3, 2])  # arrays of two shapes, and a set
    infos = envs.step([1, 1, 1])[4]
    assert infos["a"].tolist() == [[0]] * 3
    envs.close()


@pytest.mark.deep
@WORKERS
@SHARED
def test_a_masked_first_reset(num_workers, shared_memory):
    envs = ShmVectorEnv([Counter] * 3, shared_memory=shared_memory, num_workers=num_workers)
    with closing(envs):
        mask = np.array([False, True, False])
        options = {"reset_mask": mask, "other": 1}
        observations, infos = envs.reset(seed=5, options=options)
        assert observations[:, 1].tolist() == [0, -1, 0]  # zeros where no env was reset
        assert infos["_reset"].tolist() == [False, True, False]
        assert options == {"reset_mask": mask, "other": 1}  # the caller's dict
        assert envs.get_attr("received") == ([], [{"other": 1}], [])


@pytest.mark.deep
@WORKERS
@pytest.mark.parametrize("seed", [np.int64(3), [np.int32(3), 4, np.uint8(5)], np.array([3, 4, 5])])
def test_seeds_of_any_integer_type(num_workers, seed):
    envs = ShmVectorEnv([Counter] * 3, num_workers=num_workers)
    with closing(envs):
        expected = envs.reset(seed=3)
        assert same(envs.reset(seed=seed)[0], expected[0])
        assert envs.np_random_seed == (3, 4, 5)


@pytest.mark.deep
@pytest.mark.parametrize(
    "num_workers, name", paired([0, 2], ["reset", "step", "close", "_setattr", "_check_spaces"])
)
def test_calling_what_is_no_method_to_call(num_workers, name):
    envs = ShmVectorEnv([Counter] * 2, num_workers=num_workers)
    with closing(envs):
        envs.reset()
        message = f"Trying to call function `{name}` with `call`, use `{name}` directly instead."
        with pytest.raises(ValueError, match=message):
            envs.call(name)
        envs.step([0, 0])


@pytest.mark.deep
@pytest.mark.parametrize("logs", [True, False])
def test_many_errors_are_logged_in_three_lines_or_none(logs):
    make = [Counter, *[lambda: Failing("step", ValueError("bad"), at=1)] * 7]
    with closing(ShmVectorEnv(make, num_workers=2, log_errors=logs)) as envs:
        envs.reset()
        with warnings.catch_warnings(record=True) as logged:
            warnings.simplefilter("always")
            with pytest.raises(ValueError, match="bad") as caught:
                envs.step([0] * 8)
    texts = [str(warning.message).removeprefix("\x1b[31mERROR: ") for warning in logged]
    assert [text.removesuffix("\x1b[0m") for text in texts] == logs * [
        "Received the following error from Worker-1 - Shutting it down",
        "and 6 more: envs 2 to 7",
        "Raising the last exception back to the main process.",
    ]
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == ["At the same time: envs 2 to 7: ValueError: bad"]


@pytest.mark.deep
def test_errors_are_logged_word_for_word_and_one_traceback_is_printed():
    """Gymnasium's tests look at the first argument of the warnings; a terminal shows their text."""
    make = [Counter, *[lambda i=i: Failing("step", ValueError(f"bad {i} %"), at=1) for i in (1, 2)]]
    with closing(ShmVectorEnv(make, num_workers=2)) as envs:
        envs.reset()
        with warnings.catch_warnings(record=True) as logged:
            warnings.simplefilter("always")
            with pytest.raises(ValueError, match="bad 1 %") as caught:
                envs.step([0, 9, 9])  # no actions of the space: there are notes
    logs, shown = ([text(each.message) for each in logged] for text in (lambda m: m.args[0], str))
    red = "\x1b[31mERROR: {}\x1b[0m"
    assert len(logs) == 5
    for i in (1, 2):
        line = red.format(f"Received the following error from Worker-{i} - Shutting it down")
        at = logs.index(line)
        pattern = re.escape("\x1b[31mERROR: Traceback (most recent call last):\n")
        assert re.fullmatch(rf"{pattern}(?s:.*)ValueError: bad {i} %\n\x1b\[0m", logs[at + 1])
        said = f"env {i} has raised ValueError: bad {i} % (no worker is shut down)"
        assert shown[at : at + 2] == [line, red.format(said)]
    assert logs[4] == shown[4] == red.format("Raising the last exception back to the main process.")
    assert {Path(each.filename) for each in logged} == {Path(__file__)}
    printed = "".join(traceback.format_exception(caught.value))
    assert printed.count("not in its space") == 1
    assert len(re.findall("File .*shmvec", printed)) <= 2, printed
    assert "worker.pyx" not in printed

"""The check: sick envs of many kinds, each with what ails it and what mends it; healthy ones."""

import json
from importlib.util import find_spec

import gymnasium as gym
import pytest
import sick_envs
from sick_envs import Well

import shmvec.__main__
from shmvec._commands.check import brief_check, time_finding
from shmvec._commands.probe import Facts
from shmvec.testing import check_env_fn

PROCESSES = "num_workers=num_envs"
OUTSIDE = "worker_environ="
# What is wrong, by which kinds of findings, with which option, and what is said of the first.
SICK = {
    "SharesAClassAttribute": (["one process"], PROCESSES, "observations differ"),
    "SharesAGlobal": (["one process"], PROCESSES, "observations differ"),
    "RendersAnothersFrame": (["one process"], PROCESSES, "frames differ"),
    "HangsAsSecond": (["one process"], PROCESSES, "hangs"),
    "CrashesAsSecond": (["one process"], PROCESSES, "SIGSEGV"),
    "ReturnsAnothersBuffer": (["buffers"], PROCESSES, "another one"),
    "FixedPort": (["one process", "two processes"], OUTSIDE, "Address already in use"),
    "FixedFile": (["one process", "two processes"], OUTSIDE, "differ"),
    "GlobalNumpy": (["global generators", "one process"], "worker_init=", "numpy.random"),
    "NeverSeeded": (
        ["same seed", "global generators", "one process"],
        "self.np_random",
        "in the same env",
    ),
    "GlobalRandom": (["global generators", "one process"], "worker_init=", "state of random"),
    "NotDeterministic": (["same seed"], "self.np_random", "observations differ"),
    "GoesOnWhereItWas": (["same seed"], "self.np_random", "in the same env"),
    "GoesOnAndShares": (["same seed", "one process"], "self.np_random", "in the same env"),
    "OutsideItsSpace": (["spaces"], "a wrapper", "not in its space"),
    "SpaceChanges": (["spaces"], "a wrapper", "has become another"),
    "ActionSpaceChanges": (["spaces"], "a wrapper", "become another one, Discrete(7)"),
    "SpacesDiffer": (["spaces"], 'observation_mode="different"', "differs"),
    "NoFixedSize": (["spaces"], "shared_memory=False", "Sequence"),
    "SpaceOfItsOwn": (["spaces"], "shared_memory=False", "space['mission'] is of type OwnSpace"),
    "InfoWithALock": (["infos"], "a wrapper", "'engine': cannot pickle"),
    "InfoContainsItself": (["infos"], "a wrapper", "'tree': info['tree']['self'] contains itself"),
    "ReadsAnOpenFile": (["open files"], "the env", "before workers are forked"),
    "NeedsItsThread": (["threads"], 'context="forkserver"', "hangs"),
    "OldGym": (["start method"], "the env", "not enough values to unpack"),
    "FailsToClose": (["close"], "the env's close()", "closed already"),
}
# What is no fault, but to know.
NOTED = {
    "TimeInInfo": ("same seed", None, "infos differ"),
    "SameWhateverTheSeed": ("other seeds", "self.np_random", "another seed gives the same"),
    "SameBuffer": ("buffers", "a wrapper", "changes the observation"),
    "OtherDtype": ("spaces", "a wrapper", "float64 for float32"),
    "HasAThread": ("threads", 'context="forkserver"', "logger"),
    "SlowToMake": ("time", 'overlap="auto"', "an env is made in "),
}


@pytest.fixture(autouse=True)
def a_folder_of_its_own(tmp_path, monkeypatch):
    """For envs that share files: forked workers know it, and tests may run at the same time."""
    monkeypatch.setattr(sick_envs, "SHARED", tmp_path)


def checked(name, contexts=("fork",)):
    limit = 12.0 if name in ("HangsAsSecond", "NeedsItsThread") else 100.0
    return check_env_fn(getattr(sick_envs, name), contexts=contexts, time_limit=limit, steps=25)


@pytest.mark.deep
@pytest.mark.parametrize("name", SICK)
def test_a_sick_env(name):
    report = checked(name)
    kinds, option, says = SICK[name]
    assert not report.ok
    assert [finding.kind for finding in report.wrong] == kinds, str(report)
    assert report.wrong[0].option == option and says in report.wrong[0].seen, str(report)
    assert "WRONG" in str(report) and f"-> {option}: " in str(report)


@pytest.mark.deep
def test_what_differs_alone_is_not_said_to_be_as_alone():
    lines = [each for each in checked("NotDeterministic").findings if "process" in each.kind]
    assert [each.verdict for each in lines] == ["note", "note"]
    assert all("not compared: observations, rewards, infos" in each.seen for each in lines)
    [one, _] = [each for each in checked("TimeInInfo").findings if "process" in each.kind]
    assert one.verdict == "ok" and "not compared: infos" in one.seen


@pytest.mark.deep
def test_an_env_that_draws_with_what_another_kind_of_env_has_loaded():
    """Beside envs of its own kind each draws right: it is the kinds that are not to be mixed."""
    assert checked("DrawsInTheLastContext").ok
    options = {"contexts": ["fork"], "steps": 25}
    kinds = [sick_envs.DrawsInTheLastContext, sick_envs.HasAnotherTexture]
    for first, other in (kinds, kinds[::-1]):
        [wrong] = check_env_fn(first, beside=other, **options).wrong
        assert (wrong.kind, wrong.option) == ("one process", PROCESSES)
        assert "frames differ" in wrong.seen


@pytest.mark.deep
def test_a_frame_that_is_another_envs_is_said_to_be():
    [wrong] = checked("RendersAnothersFrame").wrong
    assert "frames differ from the reset on (another env's)" in wrong.seen
    [wrong] = check_env_fn(
        sick_envs.DrawsInTheLastContext,
        beside=sick_envs.HasAnotherTexture,
        contexts=["fork"],
        steps=5,
    ).wrong
    assert "another env's" not in wrong.seen


@pytest.mark.deep
def test_envs_of_two_kinds_that_are_well():
    assert check_env_fn(Well, beside=sick_envs.WellAndAnother, contexts=["fork"], steps=25).ok


@pytest.mark.deep
def test_what_differs_alone_of_the_other_kind_is_not_compared():
    report = check_env_fn(Well, beside=sick_envs.NotDeterministic, contexts=["fork"], steps=25)
    [one, two] = [each for each in report.findings if "process" in each.kind]
    assert one.verdict == two.verdict == "note", str(report)


@pytest.mark.deep
@pytest.mark.parametrize("name", NOTED)
def test_what_is_to_know(name, monkeypatch):
    if name == "SlowToMake":
        monkeypatch.setattr("shmvec._commands.check.SLOW_S", 0.2)
    report = checked(name)
    [noted] = [finding for finding in report.findings if finding.verdict == "note"]
    kind, option, says = NOTED[name]
    assert report.ok and (noted.kind, noted.option) == (kind, option), str(report)
    assert says in noted.seen


@pytest.mark.parametrize(
    ("build_s", "close_s", "option"),
    [
        ([(3.0, 3.0), (0.1, 0.1)], 0.1, None),  # the first one imports
        ([(3.0, 3.0), (1.5, 1.4)], 0.1, "num_workers="),
        ([(3.0, 3.0), (1.5, 0.1)], 0.1, 'overlap="auto"'),
        ([(0.1, 0.0), (0.1, 0.0)], 1.5, 'overlap="auto"'),
    ],
)
def test_what_to_do_about_envs_that_are_slow_to_make_or_to_close(build_s, close_s, option):
    found = time_finding(Facts(build_s=build_s[:1]), 9.0, close_s, [Facts(build_s=build_s)])
    assert found.option == option and (found.verdict == "ok") == (option is None)


@pytest.mark.deep
def test_what_only_the_program_knows(monkeypatch):
    """Under fork a worker knows it: the other start methods fail, which is wrong if one is used."""
    monkeypatch.setattr(sick_envs, "KNOWN_TO_THE_PROGRAM", "here")
    noted = [each for each in checked("NeedsTheProgram", None).findings if each.verdict == "note"]
    assert [finding.option for finding in noted] == ['context="fork"'] * 2
    assert all("has not said" in finding.seen for finding in noted)
    report = checked("NeedsTheProgram", ("spawn", "fork"))
    [wrong] = report.wrong
    assert (wrong.kind, wrong.option) == ("start method", 'context="fork"')
    assert any(finding.kind == "two processes" for finding in report.findings)


def well(env_fn, **options):
    report = check_env_fn(env_fn, **options)
    assert report.ok and {each.verdict for each in report.findings} == {"ok"}, str(report)
    return str(report)


@pytest.mark.deep
def test_one_that_is_well():
    """Under every start method; its frames are compared."""
    text = well(Well)
    assert "render_mode" not in text and text.endswith("Nothing is wrong.")


@pytest.mark.deep
@pytest.mark.parametrize(
    ("library", "id"),
    [
        ("gymnasium", "CartPole-v1"),
        ("mujoco", "HalfCheetah-v5"),
    ],
)
def test_known_envs_are_well(library, id):
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")

    def make():
        __import__(library)
        return gym.make(id)

    assert "render_mode is None" in well(make, contexts=["fork", "forkserver"])


def test_the_command(tmp_path, capsys):
    file = tmp_path / "found.json"
    (tmp_path / "an_env.py").write_text(
        "import sys, time\n"
        f"sys.path.insert(0, {str(sick_envs.__file__).rpartition('/')[0]!r})\n"
        "from sick_envs import Well, SharesAGlobal\n"
        "from sick_envs import DrawsInTheLastContext as Last, HasAnotherTexture as Other\n"
    )
    command = ["check", "--context", "fork", "--steps", "5", "--json", str(file)]
    assert shmvec.__main__.main([*command, f"{tmp_path}/an_env.py:Well"]) == 0
    assert json.loads(file.read_text())["ok"]
    assert shmvec.__main__.main([*command, f"{tmp_path}/an_env.py:SharesAGlobal"]) == 1
    written = json.loads(file.read_text())
    text = capsys.readouterr().out
    assert not written["ok"] and text.endswith("Wrong: 1.\n")
    assert all(finding["seen"] in text for finding in written["findings"][-5:])
    beside = ["--beside", f"{tmp_path}/an_env.py:Other", f"{tmp_path}/an_env.py:Last"]
    assert shmvec.__main__.main([*command, *beside]) == 1
    assert "frames differ" in capsys.readouterr().out


@pytest.mark.deep
def test_at_a_glance():
    """What `tune` says first; nothing about an env that takes too long for it."""
    assert brief_check(Well, 60.0) is None
    assert "env 1 of 2: observations differ" in brief_check(sick_envs.SharesAGlobal, 60.0)
    assert brief_check(sick_envs.SharesAGlobal, 0.02) is None


@pytest.mark.deep
def test_an_unknown_start_method():
    with pytest.raises(ValueError, match="'threads'"):
        check_env_fn(Well, contexts=["threads"])

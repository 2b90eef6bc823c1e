"""Has spin check the models: exhaustively, and that it finds mistakes.

What the switches mean is said in csrc/model/protocol.pml and csrc/model/channel.pml.
"""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "csrc" / "model"
COMPILER = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")

STUCK = "invalid end state"
WRONG = "assertion violated"
CIRCLE = "cycle ("  # an acceptance cycle of protocol.pml's claim, a non-progress one of channel.pml


@dataclass
class Model:
    """A model, and how it is checked.

    Attributes:
        files: Its parts; the first one is what spin is given.
        lasting: What it takes to check that all runs end: flags for the compiler and for pan.
        sound: Variants that are right. Each takes some seconds at most: times and sizes grow fast
            with every number.
        large: Those where it does: they are optimized, which takes a second and saves more.
        ends: Those of which it is checked, too, that all runs end, which takes longer.
        mistakes: Where each one shows, and how.
    """

    files: list[str]
    lasting: tuple[list[str], list[str]]
    sound: dict[str, str]
    large: set[str]
    ends: set[str]
    mistakes: dict[str, tuple[str, str]]


PROTOCOL = Model(
    files=["protocol.pml", "primitives.pml", "parent.pml"],
    lasting=([], ["-a", "-f"]),
    sound={
        "three rounds": "ROUNDS=3",
        "three workers": "WORKERS=3 ROUNDS=1",
        "slices": "SLICES ROUNDS=2",
        "partial": "PARTIAL ROUNDS=2",
        "partial, two envs a worker": "PARTIAL UNITS=3 ROUNDS=1",
        "partial, one worker": "PARTIAL WORKERS=1 UNITS=2 ROUNDS=3",
        "dozing": "DOZE ROUNDS=2",
        "partial, dozing": "PARTIAL DOZE ROUNDS=1",
        "death": "DEATH ROUNDS=1",
        "death, partial": "DEATH PARTIAL ROUNDS=1",
        "death, dozing": "DEATH DOZE ROUNDS=1",
        "polling": "POLL PARTIAL ROUNDS=2",
        "polling, death": "POLL PARTIAL DEATH ROUNDS=1",
        "polling, death, one worker": "POLL PARTIAL DEATH WORKERS=1 UNITS=2 ROUNDS=2",
        "trace": "TRACES=1 ROUNDS=1",
        "trace, partial": "TRACES=1 PARTIAL ROUNDS=1",
        "traces, dozing, one worker": "TRACES=2 DOZE WORKERS=1 ROUNDS=2",
        "a flag of its own, with fences": "SEPARATE_FLAG FENCED ROUNDS=2",
    },
    large={
        "three workers",
        "partial",
        "partial, two envs a worker",
        "dozing",
        "partial, dozing",
        "death",
        "death, partial",
        "death, dozing",
        "polling",
        "polling, death",
        "polling, death, one worker",
        "trace, partial",
    },
    # With dozers or partial batches a death makes too many states for the longer check.  A lost
    # wake shows all the same: the survivors are waited for without slices.
    ends={"slices", "death"},
    mistakes={
        "LISTEN_LATE": ("ROUNDS=2", STUCK),
        "SLEEP_BLIND": ("ROUNDS=2", STUCK),
        "SEPARATE_FLAG": ("ROUNDS=2", STUCK),
        "EPOCH_STUCK": ("ROUNDS=2", STUCK),
        "RING_SPLIT": ("ROUNDS=2", STUCK),
        "RING_FIRST": ("ROUNDS=2", STUCK),
        "SOME_CLEARS": ("PARTIAL ROUNDS=2", STUCK),
        "WAKE_ONE": ("ROUNDS=2", STUCK),
        "DOZE_SILENT": ("DOZE ROUNDS=2", STUCK),
        "ALARM_RESET": ("DOZE ROUNDS=2", STUCK),
        "ROUSE_CUT_SHORT": ("DOZE ROUNDS=2", STUCK),
        "TAIL_FIRST": ("ROUNDS=2", WRONG),
        "ASK_TWICE": ("ROUNDS=2", WRONG),
        "COMPLETE_FIRST": ("ROUNDS=2", WRONG),
        "ADD_SPLIT": ("ROUNDS=2", STUCK),
        "ADD_STORES": ("ROUNDS=2", STUCK),
        "WAKE_UNCLEARED": ("ROUNDS=2", STUCK),
        "ARM_BLIND": ("ROUNDS=2", STUCK),
        "COMPARE_PLAINLY": ("ROUNDS=2", WRONG),
        "NO_SLICES": ("DEATH ROUNDS=1", STUCK),
        "NO_LOOK": ("DEATH ROUNDS=1", CIRCLE),
        "TRACE_BLIND": ("TRACES=4 WORKERS=1 ROUNDS=1", WRONG),
        "TRACE_COUNTED": ("TRACES=1 ROUNDS=1", STUCK),
        "TRACE_ANSWERED": ("TRACES=1 ROUNDS=1", WRONG),
        "DROP_THE_DEAD": ("DEATH ROUNDS=1", WRONG),
        "POLL_LATE": ("POLL PARTIAL ROUNDS=1", STUCK),
        "POLL_CLEARS": ("POLL PARTIAL ROUNDS=1", STUCK),
        "POLL_BY_ISSUED": ("POLL PARTIAL DEATH ROUNDS=1", STUCK),
        "POLL_NO_PIDFD": ("POLL PARTIAL DEATH ROUNDS=1", STUCK),
    },
)

CHANNEL = Model(
    files=["channel.pml", "exchange.pml"],
    lasting=(["-DNP", "-DNOCLAIM"], ["-l"]),
    sound={
        "Ctrl-C": "CTRL_C=1",
        "Ctrl-C twice": "CTRL_C=2",
        "Ctrl-C, two requests a worker, messages that fit": "CTRL_C=1 UNITS=3 CALLS=1 PIPE=2",
        "Ctrl-C, partial": "CTRL_C=1 PARTIAL",
        "two deaths": "DEATHS=2",
        "two deaths, partial": "DEATHS=2 PARTIAL CALLS=1",
        "death and Ctrl-C": "DEATHS=1 CTRL_C=1",
        "death and Ctrl-C, partial, one worker": "DEATHS=1 CTRL_C=1 PARTIAL WORKERS=1 UNITS=2",
        "two deaths and Ctrl-C, one worker": "DEATHS=2 CTRL_C=1 CALLS=1 WORKERS=1 UNITS=2",
        "trace and Ctrl-C": "TRACES=1 CTRL_C=1 CALLS=1",
        "trace and Ctrl-C, partial, one worker": "TRACES=1 CTRL_C=1 PARTIAL WORKERS=1 UNITS=2",
        "trace and death": "TRACES=1 DEATHS=1 CALLS=1",
    },
    large={
        "Ctrl-C, partial",
        "Ctrl-C twice",
        "two deaths",
        "two deaths, partial",
        "death and Ctrl-C",
        "death and Ctrl-C, partial, one worker",
    },
    ends={"Ctrl-C", "two deaths and Ctrl-C, one worker"},
    mistakes={
        "NO_SEQUENCE": ("CTRL_C=1", WRONG),
        "COMPARE_PLAINLY": ("CTRL_C=1", WRONG),
        "COUNT_LAST": ("CTRL_C=1", WRONG),
        "NO_DROP_OLD": ("CTRL_C=1", CIRCLE),
        "NO_DROP_ORPHAN": ("CTRL_C=1", WRONG),
        "PUSH_FIRST": ("CTRL_C=1", STUCK),
        "TELL_FIRST": ("TRACES=1 CTRL_C=1 CALLS=1", STUCK),
        "BLOCKING_SEND": ("WORKERS=1 UNITS=2", STUCK),
        "READ_LATE": ("WORKERS=1 UNITS=2", STUCK),
        "HALF_READ": ("CTRL_C=1", WRONG),
        "HALF_SENT": ("CTRL_C=1", STUCK),
        "POP_SPLIT": ("CTRL_C=1", STUCK),
        "TAKE_FIRST": ("CTRL_C=1", STUCK),
        "EOF_AS_DEATH": ("DEATHS=1", STUCK),
        "TRUST_LATE": ("DEATHS=1", STUCK),
        "LOOK_ONCE": ("DEATHS=1 CTRL_C=1 CALLS=1", CIRCLE),
        "LOSE_ONCE": ("DEATHS=1 CTRL_C=1", STUCK),
        "LOST_LOCAL": ("DEATHS=1 CTRL_C=1", STUCK),
        "RENEW_LATE": ("DEATHS=1 CTRL_C=1", WRONG),
        "LEND_ALWAYS": ("WORKERS=1 UNITS=2", WRONG),
        "KEEP_RINGS": ("DEATHS=1", WRONG),
        "KEEP_PIPE": ("DEATHS=1", WRONG),
        "KEEP_CHANNEL": ("DEATHS=1", WRONG),
    },
)

MODELS = {"protocol": PROTOCOL, "channel": CHANNEL}

needs_spin = pytest.mark.skipif(
    shutil.which("spin") is None or COMPILER is None,
    reason="spin (Debian: apt-get install spin) or a C compiler is not installed",
)


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def check(model: Model, switches: str, folder: Path, lasting: bool, optimize: str) -> str:
    """What pan says.  `lasting`: that all runs end is checked, too."""
    defines = [f"-D{switch}" for switch in switches.split()]
    run(["spin", "-a", *defines, str(MODEL / model.files[0])], folder)
    # Nothing is hashed away: states are stored whole, of the largest variant in 1.4 GB.
    flags, options = ["-DSAFETY", "-DNOCLAIM"], []
    if lasting:
        flags, options = model.lasting
    run([COMPILER, *flags, optimize, "-w", "-DMEMLIM=4000", "-o", "pan", "pan.c"], folder)
    return run(["./pan", *options], folder)


def comments_and_code(path: Path) -> tuple[str, str]:
    text = path.read_text()
    comment = re.compile(r"/\*.*?\*/", re.DOTALL)
    return "\n".join(comment.findall(text)), comment.sub("", text)


def variants(kind: str) -> list:
    """Each model's variants of a kind, of which all but the first one are deep."""
    return [
        pytest.param(which, name, marks=pytest.mark.deep if at else ())
        for which, model in MODELS.items()
        for at, name in enumerate(getattr(model, kind))
    ]


@pytest.mark.deep
@needs_spin
@pytest.mark.parametrize(("model", "name"), variants("sound"))
def test_model_is_right(model, name, tmp_path):
    tried = MODELS[model]
    optimize = "-O1" if name in tried.large else "-O0"
    said = check(tried, tried.sound[name], tmp_path, name in tried.ends, optimize)
    assert "errors: 0\n" in said, said
    assert "Full statespace search for:" in said, said
    for incomplete in ("Search not completed", "max search depth too small", "out of memory"):
        assert incomplete not in said, said
    # Nor is a part of the model never tried.
    reached = re.findall(r"^unreached in proctype (\w+)\n\t\((\d+) of \d+ states\)", said, re.M)
    assert {"worker", "parent"} <= dict(reached).keys(), said
    assert set(dict(reached).values()) == {"0"}, said


@pytest.mark.deep
@needs_spin
@pytest.mark.parametrize(("model", "mistake"), variants("mistakes"))
def test_mistake_is_found(model, mistake, tmp_path):
    switches, kind = MODELS[model].mistakes[mistake]
    said = check(MODELS[model], f"{switches} {mistake}", tmp_path, kind == CIRCLE, "-O0")
    assert "errors: 1\n" in said, said
    assert kind in said, said


@pytest.mark.deep
@pytest.mark.parametrize("model", MODELS)
def test_every_switch_is_used_and_explained(model):
    tried = MODELS[model]
    variants = [*tried.sound.values(), *(switches for switches, _ in tried.mistakes.values())]
    used = {switch.partition("=")[0] for switch in " ".join(variants).split()}
    known = set()
    for file in tried.files:
        _, code = comments_and_code(MODEL / file)
        for condition in re.findall(r"^#(?:ifdef|ifndef|if|elif)\b(.*)$", code, re.M):
            known |= set(re.findall(r"\b[A-Z]\w+", condition))
    assert used | tried.mistakes.keys() == known
    table = re.findall(r"^ \*   ([A-Z_]+)  ", (MODEL / tried.files[0]).read_text(), re.M)
    assert set(table) == tried.mistakes.keys()


@pytest.mark.deep
def test_every_file_is_of_a_model():
    files = [file for model in MODELS.values() for file in model.files]
    assert sorted(files) == sorted(path.name for path in MODEL.glob("*.pml"))


def test_what_the_model_names_exists():
    names, methods = set(), set()
    others = {"name", "poll", "read", "write", "epoll_wait"}
    for path in MODEL.glob("*.pml"):
        comments, code = comments_and_code(path)
        names |= set(re.findall(r"\b(\w+)\(\)", comments)) - others
        names |= set(re.findall(r"^(?:inline|#define) (sv_\w+)\(", code, re.M))
        methods |= set(re.findall(r"\b(\w+\.pyx?): (\w+)", comments))
    assert {"sv_bell_listen", "sv_bell_ring", "sv_completion_arm", "sleep_for_request"} <= names
    assert {("caller.pyx", "post"), ("caller.pyx", "wait_for"), ("messages.pyx", "fill")} <= methods
    source = "\n".join(path.read_text() for path in (ROOT / "csrc").glob("*.[ch]"))
    defined = set(
        re.findall(r"^(?:static )?(?:inline )?\w[\w ]*?[ *]+(\w+)\([^;]*?\)\n\{", source, re.M)
    )
    assert names <= defined, f"not in csrc: {names - defined}"
    for file, method in methods:
        (path,) = (ROOT / "src" / "shmvec").rglob(file)
        assert re.search(rf"^ +c?p?def .*?\b{method}\(", path.read_text(), re.M), (file, method)

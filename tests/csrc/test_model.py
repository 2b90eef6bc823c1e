"""Has spin check the protocol's model: exhaustively, and that it finds mistakes.

What the switches mean is said in csrc/model/protocol.pml.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "csrc" / "model"
COMPILER = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")

# Each is right, and takes some seconds at most: times and sizes grow fast with every number.
SOUND = {
    "three rounds": "ROUNDS=3",
    "three workers": "WORKERS=3 ROUNDS=2",
    "slices": "SLICES ROUNDS=2",
    "partial": "PARTIAL ROUNDS=2",
    "partial, two envs a worker": "PARTIAL UNITS=3 ROUNDS=1",
    "partial, one worker": "PARTIAL WORKERS=1 UNITS=2 ROUNDS=3",
    "dozing": "DOZE ROUNDS=2",
    "partial, dozing": "PARTIAL DOZE ROUNDS=1",
    "death": "DEATH ROUNDS=2",
    "death, partial": "DEATH PARTIAL ROUNDS=1",
    "death, dozing": "DEATH DOZE ROUNDS=1",
    "a flag of its own, with fences": "SEPARATE_FLAG FENCED ROUNDS=2",
}

STUCK = "invalid end state"
WRONG = "assertion violated"
CIRCLE = "acceptance cycle"

# The mistakes: where each one shows, and how.
MISTAKES = {
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
    "DROP_THE_DEAD": ("DEATH ROUNDS=1", WRONG),
}

needs_spin = pytest.mark.skipif(
    shutil.which("spin") is None or COMPILER is None,
    reason="spin (Debian: apt-get install spin) or a C compiler is not installed",
)


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def check(switches: str, folder: Path, lasting: bool, optimize: str) -> str:
    """What pan says.  `lasting`: that all runs end is checked, too, which takes longer."""
    defines = [f"-D{switch}" for switch in switches.split()]
    run(["spin", "-a", *defines, str(MODEL / "protocol.pml")], folder)
    # Nothing is hashed away: -DCOLLAPSE stores states whole, only more tightly.
    flags = [] if lasting else ["-DSAFETY", "-DNOCLAIM", "-DCOLLAPSE"]
    flags += [optimize, "-w", "-DMEMLIM=4000"]
    run([COMPILER, *flags, "-o", "pan", "pan.c"], folder)
    return run(["./pan", *(["-a", "-f"] if lasting else [])], folder)


def comments_and_code(path: Path) -> tuple[str, str]:
    text = path.read_text()
    comment = re.compile(r"/\*.*?\*/", re.DOTALL)
    return "\n".join(comment.findall(text)), comment.sub("", text)


@needs_spin
@pytest.mark.parametrize("name", SOUND)
def test_protocol_is_right(name, tmp_path):
    switches = SOUND[name].split()
    # With dozers or partial batches a death makes too many states for the longer check.  A lost
    # wake shows all the same: the survivors are waited for without slices.
    lasting = "SLICES" in switches or switches[0] == "DEATH" and len(switches) == 2
    said = check(SOUND[name], tmp_path, lasting, "-O2")
    assert "errors: 0\n" in said, said
    assert "Full statespace search for:" in said, said
    for incomplete in ("Search not completed", "max search depth too small", "out of memory"):
        assert incomplete not in said, said
    # Nor is a part of the model never tried.
    reached = re.findall(r"^unreached in proctype (\w+)\n\t\((\d+) of \d+ states\)", said, re.M)
    assert {"worker", "parent"} <= dict(reached).keys(), said
    assert set(dict(reached).values()) == {"0"}, said


@needs_spin
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_found(mistake, tmp_path):
    switches, kind = MISTAKES[mistake]
    said = check(f"{switches} {mistake}", tmp_path, kind == CIRCLE, "-O0")
    assert "errors: 1\n" in said, said
    assert kind in said, said


def test_every_switch_is_used_and_explained():
    given = " ".join([*SOUND.values(), *(switches for switches, _ in MISTAKES.values())]).split()
    used = {switch.partition("=")[0] for switch in given} | MISTAKES.keys()
    known = set()
    for path in MODEL.glob("*.pml"):
        _, code = comments_and_code(path)
        for condition in re.findall(r"^#(?:ifdef|ifndef|if|elif)\b(.*)$", code, re.M):
            known |= set(re.findall(r"\b[A-Z]\w+", condition))
    assert used == known
    table = re.findall(r"^ \*   ([A-Z_]+)  ", (MODEL / "protocol.pml").read_text(), re.M)
    assert set(table) == MISTAKES.keys()


def test_what_the_model_names_exists():
    names, methods = set(), set()
    for path in MODEL.glob("*.pml"):
        comments, code = comments_and_code(path)
        names |= set(re.findall(r"\b(\w+)\(\)", comments)) - {"name", "poll", "read"}
        names |= set(re.findall(r"^(?:inline|#define) (sv_\w+)\(", code, re.M))
        methods |= set(re.findall(r"\b(\w+\.pyx?): (\w+)", comments))
    assert {"sv_bell_listen", "sv_bell_ring", "sv_completion_arm", "sleep_for_request"} <= names
    assert len(methods) > 10
    source = "\n".join(path.read_text() for path in (ROOT / "csrc").glob("*.[ch]"))
    defined = set(
        re.findall(r"^(?:static )?(?:inline )?\w[\w ]*?[ *]+(\w+)\([^;]*?\)\n\{", source, re.M)
    )
    assert names <= defined, f"not in csrc: {names - defined}"
    for file, method in methods:
        (path,) = (ROOT / "src" / "shmvec").rglob(file)
        assert re.search(rf"^ +c?p?def .*?\b{method}\(", path.read_text(), re.M), (file, method)

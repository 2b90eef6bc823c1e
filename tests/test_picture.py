"""What ``top`` draws on a terminal: the facts of the text, and what fits."""

import os
import re
import signal
import sys
from dataclasses import replace
from io import BytesIO, TextIOWrapper
from types import SimpleNamespace

import pytest

pytest.importorskip("rich", reason="the top extra")

from rich.console import Console
from rich.screen import Screen
from test_top import HERE, resize, stepped, terminal
from test_verdicts import CASES, env, made

from shmvec.__main__ import main
from shmvec._commands.attaching import Snapshot
from shmvec._commands.picture import Picture
from shmvec.stats import Doing, FaultCounts, Process

MS = 1e-3
BAR = {"in", "reset", "waiting", "step"}
HOSTILE = "[bold red]train[/] :smile: [link=x]y[/link] [/nothing]"


def draw(looks, problems, encoding, columns, rows):
    """The lines of a terminal."""
    out = TextIOWrapper(BytesIO(), encoding, errors="shmvec.replace")
    console = Console(file=out, force_terminal=True, markup=False, emoji=False, highlight=False)
    console.size = columns, rows
    console.print(Screen(Picture(looks, problems)), end="")
    out.flush()
    return out.buffer.getvalue().decode(encoding).split("\n")


@pytest.fixture(autouse=True)
def a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "COLORTERM", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def look(stats=None, command=HOSTILE, number=1):
    if stats is None:
        envs = [env((1000, MS), resets=((10, MS),))] * 7 + [env((1000, 4 * MS))]
        stats = made(envs, workers=2, waited=9.0, starved_s=[0.0, 1.0], first_env=[0, 4])
        stats = replace(
            stats,
            workers=tuple(replace(worker, num_envs=4) for worker in stats.workers),
            doing=(None, Doing(7, "step", 12.5)),
            waiting_s=12.5,
            processes=(Process(4711, 2**24, 2**24), None),
            caller=Process(4710, 2**25, 2**25),
            faults=FaultCounts(1, 2, 0, 3, 4, 0.5),
        )
    seen = SimpleNamespace(command=command, pid=4710)
    return Snapshot(seen, (4710, number), stats, stats, 1.0)


def shown(lines):
    """Without colours, and the blanks up to the edge."""
    return [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in lines]


def styles(lines, word):
    """Of the rows with a word, how that is written."""
    return {
        code
        for line in lines
        for codes, written in re.findall(r"\x1b\[([0-9;]*)m([^\x1b]*)", line)
        if word in written
        for code in codes.split(";")
    }


def facts(lines):
    """The words on the screen; not what they are set off with."""
    return set(re.sub(r"[█▓×░]+", " ", " ".join(shown(lines))).split())


def test_the_same_facts_as_in_the_text():
    text = "\n".join([*look().heading(), str(look().recent)])
    drawn = draw([look()], ["one is damaged"], "utf-8", 150, 50)
    of_text, of_picture = set(text.split()), facts(drawn)
    assert of_text - of_picture == set()
    assert of_picture - of_text <= {"time", "no", "core", "one", "is", "damaged"} | BAR
    assert {"4711", "process", "p99", "[bold", "crashes,", "12.5"} <= of_text
    assert "█ in step" in "".join(shown(drawn))


def cells(line):
    return sum(2 if character == "字" else 1 for character in line)


@pytest.mark.deep
def test_it_fits():
    """Whatever there is, and however little room for it."""
    nothing = look(made([], workers=1, waited=0.0))
    for columns, rows in ((1, 1), (1, 50), (9, 6), (20, 6), (40, 24), (80, 24), (300, 2)):
        for looks in ([look()], [look(), look(number=2)], [nothing]):
            lines = shown(draw(looks, [HOSTILE * 9], "utf-8", columns, rows))
            assert len(lines) <= rows and max(map(len, lines)) <= columns
        lines = shown(draw([look(command="字" * 300)], [], "utf-8", columns, rows))
        assert max(map(cells, lines)) <= columns


@pytest.mark.deep
def test_what_matters_comes_first():
    stats = look().recent
    kind = stats.verdict.kind
    for columns, rows in ((20, 6), (40, 6)):
        lines = shown(draw([look()], [], "utf-8", columns, rows))
        assert lines[0].startswith("process 4710") and kind in "\n".join(lines)
        assert re.fullmatch(r"\.\.\. and \d+ more", lines[-1])
    lines = shown(draw([look()], [], "utf-8", 40, 24))
    table = next(at for at, line in enumerate(lines) if line.startswith("worker "))
    assert lines[table].split() == ["worker", "now"] and "no process" in lines[table + 2]
    assert any(line.split()[:2] == ["any", "env's"] for line in lines)


@pytest.mark.deep
def test_what_others_say_is_shown_as_it_is():
    problem = "\x1b[2J\x07" + HOSTILE + "\u202e\r\n"
    lines = draw([look()], [problem], "utf-8", 120, 40)
    drawn = "\n".join(shown(lines))
    assert f"process 4710: {HOSTILE}" in drawn and f"?[2J?{HOSTILE}???" in drawn
    assert not set("\x1b\x07\u202e\r") & set(drawn)


@pytest.mark.deep
def test_colours():
    colours = {
        kind: styles(draw([look(stats)], [], "utf-8", 120, 40), kind)
        for stats, kind, _ in CASES.values()
    }
    assert {"32", "1"} <= colours["env-bound"] and "31" in colours["straggler"]
    assert "33" in colours["policy-bound"] and "31" in colours["oversubscribed"]
    assert not {"31", "32", "33"} & colours["idle"]
    hangs = look()
    hangs.total = hangs.recent = replace(hangs.recent, processes=())
    lines = draw([hangs], [], "utf-8", 120, 40)
    assert {"1", "31"} <= styles(lines, "step of env 7 for 12.5 s")
    hangs.recent = replace(hangs.recent, doing=(None, Doing(7, "step", 5 * MS)))
    lines = draw([hangs], [], "utf-8", 120, 40)
    assert not {"31", "33"} & styles(lines, "step of env 7 for 5 ms")


@pytest.mark.deep
def test_a_bar_says_what_the_time_went_into():
    envs = [env((1000, 5 * MS), resets=((100, 20 * MS),))] * 2
    stats = made(envs, workers=2, waited=9.0, starved_s=[0.0, 3.5], park_s=[2.0, 0.0])
    for encoding, letters in (("utf-8", "█▓×░"), ("ascii", "#+x.")):
        step, reset, lacking, waiting = letters
        lines = shown(draw([look(stats)], [], encoding, 150, 40))
        "\n".join(lines).replace("µ", "u").encode(encoding)
        first, second = [line for line in lines if step in line and "in step" not in line]
        bars = [[line.count(letter) for letter in letters] for line in (first, second)]
        whole = sum(bars[0]) / 0.9  # of 10 s it was 5 in steps, 2 in resets, and waited for 2
        for bar, parts in zip(bars, ((5, 2, 0, 2), (2.5, 1, 3.5, 0)), strict=True):
            assert bar == [pytest.approx(whole * part / 10, abs=1.1) for part in parts]


@pytest.mark.deep
def test_no_colours(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    lines = draw([look()], [], "utf-8", 120, 40)
    codes = {
        code
        for codes in re.findall(r"\x1b\[([0-9;]*)m", "".join(lines))
        for code in codes.split(";")
    }
    assert codes <= {"", "0", "1", "2"} and "█" in "".join(lines)


def resized(process, columns, rows):
    """As a terminal's window is."""
    descriptor = os.open(f"/proc/{process.pid}/fd/1", os.O_RDWR | os.O_NOCTTY)
    resize(descriptor, columns, rows)
    os.close(descriptor)


@pytest.mark.deep
def test_it_follows_the_size_of_the_terminal():
    """Soon, however long until it looks again."""
    # It says nothing of its size first; variables are of the one that a container was entered by.
    options = {"columns": 0, "rows": 0, "COLUMNS": "200", "LINES": "50"}
    options |= {"PYTHONIOENCODING": "ascii"}
    with (
        stepped(num_workers=2),
        terminal(HERE, "--interval", 600, **options) as (top, until),
    ):
        for columns, rows in ((80, 24), (150, 30), (40, 6), (100, 24)):
            if columns != 80:
                resized(top, columns, rows)
            wanted = r"\x1b\[H(?=process)" + r"[^\n]*\n" * (rows - 1) + r"[^\n]*(?=\x1b\[H)"
            text = re.findall(wanted, until(wanted))[-1]
            lines = [line.strip("\r") for line in shown(text.removeprefix("\x1b[H").split("\n"))]
            assert len(lines) == rows and max(map(len, lines)) <= columns
            assert lines[0].startswith("process ") and (" now" in "\n".join(lines)) == (rows > 6)
        top.send_signal(signal.SIGINT)
        until()
        assert top.wait(60) == 0
        assert "????" not in text


@pytest.mark.deep
def test_without_rich_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.delitem(sys.modules, "shmvec._commands.picture")
    monkeypatch.delattr("shmvec._commands.picture")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    assert main(["top", HERE]) == 2
    assert "pip install 'shmvec[top]'" in capsys.readouterr().err
    with stepped(num_workers=0):
        for how in ("--json", "--prometheus"):
            assert main(["top", HERE, how]) == 0 and capsys.readouterr().out

"""A pytest plugin: puts our classes in the place of others, and tells what came of their tests.

A test is *applied* where one of our classes was made in it, or given to it by a fixture.
"""

import functools
import importlib
import json
import operator
import os
import signal
import sys
import time

import pytest

ASKED = json.loads(os.environ.get("SHMVEC_UPSTREAM", '{"title": "", "swaps": {}, "private": {}}'))
LIMIT_S = 600
OURS: list[type] = []
made = 0
applied: set[str] = set()
outcomes: dict[str, str] = {}


def named(name):
    """What a "module:name" names; None if there is no such thing."""
    module, _, name = name.partition(":")
    try:
        return getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        return None


def count(cls):
    """Lets a class say when one of it is made."""
    original = cls.__init__

    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        global made
        made += 1
        original(self, *args, **kwargs)

    cls.__init__ = __init__
    OURS.append(cls)


def alias(path):
    """An attribute that stands for another one: "name", or "name.name"."""

    def set_(self, value):
        *owners, name = path.split(".")
        setattr(operator.attrgetter(".".join(owners))(self) if owners else self, name, value)

    return property(operator.attrgetter(path), set_)


def rebind(old, new):
    """Replaces a class wherever a module has it, by whatever name."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ("shmvec", __name__):
            continue
        for key, value in list(getattr(module, "__dict__", {}).items()):
            if value is old:
                setattr(module, key, new)


def pytest_configure():
    for theirs, ours in ASKED["swaps"].items():
        old = named(theirs)
        new = next(filter(None, map(named, ours)), None)
        if old is None or new is None:
            raise pytest.UsageError(f"there is no {theirs if old is None else ours}")
        if new not in OURS:
            count(new)
            for name, path in ASKED["private"].items():
                setattr(new, name, alias(path))
        rebind(old, new)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    def late(number, frame):
        raise TimeoutError(f"the test takes longer than {LIMIT_S} s")

    before = made
    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if made > before:
            applied.add(item.nodeid)


def pytest_runtest_call(item):
    if any(isinstance(value, tuple(OURS)) for value in getattr(item, "funcargs", {}).values()):
        applied.add(item.nodeid)


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        outcomes[report.nodeid] = report.outcome


def pytest_terminal_summary(terminalreporter):
    def counted(nodes):
        return ", ".join(
            f"{sum(outcomes[node] == outcome for node in nodes)} {outcome}"
            for outcome in ("passed", "failed", "skipped")
        )

    date = time.strftime("%Y-%m-%d")
    terminalreporter.section(f"{ASKED['title']}, {date}")
    terminalreporter.line(f"all: {len(outcomes)}: {counted(outcomes)}")
    with_ours = applied & outcomes.keys()
    terminalreporter.line(f"applied: {len(with_ours)}: {counted(with_ours)}")

"""The record of a suite: a file with a line of JSON for each episode, to resume it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shmvec.evaluation.episodes import Episode

__all__ = ["Content", "Record", "RecordError", "read_record", "to_plain"]

_FORMAT = 1
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_SYNC_S = 1.0  # between two syncs; a power cut costs the episodes since the last one


class RecordError(ValueError):
    """A file is not a record, is damaged, or is the record of another evaluation."""


class Record:
    """A file to which each episode is appended as it ends.

    Its first line says how the episodes were chosen. Each further line describes a task, before
    its first episode, or an episode. A last line that a crash has left incomplete is cut off.
    ``head`` is the first line, empty in a new record.
    """

    def __init__(self, file: str | os.PathLike[str]) -> None:
        """Opens the file, which is made if there is none, and reads it.

        Raises:
            ValueError: It is not a record, or a line that is not the last one is damaged.
            BlockingIOError: Another evaluation is writing it.
        """
        self.path = Path(file)
        if self.path.exists() and not self.path.is_file():
            raise RecordError(f"{self.path} is not a file, and so not a record of an evaluation")
        self._file = open(self.path, "a+b")  # noqa: SIM115  # until `close`
        try:
            self._lock()
            content = read_record(self.path)
            self._file.truncate(content.nbytes)
        except BaseException:
            self._unlock()
            raise
        self.head, self._tasks, self._episodes, _ = content
        self._pending: list[Mapping[str, Any]] = []  # lines to write before the next episode
        self._last_sync = time.monotonic()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(
                f"another evaluation is writing {self.path}: wait for its end, or give this one "
                "another record"
            ) from None
        except OSError:  # a file system without locks
            pass

    def begin(self, head: Mapping[str, Any]) -> None:
        """Begins a new record; its first line is written with the first episode."""
        self.head = {"shmvec": _FORMAT, **head}
        self._pending.append(self.head)

    def check_task(self, name: str, identity: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        """Checks that a task is the one that was recorded under its name.

        A new task is written with the next episode, so that an evaluation that is refused before
        it writes nothing.

        Args:
            name: Its name.
            identity: Values that must be those of the record.
            extra: Further values to record.

        Raises:
            ValueError: The record has another task of this name.
        """
        recorded = self._tasks.get(name)
        if recorded is None:
            self._tasks[name] = {"task": name, **identity, **extra}
            self._pending.append(self._tasks[name])
            return
        for key, value in identity.items():
            if recorded.get(key) != value:
                raise RecordError(
                    f"{self.path} was recorded with another {key} of task {name!r}: "
                    f"{recorded.get(key)}, and not {value}. Give this evaluation another record."
                )

    def fill(self, episode: Episode) -> None:
        """Fills in an episode's results, if it is recorded.

        Raises:
            ValueError: The recorded episode has another seed, or other options.
        """
        line = self._episodes.get(episode.task, {}).get(episode.number)
        if line is None:
            return
        options = to_plain(episode.options)
        if line["seed"] != episode.seed or _comparable(line.get("options")) != _comparable(options):
            raise RecordError(
                f"{self.path} has episode {episode.number} of task {episode.task!r} with seed "
                f"{line['seed']} and options {line.get('options')}, and not with {episode.seed} "
                f"and {options}. Give this evaluation another record."
            )
        _fill_in(episode, line)

    def add(self, episode: Episode) -> None:
        """Appends an episode that has ended, or counts as failed."""
        line = {"task": episode.task, "episode": episode.number, "seed": episode.seed}
        if episode.options is not None:
            line["options"] = to_plain(episode.options)
        line |= {_KEYS.get(name, name): getattr(episode, name) for name in _FIELDS}
        lines, self._pending = [*self._pending, line], []
        self._file.write(b"".join(json.dumps(each).encode() + b"\n" for each in lines))
        self._file.flush()
        if time.monotonic() >= self._last_sync + _SYNC_S:
            self._sync()

    def _sync(self) -> None:
        os.fsync(self._file.fileno())
        self._last_sync = time.monotonic()

    def close(self) -> None:
        """Closes the file, once it is on the disk."""
        with contextlib.suppress(OSError):
            self._sync()
        self._unlock()

    def _unlock(self) -> None:
        # Unlocked explicitly, since a fork of this process (a DataLoader's) may keep the file open.
        with contextlib.suppress(OSError), self._file:
            fcntl.flock(self._file, fcntl.LOCK_UN)


# The attributes of an episode that its line has, besides those that identify it.
_FIELDS = ("return_", "length", "terminated", "info", "failed", "repeats", "steps", "seconds")
_KEYS = {"return_": "return"}


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_integer(value: Any) -> bool:
    """Whether it is an integer that fits into int64."""
    return isinstance(value, int) and -1 << 63 <= value < 1 << 63


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_integer(value)


def _are_keys(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_text, value))


def _is_reference(value: Any) -> bool:
    """Whether it is a reference that `Task` accepts."""
    if value is None:
        return True
    two = isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))
    return two and value[0] != value[1] and all(map(math.isfinite, value))


def _is_info(value: Any) -> bool:
    """Whether it is a dict whose integers can be converted to floats, as `to_plain` ensures."""
    return isinstance(value, dict) and all(
        abs(each) < 1 << 1000 for each in value.values() if isinstance(each, int)
    )


# The keys that each kind of line must have, and the checks of their values.
_HEAD: Mapping[str, Callable[[Any], bool]] = {
    "shmvec": _is_integer,
    "drawn": lambda value: value is None or isinstance(value, int) and value >= 0,
}
_TASK: Mapping[str, Callable[[Any], bool]] = {
    "task": _is_text,
    "env": _is_text,
    "info_keys": _are_keys,
    "reference": _is_reference,
}
_EPISODE: Mapping[str, Callable[[Any], bool]] = {
    "task": _is_text,
    "return": _is_number,
    "terminated": lambda value: isinstance(value, bool),
    "info": _is_info,
    "failed": _is_text,
    "seconds": _is_number,
    **dict.fromkeys(("episode", "seed", "length", "repeats", "steps"), _is_integer),
}


class Content(NamedTuple):
    """What a record has.

    Attributes:
        head: Its first line; empty in a new record.
        tasks: The lines of tasks, by name.
        episodes: By task, the lines of its episodes, by number; of two of one, the first.
        nbytes: The number of bytes of all lines.
    """

    head: dict[str, Any]
    tasks: dict[str, dict[str, Any]]
    episodes: dict[str, dict[int, dict[str, Any]]]
    nbytes: int

    def played(self, task: str) -> Iterator[Episode]:
        """The episodes of a task, by number."""
        for number, line in sorted(self.episodes.get(task, {}).items()):
            episode = Episode(number, line["seed"], line.get("options"), task=task)
            _fill_in(episode, line)
            yield episode


def read_record(path: Path) -> Content:
    """Reads a record.

    An incomplete last line, which a crash or a power cut has left, is ignored.

    Raises:
        ValueError: It is not a record, or a line that is not the last one is damaged.
    """
    lines, nbytes, torn = [], 0, 0
    with open(path, "rb") as file:
        for number, text in enumerate(file, 1):
            line = _parse_line(text)
            if line is None or ("shmvec" in line) != (number == 1):
                torn = torn or number
                continue
            if torn > 1:
                raise RecordError(
                    f"{path}, line {torn} is damaged, and more lines follow it: delete the line, "
                    "and its episode is played again"
                )
            lines.append(line)
            nbytes += len(text)
    if (
        torn == 1
        and (lines or not _is_torn_head(path))
        or (lines and lines[0]["shmvec"] != _FORMAT)
    ):
        raise RecordError(f"{path} is not a record of an evaluation: name another file")
    content = Content(lines[0] if lines else {}, {}, {}, nbytes)
    for line in lines[1:]:
        if "episode" in line:
            content.episodes.setdefault(line["task"], {}).setdefault(line["episode"], line)
        else:
            content.tasks[line["task"]] = line
    return content


def _is_torn_head(path: Path) -> bool:
    """Whether a file without a complete line is the beginning of a record, or zeros."""
    content = path.read_bytes()
    head = b'{"shmvec"'
    return content.startswith(head[: len(content)]) or not content.strip(b"\0")


def _comparable(value: Any) -> str:
    """A value as text, which can be compared even if it contains nan."""
    return json.dumps(value, sort_keys=True)


def _parse_line(text: bytes) -> dict[str, Any] | None:
    """A line's content; None: the line is incomplete or damaged."""
    if not text.endswith(b"\n"):
        return None
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and _is_complete(line) else None


def _is_complete(line: Mapping[str, Any]) -> bool:
    """Whether a line has all keys that are read, with valid values."""
    checks = _HEAD if "shmvec" in line else _EPISODE if "episode" in line else _TASK
    return all(name in line and check(line[name]) for name, check in checks.items())


def to_plain(value: Any) -> Any:
    """Converts a value to values that JSON has.

    An array becomes a list or, if it has one value, that; anything unknown becomes its repr. The
    result is the same when read from a record, and in each process: reprs have no addresses.
    """
    try:
        return _to_plain(value)
    except Exception as error:  # it contains itself, or its class has a fault
        return f"<{type(value).__name__}: {type(error).__name__}>"


def _to_plain(value: Any) -> Any:
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            if kind is int:
                float(value)  # raises: it has more digits than Python writes
            return kind(value)
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {str(key): _to_plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(each) for each in value]
    if isinstance(value, np.ndarray) and value.size == 1:
        return _to_plain(value.item())
    if isinstance(value, np.longdouble):
        return float(value)
    if hasattr(value, "tolist") and not isinstance(value, np.clongdouble):  # an array, a tensor
        return _to_plain(value.tolist())
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(repr, value)))}}}"
    return _ADDRESS.sub("", repr(value))


def _fill_in(episode: Episode, line: Mapping[str, Any]) -> None:
    for name in _FIELDS:
        setattr(episode, name, line[_KEYS.get(name, name)])
    episode.finished = not episode.failed

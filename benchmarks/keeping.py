"""Results made in parts, by runs that may be killed: a JSON file of what is there, a line a row."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Row", "merged", "read", "write"]

Row = dict[str, Any]


def read(file: Path | None, name: str, setup: Mapping[str, Any]) -> list[Row]:
    """The rows of that name that are there.

    Raises:
        SystemExit: They are of another machine or other versions.
    """
    if file is None or not file.exists():
        return []
    results = json.loads(file.read_text())
    if results["machine"] != setup:
        raise SystemExit(f"{file} is of another machine or other versions")
    rows: list[Row] = results[name]
    return rows


def merged(old: Sequence[Row], new: Sequence[Row], cell: Sequence[str]) -> list[Row]:
    """All rows; of a cell, which these columns name, that was measured anew the new ones."""

    def key(row: Row) -> tuple[str, ...]:
        return tuple(str(row[name]) for name in cell)

    anew = set(map(key, new))
    return [*(row for row in old if key(row) not in anew), *new]


def write(file: Path | None, results: Mapping[str, Any]) -> None:
    """Replaces the file at once, so that it is whole whenever its writer is killed."""
    if file is None:
        return
    parts = []
    for name, part in results.items():
        if isinstance(part, list):
            text = "[\n" + ",\n".join(map(json.dumps, part)) + "\n]"
        else:
            text = json.dumps(part, indent=1)
        parts.append(f"{json.dumps(name)}: {text}")
    new = file.with_name(file.name + ".new")
    new.write_text("{" + ",\n".join(parts) + "}\n")
    os.replace(new, file)

"""The control groups that this process lives in: where their limits are to be read."""

from __future__ import annotations

import contextlib
from pathlib import Path

__all__ = ["MEMBERSHIP", "ROOT", "own_cgroups"]

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def own_cgroups(controller: str, root: Path = ROOT, membership: Path = MEMBERSHIP) -> list[Path]:
    """Folders of the cgroups that this process is in, and of all around them, of v2 and v1.

    A limit of any of them holds. A container usually sees its own cgroup as the root, and may see
    the path that it has outside as its membership: not every folder exists.

    Args:
        controller: Which of v1's hierarchies, for example "cpu".
        root: Where the hierarchies are mounted.
        membership: The file that names the process's cgroups.
    """
    owns = {root: Path(), root / controller: Path()}
    with contextlib.suppress(OSError):
        for line in membership.read_text("utf-8", "surrogateescape").splitlines():
            _, controllers, path = line.split(":", 2)
            own = Path(path.removeprefix("/"))
            if not controllers:
                owns[root] = own
            elif controller in controllers.split(","):
                owns[root / controller] = own
    return [top / folder for top, own in owns.items() for folder in (own, *own.parents)]

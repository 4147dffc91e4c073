# SPDX-License-Identifier: Apache-2.0
"""Memory that processes of this machine may still take: of the machine, and within limits of control groups."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import NamedTuple

_ROOT = pathlib.Path("/")
# Limits above this are none: cgroup v1 has the largest multiple of a page for "max".
_NO_LIMIT = 1 << 60


class Room(NamedTuple):
    """Memory that several processes may share.

    Attributes:
      key: the same for all processes that share it.
      free_bytes: what they may still take, all together.
      total_bytes: with what is taken.
      name: in words.
    """

    key: str
    free_bytes: int
    total_bytes: int
    name: str


def rooms(root: pathlib.Path = _ROOT) -> list[Room]:
    """Returns the memory of this machine, and that of each control group with a limit that this process is in.

    Args:
      root: directory with `proc` and `sys`.
    """
    try:
        boot = (root / "proc/sys/kernel/random/boot_id").read_text().strip()
        lines = (root / "proc/meminfo").read_text().splitlines()
        kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines if len(line.split()) > 1}
        machine = Room(boot, 1024 * kilobytes["MemAvailable"], 1024 * kilobytes["MemTotal"], "the machine")
    except (OSError, ValueError, KeyError):
        return []
    return [machine, *_groups(root, boot)]


def _groups(root: pathlib.Path, boot: str) -> Iterator[Room]:
    try:
        entries = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in entries:
        if not controllers:
            mount, limit, used, prefix = root / "sys/fs/cgroup", "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            limit, used, prefix = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
        else:
            continue
        # Within a container the path may be that of the host; the container's own group is at the mount, then.
        group = mount / path.lstrip("/")
        for folder in dict.fromkeys([group, *group.parents]):
            if not folder.is_relative_to(mount):
                break
            room = _group(folder, limit, used, prefix, boot)
            if room is not None:
                yield room


def _group(folder: pathlib.Path, limit: str, used: str, prefix: str, boot: str) -> Room | None:
    try:
        most = int((folder / limit).read_text())
        taken = int((folder / used).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        # Containers of one machine have groups of the same name, which are different directories.
        key = f"{boot}:{folder.stat().st_ino}:{folder}"
    except (OSError, ValueError):  # There is no such group, or its limit is "max".
        return None
    if most >= _NO_LIMIT:
        return None
    # Pages of files are given up for others.
    files = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
    free = max(0, most - taken + files)
    return Room(key, free, most, f"the control group {folder}")

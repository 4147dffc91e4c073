# SPDX-License-Identifier: Apache-2.0
"""Memory that processes may still take: of the machine, and of control groups of both versions."""

from __future__ import annotations

import pathlib

from tfdist.coordination import usage

GIB = 1 << 30


def put(root: pathlib.Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def machine(root: pathlib.Path, groups: str) -> None:
    meminfo = "MemTotal:       16777216 kB\nMemFree:  1024 kB\nMemAvailable:    8388608 kB\nHugePages_Total:   0\n"
    put(root, {"proc/meminfo": meminfo, "proc/sys/kernel/random/boot_id": "b00t\n", "proc/self/cgroup": groups})


def found(root: pathlib.Path) -> list[tuple[int, int]]:
    return [(room.free_bytes, room.total_bytes) for room in usage.rooms(root)]


def test_limits_of_all_groups_above_count_in_version_two(tmp_path: pathlib.Path) -> None:
    machine(tmp_path, "0::/pod/task\n")
    pod, task = "sys/fs/cgroup/pod/", "sys/fs/cgroup/pod/task/"
    put(tmp_path, {task + "memory.max": "max\n", task + "memory.current": "1\n", task + "memory.stat": "anon 1\n"})
    files = f"inactive_file {GIB // 4}\nactive_file {GIB * 3 // 4}\n"
    used = {"memory.max": f"{4 * GIB}\n", "memory.current": f"{3 * GIB}\n", "memory.stat": files}
    put(tmp_path, {pod + name: text for name, text in used.items()})
    assert found(tmp_path) == [(8 * GIB, 16 * GIB), (2 * GIB, 4 * GIB)]
    assert usage.rooms(tmp_path)[0].key == "b00t"
    # The key is the same for all processes of the group, and of no other machine.
    assert usage.rooms(tmp_path)[1].key.startswith("b00t") and usage.rooms(tmp_path)[1].key.endswith("/pod")


def test_a_container_finds_its_limit_at_the_mount_in_version_one(tmp_path: pathlib.Path) -> None:
    machine(tmp_path, "5:cpu,cpuacct:/x\n4:memory:/docker/0123\n0::/\n")
    group = "sys/fs/cgroup/memory/memory."
    put(tmp_path, {f"{group}limit_in_bytes": f"{2 * GIB}\n", f"{group}usage_in_bytes": f"{GIB}\n"})
    put(tmp_path, {f"{group}stat": "cache 5\ntotal_inactive_file 0\n"})
    assert found(tmp_path) == [(8 * GIB, 16 * GIB), (GIB, 2 * GIB)]


def test_a_system_without_proc_says_nothing(tmp_path: pathlib.Path) -> None:
    assert usage.rooms(tmp_path) == []

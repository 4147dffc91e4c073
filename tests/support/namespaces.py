# SPDX-License-Identifier: Apache-2.0
"""Machines made of network namespaces, each with a link of a given rate to a switch between them. Root, iproute2."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Sequence

PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def missing() -> str:
    """Returns a reason why there can be no such machines here; "" if there can."""
    if os.geteuid():
        return "network namespaces need root"
    absent = [tool for tool in ("ip", "tc") if not shutil.which(tool, path=PATH)]
    return f"network namespaces need {' and '.join(absent)}, of iproute2" if absent else ""


@contextlib.contextmanager
def joined(count: int, mbits: int) -> Iterator[tuple[Sequence[str], Sequence[str]]]:
    """Yields the names of namespaces and their addresses; each sends and receives up to `mbits` Mb/s."""
    token = secrets.token_hex(3)
    switch, spaces = f"tfs{token}", [f"tf{token}{index}" for index in range(count)]
    hosts = [f"10.78.0.{index + 1}" for index in range(count)]
    try:
        _do("ip", "netns", "add", switch)
        _do("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _do("ip", "-n", switch, "link", "set", "br0", "up")
        for index, (space, host) in enumerate(zip(spaces, hosts, strict=True)):
            port = f"port{index}"
            _do("ip", "netns", "add", space)
            _do("ip", "-n", space, "link", "add", "eth0", "type", "veth", "peer", port, "netns", switch)
            _do("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
            _do("ip", "-n", space, "link", "set", "lo", "up")
            _do("ip", "-n", space, "addr", "add", f"{host}/24", "dev", "eth0")
            _do("ip", "-n", space, "link", "set", "eth0", "up")
            # Out of the machine, and out of the switch into it; a bucket of a few milliseconds.
            for where, device in ((space, "eth0"), (switch, port)):
                rate = [f"{mbits}mbit", "burst", "128kb", "latency", "100ms"]
                _do("tc", "-n", where, "qdisc", "add", "dev", device, "root", "tbf", "rate", *rate)
        yield spaces, hosts
    finally:
        for space in (*spaces, switch):
            subprocess.run(["ip", "netns", "del", space], env={**os.environ, "PATH": PATH}, capture_output=True)


def counters(spaces: Sequence[str]) -> list[tuple[int, int]]:
    """Returns the bytes that each of the namespaces of `joined` has sent and received so far, headers included."""
    # All links end at the switch.
    command = ["ip", "-n", f"tfs{spaces[0][2:8]}", "-j", "-s", "link", "show", "type", "veth"]
    done = subprocess.run(command, env={**os.environ, "PATH": PATH}, capture_output=True, text=True, check=True)
    ports = {each["ifname"]: each["stats64"] for each in json.loads(done.stdout)}
    each_port = [ports[f"port{index}"] for index in range(len(spaces))]
    return [(port["rx"]["bytes"], port["tx"]["bytes"]) for port in each_port]


def _do(*command: str) -> None:
    done = subprocess.run(command, env={**os.environ, "PATH": PATH}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")

# SPDX-License-Identifier: Apache-2.0
"""Hosts with a real sshd each, in network namespaces of this machine, whose links can be cut.

    with hosts(["a", "b"], folder) as network:
        network.run([... "launch", "ssh", *network.flags, f"--hosts={network.address('a')}", ...])
        network.drop("b")  # From now on b's packets vanish without a word.

Needs root, sshd, iproute2 and iptables; `missing()` says what is not there.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

_LAUNCHER = "launcher"
_TOOLS = ("ip", "iptables", "ssh", "sshd", "ssh-keygen")
_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
_CONFIG = """
Port 22
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
PasswordAuthentication no
PermitRootLogin prohibit-password
PermitUserEnvironment no
UsePAM no
"""


def missing() -> str:
    """A reason why there can be no such hosts here; "" if there can."""
    if os.geteuid():
        return "network namespaces with an sshd in each need root"
    for tool in _TOOLS:
        if not shutil.which(tool, path=_PATH):
            return f"there is no {tool} here"
    name = f"tfdist{secrets.token_hex(3)}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, env=_env()).returncode:
        return "this system lets nobody make a network namespace"
    _ip("netns", "del", name)
    return ""


class Network:
    """Hosts on one switch, and the launcher's machine. Made by `hosts`.

    Attributes:
      flags: of `tfdist launch ssh`, for these hosts.
    """

    def __init__(self, names: Sequence[str], folder: pathlib.Path) -> None:
        self._folder = folder
        self._prefix = f"tf{secrets.token_hex(2)}"
        # Jobs of several networks leave marks in one /tmp, by their addresses.
        self._net = f"10.{20 + secrets.randbelow(200)}.{secrets.randbelow(250)}"
        self._numbers = {name: number for number, name in enumerate([_LAUNCHER, *names], 1)}
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.options = [
            "-F/dev/null",
            f"-i{folder}/key",
            "-oStrictHostKeyChecking=no",
            "-oUserKnownHostsFile=/dev/null",
            "-oLogLevel=ERROR",
        ]
        self.flags = [f"--ssh={option}" for option in self.options]

    def address(self, name: str) -> str:
        """The IP address of a host."""
        return f"{self._net}.{self._numbers[name]}"

    def start(self) -> None:
        """Makes namespaces and links, and starts the servers."""
        for name in ("host_key", "key"):
            subprocess.run(
                ["ssh-keygen", "-q", "-N", "", "-t", "ed25519", "-f", str(self._folder / name)], check=True, env=_env()
            )
        (self._folder / "sshd_config").write_text(_CONFIG.format(folder=self._folder))
        pathlib.Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        _ip("netns", "add", self._space("switch"))
        self._in("switch", "ip", "link", "add", "switch", "type", "bridge")
        self._in("switch", "ip", "link", "set", "switch", "up")
        for name, number in self._numbers.items():
            self._plug_in(name, f"port{number}")
        for name in self._numbers:
            if name != _LAUNCHER:
                self._serve(name)

    def _plug_in(self, name: str, port: str) -> None:
        _ip("netns", "add", self._space(name))
        _ip(
            "-n", self._space("switch"), "link", "add", port, "type", "veth", "peer", "eth0", "netns", self._space(name)
        )
        self._in("switch", "ip", "link", "set", port, "master", "switch", "up")
        self._in(name, "ip", "link", "set", "lo", "up")
        self._in(name, "ip", "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
        self._in(name, "ip", "link", "set", "eth0", "up")

    def _serve(self, name: str) -> None:
        sshd = shutil.which("sshd", path=_PATH) or "sshd"
        command = [sshd, "-D", "-e", "-f", str(self._folder / "sshd_config")]
        with (self._folder / f"sshd_{name}.log").open("wb") as log:
            self._daemons.append(
                subprocess.Popen(self.command(name, command), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )

    def wait_until_up(self) -> None:
        """Returns once every host takes a login."""
        for name in self._numbers:
            options = [*self.options, "-oBatchMode=yes", "-oConnectionAttempts=20"]
            if name != _LAUNCHER:
                self.run(["ssh", *options, self.address(name), "true"], check=True, timeout=20)

    def stop(self) -> None:
        """Ends every process in the namespaces, and takes them away."""
        for name in (*self._numbers, "switch"):
            pids = _ip("netns", "pids", self._space(name), check=False).split()
            if pids:
                subprocess.run(["kill", "-KILL", *pids], capture_output=True)
        for daemon in self._daemons:
            daemon.wait()
        for name in (*self._numbers, "switch"):
            _ip("netns", "del", self._space(name), check=False)

    def pids(self, name: str) -> list[int]:
        """The processes on a host."""
        return [int(pid) for pid in _ip("netns", "pids", self._space(name)).split()]

    # What happens to a host's link.

    def drop(self, name: str) -> None:
        """Every packet from and to the host vanishes."""
        for chain in ("INPUT", "OUTPUT"):
            self._in(name, "iptables", "-w", "-I", chain, "!", "-i" if chain == "INPUT" else "-o", "lo", "-j", "DROP")

    def unplug(self, name: str) -> None:
        """Pulls the cable out of the switch."""
        self._in("switch", "ip", "link", "set", f"port{self._numbers[name]}", "down")

    # Programs.

    def command(self, name: str, command: Sequence[str]) -> list[str]:
        """The command that runs `command` on a host."""
        return ["ip", "netns", "exec", self._space(name), *command]

    def run(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs a command on the launcher's machine."""
        options = {"capture_output": True, "text": True, "env": _env(), **options}
        return subprocess.run(self.command(_LAUNCHER, command), **options)

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Starts a command on the launcher's machine."""
        return subprocess.Popen(self.command(_LAUNCHER, command), **{"env": _env(), **options})

    def _space(self, name: str) -> str:
        return f"{self._prefix}{name}"

    def _in(self, name: str, *command: str) -> None:
        subprocess.run(self.command(name, command), check=True, capture_output=True, env=_env())


@contextlib.contextmanager
def hosts(names: Sequence[str], folder: pathlib.Path) -> Iterator[Network]:
    """Makes hosts of these names; keys and logs are in `folder`. All is gone at the end."""
    network = Network(names, folder)
    try:
        network.start()
        network.wait_until_up()
        yield network
    finally:
        network.stop()


def _env() -> dict[str, str]:
    return {**os.environ, "PATH": _PATH}


def _ip(*arguments: str, check: bool = True) -> str:
    return subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True, env=_env()).stdout

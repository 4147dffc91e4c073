# SPDX-License-Identifier: Apache-2.0
"""Parser of the list of hosts: from a file with one line per host, or from the command line."""

from __future__ import annotations

import dataclasses
import pathlib
import re

from tfdist import _addresses
from tfdist.launchers.requests import LaunchError

_MAX_SLOTS = 1024
_LOGIN = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_][A-Za-z0-9_.:-]*", re.ASCII)
_EXAMPLE = 'write "host", "user@host slots=2" or "host slots=2 address=10.0.0.2"'


@dataclasses.dataclass(frozen=True)
class Host:
    """A machine that runs tasks.

    Args:
      login: destination for ssh, such as "user@host".
      slots: most tasks on this host.
      address: name or address at which the other tasks reach it; the host of `login` by default.
    """

    login: str
    slots: int = 1
    address: str = ""

    def __post_init__(self) -> None:
        if not self.address:
            object.__setattr__(self, "address", self.login.rpartition("@")[2])


def read(path: str) -> list[Host]:
    """Reads the hosts in a file: one line each, "host slots=N"; a # begins a comment.

    Raises:
      LaunchError: a line is invalid (the message has its number), the file has no host, or it can't be read.
    """
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise LaunchError(f"--hostfile is not a text file. Received: {path!r}") from None
    except OSError as error:
        raise LaunchError(f"--hostfile can't be read: {error.strerror}. Received: {path!r}") from None
    return parse(text, path)


def parse(text: str, name: str = "hostfile") -> list[Host]:
    """Parses the text of a file. See `read`."""
    found: dict[str, int] = {}
    hosts = []
    for number, line in enumerate(text.split("\n"), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{name}, line {number}"
        host = _host(words, where)
        first = found.setdefault(host.address.lower(), number)
        if first != number:
            raise LaunchError(f"{where}: the host is on line {first} already; add its slots there. Received: {line!r}")
        hosts.append(host)
    if not hosts:
        raise LaunchError(f"{name} lists no host; {_EXAMPLE} on a line. Received: nothing")
    return hosts


def from_flag(text: str) -> list[Host]:
    """Parses "a,user@b:2": names, each with its number of slots if it has more than one.

    Raises:
      LaunchError: an entry is invalid.
    """
    lines = []
    for item in text.split(","):
        login, colon, slots = item.partition(":")
        lines.append(f"{login} slots={slots}" if colon else login)
        if not login.strip() or len(item.split()) != 1 or "#" in item:
            raise LaunchError(f"--hosts has an entry that is no host; write --hosts=a,user@b:2. Received: {text!r}")
    return parse("\n".join(lines), "--hosts")


def _host(words: list[str], where: str) -> Host:
    login, *options = words
    if not _LOGIN.fullmatch(login):
        raise LaunchError(f"{where}: the name of the host is invalid; {_EXAMPLE}. Received: {login!r}")
    found: dict[str, str] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if key not in ("slots", "address") or not equals or not value or key in found:
            raise LaunchError(f"{where}: the option of the host is invalid; {_EXAMPLE}. Received: {option!r}")
        found[key] = value
    slots = found.get("slots", "1")
    if not (slots.isascii() and slots.isdigit() and len(slots) < 6 and 1 <= int(slots) <= _MAX_SLOTS):
        raise LaunchError(f"{where}: slots is no number from 1 to {_MAX_SLOTS}; {_EXAMPLE}. Received: {slots!r}")
    host = Host(login, int(slots), found.get("address", ""))
    wrong = _addresses.problem(f"{host.address}:1")
    if wrong:
        raise LaunchError(f"{where}: the address {wrong[0]}; {_EXAMPLE}. Received: {host.address!r}")
    return host

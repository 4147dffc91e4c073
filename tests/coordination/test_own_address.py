# SPDX-License-Identifier: Apache-2.0
"""A worker listens where the other workers reach it, whatever its own name means to itself."""

from __future__ import annotations

import socket

import pytest

from tfdist.strategies import _multi_worker_cluster


class Machine(_multi_worker_cluster.System):
    """Machine `a` of a cluster: its /etc/hosts, its interfaces, and where its packets leave."""

    def __init__(self, names: dict[str, list[str]], interfaces: set[str], source: str | None = "10.0.0.1") -> None:
        self._names, self._interfaces, self._source = names, interfaces, source

    def resolve(self, host: str) -> list[str]:
        return self._names.get(host, [host] if host[0].isdigit() else [])

    def has(self, address: str) -> bool:
        return address in self._interfaces

    def source(self, address: str) -> str | None:
        return self._source


NETWORK = {"127.0.0.1", "127.0.1.1", "10.0.0.1"}
PEER = {"b": ["10.0.0.2"]}


def listening(machine: Machine, own: str, *others: str) -> tuple[str, list[str]]:
    said: list[str] = []
    return _multi_worker_cluster.reachable(own, [own, *others], said.append, machine), said


def test_an_own_name_that_means_the_loopback_interface_is_not_taken_at_its_word() -> None:
    machine = Machine({"a": ["127.0.1.1"], **PEER}, NETWORK)
    found, said = listening(machine, "a", "b")
    assert found == "10.0.0.1"
    (line,) = said
    assert "a is 127.0.1.1 on this machine" in line and "listening at 10.0.0.1" in line


@pytest.mark.parametrize(
    ("own", "names"),
    [("a", {"a": ["10.0.0.1"]}), ("a", {"a": ["127.0.1.1", "10.0.0.1"]}), ("10.0.0.1", {})],
    ids=["name", "name of two addresses", "address"],
)
def test_an_address_of_an_interface_is_where_it_listens(own: str, names: dict[str, list[str]]) -> None:
    assert listening(Machine({**names, **PEER}, NETWORK, source=None), own, "b") == ("10.0.0.1", [])


def test_an_address_that_only_the_others_know_is_that_of_the_way_to_them() -> None:
    """As behind a service of Kubernetes, or a public address that a router translates."""
    found, said = listening(Machine({"a": ["52.1.2.3"], **PEER}, NETWORK), "a", "b")
    assert found == "10.0.0.1"
    assert "52.1.2.3" in said[0]


@pytest.mark.parametrize("other", ["a", "127.0.0.1", "localhost"])
def test_workers_of_one_machine_stay_on_the_loopback_interface(other: str) -> None:
    machine = Machine({"a": ["127.0.1.1"], "localhost": ["127.0.0.1"]}, NETWORK)
    assert listening(machine, "a", other) == ("127.0.1.1", [])


def test_no_way_to_anybody_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(OSError, match=r"TF_CONFIG.*Received: a \(127.0.1.1\)"):
        listening(Machine({"a": ["127.0.1.1"], **PEER}, NETWORK, source=None), "a", "b")


def test_what_is_asked_of_this_very_machine() -> None:
    system = _multi_worker_cluster.System()
    assert system.resolve("127.0.0.1") == ["127.0.0.1"]
    assert system.resolve("no-such-host.invalid") == []
    assert system.has("127.0.0.1")
    # For documentation only (RFC 5737): nobody's address.
    assert not system.has("192.0.2.1")
    assert system.source("127.0.0.1") == "127.0.0.1"
    if socket.has_ipv6 and system.has("::1"):
        assert system.source("::1") == "::1"

# SPDX-License-Identifier: Apache-2.0
"""Tests of `tfdist.coordination.lost_servers`, with real sockets."""

import errno
import socket

import pytest

from tfdist.coordination import lost_servers


@pytest.fixture
def listening():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def closed():
    # Bound and not listening: it refuses, and nobody else gets the port.
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{unused.getsockname()[1]}"


def test_those_that_refuse_are_named(listening, closed):
    assert lost_servers.describe_lost({}) is None
    assert lost_servers.describe_lost({0: listening}) is None
    one = lost_servers.describe_lost({0: listening, 1: closed})
    assert one is not None and one.startswith(f"ps:1 ({closed}) is lost, and its variables with it; ")
    two = lost_servers.describe_lost({0: closed, 2: closed})
    assert two is not None and two.startswith(f"ps:0 ({closed}), ps:2 ({closed}) are lost, and their variables")


def test_a_server_that_is_ending_is_asked_twice(monkeypatch, closed):
    answers = iter([False, True])
    monkeypatch.setattr(lost_servers, "_is_lost", lambda address: next(answers))
    monkeypatch.setattr(lost_servers, "_ENDING_SECS", 0)
    assert "ps:0" in (lost_servers.describe_lost({0: closed}, is_suspected=True) or "")


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (TimeoutError(), True),
        (OSError(errno.EHOSTUNREACH, "no route"), True),
        (OSError(errno.EMFILE, "too many open files"), False),
        (socket.gaierror(socket.EAI_AGAIN, "try again"), False),
    ],
    ids=["no answer", "no route", "no descriptors", "no name"],
)
def test_only_what_is_known_is_said(monkeypatch, error, is_lost):
    def create_connection(*_, **__):
        raise error

    monkeypatch.setattr(socket, "create_connection", create_connection)
    assert (lost_servers.describe_lost({0: "somewhere:1"}) is not None) == is_lost

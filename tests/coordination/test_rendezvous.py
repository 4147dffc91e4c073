# SPDX-License-Identifier: Apache-2.0
"""Tasks meet at their addresses, or say who is missing and why. No TensorFlow."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tfdist import Cluster, Task, _log
from tfdist.cluster import digest_of
from tfdist.coordination import lines, rendezvous
from tfdist.launchers.supervise.processes import PortReservation


def cluster(ports, index: int, **changed: str) -> Cluster:
    addresses = {number: f"127.0.0.1:{port}" for number, port in enumerate(ports)}
    return Cluster(
        {"worker": addresses | {int(key[1:]): value for key, value in changed.items()}}, Task("worker", index)
    )


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines of those who wait."""
    found: list[str] = []
    monkeypatch.setattr(_log, "say", found.append)
    monkeypatch.setattr(rendezvous, "_SAY_EVERY_SECS", 0.2)
    return found


def test_tasks_meet_at_another_address_than_their_own_name_means():
    """As on a machine with two networks, or a virtual address: its own name means the address of one only."""
    with PortReservation(2) as reserved, ThreadPoolExecutor(2) as pool:
        port = reserved.ports[1]
        described = [cluster(reserved.ports, index, _1=f"127.0.0.{4 - index}:{port}") for index in range(2)]
        assert [*pool.map(lambda each: rendezvous.meet(each, 60), described)] == [None] * 2


def test_the_port_is_free_again_for_the_server():
    with PortReservation(2) as reserved:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda index: rendezvous.meet(cluster(reserved.ports, index), 30), range(2)))
        for port in reserved.ports:
            with socket.create_server(("", port)) as server:
                assert server.getsockname()[1] == port


def test_the_missing_are_named_with_the_reason(said: list[str]):
    with PortReservation(3) as reserved:
        described = cluster(reserved.ports, 0, _2="no-such-host.invalid:2222")
        with pytest.raises(TimeoutError) as error:
            rendezvous.meet(described, 0.5)
    for text in (str(error.value), said[-1]):
        assert f"worker:1 at 127.0.0.1:{reserved.ports[1]} (connection refused)" in text
        assert "worker:2 at no-such-host.invalid:2222 (" in text
    assert said[0].startswith("worker:0: waiting for worker:1 at")


def test_who_waits_has_a_name_also_where_it_is_no_task(said: list[str]):
    with PortReservation(1) as reserved, pytest.raises(TimeoutError):
        described = cluster(reserved.ports, 0)
        rendezvous.reach(described, described.tasks, 0.5, lambda: None, "chief")
    assert said[0].startswith("chief: waiting for worker:0 at")


def test_a_port_in_use_is_said_at_once():
    with socket.create_server(("", 0)) as used:
        port = used.getsockname()[1]
        with pytest.raises(OSError, match="worker:0 can't listen on its port") as error:
            rendezvous.meet(cluster([port, 1], 0), 30)
    assert f"Received: 127.0.0.1:{port}" in str(error.value)


def test_a_server_of_another_kind_has_met_all_already(said: list[str]):
    with PortReservation(1) as reserved, socket.create_server(("127.0.0.1", 0)) as server:

        def answer_as_tensorflow() -> None:
            with server.accept()[0] as connection:
                connection.sendall(b"\x00\x00\x1e\x04\x00\x00\x00\x00\x00")  # the beginning of HTTP/2 settings

        thread = threading.Thread(target=answer_as_tensorflow)
        thread.start()
        rendezvous.meet(cluster([reserved.ports[0], server.getsockname()[1]], 0), 30)
        thread.join()
    assert said == []


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "closed the connection"),
        (b"tfdist 0000 worker:1 nonce\n", "its TF_CONFIG differs"),
        (b"tfdist\n", "its TF_CONFIG differs"),
        (b"tfdist DIGEST worker:0 nonce\n", "says that it is 'worker:0'"),
        *[(each, "") for each in (b"tfdist \xff\xfe \xff \xff\n", b"tfdist" + bytes(9000), b"\xff", b"\n")],
    ],
)
def test_a_wrong_answer_is_a_reason(answer: bytes, reason: str):
    with socket.create_server(("127.0.0.1", 0)) as server:
        described = cluster([1, server.getsockname()[1]], 0)

        def give() -> None:
            with server.accept()[0] as connection, contextlib.suppress(OSError):
                connection.sendall(answer.replace(b"DIGEST", digest_of(described.training_tasks).encode()))

        thread = threading.Thread(target=give)
        thread.start()
        assert reason in str(rendezvous.ask(described, Task("worker", 1)) or 1)
        thread.join()


# Strangers.


@contextlib.contextmanager
def listening(described: Cluster, secret: str = "") -> Iterator[tuple[tuple[str, int], list[str]]]:
    """A task that listens and waits: at which address, and whom it has met."""
    met: list[str] = []
    with rendezvous.answering(described, secret.encode(), met.append):
        yield ("127.0.0.1", int(described.address().rpartition(":")[2])), met


@pytest.mark.parametrize("words", [b"", b"tfdist x y z " * 300])
def test_strangers_that_came_first_and_stay_delay_no_meeting(words: bytes):
    with PortReservation(2) as reserved, contextlib.ExitStack() as stack:
        address, met = stack.enter_context(listening(cluster(reserved.ports, 0), "a secret"))
        for _ in range(3 * lines.MOST_PEERS):
            stack.enter_context(socket.create_connection(address, 10)).sendall(words)
        assert rendezvous.ask(cluster(reserved.ports, 1), Task("worker", 0), b"a secret") is None
        assert met == ["worker:1"]


def test_a_stranger_cannot_say_that_it_is_a_task():
    with PortReservation(2) as reserved, listening(cluster(reserved.ports, 0), "a secret") as (_, met):
        described = cluster(reserved.ports, 1)
        for guessed in ("", "another"):
            assert "TFDIST_JOB_SECRET" in str(rendezvous.ask(described, Task("worker", 0), guessed.encode()))
        assert met == []
        assert rendezvous.ask(described, Task("worker", 0), b"a secret") is None
        assert met == ["worker:1"]


def test_all_meet_under_a_secret_that_is_not_sent():
    seen: list[bytes] = []
    read = lines.Connection.read_line
    with PortReservation(3) as reserved, ThreadPoolExecutor(3) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines.Connection, "read_line", lambda *given: seen.append(read(*given)) or seen[-1])
        described = [cluster(reserved.ports, index) for index in range(3)]
        meetings = pool.map(lambda each: rendezvous.meet(each, 30, secret="a secret"), described)
        assert [*meetings] == [None] * 3
    assert seen and b"a secret" not in b"".join(seen)


def test_a_false_task_at_a_tasks_address_is_no_meeting_under_a_secret():
    with PortReservation(1) as reserved, socket.create_server(("127.0.0.1", 0)) as server:
        described = cluster([reserved.ports[0], server.getsockname()[1]], 0)
        answers = [b"\x00\x00\x1e\x04\x00\x00\x00\x00\x00"]  # as TensorFlow's server
        answers.append(f"tfdist {digest_of(described.training_tasks)} worker:1 nonce\n".encode())

        def pretend() -> None:
            for number in itertools.count():
                try:
                    with server.accept()[0] as connection:
                        connection.sendall(answers[number % 2])
                        connection.recv(4096)
                        connection.sendall(rendezvous.MET)
                except OSError:
                    return

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(TimeoutError, match=r"worker:1 at .*(not proved|TFDIST_JOB_SECRET)"):
            rendezvous.meet(described, 1.0, secret="a secret")
        server.shutdown(socket.SHUT_RDWR)
        thread.join()

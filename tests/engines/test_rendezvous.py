# SPDX-License-Identifier: Apache-2.0
"""Tasks meet at their addresses, or say who is missing and why. No TensorFlow."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tfdist import Cluster, Task
from tfdist.engines import rendezvous
from tfdist.launchers.ports import PortReservation


def cluster(ports, index: int, **changed: str) -> Cluster:
    addresses = {number: f"127.0.0.1:{port}" for number, port in enumerate(ports)}
    return Cluster(
        {"worker": addresses | {int(key[1:]): value for key, value in changed.items()}}, Task("worker", index)
    )


def test_all_meet():
    with PortReservation(5) as reserved, ThreadPoolExecutor(5) as pool:
        meetings = [pool.submit(rendezvous.meet, cluster(reserved.ports, index), 30) for index in range(5)]
        assert [meeting.result() for meeting in meetings] == [None] * 5


def test_the_port_is_free_again_for_the_server():
    with PortReservation(2) as reserved:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda index: rendezvous.meet(cluster(reserved.ports, index), 30), range(2)))
        for port in reserved.ports:
            socket.create_server(("", port)).close()


def test_the_missing_are_named_with_the_reason():
    with PortReservation(3) as reserved:
        described = cluster(reserved.ports, 0, _2="no-such-host.invalid:2222")
        lines: list[str] = []
        with pytest.raises(TimeoutError) as error:
            rendezvous.meet(described, 0.5, every_secs=0.2, write=lines.append)
    for text in (str(error.value), lines[-1]):
        assert f"worker:1 at 127.0.0.1:{reserved.ports[1]} (connection refused)" in text
        assert "worker:2 at no-such-host.invalid:2222 (" in text
    assert lines[0].startswith("tfdist worker:0: waiting for worker:1 at")


def test_who_waits_has_a_name_also_where_it_is_no_task():
    with PortReservation(1) as reserved:
        described, lines = cluster(reserved.ports, 0), []
        with pytest.raises(TimeoutError):
            rendezvous.reach(described, described.tasks, 0.5, every_secs=0.2, write=lines.append, name="chief")
    assert lines[0].startswith("tfdist chief: waiting for worker:0 at")


def test_a_port_in_use_is_said_at_once():
    with socket.create_server(("", 0)) as used:
        port = used.getsockname()[1]
        with pytest.raises(OSError, match="worker:0 can't listen on its port") as error:
            rendezvous.meet(cluster([port, 1], 0), 30)
    assert f"Received: 127.0.0.1:{port}" in str(error.value)


def test_a_server_of_another_kind_has_met_all_already():
    with PortReservation(1) as reserved, socket.create_server(("127.0.0.1", 0)) as server:

        def answer_as_tensorflow() -> None:
            with server.accept()[0] as connection:
                connection.sendall(b"\x00\x00\x1e\x04\x00\x00\x00\x00\x00")  # the beginning of HTTP/2 settings

        thread = threading.Thread(target=answer_as_tensorflow)
        thread.start()
        rendezvous.meet(cluster([reserved.ports[0], server.getsockname()[1]], 0), 30)
        thread.join()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "closed the connection"),
        (b"tfdist 0000 worker:1\n", "its TF_CONFIG differs"),
        (b"tfdist", "its TF_CONFIG differs"),
    ],
)
def test_a_wrong_answer_is_no_meeting(answer, reason):
    assert reason in rendezvous._judge(answer, cluster([1, 2], 0), Task("worker", 1))


def test_an_address_that_leads_to_another_task_is_said():
    described = cluster([1, 2], 0)
    answer = rendezvous._hello(described)
    assert rendezvous._judge(answer, described, Task("worker", 1)) == "the task there says that it is worker:0"

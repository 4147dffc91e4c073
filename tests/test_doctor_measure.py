# SPDX-License-Identifier: Apache-2.0
"""tfdist doctor --measure: all tasks have the same links; missing tasks, strangers and invalid files are one line."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from test_doctor import PortReservation

import tfdist
from tfdist.doctor import measure as doctor_measure
from tfdist.doctor.measure import MeasuredLink


@pytest.fixture(autouse=True)
def short_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_measure, "_LINK_BYTES", 2**20)


def clusters(ports: list[int]) -> list[tfdist.Cluster]:
    addresses = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    return [tfdist.Cluster(addresses, tfdist.Task("worker", index)) for index in range(len(ports))]


def test_tasks_measure_their_links_in_turn():
    with PortReservation(3) as reservation, ThreadPoolExecutor(3) as pool:
        tasks = clusters(list(reservation.ports))
        found = list(pool.map(lambda task: doctor_measure.measure(task, 60.0), tasks))
    assert found[0] == found[1] == found[2]
    assert {(link.source, link.target) for link in found[0]} == {
        (f"worker:{one}", f"worker:{other}") for one in range(3) for other in range(3) if one != other
    }
    assert all(link.bytes_per_sec > 1e6 and 0 < link.latency_secs < 1 for link in found[0])
    assert doctor_measure.from_json(doctor_measure.to_json(found[0]), "links.json") == (found[0], False)
    assert doctor_measure.from_json(doctor_measure.to_json(found[0], True), "links.json") == (found[0], True)


def test_a_task_that_is_missing_is_named(capsys):
    with PortReservation(2) as reservation:
        first, second = clusters(list(reservation.ports))
        for task, missing in ((first, "worker:1"), (second, "worker:0")):
            assert doctor_measure.measure_as_task({"TF_CONFIG": task.to_tf_config()}, 0.3) == 1
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith("tfdist: ") and missing in line


def test_a_task_of_another_cluster_is_named_as_such(capsys):
    with PortReservation(3) as reservation, ThreadPoolExecutor(1) as pool:
        first, other = clusters(list(reservation.ports)[:2])[0], clusters(list(reservation.ports))[1]
        waiting = pool.submit(doctor_measure.measure_as_task, {"TF_CONFIG": other.to_tf_config()}, 6.0)
        assert doctor_measure.measure_as_task({"TF_CONFIG": first.to_tf_config()}, 60.0) == 1
        line, *_ = capsys.readouterr().err.splitlines()
        assert line == "tfdist: worker:1 has another TF_CONFIG; give all tasks the same cluster; see its own line"
        assert waiting.result() == 1
    assert "if it runs, see its own line" in capsys.readouterr().err


def test_one_task_alone_has_no_link(capsys):
    cluster = tfdist.Cluster({"worker": ["127.0.0.1:1"]}, tfdist.Task("worker", 0))
    assert doctor_measure.measure_as_task({"TF_CONFIG": cluster.to_tf_config()}, 1.0) == 1
    assert "worker:0 has no other task" in capsys.readouterr().err


@pytest.mark.parametrize("words", [b"", b"hello\n", b"0123 sink\n", b"\xff" * 5000])
def test_strangers_disturb_no_measurement(words):
    with PortReservation(2) as reservation, ThreadPoolExecutor(2) as pool:
        tasks = clusters(list(reservation.ports))
        first = pool.submit(doctor_measure.measure, tasks[0], 60.0)
        while True:
            try:
                stranger = socket.create_connection(("127.0.0.1", reservation.ports[0]), 10)
                break
            except ConnectionRefusedError:
                continue
        with stranger:
            stranger.sendall(words)
            second = pool.submit(doctor_measure.measure, tasks[1], 60.0)
            assert len(first.result()) == len(second.result()) == 2


def test_a_large_cluster_measures_few_links_of_each_task():
    tasks = [tfdist.Task("worker", index) for index in range(64)]
    found = doctor_measure.peers(tasks, tasks[63])
    assert [task.index for task in found] == [0, 1, 3, 7, 15, 31]
    assert len(doctor_measure.peers(tasks[:9], tasks[0])) == 8


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": "tfdist network", "version": 2}',
        *(
            json.dumps({"format": "tfdist network", "version": 1, "links": links})
            for links in (
                None,
                [],
                [1],
                [{}],
                [{**vars(MeasuredLink("a", "b", 1.0, 0.0)), "bytes_per_sec": 0.0}],
                [{**vars(MeasuredLink("a", "b", 1.0, 0.0)), "latency_secs": -1.0}],
            )
        ),
    ],
)
def test_an_invalid_file_of_links_is_one_line(text):
    with pytest.raises(ValueError, match=r"^links\.json") as raised:
        doctor_measure.from_json(text, "links.json")
    assert "\n" not in str(raised.value)

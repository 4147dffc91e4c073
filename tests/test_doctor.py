# SPDX-License-Identifier: Apache-2.0
"""tfdist doctor: what it finds on a machine and in a cluster, and that it says what to do."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys
import threading

import pytest

import tfdist
from tfdist import cli
from tfdist.doctor import __main__ as doctor
from tfdist.launchers.supervise.processes import PortReservation

ROOT = pathlib.Path(__file__).resolve().parents[1]
GOOD = {"tensorflow": "2.21.0", "keras": "3.15.1", "numpy": "2.4.0", "absl-py": "2.5.1"}


def wrong(found):
    return [finding.text for finding in found if finding.state == doctor.WRONG]


def cluster(*ports, index=0, host="127.0.0.1"):
    return tfdist.Cluster({"worker": [f"{host}:{port}" for port in ports]}, tfdist.Task("worker", index))


# This machine.


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, []),
        ({"tensorflow": "2.22.0rc1"}, ["tensorflow 2.22.0rc1 is not supported; pip install 'tensorflow>=2.20,<2.22'"]),
        ({"keras": "3.11.9"}, ["keras 3.11.9 is not supported; pip install 'keras>=3.15,<3.17'"]),
        ({"numpy": None}, ["numpy is not installed; pip install 'numpy>=1.26'"]),
        ({"tensorflow": None, "tensorflow-tpu": "2.20.0"}, []),
        (
            {"tensorflow-tpu": "2.20.0"},
            ["tensorflow 2.21.0 and tensorflow-tpu 2.20.0 overwrite each other; uninstall both"],
        ),
        ({"keras": "strange"}, ["keras strange is not supported"]),
    ],
)
def test_versions(change, words):
    found = wrong(doctor.versions({**GOOD, **change}.get))
    assert len(found) == len(words)
    assert all(text.startswith(start) for text, start in zip(found, words, strict=True))


def test_what_is_needed_is_what_setup_asks_for():
    setup = (ROOT / "setup.py").read_text()
    assert f'python_requires="{doctor._NEEDED["Python"]}"' in setup
    assert all(f'"{name}{needed}"' in setup for name, needed in doctor._NEEDED.items() if name != "Python")


def test_another_backend_of_keras(tmp_path):
    assert wrong(doctor.keras_backend({"KERAS_BACKEND": "jax"})) == [
        "KERAS_BACKEND has Keras use jax; set KERAS_BACKEND=tensorflow"
    ]
    assert wrong(doctor.keras_backend({"KERAS_HOME": str(tmp_path)})) == []
    (tmp_path / "keras.json").write_text('{"backend": "torch"}')
    assert "keras.json has Keras use torch" in wrong(doctor.keras_backend({"KERAS_HOME": str(tmp_path)}))[0]
    for text in ("[]", "{", '{"backend": "tensorflow"}'):
        (tmp_path / "keras.json").write_text(text)
        assert wrong(doctor.keras_backend({"KERAS_HOME": str(tmp_path)})) == []


def test_gpus(monkeypatch):
    def state(there, usable, package):
        monkeypatch.setattr(doctor.environment, "present", lambda env: usable if env else there)
        (finding,) = doctor.gpu_findings({"CUDA_VISIBLE_DEVICES": "x"}, {package: "9"}.get)
        return finding.state, finding.text

    assert state([], [], "")[0] == "ok"
    assert state(["0", "1"], ["0"], "nvidia-cudnn-cu12") == ("ok", "1 of 2 GPUs may be used")
    assert state(["0"], [], "") == ("warning", "CUDA_VISIBLE_DEVICES='x' hides all 1 GPUs; unset it to use them")
    assert "pip install '.[gpu]' in a checkout" in state(["0"], ["0"], "")[1]


# The cluster.


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "TF_CONFIG: the value is not JSON"),
        ('{"cluster": {"worker": ["a"]}, "task": {"type": "worker", "index": 0}}', "TF_CONFIG: cluster.worker[0] has"),
    ],
)
def test_a_malformed_tf_config(text, words):
    (found,) = wrong(doctor.examine(1.0, env={"TF_CONFIG": text}))
    assert found.startswith(words)


def test_a_cluster_that_no_strategy_takes():
    config = {"cluster": {"ps": ["a:1"], "chief": ["b:1"]}, "task": {"type": "chief", "index": 0}}
    (found,) = wrong(doctor.strategy(tfdist.Cluster.from_tf_config(json.dumps(config))))
    assert found.startswith('TF_CONFIG: cluster lists no job "worker"')


def test_host_that_can_not_be_resolved_counts_once(monkeypatch):
    def resolve(host, *args, **kwargs):
        if host == "nowhere":
            raise socket.gaierror(-2, "Name or service not known")
        if host == "slow":
            release.wait(30)
            raise socket.gaierror(-3, "Temporary failure in name resolution")
        return getaddrinfo(host, *args, **kwargs)

    release, getaddrinfo = threading.Event(), socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with PortReservation(1) as reservation:
        tasks = {"worker": [f"127.0.0.1:{reservation.ports[0]}", "nowhere:1", "slow:1"]}
        config = {"cluster": tasks, "task": {"type": "worker", "index": 0}}
        found = doctor.examine(0.1, env={"TF_CONFIG": json.dumps(config)})
    release.set()
    assert [text.partition(" (")[0].partition(";")[0] for text in wrong(found) if "worker:" in text] == [
        "worker:1 at nowhere:1: the name can't be resolved",
        "worker:2 at slow:1: no answer in 0.1 s",
    ]
    (own,) = wrong(doctor.own_port(cluster(1, host="nowhere")))
    assert own.startswith("the host nowhere of worker:0 can't be resolved (")


def test_the_own_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        (found,) = wrong(doctor.own_port(cluster(server.getsockname()[1])))
        assert "can't be listened on" in found
    with PortReservation(1) as reservation:
        assert wrong(doctor.own_port(cluster(*reservation.ports))) == []
        (finding,) = doctor.own_port(cluster(*reservation.ports, host="192.0.2.1"))
    assert (finding.state, "none of this machine" in finding.text) == ("warning", True)


def test_who_can_be_reached(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server, PortReservation(2) as reservation:
        found = doctor.reachable(cluster(reservation.ports[0], server.getsockname()[1], reservation.ports[1]), 5.0)
    assert [finding.text.partition(": ")[2] for finding in found] == [
        "something listens",
        "the machine answers, nothing listens yet",
    ]

    def fail(address, timeout):
        raise TimeoutError if address[1] == 2 else OSError(113, "No route to host")

    monkeypatch.setattr(socket, "create_connection", fail)
    found = wrong(doctor.reachable(cluster(1, 2, 3), 5.0))
    assert "no answer in 5 s; check that the machine is up" in found[0]
    assert "No route to host" in found[1]


# All tasks at once.


@pytest.mark.processes
def test_as_all_tasks_of_a_launch():
    command = [sys.executable, "-m", "tfdist", "launch", "local", "-m", "tfdist.doctor"]
    env = {**os.environ, "KERAS_BACKEND": "tensorflow"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stdout
    for index in range(2):
        assert f"[worker:{index}] ok      TF_CONFIG: this is worker:{index} of 2 tasks" in done.stdout
        assert f"[worker:{index}] ok      worker:{1 - index} at 127.0.0.1:" in done.stdout


# The command line.


@pytest.mark.parametrize(
    ("states", "code", "last"),
    [
        ([doctor.OK], 0, "all is well"),
        ([doctor.WARNING, doctor.OK], 0, "nothing is wrong, but see the warnings"),
        ([doctor.WRONG, doctor.WARNING], 1, "1 thing is wrong"),
        ([doctor.WRONG, doctor.WRONG], 1, "2 things are wrong"),
    ],
)
def test_the_last_line(monkeypatch, capsys, states, code, last):
    monkeypatch.setattr(doctor, "examine", lambda *args: [doctor.Finding(state, "something") for state in states])
    assert cli.main(["doctor"]) == code
    assert capsys.readouterr().out.splitlines()[-1] == last


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--timeout_secs=0"], "tfdist: --timeout_secs must be a number >= 0.1"),
        (["now"], "tfdist: give flags only. Received: now (see tfdist doctor --help)"),
        (["--measure"], "tfdist: --measure is for the tasks of a cluster; run tfdist launch ssh --hosts=a,b -m tfdist"),
        (["--firewall_rules"], "tfdist: --firewall_rules is for the tasks of a cluster; run tfdist launch ssh --hosts"),
        (["--json=links.json"], "tfdist: --json is for --measure; give both. Received: --json=links.json"),
    ],
)
def test_a_command_line_that_makes_no_sense(arguments, words, capsys):
    assert cli.main(["doctor", *arguments]) == 2
    assert capsys.readouterr().err.startswith(words)

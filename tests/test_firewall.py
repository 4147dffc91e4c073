# SPDX-License-Identifier: Apache-2.0
"""The rules for a firewall: which text they are, and who gets through them where root may load them."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence

import namespaces
import pytest

from tfdist import Cluster, Task, cli
from tfdist.doctor import __main__ as doctor

ROOT = pathlib.Path(__file__).resolve().parents[1]
GOLDEN = """\
table inet tfdist_2222
delete table inet tfdist_2222
table inet tfdist_2222 {
  chain from_other_machines {
    type filter hook input priority -10; policy accept;
    iif lo accept
    ip saddr { 10.0.0.1, 10.0.0.2 } tcp dport { 2222, 2223 } tcp flags & (syn | ack) == syn accept
    ip6 saddr { fd00::2 } tcp dport { 2222, 2223 } tcp flags & (syn | ack) == syn accept
    tcp dport { 2222, 2223 } tcp flags & (syn | ack) == syn reject with tcp reset
  }
  chain from_this_machine {
    type filter hook output priority -10; policy accept;
    oif lo tcp dport { 2222, 2223 } tcp flags & (syn | ack) == syn meta skuid != { 0, 1000 } reject with tcp reset
  }
}
"""
KNOWN = {"a": ["10.0.0.1"], "b": ["10.0.0.2", "fd00::2"]}


def two_hosts(index: int = 0) -> Cluster:
    return Cluster({"worker": {0: "a:2222", 1: "a:2223", 2: "b:2222"}}, Task("worker", index))


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    hosts = dict(KNOWN)

    def resolve(host: str, *_: object, **__: object) -> list[tuple]:
        if host not in hosts:
            raise socket.gaierror(-2, "Name or service not known")
        return [(0, 0, 0, "", (address, 0)) for address in hosts[host]]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return hosts


@pytest.mark.usefixtures("known")
def test_the_rules_as_text():
    text = doctor.rules(two_hosts(), 1000)
    assert "".join(line for line in text.splitlines(keepends=True) if not line.lstrip().startswith("#")) == GOLDEN


@pytest.mark.usefixtures("known")
def test_each_machine_has_rules_for_its_own_ports():
    text = doctor.rules(two_hosts(2), 1000)
    assert "tcp dport { 2222 }" in text and "2223" not in text


def test_a_host_that_cannot_be_resolved_is_one_line(known: dict[str, list[str]]):
    del known["b"]
    with pytest.raises(ValueError, match="the host b can't be resolved here") as error:
        doctor.rules(two_hosts(), 1000)
    assert "\n" not in str(error.value)


def test_doctor_prints_them(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("TF_CONFIG", Cluster({"worker": {0: "127.0.0.1:2222"}}, Task("worker", 0)).to_tf_config())
    monkeypatch.setenv("TFDIST_JOB_SECRET", "not to be shown")
    assert cli.main(["doctor", "--firewall_rules"]) == 0
    text = capsys.readouterr().out
    assert "tcp dport { 2222 }" in text and f"{{ 0, {os.getuid()} }}" in text
    assert "not to be shown" not in text


# Machines, each a network namespace: two of a job, and a stranger's.


class Machines:
    """Namespaces on one switch, at the addresses 10.78.0.1, .2, ..."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def on(self, number: int, *command: str) -> list[str]:
        """The command on a machine, from 1."""
        return ["ip", "netns", "exec", self._names[number - 1], *command]

    def connects(self, number: int, host: str, port: int, user: int = 0) -> bool:
        """Returns True if a program of this user on this machine can connect."""
        code = "import os, socket, sys; os.setuid(int(sys.argv[3])); other = socket.socket(); other.settimeout(30)\n"
        code += "sys.exit(other.connect_ex((sys.argv[1], int(sys.argv[2]))) != 0)"
        command = self.on(number, sys.executable, "-I", "-S", "-c", code, host, str(port), str(user))
        return subprocess.run(command, timeout=60).returncode == 0


def _call(*command: str, text: str | None = None) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=60, input=text)


@pytest.fixture
def machines() -> Iterator[Machines]:
    if reason := namespaces.missing() or ("" if shutil.which("nft") else "needs nft (nftables)"):
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:
        try:
            names, _ = stack.enter_context(namespaces.joined(3, mbits=1000))
            found = Machines(names)
            _call(*found.on(1, "nft", "list", "ruleset"))
        except (RuntimeError, subprocess.CalledProcessError) as error:
            pytest.skip(f"this system makes no network namespaces with a firewall: {error}")
        yield found


def _job(port: int = 2222) -> dict[int, Cluster]:
    jobs = {"worker": {0: f"10.78.0.1:{port}", 1: f"10.78.0.2:{port}"}}
    return {number: Cluster(jobs, Task("worker", number - 1)) for number in (1, 2)}


def _load_rules(machines: Machines) -> None:
    for number, described in _job().items():
        doctor = machines.on(number, sys.executable, "-m", "tfdist.doctor", "--firewall_rules")
        env = {**os.environ, "TF_CONFIG": described.to_tf_config()}
        text = subprocess.run(doctor, cwd=ROOT, env=env, check=True, capture_output=True, text=True, timeout=60).stdout
        for _ in range(2):  # The second time replaces them.
            _call(*machines.on(number, "nft", "-f", "-"), text=text)


@pytest.mark.processes
def test_who_gets_through_the_rules(machines: Machines):
    serve = "import socket; server = socket.create_server(('', {})); print(flush=True); [*iter(server.accept, 0)]"
    with contextlib.ExitStack() as stack:
        for port in (2222, 2300):
            listens = [sys.executable, "-I", "-S", "-c", serve.format(port)]
            server = stack.enter_context(subprocess.Popen(machines.on(1, *listens), stdout=subprocess.PIPE))
            stack.callback(server.kill)
            assert server.stdout and server.stdout.readline()
        callers = {"task": (2, "10.78.0.1"), "stranger": (3, "10.78.0.1")}
        local = {"own": (1, "127.0.0.1"), "own by name": (1, "10.78.0.1")}
        before = {name: machines.connects(*at, 2222) for name, at in (callers | local).items()}
        assert before == dict.fromkeys(before, True)
        assert machines.connects(1, "127.0.0.1", 2222, user=65534)
        _load_rules(machines)
        after = {name: machines.connects(*at, 2222) for name, at in (callers | local).items()}
        assert after == {**before, "stranger": False}
        assert not machines.connects(1, "127.0.0.1", 2222, user=65534)
        assert not machines.connects(1, "10.78.0.1", 2222, user=65534)
        # Other programs' ports are left alone.
        assert machines.connects(3, "10.78.0.1", 2300)
        assert machines.connects(1, "127.0.0.1", 2300, user=65534)


_TRAINS = """
import sys
import numpy as np, keras, tfdist
strategy = tfdist.MultiWorkerMirroredStrategy(policies=[tfdist.BackupWorkers(spares=0)])
with strategy.scope():
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.ones((64, 3), np.float32)
model.fit(x, x[:, :1], batch_size=8, verbose=0)
print("training", flush=True)
sys.stdin.readline()
model.fit(x, x[:, :1], batch_size=8, verbose=0)
print("trained", flush=True)
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_a_stranger_is_refused_while_the_job_trains(machines: Machines, tmp_path: pathlib.Path):
    _load_rules(machines)
    (tmp_path / "train.py").write_text(_TRAINS)
    with contextlib.ExitStack() as stack:
        workers = []
        for number, described in _job().items():
            env = {**os.environ, "TF_CONFIG": described.to_tf_config(), "TFDIST_JOB_SECRET": "a secret"}
            env |= {"PYTHONPATH": str(ROOT), "TFDIST_COMMUNICATION": "tensorflow"}  # MPI has ports of its own.
            command = machines.on(number, sys.executable, str(tmp_path / "train.py"))
            log = stack.enter_context((tmp_path / f"log{number}").open("w"))
            pipe = subprocess.PIPE
            worker = subprocess.Popen(command, env=env, cwd=tmp_path, text=True, stdin=pipe, stdout=pipe, stderr=log)
            workers.append(stack.enter_context(worker))
            stack.callback(worker.kill)
        logs = [tmp_path / f"log{number}" for number in (1, 2)]
        assert [_line(worker) for worker in workers] == ["training"] * 2, [log.read_text() for log in logs]
        listening = [_listening(machines, number) for number in (1, 2)]
        for number, found in zip((1, 2), listening, strict=True):
            assert "*:2222" in found  # TensorFlow's server, on all interfaces
            assert not machines.connects(3, f"10.78.0.{number}", 2222)
        # The quorum server, whose callers prove that they know the job's secret.
        (server,) = [each for each in listening[0] if each != "*:2222"]
        assert server.startswith("*:")
        for worker in workers:
            assert worker.stdin
            worker.stdin.write("\n")
            worker.stdin.flush()
        assert [_line(worker) for worker in workers] == ["trained"] * 2
        assert [worker.wait(120) for worker in workers] == [0, 0]


def _line(worker: subprocess.Popen[str]) -> str:
    assert worker.stdout
    return worker.stdout.readline().strip()


def _listening(machines: Machines, number: int) -> list[str]:
    done = subprocess.run(machines.on(number, "ss", "-Hltn"), capture_output=True, text=True, timeout=60)
    return [line.split()[3] for line in done.stdout.splitlines()]

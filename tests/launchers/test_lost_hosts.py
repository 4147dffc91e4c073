# SPDX-License-Identifier: Apache-2.0
"""Hosts that vanish: which is blamed, what counts as a failure, and what the tasks that are left are told."""

import errno
import functools
import json
import os
import pathlib
import socket
import subprocess
import sys

import launching
import pytest

from tfdist.cluster import NOTICES_VARIABLE
from tfdist.launchers import requests
from tfdist.launchers.shape import Shape
from tfdist.launchers.ssh import launcher as ssh
from tfdist.launchers.ssh import task as ssh_task
from tfdist.launchers.ssh.launcher import Host
from tfdist.launchers.supervise import attempts, notices

AWAY = "ssh: connect to host beta port 22: Connection timed out"


def attempt(monkeypatch, unreachable, name, code):
    """The outcome of a job on alpha and beta, one of whose workers ends with this code, and what the launcher says."""
    monkeypatch.setattr(attempts, "CAUSE_SECS", 0.0)
    asked = []
    monkeypatch.setattr(attempts, "unreachable", lambda probes, _: asked.append(probes) or unreachable)
    request = ssh.plan(ssh.SshJob(("train.py",), Shape(2), hosts=(Host("alpha", 1), Host("beta", 1))))
    tasks = launching.Scripted((name, code, 40.0))
    outcome = attempts.Attempt(request, tasks, [], number=0, min_workers=2, logs=None).run()
    return outcome, tasks.lines, asked


@pytest.mark.parametrize("code", [1, requests.TRY_AGAIN_EXIT_CODE])
def test_a_lost_host_is_the_cause_not_its_survivor(monkeypatch, code):
    outcome, lines, asked = attempt(monkeypatch, {"beta": AWAY}, "worker:0", code)
    assert list(asked[0]) == ["beta"]
    assert (outcome.code, outcome.failed.name) == (255, "worker:1")
    assert lines[0] == f"worker:0 failed (exit code {code}), as it misses worker:1"
    assert len(lines) == 5 and lines[4] == (
        f"worker:1 failed first (its host beta can't be reached: {AWAY}); all others have ended, and those on beta end "
        "by themselves within 30 s; start with --max_restarts=N and tfdist.callbacks.Resume to go on from a checkpoint"
    )
    assert outcome.orphan_secs == ssh_task.ORPHAN_SECS


@pytest.mark.parametrize(
    ("code", "cause"), [(1, "failed first (exit code 1)"), (75, "was preempted, and the work is saved (exit code 75)")]
)
def test_without_a_lost_host_the_first_failure_decides(monkeypatch, code, cause):
    outcome, lines, _ = attempt(monkeypatch, {}, "worker:0", code)
    assert (outcome.code, outcome.failed.name, outcome.orphan_secs) == (code, "worker:0", 0.0)
    last = ["the last lines of worker:0:", "  last line 0"] if code == 1 else []
    assert lines == [f"worker:0 {cause}; ending all tasks", *last, f"worker:0 {cause}; all tasks have ended"]


@pytest.mark.parametrize("code", requests.HOPELESS_EXIT_CODES)
def test_after_a_hopeless_failure_no_host_is_looked_for(monkeypatch, code):
    """A wrong command line fails at once; hosts may take half a minute not to answer."""
    outcome, _, asked = attempt(monkeypatch, {"beta": AWAY}, "worker:0", code)
    assert (outcome.code, outcome.failed.name, asked) == (code, "worker:0", [])


def test_when_no_host_answers_the_launchers_link_is_named(monkeypatch):
    outcome, lines, asked = attempt(monkeypatch, {"alpha": AWAY, "beta": AWAY}, "worker:1", 255)
    assert sorted(asked[0]) == ["alpha", "beta"]
    assert outcome.code == 255
    assert lines[0] == "no host can be reached: the link of this machine may be down"
    assert "those on alpha, beta end by themselves within 30 s" in lines[-1]


def test_after_a_lost_host_tasks_there_have_time_to_end(monkeypatch):
    """Else the next attempt would find their ports in use."""
    lost = launching.Ended("worker:1", {}, 0)
    outcomes = [attempts.AttemptOutcome(255, lost, orphan_secs=30.0), attempts.AttemptOutcome(0)]
    pauses = []
    monkeypatch.setattr(attempts._Submission, "_attempt", lambda *_: outcomes.pop(0))
    monkeypatch.setattr(attempts._Submission, "_pause", lambda _, secs: pauses.append(secs) or True)
    assert attempts.run_tasks(requests.Request((), frozenset(), 1.0, requests.Restarts(max_restarts=1))) == 0
    assert pauses == [30.0]


def test_far_tasks_end_before_the_launcher_gives_their_host_up():
    command = ssh.plan(ssh.SshJob(("train.py",), Shape(2), hosts=(Host("alpha", 2),))).tasks[0].command
    assert "tfdist.launchers.ssh.client" in command
    settings = {
        word.partition("=")[0].removeprefix("-o"): word.partition("=")[2]
        for word in ssh.ssh_client.command("alpha", "python3", ())
    }
    given_up_secs = float(settings["ServerAliveInterval"]) * float(settings["ServerAliveCountMax"])
    assert given_up_secs > ssh_task._LOST_SECS + ssh_task._GRACE_SECS


def test_a_far_task_that_lost_its_launcher_is_no_preemption(tmp_path):
    line = json.dumps({"script": ["-c", "import signal; signal.pause()"], "directory": str(tmp_path), "env": {}})
    done = subprocess.run(
        [sys.executable, "-m", "tfdist.launchers.ssh.task"], input=line.encode() + b"\n", timeout=60, check=False
    )
    assert done.returncode == 255


@pytest.mark.processes
def test_a_far_task_ends_when_its_connection_breaks_with_output_unread(tmp_path):
    # As sshd does it: one socket pair is both standard input and output.
    script = "import signal; print('unread', flush=True); signal.pause()"
    line = json.dumps({"script": ["-c", script], "directory": str(tmp_path), "env": {}})
    near, far = socket.socketpair()
    with near, far:
        wrapper = subprocess.Popen(
            [sys.executable, "-m", "tfdist.launchers.ssh.task"], stdin=far, stdout=far, stderr=subprocess.PIPE
        )
        far.close()
        try:
            near.sendall(line.encode() + b"\n")
            assert near.recv(1)
        finally:
            near.close()
        _, said = wrapper.communicate(timeout=60)
    assert wrapper.returncode == 255, said


def test_a_host_that_does_not_answer_is_unreachable_with_its_reason(monkeypatch):
    monkeypatch.setattr(attempts, "_ANSWER_SECS", 0.2)
    script = "import sys; sys.exit('no route')"
    found = attempts.unreachable(
        {"fine": [sys.executable, "-c", ""], "away": [sys.executable, "-S", "-c", script], "none": ["/no/such/program"]}
        | {"silent": ["sleep", "1000"]},
        lambda: False,
    )
    assert set(found) >= {"silent"}
    assert found["silent"] == "it does not answer within 0.2 s"
    assert "fine" not in found or "0.2 s" in found["fine"]
    assert "none" not in found


def test_a_host_that_answers_the_second_time_is_not_lost(tmp_path):
    probe = ["sh", "-c", 'mkdir "$0" && exit 255; exit 0', str(tmp_path / "tried")]
    assert attempts.unreachable({"slow": probe}, lambda: False) == {}
    assert (tmp_path / "tried").exists()


def test_a_host_that_can_not_be_asked_counts_as_there(monkeypatch):
    def refuse(name, command, env):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(attempts, "Supervisor", functools.partial(attempts.Supervisor, start=refuse))
    assert attempts.unreachable({"alpha": ["true"]}, lambda: False) == {}


def test_an_interrupt_ends_the_wait_for_hosts():
    assert attempts.unreachable({"silent": ["sleep", "30"]}, lambda: True) == {}


# Notices.


def test_notices_are_read_line_by_line():
    left = notices.Notices()
    try:
        path = pathlib.Path(left.env[NOTICES_VARIABLE])
        reader = notices.Reader(str(path))
        assert reader.new_lines() == []
        left.add("given up worker:1")
        with path.open("a") as file:
            file.write("half a")
        assert reader.new_lines() == ["given up worker:1"]
        left.add(" line")
        assert reader.new_lines() == ["half a line"]
    finally:
        left.close()
    assert reader.new_lines() == []


def test_a_job_does_without_notices_where_there_is_no_place_for_them(monkeypatch):
    def refuse(*_, **__):
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(notices.tempfile, "mkdtemp", refuse)
    left = notices.Notices()
    left.add("given up worker:1")
    left.close()
    assert left.env == {}


def test_a_connection_carries_signals_and_notices():
    given, taken = os.pipe()
    os.write(taken, b"\0\x0f" + bytes([ssh_task.NOTICE]) + b"given up worker:1\n" + b"\0\x02")
    os.close(taken)
    assert list(ssh_task.received_from(given)) == [15, "given up worker:1", 2]
    os.close(given)


CHIEF_READS = f"""
import json, os, signal, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]
if task["type"] == "worker" and task["index"] == 1:
    sys.exit(6)
if task["type"] == "chief":
    while not (lines := open(os.environ["{NOTICES_VARIABLE}"]).read()): time.sleep(0.05)
    print(lines, end="")
    sys.exit(0)
signal.pause()
"""


@pytest.mark.processes
@pytest.mark.parametrize("platform", ["local", "ssh"])
def test_the_chief_is_told_of_a_worker_that_is_given_up(tmp_path, platform):
    """A worker that has run for long: otherwise all would start again without it."""
    (tmp_path / "train.py").write_text(CHIEF_READS)
    # In place of ssh: runs the command here, as sshd would.
    (tmp_path / "ssh").write_text('#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n')
    (tmp_path / "ssh").chmod(0o755)
    start = """
import sys
from tfdist import cli
from tfdist.launchers import requests
from tfdist.launchers.ssh import client as ssh_client
ssh_client.HEARTBEAT_SECS = 0.1
original = requests.Restarts.__init__
def settled(self, *args, **kwargs):
    original(self, *args, **kwargs)
    object.__setattr__(self, "settled_secs", 0.0)
requests.Restarts.__init__ = settled
sys.exit(cli.main(sys.argv[1:]))
"""
    hosts = ["--hosts=127.0.0.1:4", "--preflight_secs=0"] if platform == "ssh" else []
    flags = ["--num_ps=1", "--min_workers=1", "--max_worker_restarts=0", "--grace_period_secs=0.2", *hosts]
    command = [sys.executable, "-c", start, "launch", platform, *flags, "train.py"]
    env = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100)
    assert "worker:1 is given up" in done.stderr
    assert "going on with 1 of 2 workers" in done.stderr
    assert (done.returncode, done.stdout) == (0, "[chief:0] given up worker:1\n")


# Ports.


def test_a_privileged_port_is_not_called_in_use(monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    answer = ssh_task.probe({"directory": ".", "files": [], "ports": [80], "gpus": 0})
    assert answer["taken"] == {"80": "privileged"}
    problems = ssh.problems_of(json.loads(json.dumps(answer)), {"gpus": 0}, {})
    assert problems == ["lets this user not listen on port 80, which is privileged; use a --port from 1024"]

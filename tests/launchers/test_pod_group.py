# SPDX-License-Identifier: Apache-2.0
"""Pods of an all-reduce on Kubernetes: they end together, and one failure is counted once."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tfdist.launchers.kubernetes import pod_group
from tfdist.launchers.kubernetes import task as kubernetes_task
from tfdist.launchers.kubernetes.pod_group import GIVEN_UP_EXIT_CODE, Counts, Rules
from tfdist.launchers.shape import Shape

LOST = 75
COUNTS = (kubernetes_task.FAILURES_VARIABLE, kubernetes_task.IGNORED_VARIABLE)
# Ends as the first argument says for this task: with a code, or when it misses the worker that has ended, with 1.
SCRIPT = """
import json, os, pathlib, signal, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]
name, folder = f"{task['type']}-{task['index']}", pathlib.Path(sys.argv[1])
plan = json.loads((folder / "plan.json").read_text())[name]
if plan == "term":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
(folder / name).touch()
print("ready", flush=True)
if isinstance(plan, int):
    while len(list(folder.glob("*-?"))) < 4:
        time.sleep(0.01)
    if plan:
        (folder / "gone").touch()
    print("ending", flush=True)
    sys.exit(plan)
if plan == "strategy":
    import tfdist
    tfdist.MultiWorkerMirroredStrategy()
parent = os.getppid()  # With the first process of a container, all others end.
while os.getppid() == parent and not (plan == "miss" and (folder / "gone").exists()):
    time.sleep(0.01)
print("Unavailable: the ring is broken", file=sys.stderr)
sys.exit(1)
"""


# The wrapper, with a second instead of ten for a script that is no longer needed.
PROGRAM = """
import sys
from tfdist.launchers.kubernetes import task
from tfdist.launchers.supervise import wrapping
wrapping._OVER_SECS = 1.0
sys.exit(task.main(sys.argv[1:]))
"""


def free_port():
    """A port that is free, and so is the next."""
    while True:
        with socket.create_server(("", 0)) as first:
            port = first.getsockname()[1]
            with contextlib.suppress(OSError), socket.create_server(("", port + 1)):
                return port


def command(program, index, folder, port, options=()):
    """Command of a pod. As hosts it has 127.0.1.0 and so on, in the one spelling that looks like names."""
    where = ["--num_workers=4", "--host_format=0x7f.0.1.{index}", f"--port={port}", *options]
    return [sys.executable, *program, *where, "--", str(folder / "train.py"), str(folder)]


@pytest.fixture
def start(tmp_path):
    """Starts wrappers of workers as their pods would; ends them."""
    port, started = free_port(), []
    (tmp_path / "train.py").write_text(SCRIPT)

    def run(*plans, options=(), counts=()):
        program = ["-c", PROGRAM] if "hang" in plans else ["-m", "tfdist.launchers.kubernetes.task"]
        (tmp_path / "plan.json").write_text(json.dumps({f"worker-{i}": plan for i, plan in enumerate(plans)}))
        for index in range(len(plans)):
            env = {**os.environ, "JOB_COMPLETION_INDEX": str(index), "TFDIST_JOB_SECRET": "s"}
            if counts:
                env |= dict(zip(COUNTS, map(str, counts[index]), strict=True))
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            started.append(subprocess.Popen(command(program, index, tmp_path, port, options), env=env, **pipes))
        return started

    yield run
    for process in started:
        process.kill()
        process.communicate()


def codes(tasks):
    return [task.wait(120) for task in tasks]


@pytest.mark.processes
@pytest.mark.parametrize("first", [0, 1])
def test_one_failure_of_four_workers_is_counted_once(start, first):
    plans = ["miss"] * 4
    plans[first] = 3
    tasks = start(*plans)
    # All four scripts fail at about the same time, each with a code that counts.
    found = codes(tasks)
    assert sorted(found)[1:] == [LOST] * 3 and min(found) in (1, 3)
    said = tasks[2 if found[2] == LOST else 3].stderr.read()
    assert f"tfdist: worker:{found.index(min(found))} ended with exit code {min(found)}, as the first; this" in said


@pytest.mark.processes
def test_75_of_a_peer_does_not_hide_the_failure_behind_it(start):
    # A script may end with 75 because it misses a peer, before that one is through with failing.
    assert codes(start(75, "miss", "hang", "hang")) == [LOST, 1, LOST, LOST]


@pytest.mark.processes
def test_scripts_that_hang_after_a_failure_are_ended(start):
    # The script that misses the failed one may be reported first.
    assert codes(start("hang", 3, "term", "miss")) in ([LOST, 3, LOST, LOST], [LOST, LOST, LOST, 1])


@pytest.mark.processes
@pytest.mark.parametrize("lost", [0, 2])
def test_peers_of_a_pod_that_vanishes_end_with_75(start, lost):
    tasks = start(*["hang"] * 4)
    for task in tasks:
        assert task.stdout.readline() == "ready\n"
    assert tasks[0].stderr.readline() == "tfdist: all 4 tasks have met; they end and start again together\n"
    tasks[lost].kill()
    assert codes(tasks) == [-signal.SIGKILL if index == lost else LOST for index in range(4)]


@pytest.mark.processes
def test_preempted_worker_ends_all_with_75(start):
    assert codes(start("hang", 75, "term", "term", options=["--grace_period_secs=1"])) == [LOST] * 4


@pytest.mark.processes
def test_workers_that_succeed_end_together(start):
    assert codes(start(0, 0, 0, 0)) == [0] * 4


@pytest.mark.processes
def test_a_strategy_that_one_worker_alone_builds_does_not_wait_for_who_has_ended(start):
    # Whether the others end before or after its wait has begun.
    tasks = start("strategy", 0, 0, 0)
    assert codes(tasks) == [1, LOST, LOST, LOST]
    assert "has ended with code 0 and has not joined the cluster; every task must build the" in tasks[0].stderr.read()


@pytest.mark.processes
def test_failure_after_the_success_of_others_restarts_these_too(start, tmp_path):
    tasks = start(0, 0, "miss", 0)
    for task in (tasks[0], tasks[1], tasks[3]):
        assert [task.stdout.readline() for _ in range(2)] == ["ready\n", "ending\n"]
    (tmp_path / "gone").touch()
    assert codes(tasks) == [LOST, LOST, 1, LOST]


@pytest.mark.processes
def test_more_preemptions_than_allowed_fail_the_job(start):
    # Restarted three times; one of these was a failure of worker:2.
    counts = [(0, 3), (0, 3), (1, 2), (0, 3)]
    tasks = start(*["hang"] * 4, options=["--max_preemptions=1"], counts=counts)
    assert codes(tasks) == [GIVEN_UP_EXIT_CODE] * 4
    assert "the job is not started again: --max_preemptions=1 is used up" in tasks[0].stderr.read()


@pytest.mark.processes
def test_as_many_preemptions_as_allowed_start_again(start):
    counts = [(0, 3), (0, 3), (1, 2), (0, 3)]
    assert codes(start(0, 0, 0, 0, options=["--max_preemptions=2"], counts=counts)) == [0] * 4


@pytest.mark.processes
def test_peers_in_a_jobset_never_end_as_preempted_after_a_failure(start):
    # A script that misses the failed one may be reported first; then the failed one is told to end like all others.
    found = codes(start("miss", 3, "hang", "miss", options=["--form=jobset"]))
    assert found in ([1, 3, 1, 1], [1, 1, 1, 1])


# The rules.


@pytest.mark.parametrize(
    ("kinds", "first", "failures", "expected"),
    [
        (1, 1, 0, (None, 75)),
        (1, 1, 3, (None, 75)),  # The Job's own limit is reached.
        (2, 1, 2, (None, 75)),
        (2, 1, 3, (GIVEN_UP_EXIT_CODE, GIVEN_UP_EXIT_CODE)),  # Neither Job's own limit may be.
        (2, 127, 0, (None, GIVEN_UP_EXIT_CODE)),
        (2, 75, 3, (None, 75)),
        (2, 143, 3, (None, 75)),
        (2, None, 3, (None, 75)),
    ],
)
def test_exit_codes_after_the_first_failure(kinds, first, failures, expected):
    assert Rules(3, 100, kinds=kinds).exit_codes(first, failures) == expected


def test_chief_and_workers_are_two_jobs_with_one_limit():
    values = kubernetes_task.command_line.parse(kubernetes_task.define_flags, ["--max_restarts=5"])[0]
    assert kubernetes_task.group_rules(values, Shape(2, chief=True)) == Rules(5, 100, kinds=2)
    assert kubernetes_task.group_rules(values, Shape(2)) == Rules(5, 100)


# Strangers.


@pytest.fixture
def leader():
    with contextlib.closing(pod_group.Leader(["worker:0", "worker:1"], Rules(3, 100), 0, "secret")) as made:
        yield made


def member(leader, secret="secret", task="worker:0"):
    made = pod_group.Member(task, ("localhost", leader.port), secret, Counts(), 75, lambda line: None)
    return contextlib.closing(made)


@pytest.mark.parametrize("sent", [b"", b"garbage\n", b'{"task": "worker:1"}\n', b"x" * 100_000])
def test_strangers_end_no_job(leader, sent):
    with member(leader) as first, member(leader, task="worker:1") as second:
        with socket.create_connection(("localhost", leader.port)) as stranger, contextlib.suppress(OSError):
            stranger.sendall(sent)
            stranger.shutdown(socket.SHUT_WR)
            stranger.settimeout(30)
            while stranger.recv(4096):
                pass
        results = []
        threads = [threading.Thread(target=lambda m=m: results.append(m.finish(0))) for m in (first, second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert results == [0, 0]


def test_another_secret_is_refused(leader, monkeypatch):
    monkeypatch.setattr(pod_group, "_MEET_SECS", 0.2)
    with member(leader, secret="other") as stranger:
        assert stranger.finish(1) == 75
        assert not leader.tasks_met


def test_member_that_joins_after_the_failure_is_not_counted(leader):
    with member(leader) as first:
        first.join()
        assert first.finish(3) == 3
        with member(leader, task="worker:1") as late:
            late.join()
            assert late.finish(1) == 75


def test_leader_that_is_gone_means_75(leader, monkeypatch):
    monkeypatch.setattr(pod_group, "_MEET_SECS", 0.2)
    leader.close()
    with member(leader) as left:
        assert left.finish(1) == 75


@pytest.mark.parametrize("has_ended", [True, False])
def test_replaced_pod_waits_for_the_next_leader(leader, has_ended):
    met = threading.Event()

    class Replaced(pod_group.Member):
        def _greet(self, connection, lines):
            try:
                super()._greet(connection, lines)
            finally:
                met.set()

    with member(leader) as first, member(leader, task="worker:1") as second:
        first.join()
        second.join()
        if has_ended:
            assert second.finish(3) == 3
        address = ("localhost", leader.port)
        with contextlib.closing(Replaced("worker:1", address, "secret", Counts(), 75, lambda line: None)) as again:
            assert met.wait(60)
            assert first.finish(1) == 75
            leader.close()
            following = pod_group.Leader(["worker:0", "worker:1"], Rules(3, 100), leader.port, "secret")
            with contextlib.closing(following), member(following) as first_again, ThreadPoolExecutor(2) as pool:
                assert list(pool.map(lambda each: each.finish(0), (first_again, again))) == [0, 0]

# SPDX-License-Identifier: Apache-2.0
"""Failed workers are started again or given up, and the job goes on or ends. No processes."""

import functools
import itertools
import json
import math
import os
import signal
import types

import pytest
from launching import LATER, Ended, Scripted
from waiting import Clock

from tfdist.cluster import JOINED_VARIABLE, Cluster, Task
from tfdist.launchers import local, requests
from tfdist.launchers.requests import Restarts
from tfdist.launchers.shape import Shape
from tfdist.launchers.ssh import launcher as ssh
from tfdist.launchers.ssh.launcher import Host
from tfdist.launchers.supervise import attempts, verdict
from tfdist.launchers.supervise.replacements import FailureRows, Replacements

# The rule.


def test_a_failure_long_after_the_start_begins_a_new_row():
    rows = FailureRows(settled_secs=30.0)
    assert [rows.add("a", secs) for secs in (1.0, 29.9, 30.0, 0.0, math.inf)] == [1, 2, 1, 2, 1]
    assert rows.add("b", 1.0) == 1


def test_the_first_replacement_is_at_once_and_the_next_are_later_and_later():
    replacements = Replacements(Restarts(max_worker_restarts=4, restart_backoff_secs=2.0), Clock(100.0))
    found = [replacements.failed("a", ran_secs=1.0) for _ in range(5)]
    assert found == [(1, 0.0), (2, 2.0), (3, 4.0), (4, 8.0), (5, None)]
    assert replacements.failed("a", ran_secs=30.0) == (1, 0.0), "it had come back"


def test_a_task_is_due_once_and_when_its_time_has_come():
    clock = Clock(100.0)
    replacements = Replacements(Restarts(), clock)
    assert (replacements.wait_secs(), replacements.due()) == (None, [])
    replacements.failed("a", 1.0, least_secs=0.5)
    replacements.failed("b", 1.0)
    assert (replacements.wait_secs(), replacements.due()) == (0.0, ["b"])
    assert replacements.wait_secs() == 0.5
    clock.now += 1
    assert (replacements.wait_secs(), replacements.due()) == (0.0, ["a"])
    replacements.postpone("a", 3.0)
    assert (replacements.wait_secs(), replacements.due()) == (3.0, [])


# What an attempt makes of it.


@pytest.fixture(autouse=True)
def in_no_time(monkeypatch):
    monkeypatch.setattr(attempts, "_REPLACE_SECS", 0.0)
    for name in ("CAUSE_SECS", "LEAST_SECS"):
        monkeypatch.setattr(attempts, name, 0.0)
        monkeypatch.setattr(verdict, name, 0.0)


def attempt(*endings, min_workers=2, **restarts):
    """Runs a job of a chief, two workers and a ps; gives the outcome and the supervisor."""
    settings = Restarts(restart_backoff_secs=0.0, max_worker_restarts=1, min_workers=min_workers, **restarts)
    request = local.plan(
        local.LocalJob(("train.py",), Shape(num_ps=1), grace_period_secs=0.0, restarts=settings), range(1, 6)
    )
    supervisor = Scripted(*endings)
    outcome = attempts.Attempt(request, supervisor, [], number=0, min_workers=min_workers, logs=None).run()
    return outcome, supervisor


def test_no_wait_for_the_others_is_negative(monkeypatch):
    """The time is over between the look at the clock and the wait."""
    waits, moments = [], itertools.count()
    request = local.plan(local.LocalJob(("train.py",), Shape(num_ps=1), grace_period_secs=1.5), range(1, 6))
    supervisor = Scripted()
    supervisor.start("ps:0", (), {JOINED_VARIABLE: os.devnull})
    monkeypatch.setattr(supervisor, "wait_first_exit", waits.append)
    ending = attempts.Attempt(request, supervisor, [], number=0, min_workers=2, logs=None)
    monkeypatch.setattr(attempts, "time", types.SimpleNamespace(monotonic=lambda: next(moments)))
    ending._let_others_end()
    assert waits == [0.5]


LOST, RAN, SOON = -signal.SIGKILL, 40.0, 1.0
DONE = ("chief:0", 0, RAN)


def test_a_lost_worker_is_started_again_alone():
    outcome, supervisor = attempt(("worker:1", LOST, RAN), LATER, DONE)
    assert outcome == attempts.AttemptOutcome(0)
    assert [task.name for task in supervisor.started] == ["chief:0", "worker:0", "worker:1", "ps:0", "worker:1"]
    first, again = (task.env for task in supervisor.started if task.name == "worker:1")
    assert again["TF_CONFIG"] == first["TF_CONFIG"]
    assert [env["TFDIST_TASK_RESTART"] for env in (first, again)] == ["0", "1"]
    assert [env["TFDIST_ATTEMPT"] for env in (first, again)] == ["0", "0"]
    assert supervisor.lines == ["worker:1 failed (SIGKILL, exit code 137, failure 1 in a row); starting it again"]


def test_a_worker_may_be_lost_as_often_as_it_comes_back():
    outcome, supervisor = attempt(*[("worker:1", LOST, RAN)] * 20, LATER, DONE)
    assert outcome.code == 0
    assert len(supervisor.started) == 4 + 20


def test_a_worker_that_has_ended_well_is_not_started_again():
    assert len(attempt(("worker:1", 0, SOON), DONE)[1].started) == 4


def test_who_fails_again_and_again_fails_the_job():
    outcome, supervisor = attempt(("worker:1", 6, RAN), ("worker:1", 7, SOON), DONE)
    assert (outcome.code, outcome.failed.name, outcome.goes_on) == (7, "worker:1", False)
    assert supervisor.lines[1:] == [
        "worker:1 is given up (exit code 7, failure 2 in a row)",
        "worker:1 failed first (exit code 7); ending all tasks",
        "the last lines of worker:1:",
        "  last line 1",
        "worker:1 failed first (exit code 7); all tasks have ended",
    ]


def test_the_chief_goes_on_without_a_worker_that_it_has_met():
    outcome, supervisor = attempt(("worker:1", LOST, RAN), ("worker:1", 6, SOON), DONE, min_workers=1)
    assert outcome == attempts.AttemptOutcome(0)
    assert supervisor.lines[-1] == (
        "worker:1 is given up (exit code 6, failure 2 in a row); going on with 1 of 2 workers"
    )
    assert "  last line 1" in supervisor.lines


def test_a_worker_that_the_chief_still_waits_for_is_left_out_of_the_next_attempt():
    outcome, _ = attempt(("worker:1", 6, SOON), ("worker:1", 6, SOON), min_workers=1)
    assert (outcome.code, outcome.given_up, outcome.goes_on) == (6, {"worker:1"}, True)


def test_when_too_few_workers_are_left_the_job_fails():
    endings = [(name, 6, secs) for name in ("worker:1", "worker:0") for secs in (RAN, SOON)]
    outcome, _ = attempt(*endings, min_workers=1)
    assert (outcome.code, outcome.failed.name, outcome.goes_on) == (6, "worker:0", False)


def test_a_worker_that_only_misses_the_chief_changes_nothing(monkeypatch):
    monkeypatch.setattr(attempts, "_REPLACE_SECS", 1000.0)
    for code in (0, 3):
        outcome, supervisor = attempt(("worker:0", 5, RAN), ("worker:1", LOST, RAN), ("chief:0", code, RAN))
        assert (outcome.code, len(supervisor.started)) == (code, 4)
        assert all("worker" not in line for line in supervisor.lines)


def test_a_worker_that_says_that_it_has_lost_the_chief_waits_for_what_the_chief_does(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(attempts, "CAUSE_SECS", 1000.0)
        outcome, supervisor = attempt(("worker:0", 75, RAN), ("chief:0", 3, RAN))
        assert (outcome.code, len(supervisor.started)) == (3, 4)
    outcome, supervisor = attempt(("worker:0", 75, RAN), LATER, DONE)
    assert (outcome.code, len(supervisor.started)) == (0, 5)


def test_after_a_chief_or_ps_has_failed_nobody_is_replaced():
    for name in ("chief:0", "ps:0"):
        outcome, supervisor = attempt((name, 75, RAN), ("worker:1", LOST, RAN))
        assert (outcome.code, outcome.failed.name, len(supervisor.started)) == (75, name, 4)


def test_a_replacement_that_comes_too_late_to_meet_the_chief_is_ended():
    endings = [("worker:0", LOST, RAN), ("worker:0", LOST, RAN), ("worker:1", LOST, RAN), LATER, DONE]
    _, supervisor = attempt(*endings)
    assert [task.signals for task in supervisor.started] == [*[[]] * 5, *[[signal.SIGTERM, signal.SIGKILL]] * 2]


def test_a_worker_whose_process_can_not_be_started_counts_as_failed(monkeypatch):
    start = Scripted.start

    def refuse(self, name, command, env):
        if len(self.started) >= 4:
            raise OSError("no more processes")
        return start(self, name, command, env)

    monkeypatch.setattr(Scripted, "start", refuse)
    outcome, supervisor = attempt(("worker:1", LOST, RAN))
    assert outcome.code == 137
    assert "worker:1 could not be started: no more processes" in supervisor.lines


# What the whole job makes of its attempts.


def job_of(monkeypatch, outcomes, num_ps, **restarts):
    """Submits a job of three workers whose attempts end as given; gives the code and the workers of each attempt."""
    crews = []

    class ScriptedAttempt:
        def __init__(self, request, supervisor, received, number, min_workers, logs):
            crews.append([Members(task).address for task in request.tasks if task.name.startswith("worker")])

        def run(self):
            return outcomes.pop(0)

    monkeypatch.setattr(attempts, "Attempt", ScriptedAttempt)
    settings = Restarts(**{"restart_backoff_secs": 0.0, "min_workers": 2, **restarts})
    job = local.LocalJob(("train.py",), Shape(3, num_ps), restarts=settings)
    planned = functools.partial(local.plan, job, range(1, 7))
    code = attempts.run_tasks(planned(), replan=lambda dropped: planned(dropped=dropped))
    return code, [[address.rpartition(":")[2] for address in crew] for crew in crews]


def failure(name, ran_secs, code=6, given_up=(), goes_on=False):
    failed = Ended(name, {}, 0)
    failed.returncode, failed.ran_secs = code, ran_secs
    return attempts.AttemptOutcome(code, failed, frozenset(given_up), goes_on)


WELL = attempts.AttemptOutcome(0)


def test_an_attempt_in_which_all_had_come_up_forgives_earlier_failures(monkeypatch):
    soon, late = failure("worker:1", SOON), failure("worker:2", RAN)
    ended, crews = job_of(monkeypatch, [soon, soon, late, soon, soon, WELL], 0, max_restarts=9, max_worker_restarts=2)
    assert (ended, crews) == (0, [["1", "2", "3"]] * 6)
    _, crews = job_of(monkeypatch, [soon, soon, soon, WELL], 0, max_restarts=9, max_worker_restarts=2)
    assert crews == [["1", "2", "3"]] * 3 + [["1", "3"]]


@pytest.mark.parametrize(
    ("failing", "restarts", "code", "crews"),
    [
        # With fewer restarts of all tasks than of one worker, the last of them shows which one can't come back.
        (["worker:0"] * 2, {"max_restarts": 1}, 0, ["123", "123", "23"]),
        (["worker:0"] * 3, {"max_restarts": 2, "min_workers": None}, 6, ["123"] * 3),
        (["worker:0", "worker:1", "worker:2"], {"max_restarts": 2, "min_workers": 1}, 6, ["123"] * 3),
        (["worker:1"] * 4, {"max_restarts": 1, "min_workers": 1}, 0, ["123", "123", "13", "13", "1"]),
        (["worker:1"] * 4, {"max_restarts": 1}, 6, ["123", "123", "13", "13"]),
    ],
)
def test_workers_of_each_attempt_of_an_all_reduce(monkeypatch, failing, restarts, code, crews):
    outcomes = [*(failure(name, SOON) for name in failing), WELL]
    assert job_of(monkeypatch, outcomes, 0, **restarts) == (code, [list(crew) for crew in crews])


def test_a_preemption_is_no_failure_of_a_worker(monkeypatch):
    preempted = failure("worker:1", SOON, code=75)
    _, crews = job_of(monkeypatch, [preempted] * 5 + [WELL], 0, max_restarts=1, max_worker_restarts=0)
    assert crews == [["1", "2", "3"]] * 6


def test_after_the_chief_has_failed_those_who_were_given_up_stay_out(monkeypatch):
    chief = failure("chief:0", RAN, given_up={"worker:1"})
    ended, crews = job_of(monkeypatch, [chief, failure("ps:0", RAN), WELL], 1, max_restarts=1)
    assert (ended, crews) == (6, [["2", "3", "4"], ["2", "4"]])


def test_when_too_few_are_left_a_restart_has_all_of_them_again(monkeypatch):
    both = failure("worker:2", SOON, given_up={"worker:1", "worker:2"})
    assert job_of(monkeypatch, [both, WELL], 1, max_restarts=1) == (0, [["2", "3", "4"]] * 2)


def test_names_of_a_smaller_cluster_mean_the_workers_of_the_whole_one(monkeypatch):
    first = failure("worker:0", SOON, given_up={"worker:0"}, goes_on=True)
    second = failure("chief:0", RAN, given_up=set())
    _, crews = job_of(monkeypatch, [first, second, WELL], 1, max_restarts=1)
    assert crews == [["2", "3", "4"], ["3", "4"], ["3", "4"]]


# Plans for fewer workers.


def clusters(request, prefix=""):
    return [Cluster.from_tf_config(task.env[f"{prefix}TF_CONFIG"]) for task in request.tasks]


@pytest.mark.parametrize("dropped", [set(), {"worker:0"}, {"worker:1"}, {"worker:0", "worker:2"}])
@pytest.mark.parametrize("num_ps", [0, 1])
def test_those_who_are_left_keep_their_ports_and_gpus(dropped, num_ps):
    job = local.LocalJob(("train.py",), Shape(3, num_ps, evaluator=True))
    ports, gpus = range(1, 1 + len(job.shape.members)), ["a", "b", "c"]
    whole, left = local.plan(job, ports, devices=gpus), local.plan(job, ports, devices=gpus, dropped=dropped)
    kept = [task for task in whole.tasks if task.name not in dropped]
    assert [task.env["CUDA_VISIBLE_DEVICES"] for task in left.tasks] == [
        task.env["CUDA_VISIBLE_DEVICES"] for task in kept
    ]
    assert [task.name.partition(":")[0] for task in left.tasks] == [task.name.partition(":")[0] for task in kept]
    addresses = [task.address for task in map(Members, kept)]
    assert [task.address for task in map(Members, left.tasks)] == addresses
    for cluster in clusters(left):
        assert list(cluster.jobs["worker"]) == list(range(3 - len(dropped)))
        assert [cluster.address(Task("worker", i)) for i in range(3 - len(dropped))] == [
            task.address for task in map(Members, kept) if task.name.startswith("worker")
        ]
    assert left.computing == tuple(f"worker:{i}" for i in range(3 - len(dropped)))
    assert left.deciding == ({"chief:0"} if num_ps else set(left.computing))


class Members:
    """A planned task with its address, if it has one."""

    def __init__(self, request):
        cluster = Cluster.from_tf_config(request.env["TF_CONFIG"])
        self.name = request.name
        self.address = cluster.address(cluster.task) if cluster.task.type != "evaluator" else None


@pytest.mark.parametrize(
    ("workers", "dropped", "left"),
    [
        (2, {"worker:0"}, ["chief:0", "worker:0"]),
        (2, {"chief:0"}, ["worker:0", "worker:1"]),
        (2, {"worker:0", "worker:1"}, ["worker:0"]),
    ],
)
def test_a_chief_of_an_all_reduce_is_one_of_those_who_train(workers, dropped, left):
    shape, places = Shape(workers, chief=True).without(dropped)
    assert [str(task) for task in shape.computing] == [str(task) for task in places] == left
    assert not {str(task) for task in places.values()} & dropped


def test_somebody_has_to_be_left():
    for shape in (Shape(1), Shape(1, 1)):
        with pytest.raises(requests.LaunchError, match="--num_workers"):
            shape.without({"worker:0"})


def test_on_hosts_those_who_are_left_keep_their_places():
    job = ssh.SshJob(
        ("train.py",), Shape(3), hosts=(Host("alpha", 2), Host("me@beta", 1, "10.0.0.2")), gpus_per_worker=1
    )
    whole, left = ssh.plan(job), ssh.plan(job, dropped={"worker:0"})
    assert [task.command for task in left.tasks] == [task.command for task in whole.tasks[1:]]
    config = json.loads(left.tasks[0].env["TFDIST_SEND_TF_CONFIG"])
    assert config["cluster"] == {"worker": ["alpha:2223", "10.0.0.2:2222"]}
    assert left.tasks[0].env["TFDIST_SEND_CUDA_VISIBLE_DEVICES"] == "1"


# What makes no sense.


@pytest.mark.parametrize(
    ("restarts", "shape", "words"),
    [
        ({"min_workers": 3}, {"num_ps": 1}, "--min_workers is out of range; use 1 to --num_workers=2. Received: 3"),
        ({"min_workers": 1}, {}, "--min_workers has no effect without a restart, where there is no parameter server"),
    ],
)
def test_what_makes_no_sense_is_refused(restarts, shape, words):
    with pytest.raises(requests.LaunchError) as caught:
        local.LocalJob(("a.py",), Shape(**shape), restarts=Restarts(**restarts))
    assert str(caught.value).startswith(words)
    assert "Received: " in str(caught.value)

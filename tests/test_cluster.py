# SPDX-License-Identifier: Apache-2.0
"""TF_CONFIG in and out: what is read, what is refused, and with which words."""

import copy
import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tfdist
from tfdist.cluster import Cluster, ClusterError, Task
from tfdist.doctor import __main__ as doctor

WORKERS = ["a:1", "b:2"]


def config(jobs=None, task=("worker", 0), **more):
    """A TF_CONFIG text; `task` is a (type, index) pair."""
    described = {"type": task[0], "index": task[1]}
    return json.dumps({"cluster": {"worker": WORKERS} if jobs is None else jobs, "task": described, **more})


def read(jobs=None, task=("worker", 0), **more):
    return Cluster.from_tf_config(config(jobs, task, **more))


def refusal(text):
    with pytest.raises(ClusterError) as caught:
        Cluster.from_tf_config(text)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("TF_CONFIG")
    assert "Received: " in message
    return message


# What is read.


def test_a_dense_cluster_is_read():
    found = read({"chief": ["c:1"], "worker": WORKERS, "ps": ["p:1"]}, ("worker", 1))
    assert found.task == Task("worker", 1)
    assert (found.num_workers, found.num_ps) == (2, 1)
    assert found.address() == "b:2"
    assert found.address(Task("ps", 0)) == "p:1"
    assert list(map(str, found.tasks)) == ["chief:0", "worker:0", "worker:1", "ps:0"]


def test_a_sparse_job_keeps_its_indices():
    found = read({"worker": {"3": "d:1", "1": "b:1"}}, ("worker", 3))
    assert dict(found.jobs["worker"]) == {1: "b:1", 3: "d:1"}
    assert json.loads(found.to_tf_config())["cluster"] == {"worker": {"1": "b:1", "3": "d:1"}}


def test_a_sparse_job_without_gaps_is_the_dense_one():
    assert read({"worker": {"1": "b:2", "0": "a:1"}}) == read({"worker": WORKERS})


def test_master_is_the_chief():
    found = read({"master": ["m:1"], "worker": WORKERS}, ("master", 0))
    assert found.task == Task("chief", 0)
    assert found.is_chief
    assert "master" not in found.to_tf_config()


@pytest.mark.parametrize(
    ("jobs", "task", "expected"),
    [
        (None, ("worker", 0), ("worker:0", True, 0, 2)),
        (None, ("worker", 1), ("worker:1", False, 1, 2)),
        ({"chief": ["c:1"], "worker": WORKERS}, ("chief", 0), ("chief:0", True, 0, 3)),
        ({"chief": ["c:1"], "worker": WORKERS}, ("worker", 1), ("worker:1", False, 2, 3)),
        ({"chief": ["c:1"], "worker": WORKERS, "ps": ["p:1"]}, ("chief", 0), ("chief:0", True, 0, 2)),
        ({"chief": ["c:1"], "worker": WORKERS, "ps": ["p:1"]}, ("worker", 1), ("worker:1", False, 1, 2)),
        ({"worker": WORKERS, "ps": ["p:1"]}, ("worker", 0), ("worker:0", False, 0, 2)),
        (None, ("evaluator", 0), ("evaluator:0", False, 0, 2)),
    ],
)
def test_place_of_this_process_under_tf_config(monkeypatch, jobs, task, expected):
    monkeypatch.setenv("TF_CONFIG", config(jobs, task))
    assert (str(tfdist.task()), tfdist.is_chief(), tfdist.worker_index(), tfdist.num_workers()) == expected


def test_chief_without_an_address_is_the_chief_of_its_servers():
    servers = Cluster({"worker": {0: "a:1"}, "ps": {0: "p:1"}}, Task("chief", 0))
    assert servers.is_chief
    assert not servers.with_task(Task("worker", 0)).is_chief


def test_place_of_a_program_that_trains_alone(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    place = str(tfdist.task()), tfdist.is_chief(), tfdist.worker_index(), tfdist.num_workers()
    assert place == ("worker:0", True, 0, 1)


def test_place_under_an_invalid_tf_config_is_an_error(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "{")
    for function in (tfdist.task, tfdist.is_chief, tfdist.worker_index, tfdist.num_workers):
        with pytest.raises(ClusterError):
            function()


def test_an_evaluator_need_not_be_listed():
    found = read(task=("evaluator", 0))
    assert not found.is_chief
    with pytest.raises(ClusterError, match="evaluator:0"):
        found.address()


def test_a_listed_evaluator_has_an_address():
    assert read({"worker": WORKERS, "evaluator": ["e:1"]}, ("evaluator", 0)).address() == "e:1"


def test_training_tasks_are_chief_and_workers():
    found = read({"chief": ["c:1"], "worker": WORKERS, "evaluator": ["e:1"]})
    assert list(map(str, found.training_tasks)) == ["chief:0", "worker:0", "worker:1"]


def test_other_keys_are_ignored():
    assert read(rpc_layer="grpc", environment="cloud", job={"scale": 1}) == read()


def test_an_empty_job_is_left_out():
    assert list(read({"worker": WORKERS, "ps": []}).jobs) == ["worker"]


@pytest.mark.parametrize(
    "address", ["localhost:1", "10.0.0.1:65535", "a-b.c_d.e:80", "[::1]:2222", "[fe80::1%eth0]:2222", "host:1"]
)
def test_addresses_that_are_fine(address):
    assert read({"worker": [address]}).address() == address


def test_a_host_with_a_final_dot_is_the_host_without():
    dotted = read({"worker": ["a.example.com.:1", "localhost.:2"]})
    plain = read({"worker": ["a.example.com:1", "localhost:2"]})
    assert dotted == plain
    assert dotted.to_tf_config() == plain.to_tf_config()
    with pytest.raises(ClusterError, match=r"worker\[1\] is the same address as cluster.worker\[0\]"):
        read({"worker": ["a.example.com.:1", "a.example.com:1"]})


def test_without_tf_config_there_is_no_cluster(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert Cluster.from_environment() is None
    with pytest.raises(ClusterError, match="TF_CONFIG is not set"):
        Cluster.from_tf_config()


def test_an_empty_variable_is_an_error_not_an_absent_one(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "")
    with pytest.raises(ClusterError, match="is empty"):
        Cluster.from_environment()


def test_with_task_changes_only_the_task():
    other = read().with_task(Task("worker", 1))
    assert other == read(task=("worker", 1))
    with pytest.raises(ClusterError, match="out of range"):
        read().with_task(Task("worker", 2))


def test_a_cluster_is_a_value():
    found = read({"chief": ["c:1"], "worker": WORKERS})
    assert copy.deepcopy(found) == pickle.loads(pickle.dumps(found)) == found
    assert len({found, copy.copy(found)}) == 1
    with pytest.raises(TypeError):
        found.jobs["worker"][0] = "x:1"


def test_python_values_are_checked_like_json():
    assert Cluster({"worker": WORKERS}, Task("worker", 1)) == read(task=("worker", 1))
    with pytest.raises(ClusterError, match=r"^cluster\.worker\[1\] has no port"):
        Cluster({"worker": ["a:1", "b"]}, Task("worker", 0))


# What is refused.


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        ("nope", "is not JSON"),
        ("{'cluster': 1}", "double quotes"),
        ("null", "is not a JSON object"),
        ("[]", "is not a JSON object"),
        ("5", "is not a JSON object"),
        ("{}", "has no cluster"),
        ("[" * 100_000, "is nested too deeply"),
        ('{"task": {"type": "worker", "index": 0}}', "has a task but no cluster"),
        ('{"cluster": {}, "task": {"type": "worker", "index": 0}}', "has a task but no cluster"),
        ('{"cluster": {"worker": ["a:1"]}}', "has a cluster but no task"),
        ('{"cluster": {"worker": ["a:1"]}, "task": "worker"}', "task is not an object"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"index": 0}}', "task has no type"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker"}}', "task has no index"),
        ('{"cluster": {"worker": ["a:1"], "worker": ["b:1"]}, "task": {}}', 'the key "worker" twice'),
    ],
)
def test_a_text_that_is_no_description_is_refused(text, words):
    assert words in refusal(text)


@pytest.mark.parametrize(
    "index", ['"1"', "1.7", "1.0", "-1", "true", "null", "[]", "2", "99999999999", "NaN", "1" * 5000]
)
def test_an_index_that_is_none_is_refused(index):
    message = refusal(config().replace('"index": 0', f'"index": {index}'))
    assert "index" in message or "NaN" in message or "5000 digits" in message


@pytest.mark.parametrize("job", ["wrker", "Worker", "", "localhost", 1, None, ["worker"]])
def test_an_unknown_task_type_is_refused(job):
    message = refusal(config(task=(job, 0)))
    assert "task.type is not a known job; use one of chief, worker, ps, evaluator." in message
    assert json.dumps(job) in message


@pytest.mark.parametrize("job", ["ps", "chief", "master"])
def test_a_task_of_a_job_that_is_not_listed_is_refused(job):
    assert "not a job of this cluster" in refusal(config(task=(job, 0)))


@pytest.mark.parametrize(
    ("jobs", "words"),
    [
        ({"wrker": ["a:1"]}, 'cluster["wrker"] is not a known job'),
        ({"chief": ["a:1", "b:1"], "worker": ["c:1"]}, "cluster.chief has more than one task"),
        ({"chief": ["a:1"], "master": ["b:1"], "worker": ["c:1"]}, "both a chief and a master"),
        ({"worker": "a:1"}, "cluster.worker is not a list"),
        ({"worker": None}, "cluster.worker is not a list"),
        ({"worker": 5}, "cluster.worker is not a list"),
        ({"worker": []}, "cluster lists no task"),
        ({"worker": {"01": "a:1"}}, "not an index"),
        ({"worker": {"-1": "a:1"}}, "not an index"),
        ({"worker": {"1.5": "a:1"}}, "not an index"),
        ({"worker": {"²": "a:1"}}, "not an index"),
        (["a:1"], "cluster is not an object"),
        ("a:1", "cluster is not an object"),
        ({"worker": ["a:1", "a:1"]}, "cluster.worker[1] is the same address as cluster.worker[0]"),
        ({"worker": ["a:1"], "ps": ["A.:1"]}, "cluster.ps[0] is the same address as cluster.worker[0]"),
        ({"worker": ["localhost:1", "127.0.0.1:1"]}, "is the same address"),
        ({"worker": ["[::1]:1", "[0:0::1]:1"]}, "is the same address"),
    ],
)
def test_jobs_that_make_no_sense_are_refused(jobs, words):
    assert words in refusal(config(jobs))


@pytest.mark.parametrize(
    ("address", "words"),
    [
        *[(each, "is not a string") for each in (2222, None, ["b:1"])],
        *[(each, "has no port from 1 to 65535") for each in ("b", "", "b:", "b:x", "b:0", "b:65536", "b:02", "[::1]")],
        *[(each, "has no port from 1 to 65535") for each in ("b:\u00b2", "b:1\n", "[::1]2")],
        *[(each, "has a host that is neither") for each in (":2222", "b c:1", "b/c:1", "1.2.3:1", "1.2.3.256:1")],
        *[(each, "has a host that is neither") for each in ("grpc://b:1", "::1:2222", "[::g]:1", "[::1", "[::1:1")],
        *[(each, "has a host that is neither") for each in ("[1.2.3.4]:1", "\ud800:1", "[::1]\n:1")],
    ],
)
def test_addresses_that_are_none_are_refused(address, words):
    message = refusal(config({"worker": ["a:1", address]}))
    assert f"cluster.worker[1] {words}" in message
    assert message.endswith(f"Received: {json.dumps(address)}")


def test_a_long_value_is_shortened():
    assert len(refusal(config({"worker": ["a" * 10_000]}))) < 400


# Roles.


def test_multi_worker_wants_no_parameter_server():
    with pytest.raises(ClusterError, match=r"cluster\.ps .*MultiWorkerMirroredStrategy.*use ParameterServerStrategy"):
        read({"chief": ["c:1"], "worker": WORKERS, "ps": ["p:1"]}, ("ps", 0)).check_multi_worker()


def test_multi_worker_wants_somebody_who_leads():
    with pytest.raises(ClusterError, match="no chief and no worker 0"):
        read({"evaluator": ["e:1"]}, ("evaluator", 0)).check_multi_worker()


def test_multi_worker_wants_no_gaps():
    with pytest.raises(ClusterError, match=r"cluster\.worker has gaps"):
        read({"chief": ["c:1"], "worker": {"1": "b:1"}}, ("chief", 0)).check_multi_worker()


@pytest.mark.parametrize("jobs", [{"worker": WORKERS}, {"chief": ["c:1"], "worker": WORKERS}, {"chief": ["c:1"]}])
def test_multi_worker_takes_workers_with_or_without_a_chief(jobs):
    job = next(iter(jobs))
    read(jobs, (job, 0)).check_multi_worker()


@pytest.mark.parametrize("missing", ["chief", "worker", "ps"])
def test_parameter_server_wants_all_three_jobs(missing):
    jobs = {"chief": ["c:1"], "worker": ["w:1"], "ps": ["p:1"]}
    del jobs[missing]
    with pytest.raises(ClusterError, match=f'no job "{missing}".*ParameterServerStrategy.*add "{missing}"'):
        read(jobs, (next(iter(jobs)), 0)).check_parameter_server()


@pytest.mark.parametrize("listed", [{}, {"evaluator": ["e:1"]}])
def test_an_evaluator_has_no_part_in_a_parameter_server_cluster_but_may_be_listed(listed):
    jobs = {"chief": ["c:1"], "worker": ["w:1"], "ps": ["p:1"], **listed}
    with pytest.raises(ClusterError, match=r'ParameterServerStrategy.*leave the evaluator out.*Received: "evaluator"'):
        read(jobs, ("evaluator", 0)).check_parameter_server()
    read(jobs, ("chief", 0)).check_parameter_server()


def test_a_gap_matters_to_the_chief_of_a_parameter_server_cluster_only():
    jobs = {"chief": ["c:1"], "worker": {"1": "w:1"}, "ps": ["p:1"]}
    read(jobs, ("worker", 1)).check_parameter_server()
    with pytest.raises(ClusterError, match=r"cluster\.worker has gaps"):
        read(jobs, ("chief", 0)).check_parameter_server()


HOSTS = st.integers(0, 255).map(lambda n: f"10.0.0.{n}") | st.integers(0, 99).map(lambda n: f"host{n}.example")
ADDRESSES = st.builds("{}:{}".format, HOSTS, st.integers(1, 65535))


@st.composite
def clusters(draw):
    addresses = draw(st.lists(ADDRESSES, min_size=1, max_size=12, unique=True))
    jobs = {}
    for address in addresses:
        job = draw(st.sampled_from(("worker", "ps", "evaluator")))
        jobs.setdefault(job, {})[draw(st.integers(0, 50).filter(lambda i, j=job: i not in jobs[j]))] = address
    job = draw(st.sampled_from(sorted(jobs)))
    return Cluster(jobs, Task(job, draw(st.sampled_from(sorted(jobs[job])))))


@given(clusters())
def test_what_is_written_is_read_back(described):
    assert Cluster.from_tf_config(described.to_tf_config()) == described


@given(clusters())
def test_exactly_one_task_leads_or_nobody(described):
    leaders = [task for task in described.tasks if described.with_task(task).is_chief]
    assert leaders == ([described.chief] if described.chief else [])


WORDS = st.sampled_from(
    ["cluster", "task", "type", "index", "worker", "ps", "chief", "master", "evaluator", "a:1", "b:2", "0"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS | st.text(max_size=3), inner, max_size=4),
    max_leaves=15,
)
SHAPED = st.fixed_dictionaries(
    {"cluster": st.dictionaries(WORDS, st.lists(WORDS | VALUES, max_size=3) | VALUES, max_size=4)},
    optional={"task": st.fixed_dictionaries({"type": WORDS | VALUES, "index": st.integers(-1, 3) | VALUES}) | VALUES},
)


@given(st.text() | st.binary() | st.integers() | st.lists(st.text()))
def test_no_text_raises_anything_else(text):
    try:
        assert Cluster.from_tf_config(text).task
    except ClusterError as error:
        assert len(str(error).splitlines()) == 1


@given(VALUES, VALUES, VALUES)
def test_no_python_value_raises_anything_else(jobs, job, index):
    try:
        Cluster({"worker": jobs}, Task(job, index))
    except ClusterError as error:
        assert len(str(error).splitlines()) == 1


JOBS = '{"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": {"0": "d:1"}}'
CONFIG = f'{{"cluster": {JOBS}, "task": {{"type": "worker", "index": 1}}}}'


@st.composite
def mutations(draw):
    """A good one, with a few characters taken out, put in or doubled."""
    text = CONFIG
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(text)))
        until = draw(st.integers(at, min(len(text), at + 8)))
        text = (
            text[:at]
            + draw(st.sampled_from(["", '"', "{", "}", "[", ",", ":", "1", "-", "null", text[at:until] * 2]))
            + text[until:]
        )
    return text


@pytest.mark.parametrize("cases", [300, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_a_right_answer_or_one_line(cases):
    """From the parser and from the doctor."""

    @settings(max_examples=cases, deadline=None, database=None)
    @given(mutations() | (VALUES | SHAPED).map(json.dumps) | st.text(max_size=30))
    def check(text):
        try:
            cluster = Cluster.from_tf_config(text)
        except ClusterError as error:
            assert len(str(error).splitlines()) == 1
        else:
            assert Cluster.from_tf_config(cluster.to_tf_config()) == cluster
            (finding,) = doctor.strategy(cluster)
            assert len(str(finding).splitlines()) == 1

    check()

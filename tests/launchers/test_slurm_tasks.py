# SPDX-License-Identifier: Apache-2.0
"""Tasks of a Slurm step: type, index, address and GPUs, from the variables that Slurm sets."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.cluster import Task
from tfdist.launchers import requests
from tfdist.launchers.shape import Shape
from tfdist.launchers.slurm import task as slurm_task

ENVIRONMENT = {
    "SLURM_JOB_ID": "1234",
    "SLURM_JOB_NODELIST": "gpu[08-10]-ib",
    "SLURM_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "0",
}


def found(job, env, port=0):
    return slurm_task.task_environment(slurm_task.SlurmProcess.from_environment(env), job, port, env)


def test_tasks_of_a_step():
    job = Shape(num_workers=3, num_ps=1)
    env = [found(job, {**ENVIRONMENT, "SLURM_PROCID": str(number)}) for number in range(5)]
    assert [str(task) for task, _ in env] == ["worker:0", "worker:1", "worker:2", "ps:0", "chief:0"]
    first = 12000 + 234 * 16
    assert json.loads(env[4][1]["TF_CONFIG"]) == {
        "cluster": {
            "chief": [f"gpu10-ib:{first}"],
            "worker": [f"gpu08-ib:{first}", f"gpu08-ib:{first + 1}", f"gpu09-ib:{first}"],
            "ps": [f"gpu09-ib:{first + 1}"],
        },
        "task": {"type": "chief", "index": 0},
    }


def test_an_evaluator_is_a_task_without_address():
    task, env = found(Shape(3, chief=True, evaluator=True), {**ENVIRONMENT, "SLURM_PROCID": "4"}, port=2000)
    assert task == Task("evaluator", 0)
    assert json.loads(env["TF_CONFIG"])["cluster"] == {
        "chief": ["gpu09-ib:2001"],
        "worker": ["gpu08-ib:2000", "gpu08-ib:2001", "gpu09-ib:2000"],
    }


def test_gpus_are_shared_out_among_the_workers_of_a_host():
    env = {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    shares = [found(Shape(3, 1), {**env, "SLURM_PROCID": str(n)})[1].get("CUDA_VISIBLE_DEVICES") for n in range(5)]
    assert shares == ["0,1", "2,3", None, "", ""]  # None: it has the host's GPUs for itself.


def test_gpus_that_slurm_has_bound_to_a_task_are_its_own():
    env = {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": "1", "SLURM_GPUS_ON_NODE": "2", "SLURM_GPU_BIND": "single:1"}
    assert "CUDA_VISIBLE_DEVICES" not in found(Shape(3, 1), env)[1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"SLURM_PROCID": ""}, "SLURM_PROCID is not set; run this inside of a job, with srun"),
        ({"SLURM_PROCID": "five"}, "SLURM_PROCID is not a number. Received: 'five'"),
        ({"SLURM_PROCID": "5"}, "SLURM_PROCID is no process of this step of 5. Received: 5"),
        ({"SLURM_JOB_NODELIST": "gpu[08-09]"}, "Slurm has 2 hosts, tasks for 3"),
        ({"SLURM_TASKS_PER_NODE": "2(x3)"}, "the step needs 5 processes; use srun --ntasks. Received: 6"),
        ({"SLURM_TASKS_PER_NODE": "5", "SLURM_JOB_NODELIST": "n$1"}, "cluster.chief[0] has a host that is neither"),
        (
            {"SLURM_TASKS_PER_NODE": "4,1", "SLURM_JOB_NODELIST": "a,b", "CUDA_VISIBLE_DEVICES": "0,1"},
            "3 workers need a GPU each, and there are fewer; use --gpus_per_node=3 or more, or fewer --tasks",
        ),
    ],
)
def test_steps_that_make_no_sense(change, words):
    with pytest.raises(ValueError) as caught:
        found(Shape(3, 1), {**ENVIRONMENT, **change})
    assert str(caught.value).startswith(words)


def test_more_tasks_on_a_host_than_ports():
    env = {**ENVIRONMENT, "SLURM_JOB_NODELIST": "n", "SLURM_TASKS_PER_NODE": "17"}
    with pytest.raises(requests.LaunchError, match="a host has more tasks than the 16 for which ports are set aside"):
        found(Shape(17), env)
    assert "n:3015" in found(Shape(17), env, port=3000)[1]["TF_CONFIG"]


# Host lists as Slurm writes them: ranges, padding, suffixes; whatever else is typed is one line of error.


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n1,n2", ["n1", "n2"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[008,10,7]", ["n008", "n10", "n7"]),
        ("n[9-10]-ib,login", ["n9-ib", "n10-ib", "login"]),
        ("r[0-1]n[1-2].x", ["r0n1.x", "r0n2.x", "r1n1.x", "r1n2.x"]),
        ("[1-2]", ["1", "2"]),
        ("n[5-5],n5", ["n5", "n5"]),
    ],
)
def test_lists(text, hosts):
    assert slurm_task.expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "a,,b", "n[1-3", "n1-3]", "n[[1]]", "n[]", "n[a-c]", "n[3-1]", "n 1"])
def test_what_is_no_list(text):
    with pytest.raises(requests.LaunchError, match="the host list is not written as Slurm does"):
        slurm_task.expand_hosts(text)


@pytest.mark.parametrize(("text", "counts"), [("2(x3),1", [2, 2, 2, 1]), ("4", [4]), ("1,2", [1, 2])])
def test_tasks_per_host(text, counts):
    assert slurm_task.expand_counts(text) == counts


@pytest.mark.parametrize("text", ["", "x", "2x3", "2(x0)", "-1", "²"])
def test_what_are_no_tasks_per_host(text):
    with pytest.raises(requests.LaunchError, match="the tasks per host are not written as Slurm does"):
        slurm_task.expand_counts(text)


NAMES = st.text("abcxyz0189-._", min_size=1, max_size=6)
RANGES = st.tuples(st.integers(0, 1200), st.integers(0, 30), st.integers(0, 6))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(NAMES, RANGES, NAMES), min_size=1, max_size=5))
def test_a_list_written_from_hosts_gives_them_back(parts):
    hosts, texts = [], []
    for prefix, (first, more, width), suffix in parts:
        numbers = [f"{number:0{width}d}" for number in range(first, first + more + 1)]
        hosts += [f"{prefix}{number}{suffix}" for number in numbers]
        texts.append(f"{prefix}[{numbers[0]}-{numbers[-1]}]{suffix}")
    assert slurm_task.expand_hosts(",".join(texts)) == hosts

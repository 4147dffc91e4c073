# SPDX-License-Identifier: Apache-2.0
"""Plans of jobs on Ray, and what is refused before any of them starts. test_real_ray.py has the jobs themselves."""

import json
import sys

import pytest

from tfdist.launchers import command_line, ray
from tfdist.launchers.requests import LaunchError
from tfdist.launchers.shape import Shape

JOB = ray.RayJob(
    ("train.py", "--epochs=5"), Shape(2, 1), {"A": "b"}, resources_per_worker='{"CPU": 2, "GPU": 1, "TPU": 0}'
)


def test_plan_of_fewer_workers_keeps_their_bundles():
    assert JOB.bundles == [{"CPU": 1}, *[{"CPU": 2, "GPU": 1}] * 2, {"CPU": 1}]
    request = ray.plan(JOB, dropped=["worker:0"])
    assert [(task.name, task.env["TFDIST_RAY_BUNDLE"]) for task in request.tasks] == [
        ("chief:0", "0"),
        ("worker:0", "2"),
        ("ps:0", "3"),
    ]
    assert json.loads(request.tasks[1].env["TFDIST_SEND_TF_CONFIG"]) == {
        "cluster": {"chief": ["chief-0:2222"], "worker": ["worker-1:2222"], "ps": ["ps-0:2222"]},
        "task": {"type": "worker", "index": 0},
    }
    assert request.tasks[1].env["TFDIST_SEND_A"] == "b" and request.replaces_workers
    assert str(request.tasks[1]).endswith(" python train.py --epochs=5\n")


@pytest.mark.parametrize(
    ("wanted", "free", "words"),
    [
        ({"worker:0": {"CPU": 2, "GPU": 1}}, {"CPU": 2}, "(0 of 0 free, 1 asked); they start as nodes join or jobs"),
        ({"worker:0": {"CPU": 2}, "ps:0": {"CPU": 1}}, {"CPU": 0.5}, "CPU 2.5 (0.5 of 4 free, 3 asked); they start as"),
        ({"worker:0": {"CPU": 2}}, {"CPU": 2}, "enough is free, but not on nodes as --strategy asks"),
    ],
)
def test_missing_resources_are_named_with_free_ones(wanted, free, words):
    line = ray.missing(wanted, {"CPU": 4}, free)
    assert line.startswith(f"{', '.join(wanted)} wait for resources: ") and words in line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"resources_per_worker": "GPU"}, "--resources_per_worker is no JSON object; write it as"),
        ({"resources_per_worker": {"CPU": 0}}, "--resources_per_worker must be numbers by Ray's names, not all 0"),
        ({"resources_per_worker": {"cpu": 2}}, "--resources_per_worker must be numbers by Ray's names, not all 0"),
        ({"address": "http://head:8265"}, "--address has a host that is neither a name nor an IP address; use auto"),
        ({"resources_per_worker": {"CPU": "2"}}, "--resources_per_worker must be numbers by Ray's names, not all 0"),
        (
            {"runtime_env": [1]},
            '--runtime_env is no JSON object; write it as --runtime_env=\'{"pip": ["scikit-learn"]}\'',
        ),
        ({"gpus_per_worker": 1}, "unknown flag --gpus_per_worker; did you mean --resources_per_worker='{\"GPU\": 1}'"),
        ({"copy": True}, "the script does not exist"),
        ({}, f"{sys.executable} has no package ray; pip install '.[ray]' in a checkout"),
    ],
)
def test_jobs_that_make_no_sense_are_one_line(options, words, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises((LaunchError, command_line.FlagError)) as caught:
        ray.run("missing.py", **options)
    assert str(caught.value).startswith(words) and "\n" not in str(caught.value)

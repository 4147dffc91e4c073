# SPDX-License-Identifier: Apache-2.0
"""The Kubernetes launcher: manifests as text, tasks run as their containers would."""

import json
import os
import pathlib
import subprocess
import sys

import hypothesis
import pytest
import yaml

from tfdist.launchers import requests
from tfdist.launchers.kubernetes import launcher as kubernetes
from tfdist.launchers.kubernetes import task as kubernetes_task
from tfdist.launchers.shape import Shape

GOLDEN = pathlib.Path(__file__).parent / "golden"
FORMS = ("job", "jobset")
ODD = ["two words", 'it\'s "$(HOME)" $$x `y`', "new\nline", "", "é", "--", "-m"]


def pods(**options):
    options = {"shape": Shape(2, 1, evaluator=True), "command": ("train.py", "--name=it's two words"), **options}
    return kubernetes.Pods(**{"name": "run1", "image": "me/train:1", **options})


def full(**options):
    return pods(
        **options,
        shape=Shape(2),
        gpus_per_worker=1,
        claims={"data": "/data"},
        command=("train.py", *ODD),
        cpu="4",
        env={"ODD": "$(B) 'c'\nd", "N": "1"},
        memory="16Gi",
        namespace="ml",
        node_selector={"cloud/pool": "gpu"},
        working_dir="/app",
    )


def test_image_of_a_host_in_capitals_is_one():
    assert kubernetes.plan(pods(image="MyReg.azurecr.io/t:1"))


@pytest.mark.parametrize("form", FORMS)
def test_a_plan_as_text(form, monkeypatch):
    monkeypatch.setattr(kubernetes.secrets, "token_hex", lambda size: "a secret")
    assert str(kubernetes.plan(full(form=form))) == (GOLDEN / f"kubernetes_{form}.yaml").read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"image": ""}, "--image is no name of an image; write the one in which the script and tfdist are, such as"),
        ({"image": "a b"}, "--image is no name of an image"),
        ({"name": ""}, "--name makes hosts with names of"),
        ({"name": "Run_1"}, "--name is no name for Kubernetes; begin with a-z, go on with a-z, 0-9 and dashes"),
        ({"name": "1run"}, "--name is no name for Kubernetes"),
        ({"name": "a" * 64}, "--name is longer than 63 characters"),
        ({"namespace": "n.s"}, "--namespace is no name for Kubernetes"),
        ({"claims": {"data": "x"}}, "--claim is mounted at an absolute path; write --claim=data=/x"),
        ({"claims": {"da ta": "/x"}}, "--claim is no name for Kubernetes"),
        ({"cpu": "four"}, "--cpu is no quantity"),
        ({"cpu": "16Gi"}, "--cpu is no quantity of it; write 4 or 500m"),
        ({"memory": "16GB"}, "--memory is no quantity"),
        ({"memory": "16"}, "--memory is no quantity of it; write 16Gi or 512Mi"),
        ({"command": ("a.py", "\0")}, "an argument is not UTF-8 text"),
        ({"env": {"A": "\udcff"}}, "an argument is not UTF-8 text"),
    ],
)
def test_jobs_that_make_no_sense(options, words):
    with pytest.raises(requests.LaunchError) as caught:
        kubernetes.plan(pods(**options))
    assert str(caught.value).startswith(words)


def test_longest_name_of_a_job_is_the_name_of_its_objects():
    name = "a" * (63 - len("-evaluator-0-0"))
    assert kubernetes.plan(pods(name=name)).objects[0]["metadata"]["name"] == name
    with pytest.raises(requests.LaunchError, match=r"names of 64 characters, such as a+-evaluator-0-0, and 63"):
        kubernetes.plan(pods(name=f"{name}a"))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (Shape(2, 1, evaluator=True), {"worker"}),
        (Shape(2, chief=True, evaluator=True), {"chief", "worker"}),  # The chief of an all-reduce trains too.
    ],
)
def test_only_tasks_that_train_reserve_gpus(form, shape, expected):
    request = kubernetes.plan(pods(shape=shape, gpus_per_worker=4, node_selector={"pool": "gpu"}, form=form))
    found = {}
    for template in templates(json.loads(json.dumps(request.objects))):
        role = template["metadata"]["labels"]["app.kubernetes.io/component"]
        (container,) = template["spec"]["containers"]
        found[role] = container.get("resources", {}), template["spec"].get("nodeSelector", {})
    gpus = {"nvidia.com/gpu": 4}
    assert {role for role in found if found[role] == ({"requests": gpus, "limits": gpus}, {"pool": "gpu"})} == expected
    assert all(found[role] == ({}, {}) for role in found if role not in expected)


def templates(value):
    """The templates of pods anywhere in an object."""
    if isinstance(value, list):
        return [template for each in value for template in templates(each)]
    if not isinstance(value, dict):
        return []
    own = [value["template"]] if "containers" in value.get("template", {}).get("spec", {}) else []
    return own + [template for each in value.values() for template in templates(each)]


# What the pods do.


def containers(request):
    """Command and environment of each container, as Kubernetes would start it, one for each task."""
    for job in request.objects:
        if job["kind"] == "Job":
            (container,) = job["spec"]["template"]["spec"]["containers"]
            command = [word.replace("$$", "$") for word in container["command"]]
            env = {e["name"]: e["value"].replace("$$", "$") for e in container["env"] if "value" in e}
            for index in range(job["spec"]["completions"]):
                yield command, {**env, "JOB_COMPLETION_INDEX": str(index)}


@pytest.mark.processes
def test_each_container_runs_its_task_and_all_arrives_unchanged(tmp_path):
    script = tmp_path / "train it.py"
    script.write_text(
        "import json, os, sys\nprint(json.dumps([os.environ['TF_CONFIG'], os.environ['ODD'], sys.argv[1:]]))"
    )
    request = kubernetes.plan(pods(command=(str(script), *ODD), env={"ODD": ODD[1]}, python=sys.executable))
    tasks = []
    for command, env in containers(request):
        done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        config, odd, arguments = json.loads(done.stdout)
        config = json.loads(config)
        tasks.append(f"{config['task']['type']}:{config['task']['index']}")
        assert (odd, arguments) == (ODD[1], ODD)
        assert config["cluster"] == {
            "chief": ["run1-chief-0.run1:2222"],
            "worker": ["run1-worker-0.run1:2222", "run1-worker-1.run1:2222"],
            "ps": ["run1-ps-0.run1:2222"],
        }
    assert tasks == ["chief:0", "worker:0", "worker:1", "ps:0", "evaluator:0"]


@pytest.mark.parametrize(
    ("role", "index", "words"),
    [
        ("worker", None, "JOB_COMPLETION_INDEX is no index"),
        ("worker", "-1", "JOB_COMPLETION_INDEX is no index"),
        ("worker", "2", "the job has no task worker:2"),
        ("evaluator", "0", "the job has no task evaluator:0"),
        ("boss", "0", "task.type is not a known job"),
    ],
)
def test_pods_that_make_no_sense(role, index, words):
    env = {} if index is None else {"JOB_COMPLETION_INDEX": index}
    with pytest.raises(ValueError) as caught:
        kubernetes_task.task_environment(Shape(2, 1), role, "{type}-{index}", 2222, env)
    assert str(caught.value).startswith(words)


@pytest.mark.processes
def test_a_signal_reaches_the_script_and_its_exit_code_comes_back(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\nprint('ready', flush=True)\n"
        "while True: signal.pause()\n"
    )
    command, env = next(
        containers(kubernetes.plan(pods(shape=Shape(1), command=(str(script),), python=sys.executable)))
    )
    with subprocess.Popen(command, env={**os.environ, **env}, stdout=subprocess.PIPE) as task:
        assert task.stdout.readline() == b"ready\n"
        task.terminate()
        assert task.wait(30) == 75


# Has the pod end while its wrapper is between two steps, where there is no script that it could be forwarded to.
END_EARLY = """
import os, signal, sys
from tfdist.launchers.kubernetes import task as kubernetes_task
module, _, name = sys.argv[1].rpartition(".")
where = getattr(kubernetes_task, module)
original = getattr(where, name)
def end(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGTERM)
    return original(*args, **kwargs)
setattr(where, name, end)
sys.exit(kubernetes_task.main(sys.argv[2:]))
"""


@pytest.mark.processes
@pytest.mark.parametrize("step", ["command_line.parse", "wrapping.run_wrapped"])
def test_a_pod_that_is_ended_before_its_script_runs_is_preempted(tmp_path, step):
    script = tmp_path / "train.py"
    script.write_text("import signal\nwhile True: signal.pause()\n")
    command = [sys.executable, "-c", END_EARLY, step, "--num_workers=1", "--host_format=localhost", "--", str(script)]
    done = subprocess.run(command, env={**os.environ, "JOB_COMPLETION_INDEX": "0"}, timeout=60, check=False)
    assert done.returncode == (75 if step == "command_line.parse" else 143)  # As the script ends without a handler.


def test_patches_merge_by_kind_and_lists_by_name(tmp_path):
    path = tmp_path / "patches.yaml"
    path.write_text(
        """
kind: Job
metadata: {name: run1-ps}
spec: {template: {spec: {priorityClassName: high, containers: [{name: task, env: [{name: A, value: b}]}]}}}
---
kind: Job
spec: {ttlSecondsAfterFinished: null, template: {spec: {tolerations: [{key: gpu}]}}}
"""
    )
    found = kubernetes.plan(pods(), patches=kubernetes.read_patches(str(path))).objects
    plain = kubernetes.plan(pods()).objects
    assert found[1:3] == plain[1:3]
    jobs = {each["metadata"]["name"]: each["spec"] for each in found if each["kind"] == "Job"}
    assert all("ttlSecondsAfterFinished" not in each for each in jobs.values())
    specs = {name: each["template"]["spec"] for name, each in jobs.items()}
    assert all(each["tolerations"] == [{"key": "gpu"}] for each in specs.values())
    assert [name for name, each in specs.items() if "priorityClassName" in each] == ["run1-ps"]
    (servers,) = (each for each in plain if each["metadata"]["name"] == "run1-ps")
    (container,), (before,) = specs["run1-ps"]["containers"], servers["spec"]["template"]["spec"]["containers"]
    assert container == {**before, "env": [*before["env"], {"name": "A", "value": "b"}]}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kind: Pod", "--patch is for none of the objects; give kind, and name in metadata, of one of Secret run1, "),
        ("kind: Job\nmetadata: {name: other}", "--patch is for none of the objects"),
        ("- a list", "--patch needs an object with a kind, such as kind: Job, and what to change in it. Received: "),
        ("# empty", "--patch needs an object with a kind"),
        ("spec: 3", "--patch needs an object with a kind"),
        ("kind: Job\nspec: 3", "--patch: Job.spec has fields; write these, or null to remove it. Received: 3"),
        ("{", "--patch is no YAML (line 1: "),
    ],
)
def test_patch_for_no_object_is_one_line(tmp_path, text, words):
    path = tmp_path / "patch.yaml"
    path.write_text(text)
    with pytest.raises(requests.LaunchError) as caught:
        kubernetes.plan(pods(), patches=kubernetes.read_patches(str(path)))
    assert str(caught.value).startswith(words) and "\n" not in str(caught.value)


def test_a_document():
    value = {"a": {"b c": [1, {"d": "x y", "e": []}, ["f"]], "g": {}}, "h": True, "on": "off"}
    assert kubernetes.yaml_documents([value]) == (
        'a:\n  b c:\n  - 1\n  - d: x y\n    e: []\n  - - f\n  g: {}\nh: true\n"on": "off"\n'
    )


WORDS = ("", "true", "No", "null", "~", "1", "1e3", "0x1", "1.5", "1:30", ".inf", "...")


@pytest.mark.parametrize("text", [*WORDS, "a: b", "a #b", "- a", " a", "a ", "*a"])
def test_text_that_looks_like_something_else_is_quoted(text):
    assert kubernetes.yaml_documents([{"a": text}]) == f'a: "{text}"\n'


def test_text_with_anything_in_it_is_one_line():
    text = '"\\\n\t\r\0\x7f\x85\u2028é😀'
    written = kubernetes.yaml_documents([{"a": text}])
    assert written.splitlines() == [written.removesuffix("\n")]


def test_two_documents():
    assert kubernetes.yaml_documents([{"a": 1}, {"b": 2}]) == "a: 1\n---\nb: 2\n"


def test_what_is_not_plain_data_is_refused():
    with pytest.raises(yaml.representer.RepresenterError, match="cannot represent an object"):
        kubernetes.yaml_documents([{"a": object()}])


@hypothesis.given(hypothesis.strategies.text())
def test_any_text_is_read_as_the_same_text(text):
    assert yaml.safe_load(kubernetes.yaml_documents([{"a": text}])) == {"a": text}

# SPDX-License-Identifier: Apache-2.0
"""The Kubernetes launcher and kubectl's answers: all objects or none, warnings, pods that can't be created."""

import os

import fake_kubectl
import pytest

from tfdist.launchers import requests
from tfdist.launchers.kubernetes import launcher as kubernetes

ARGUMENTS = ["--image=me/train:1", "--name=run1", "/app/train.py"]
ALL = ["job.batch/run1-worker", "networkpolicy.networking.k8s.io/run1", "secret/run1", "service/run1"]
QUOTA = 'Error creating: pods "run1-worker-1-x" is forbidden: exceeded quota: few'


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A kubectl that refuses what it does not know, and its memory."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(kubernetes, "_POLL_SECS", 0.01)
    monkeypatch.setattr(kubernetes, "_SETTLED_SECS", 0.01)
    return fake_kubectl.install(tmp_path)


def test_what_is_submitted_is_the_plan_with_a_new_secret(cluster, capsys, tmp_path):
    patch = tmp_path / "patch.yaml"
    patch.write_text("kind: Job\nspec: {template: {spec: {tolerations: [{key: gpu}]}}}\n")
    arguments = ["--gpus_per_worker=2", f"--patch={patch}", *ARGUMENTS]
    assert kubernetes.main(["--dry_run", *arguments]) == 0
    text = capsys.readouterr().out
    assert kubernetes.main(arguments) == 0
    (drawn, planned), (submitted, rest) = (each.split("---\n", 1) for each in (text, cluster.read()["text"]))
    assert rest == planned and "key: gpu" in rest
    assert "kind: Secret" in drawn and "kind: Secret" in submitted and drawn != submitted
    shown = capsys.readouterr()
    assert sorted(shown.out.splitlines()) == [f"{name} created" for name in ALL]
    assert cluster.names == ALL
    assert "kubectl delete secret,service,networkpolicy,job --selector=app.kubernetes.io/instance=run1 " in shown.err


def test_taken_name_creates_nothing_and_names_the_remedy(cluster):
    old = {"job.batch/run1-worker": {"kind": "Job", "size": 2}}
    cluster.set(objects=old)
    with pytest.raises(requests.LaunchError) as caught:
        kubernetes.main(ARGUMENTS)
    remedy = "kubectl delete secret,service,networkpolicy,job --selector=app.kubernetes.io/instance=run1"
    assert str(caught.value) == (
        f"--name=run1 is taken; use another, or remove the old job first ({remedy}). "
        "There already: jobs.batch run1-worker; nothing was created"
    )
    assert cluster.read()["objects"] == old


@pytest.mark.parametrize("behaviour", [{}, {"no_dry_run": True}])
def test_name_taken_after_the_rehearsal_names_what_is_left(cluster, behaviour):
    cluster.set(taken_later=["networkpolicy.networking.k8s.io/run1"], **behaviour)
    left = r"kubectl delete --namespace=ml secret/run1 service/run1 job.batch/run1-worker$"
    with pytest.raises(requests.LaunchError, match=rf"is taken; .* run1; remove what was created: .*{left}"):
        kubernetes.main(["--namespace=ml", *ARGUMENTS])
    assert cluster.names == ["job.batch/run1-worker", "secret/run1", "service/run1"]


def test_kubectl_that_is_late_brings_what_removes_the_job(cluster, monkeypatch):
    def run(command, text, **options):
        if "--dry-run=server" not in command:
            raise requests.ToolError("kubectl did not answer within 120 s", is_late=True)

    monkeypatch.setattr(requests, "run_tool", run)
    with pytest.raises(
        requests.LaunchError, match="may have created: kubectl delete secret,service,networkpolicy,job --"
    ):
        kubernetes.main(ARGUMENTS)


def test_a_refusal_keeps_all_that_the_tool_wrote():
    with pytest.raises(requests.ToolError) as caught:
        requests.run_tool(["sh", "-c", "seq 1000 >&2; exit 1"])
    assert len(str(caught.value)) < 600 and caught.value.errors.startswith("1\n2\n")


def test_refused_pods_are_one_line_and_an_exit_code(cluster, capsys):
    warning = 'would violate PodSecurity "restricted:latest"'
    cluster.set(refusal=QUOTA, max_pods=1, warnings=[warning])
    assert kubernetes.main(ARGUMENTS) == 1
    error = capsys.readouterr().err
    assert f"tfdist: 1 of 2 pods are created, for the cluster refuses the others: {QUOTA}\n" in error
    assert "of an older job" not in error and error.count(f"tfdist: kubectl: Warning: {warning}\n") == 1


def test_refusal_that_passes_is_no_failure(cluster, capsys):
    cluster.set(refusal=QUOTA)
    assert kubernetes.main(ARGUMENTS) == 0
    assert "refuses" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        ({"max_pods": 0}, "0 of 2 pods are created after 0.05 s"),
        ({"max_pods": 0, "spec": {"suspend": True}}, "the job is suspended"),
        ({"forbidden": True}, "can't look whether pods are created"),
    ],
)
def test_what_cannot_be_told_is_said_and_no_failure(cluster, capsys, behaviour, words):
    cluster.set(**behaviour)
    assert kubernetes.main(["--start_timeout_secs=0.05", *ARGUMENTS]) == 0
    assert words in capsys.readouterr().err


def test_no_time_to_look_asks_nothing(cluster):
    assert kubernetes.main(["--start_timeout_secs=0", *ARGUMENTS]) == 0
    assert [call[0] for call in cluster.read()["calls"]] == ["create", "create"]

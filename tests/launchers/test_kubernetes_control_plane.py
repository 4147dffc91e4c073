# SPDX-License-Identifier: Apache-2.0
"""The Kubernetes launcher against a real API server and Job controller; a stand-in for the kubelet runs the pods.

Needs etcd, kube-apiserver and kube-controller-manager in the directory TFDIST_KUBE_BIN, or on PATH.
"""

import contextlib
import sys
import time

import control_plane
import pytest
from waiting import wait_until

from tfdist.launchers import requests
from tfdist.launchers.kubernetes import launcher as kubernetes

MISSING = [name for name, path in control_plane.find_binaries().items() if not path]
pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(MISSING), reason=f"TFDIST_KUBE_BIN and PATH have no {', '.join(MISSING)}"),
]
SECS = 400
RESTRICTED = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
# Fails, or misses another and fails, or ends well: by the task's index and by how often its pod was replaced.
SCRIPT = """
import os, pathlib, sys, time
index = int(os.environ["JOB_COMPLETION_INDEX"])
folder, plan = pathlib.Path(sys.argv[1]), sys.argv[2].split(",")
before = len(list(folder.glob(f"*-{index}")))
code = int(plan[min(before, len(plan) - 1)])
(folder / f"{before}-{index}").touch()
while len(list(folder.glob(f"{before}-*"))) < 4:
    time.sleep(0.05)
# All of them fail at once, as where a collective breaks.
sys.exit(code if index == 1 or not code else 75 if code == 75 else 1)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kubernetes")
    with control_plane.running(folder) as api:
        yield api, folder / "kubeconfig"


@pytest.fixture
def api(cluster, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", str(cluster[1]))
    return cluster[0]


def names():
    return f"t{time.monotonic_ns()}"


def launch(namespace, script, *arguments, options=()):
    flags = [f"--namespace={namespace}", "--image=i", "--name=run1", "--num_workers=4", f"--python={sys.executable}"]
    return kubernetes.main([*flags, *options, str(script), *map(str, arguments)])


@pytest.fixture
def trained(api, tmp_path):
    """Runs a job of four workers to its end; gives its status, and counts and exit code of each pod."""

    def run(plan, *options):
        script, namespace = tmp_path / "train.py", api.create_namespace(names())
        script.write_text(SCRIPT)
        with contextlib.closing(control_plane.Kubelet(api, namespace)) as kubelet:
            assert launch(namespace, script, tmp_path, plan, options=options) == 0

            def status():
                (job,) = api.items(namespace, "jobs")
                return job["status"]

            def ends():
                return [end for end in status().get("conditions", []) if end["type"] in ("Complete", "Failed")]

            wait_until(ends, SECS, lambda: str(status()))
            return ends()[0], status(), kubelet.codes

    return run


def test_failure_of_one_worker_restarts_all_four(trained):
    ended, status, codes = trained("3,0", "--max_restarts=1")
    assert ended["type"] == "Complete", ended
    assert status["succeeded"] == 4 and sorted(codes) == [0, 0, 0, 0, 1, 1, 1, 3]


def test_first_worker_with_too_many_failures_fails_the_job(trained):
    ended, _, codes = trained("3", "--max_restarts=1")
    assert (ended["type"], ended["reason"]) == ("Failed", "MaxFailedIndexesExceeded")
    assert len(codes) > 4  # The attempt and one restart.


def test_preemptions_beyond_the_limit_fail_the_job(trained):
    ended, _, codes = trained("75", "--max_preemptions=1")
    assert (ended["type"], ended["reason"]) == ("Failed", "PodFailurePolicy")
    assert codes[:8] == [75] * 8 and 79 in codes[8:]


@pytest.mark.parametrize(
    ("labels", "created", "words"),
    [({}, 2, "exceeded quota: few"), (RESTRICTED, 0, 'violates PodSecurity "restricted:latest"')],
)
def test_refused_pods_are_one_line_and_an_exit_code(api, capsys, labels, created, words):
    namespace = api.create_namespace(names(), labels)
    quota = {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "2"}}}
    api.call("POST", f"/api/v1/namespaces/{namespace}/resourcequotas", quota)
    path = f"/api/v1/namespaces/{namespace}/resourcequotas/few"
    wait_until(lambda: "hard" in api.call("GET", path).get("status", {}))
    assert launch(namespace, "/app/train.py") == 1
    error = capsys.readouterr().err
    assert error.count("tfdist: kubectl: Warning: would violate PodSecurity") == bool(labels)
    assert f"tfdist: {created} of 4 pods are created, for the cluster refuses the others: " in error
    assert words in error


@pytest.mark.parametrize("taken", ["services", "jobs"])
def test_taken_name_leaves_nothing_behind(api, taken):
    namespace = api.create_namespace(names())
    assert launch(namespace, "/app/train.py") == 0
    kinds = ("services", "jobs", "secrets")
    for plural in kinds:
        if plural != taken:
            group = "/apis/batch/v1" if plural == "jobs" else "/api/v1"
            for each in api.items(namespace, plural):
                path = f"{group}/namespaces/{namespace}/{plural}/{each['metadata']['name']}"
                api.call("DELETE", f"{path}?propagationPolicy=Background")
    api.call("DELETE", f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies/run1")
    wait_until(lambda: not any(api.items(namespace, plural) for plural in kinds if plural != taken))
    name = api.items(namespace, taken)[0]["metadata"]["uid"]
    with pytest.raises(requests.LaunchError, match=r"--name=run1 is taken; .*; nothing was created$"):
        launch(namespace, "/app/train.py")
    assert [each["metadata"]["uid"] for each in api.items(namespace, taken)] == [name]
    assert not any(api.items(namespace, plural) for plural in kinds if plural != taken)

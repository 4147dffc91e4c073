# SPDX-License-Identifier: Apache-2.0
"""A real Kubernetes API server and its controllers on this machine, with a stand-in for the kubelet.

The stand-in runs the container of each pod as a process, and reports its exit code as the pod's status. There are no
nodes and no containers: images, mounts, host names and network policies have no effect.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import waiting

BINARIES = ("etcd", "kube-apiserver", "kube-controller-manager", "kubectl", "openssl")
_TOKEN = "test"
_UP_SECS = 240.0
_POLL_SECS = 0.2


def find_binaries() -> dict[str, str | None]:
    """Returns the path of each program: in the directory TFDIST_KUBE_BIN, or on PATH."""
    path = os.pathsep.join([os.environ.get("TFDIST_KUBE_BIN", ""), os.environ["PATH"]])
    return {name: shutil.which(name, path=path) for name in BINARIES}


def free_port() -> int:
    """A port that is free, and so is the next."""
    while True:
        with socket.create_server(("", 0)) as first:
            port = first.getsockname()[1]
            with contextlib.suppress(OSError), socket.create_server(("", port + 1)):
                return port


class Api:
    """The API server, as its administrator."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._context = ssl._create_unverified_context()

    def call(self, method: str, path: str, body=None, kind: str = "application/json"):
        """The answer of a request.

        Raises:
          urllib.error.HTTPError: the server refuses it.
        """
        headers = {"Authorization": f"Bearer {_TOKEN}", "Content-Type": kind}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=60, context=self._context) as answer:
            text = answer.read()
            return json.loads(text) if "json" in answer.headers["Content-Type"] else text

    def create_namespace(self, name: str, labels=None) -> str:
        meta = {"name": name, "labels": labels or {}}
        self.call("POST", "/api/v1/namespaces", {"metadata": meta})
        return name

    def items(self, namespace: str, plural: str):
        group = "/apis/batch/v1" if plural == "jobs" else "/api/v1"
        return self.call("GET", f"{group}/namespaces/{namespace}/{plural}")["items"]


@contextlib.contextmanager
def running(folder: pathlib.Path) -> Iterator[Api]:
    """Starts etcd, the API server and the controllers; ends them. Sets no environment variable."""
    binaries = {name: str(path) for name, path in find_binaries().items()}
    key, tokens, config = folder / "sa.key", folder / "tokens.csv", folder / "kubeconfig"
    subprocess.run([binaries["openssl"], "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
    tokens.write_text(f'{_TOKEN},admin,admin,"system:masters"\n')
    etcd_port, port = free_port(), free_port()
    url, etcd = f"https://127.0.0.1:{port}", f"http://127.0.0.1:{etcd_port}"
    config.write_text(json.dumps(_kubeconfig(url)))
    commands = [
        [
            *(binaries["etcd"], f"--data-dir={folder / 'etcd'}", "--unsafe-no-fsync"),
            *(f"--listen-client-urls={etcd}", f"--advertise-client-urls={etcd}"),
            *("--listen-peer-urls=http://127.0.0.1:0", "--initial-advertise-peer-urls=http://127.0.0.1:0"),
            *("--initial-cluster=default=http://127.0.0.1:0",),
        ],
        [
            *(binaries["kube-apiserver"], f"--etcd-servers={etcd}", f"--cert-dir={folder / 'certs'}"),
            *("--bind-address=127.0.0.1", f"--secure-port={port}", f"--token-auth-file={tokens}"),
            *("--authorization-mode=RBAC", "--service-cluster-ip-range=10.0.0.0/24"),
            *(f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}"),
            *("--service-account-issuer=https://kubernetes.default.svc", "--disable-admission-plugins=ServiceAccount"),
        ],
        [
            *(binaries["kube-controller-manager"], f"--kubeconfig={config}", "--leader-elect=false", "--secure-port=0"),
            "--controllers=job-controller,resourcequota-controller,namespace-controller",
        ],
    ]
    api = Api(url)
    with contextlib.ExitStack() as stack:
        for command in commands:
            log = stack.enter_context((folder / f"{pathlib.Path(command[0]).name}.log").open("wb"))
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
            stack.callback(waiting.end, process)
            if "apiserver" in command[0]:
                _await_ready(api, process)
        yield api


def _kubeconfig(url: str):
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": {"server": url, "insecure-skip-tls-verify": True}}],
        "users": [{"name": "test", "user": {"token": _TOKEN}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "current-context": "test",
    }


def _await_ready(api: Api, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _UP_SECS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError, ValueError):
            # The controllers wait for this for 10 s only.
            api.call("GET", "/readyz")
            return
        time.sleep(_POLL_SECS)
    raise RuntimeError(f"the API server did not come up; exit code {process.poll()}")


class Kubelet:
    """Runs the pods of a namespace as processes, and reports how they end.

    Attributes:
      codes: exit codes of the pods that have ended, in their order.
    """

    def __init__(self, api: Api, namespace: str) -> None:
        self._api = api
        self._path = f"/api/v1/namespaces/{namespace}/pods"
        self._namespace = namespace
        self._port = free_port()
        self._running: dict[str, tuple[str, subprocess.Popen[bytes]]] = {}
        self._seen: set[str] = set()
        self.codes: list[int] = []
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()
        for _, process in self._running.values():
            process.kill()
            process.wait()

    def _run(self) -> None:
        while not self._is_closed.wait(_POLL_SECS):
            with contextlib.suppress(urllib.error.URLError):
                for pod in self._api.items(self._namespace, "pods"):
                    if pod["metadata"]["uid"] not in self._seen:
                        self._start(pod)
                for uid, (name, process) in list(self._running.items()):
                    if process.poll() is not None:
                        del self._running[uid]
                        self._report(name, process.returncode)

    def _start(self, pod) -> None:
        meta, (container,) = pod["metadata"], pod["spec"]["containers"]
        self._seen.add(meta["uid"])
        env = {each["name"]: self._value(each, meta) for each in container["env"]}
        command = [word.replace("$$", "$") for word in container["command"]]
        # No name service has the pods' names.
        changed = {"--host_format": "0x7f.0.1.{index}", "--port": str(self._port)}
        command = [f"{flag}={changed[flag]}" if (flag := w.partition("=")[0]) in changed else w for w in command]
        self._set_status(meta["name"], {"phase": "Running"})
        process = subprocess.Popen(command, env={**os.environ, **env}, stderr=subprocess.DEVNULL)
        self._running[meta["uid"]] = meta["name"], process

    def _value(self, variable, meta) -> str:
        if "value" in variable:
            return variable["value"].replace("$$", "$")
        source = variable["valueFrom"]
        if "secretKeyRef" in source:
            return "secret"
        path = source["fieldRef"]["fieldPath"]
        place = meta.get("labels" if ".labels" in path else "annotations", {})
        return place.get(path.split("'")[1], "")

    def _report(self, name: str, code: int) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        ended = {"exitCode": code if code >= 0 else 128 - code, "startedAt": now, "finishedAt": now}
        state = {"name": "task", "image": "i", "imageID": "i", "ready": False, "restartCount": 0}
        phase = "Failed" if code else "Succeeded"
        status = {"phase": phase, "containerStatuses": [{**state, "state": {"terminated": ended}}]}
        self.codes.append(ended["exitCode"])
        self._set_status(name, status)

    def _set_status(self, name: str, status):
        return self._api.call(
            "PATCH", f"{self._path}/{name}/status", {"status": status}, "application/merge-patch+json"
        )

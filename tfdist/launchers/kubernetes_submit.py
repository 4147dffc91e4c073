# SPDX-License-Identifier: Apache-2.0
"""Creates a job's objects through kubectl, all of them or none, and checks that their pods are created."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.launchers.requests import ToolError

_TIMEOUT_SECS = 120.0
_POLL_SECS = 0.5
# A controller that fails once, for example because a service account doesn't exist yet, retries within seconds.
_SETTLED_SECS = 5.0
_TAKEN = re.compile(r'([a-z0-9.-]+) "([^"]+)" already exists')
_WARNING = "Warning:"
_REFUSED = ("FailedCreate", "FailedCreatePod")


@dataclasses.dataclass(frozen=True)
class Job:
    """The objects of a job, and the flags that select them.

    Args:
      name: name of the job.
      text: the manifests.
      kinds: kinds of the objects, as kubectl writes them.
      selector: the flags of kubectl that select the job's objects.
      num_pods: number of the job's pods.
    """

    name: str
    text: str
    kinds: tuple[str, ...]
    selector: tuple[str, ...]
    num_pods: int

    @property
    def removal(self) -> str:
        """The command that removes the job."""
        return f"kubectl delete {','.join(self.kinds)} {' '.join(self.selector)}"


@dataclasses.dataclass(frozen=True)
class _Answer:
    code: int | None  # None: it took too long.
    out: str
    err: str


def create(kubectl: str, job: Job) -> None:
    """Creates all objects of a job, or none.

    Raises:
      ToolError: the cluster refuses an object, for example because its name is taken.
    """
    shown: set[str] = set()
    rehearsal = _run([kubectl, "create", "--dry-run=server", "--output=name", "--filename=-"], job.text)
    _show_warnings(rehearsal, shown)
    # Some clusters have webhooks that refuse a dry run. Then a failed creation is rolled back.
    if rehearsal.code != 0 and "dry run" not in rehearsal.err.lower():
        raise ToolError(f"{_problem(rehearsal, job)}; nothing was created")
    answer = _run([kubectl, "create", "--output=name", "--filename=-"], job.text)
    _show_warnings(answer, shown)
    created = [line.strip() for line in answer.out.splitlines() if "/" in line]
    if answer.code == 0:
        sys.stdout.write("".join(f"{name} created\n" for name in created))
        return
    if answer.code is None:
        raise ToolError(f"{_problem(answer, job)}; some may have been created, remove them: {job.removal}")
    left = _take_back(kubectl, job, created)
    rest = f"remove what was created: {left}" if left else "nothing is left of what was created"
    raise ToolError(f"{_problem(answer, job)}; {rest}")


def look(kubectl: str, job: Job, timeout_secs: float) -> int:
    """Waits until all pods are created; they need not run yet.

    Returns:
      1 if the cluster refuses to create pods; 0 if all are created, or no refusal is known.
    """
    start = time.monotonic()
    refused_secs: float | None = None
    while True:
        waited_secs = time.monotonic() - start
        found = _get(kubectl, ["pods,jobs", *job.selector])
        if found is None:
            _say(f"can't look whether pods are created; try kubectl get pods {' '.join(job.selector)}")
            return 0
        num_pods = sum(each["kind"] == "Pod" for each in found)
        if num_pods >= job.num_pods:
            return 0
        if any(each["kind"] == "Job" and each["spec"].get("suspend") for each in found):
            _say("the job is suspended; its pods are created once it is admitted")
            return 0
        reason = _refusal(kubectl, job, found)
        if reason and refused_secs is None:
            refused_secs = waited_secs
        settled = refused_secs is not None and waited_secs - refused_secs >= min(_SETTLED_SECS, timeout_secs / 2)
        if reason and (settled or waited_secs >= timeout_secs):
            _say(f"{num_pods} of {job.num_pods} pods are created, for the cluster refuses the others: {reason}")
            _say("the job goes on trying; change the quota or policy, or remove the job")
            return 1
        if waited_secs >= timeout_secs:
            _say(f"{num_pods} of {job.num_pods} pods are created after {timeout_secs:g} s; see kubectl get events")
            return 0
        time.sleep(_POLL_SECS)


def _refusal(kubectl: str, job: Job, found: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns the newest reason for which a controller could not create a pod of this job, or None."""
    where = [flag for flag in job.selector if flag.startswith("--namespace")]
    events = _get(kubectl, ["events", "--field-selector=type=Warning", *where]) or []
    # Filtered by uid, because events of an earlier job of the same name stay for an hour.
    uids = {each["metadata"]["uid"] for each in found}
    known = [kind for kind in job.kinds if kind in ("jobset", "tfjob")]
    for kind in known:
        uids |= {each["metadata"]["uid"] for each in _get(kubectl, [kind, *job.selector]) or []}
    reasons = [
        str(event.get("message", ""))
        for event in events
        if event.get("reason") in _REFUSED and event.get("involvedObject", {}).get("uid") in uids
    ]
    return " ".join(reasons[-1].split()) if reasons else None


def _get(kubectl: str, arguments: Sequence[str]) -> list[dict[str, Any]] | None:
    answer = _run([kubectl, "get", *arguments, "--output=json"])
    if answer.code != 0:
        return None
    try:
        return list(json.loads(answer.out)["items"])
    except (ValueError, KeyError, TypeError):
        return None


def _problem(answer: _Answer, job: Job) -> str:
    """Returns the reason for which kubectl failed, on one line."""
    taken = [f"{kind} {name}" for kind, name in _TAKEN.findall(answer.err)]
    if taken:
        return (
            f"--name={job.name} is taken; use another, or remove the old job first ({job.removal}). "
            f"There already: {', '.join(dict.fromkeys(taken))}"
        )
    if answer.code is None:
        return f"kubectl did not answer within {_TIMEOUT_SECS:g} s; try kubectl get pods by hand"
    said = "; ".join(line for line in answer.err.splitlines() if line.strip() and not line.startswith(_WARNING))
    said = said or answer.out.strip()
    return f"kubectl failed with exit code {answer.code}: {said[-500:] or 'it said nothing'}"


def _take_back(kubectl: str, job: Job, created: Sequence[str]) -> str:
    """Deletes the created objects; returns "", or the command that deletes them if that failed."""
    if not created:
        return ""
    where = [flag for flag in job.selector if flag.startswith("--namespace")]
    command = ["delete", "--ignore-not-found", "--wait=false", *where, *created]
    return "" if _run([kubectl, *command]).code == 0 else " ".join(["kubectl", *command])


def _show_warnings(answer: _Answer, shown: set[str]) -> None:
    """Writes each warning of the API server once."""
    for line in answer.err.splitlines():
        if line.startswith(_WARNING) and line not in shown:
            shown.add(line)
            _say(f"kubectl: {line}")


def _run(command: Sequence[str], stdin: str = "") -> _Answer:
    try:
        done = subprocess.run(command, input=stdin.encode("utf-8"), capture_output=True, timeout=_TIMEOUT_SECS)
    except subprocess.TimeoutExpired as late:
        return _Answer(None, *(text.decode("utf-8", "replace") if text else "" for text in (late.stdout, late.stderr)))
    return _Answer(done.returncode, *(text.decode("utf-8", "replace") for text in (done.stdout, done.stderr)))


def _say(line: str) -> None:
    sys.stderr.write(f"tfdist: {line}\n")

# SPDX-License-Identifier: Apache-2.0
"""A stand-in for kubectl: remembers objects in a file, refuses names that are taken and what it does not know."""

from __future__ import annotations

import json
import pathlib
import stat
import sys

_SCRIPT = """#!{python}
import sys
sys.path.insert(0, {folder!r})
import fake_kubectl
sys.exit(fake_kubectl.main({state!r}, sys.argv[1:]))
"""
_FULL = {"Secret": "secret", "Service": "service", "NetworkPolicy": "networkpolicy.networking.k8s.io"}
_FULL |= {"Job": "job.batch", "JobSet": "jobset.jobset.x-k8s.io"}


class Cluster:
    """State of the stand-in, and settings of its behaviour.

    The keys of `state`: `objects` by full name; `calls`; `taken_later`, names that are taken once the dry run is over;
    `refusal`, why pods can't be created; `max_pods`; `warnings`; `no_dry_run`.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.write({"objects": {}, "calls": []})

    def read(self):
        return json.loads(self.path.read_text())

    def write(self, state):
        self.path.write_text(json.dumps(state))

    def set(self, **values):
        self.write({**self.read(), **values})

    @property
    def names(self):
        return sorted(self.read()["objects"])


def install(folder: pathlib.Path) -> Cluster:
    """Puts a command kubectl into a folder."""
    tool, state = folder / "kubectl", folder / "cluster.json"
    tool.write_text(_SCRIPT.format(python=sys.executable, folder=str(pathlib.Path(__file__).parent), state=str(state)))
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    return Cluster(state)


def main(path: str, arguments: list[str]) -> int:
    file = pathlib.Path(path)
    state = json.loads(file.read_text())
    state["calls"].append(arguments)
    verb, *rest = arguments
    try:
        return {"create": _create, "get": _get}[verb](state, rest)
    finally:
        file.write_text(json.dumps(state))


def _documents(text):
    """Kind, name and size of each document, from the renderer's own layout."""
    for document in text.split("---\n"):
        lines = document.splitlines()
        kind = next(line.removeprefix("kind: ") for line in lines if line.startswith("kind: "))
        name = next(line.removeprefix("  name: ") for line in lines if line.startswith("  name: "))
        sizes = [int(line.rpartition(" ")[2]) for line in lines if line.startswith("  completions: ")]
        yield f"{_FULL[kind]}/{name}", kind, name, sum(sizes)


def _create(state, rest):
    if [flag for flag in rest if flag not in ("--dry-run=server", "--output=name", "--filename=-")]:
        print(f"error: unknown flag: {rest}", file=sys.stderr)
        return 1
    is_rehearsal, failed = "--dry-run=server" in rest, False
    if is_rehearsal and state.get("no_dry_run"):
        print("Error from server (BadRequest): admission webhook does not support dry run", file=sys.stderr)
        return 1
    state["text"] = sys.stdin.read()
    for line in state.get("warnings", []):
        print(f"Warning: {line}", file=sys.stderr)
    taken = set(state["objects"]) | (set() if is_rehearsal else set(state.get("taken_later", [])))
    for full, kind, name, size in _documents(state["text"]):
        # As the real one: it goes on with the others.
        if full in taken:
            plural = full.partition("/")[0].replace(".", "s.", 1) if "." in full else full.partition("/")[0] + "s"
            error = f'error when creating "STDIN": {plural} "{name}" already exists'
            print(f"Error from server (AlreadyExists): {error}", file=sys.stderr)
            failed = True
            continue
        print(full)
        if not is_rehearsal:
            state["objects"][full] = {"kind": kind, "size": size}
    return int(failed)


def _get(state, rest):
    jobs = [(full, each) for full, each in state["objects"].items() if each["kind"] == "Job"]
    items = []
    if rest[0] == "events":
        if reason := state.get("refusal"):
            old = {"reason": "FailedCreate", "involvedObject": {"uid": "old"}, "message": "of an older job"}
            items = [{**old, "message": reason, "involvedObject": {"uid": full}} for full, _ in jobs] + [old]
    else:
        items = [{"kind": "Job", "metadata": {"uid": full}, "spec": state.get("spec", {})} for full, _ in jobs]
        size = min(sum(each["size"] for _, each in jobs), state.get("max_pods", 1000))
        items += [{"kind": "Pod", "metadata": {"uid": str(number)}} for number in range(size)]
    print(json.dumps({"items": items}))
    return int(bool(state.get("forbidden")))

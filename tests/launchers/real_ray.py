# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster on this machine, of several raylets with two CPUs each, for test_real_ray.

Run as a program it starts the cluster, prints its address, and answers commands on its standard input, a line each:

    state    prints JSON: resources that are free, and all; states of placement groups
    add      adds a raylet
    end      kills the raylet that was added last
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

_OBJECT_STORE_BYTES = 80 * 2**20


class RayCluster:
    """The cluster, seen from a test."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = self._line()

    def _line(self) -> str:
        """The next line that is an answer; Ray itself prints others."""
        for line in self._process.stdout:
            if line.startswith("answer "):
                return line.removeprefix("answer ").strip()
        raise AssertionError("the cluster has ended")

    def ask(self, command: str) -> Any:
        """The answer to a command."""
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        return json.loads(self._line())

    def is_empty(self) -> bool:
        """Waits until all resources are free, and no placement group is left."""
        deadline = time.monotonic() + 20.0
        while time.monotonic() < deadline:
            state = self.ask("state")
            if state["free"] == state["all"] and set(state["groups"]) <= {"REMOVED"}:
                return True
            time.sleep(0.2)
        sys.stdout.write(f"{state}\n")
        return False


def missing() -> str:
    """Why there can be no cluster here; "" if there can."""
    return "" if importlib.util.find_spec("ray") else "ray is not installed: pip install '.[ray]'"


@contextlib.contextmanager
def cluster(num_nodes: int = 3, *flags: str) -> Iterator[RayCluster]:
    """A cluster, whose processes end with the block."""
    command = [sys.executable, __file__, str(num_nodes), *flags]
    env = {**os.environ, "RAY_worker_niceness": "0"}  # By default 15, at which they would hardly run on a busy machine.
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=env) as process:
        try:
            yield RayCluster(process)
        finally:
            process.stdin.close()
            process.wait(60)


def main(num_nodes: int, has_dashboard: bool) -> None:
    """Runs the cluster until the end of standard input."""
    import ray
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "object_store_memory": _OBJECT_STORE_BYTES}
    made = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": has_dashboard})
    added = [made.add_node(**node) for _ in range(num_nodes - 1)]
    ray.init(made.address, log_to_driver=False, logging_level="error")

    def state() -> dict[str, Any]:
        free, whole = ({"CPU": each.get("CPU", 0)} for each in (ray.available_resources(), ray.cluster_resources()))
        return {
            "free": free,
            "all": whole,
            "groups": [each["state"] for each in ray.util.placement_group_table().values()],
        }

    print("answer", made.address, flush=True)
    for line in sys.stdin:
        answer: Any = None
        if line == "state\n":
            answer = state()
        elif line == "add\n":
            added.append(made.add_node(**node))
        elif line == "end\n":
            made.remove_node(added.pop(), allow_graceful=False)
        print("answer", json.dumps(answer), flush=True)
    ray.shutdown()
    made.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), "--dashboard" in sys.argv)

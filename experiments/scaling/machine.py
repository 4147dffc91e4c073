# SPDX-License-Identifier: Apache-2.0
"""Predicts runs on this machine from a one-worker profile and the measured network, then makes them, and compares.

python machine.py --network=local               # processes of this machine
python machine.py --size=conv                   # two workers that share the cores, against one
python machine.py --size=tiny                   # the same for steps that sleep
python machine.py --network=100 --network=1000  # network namespaces with links of 100 Mb/s and 1 Gb/s; root, iproute2

All predictions of a network are written to the output before its first run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import cluster_runs
import namespaces
from absl import app, flags

import tfdist
from tfdist import Task
from tfdist.planning import prediction, profile
from tfdist.planning import prediction as networks

FLAGS = flags.FLAGS
HERE = pathlib.Path(__file__).resolve().parent
SCRIPT = HERE / "sleeping_steps.py"
flags.DEFINE_multi_string("network", ["local"], "local, or megabits per second of the links between namespaces.")
flags.DEFINE_multi_string("run", [], "Only runs whose name contains this.")
flags.DEFINE_enum("size", "", ["", "tiny", "1M", "conv"], "Model of which two workers are compared with one.")
flags.DEFINE_string("output", str(HERE / "results" / "machine.json"), "Where predictions and measurements go.")
flags.DEFINE_float("profile_secs", 45.0, "How long to profile one worker.", lower_bound=5.0)
_LIMIT_SECS = 240.0
WITHIN = 0.15
_SIMULATED_EPOCHS = 20
_PORT = 9100
_FREE_PORTS = iter(range(23100, 30000))


@dataclasses.dataclass(frozen=True)
class Run:
    """A strategy with a policy on some workers; `steps` are measured."""

    strategy: str
    policy: str
    workers: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.strategy} {self.policy or '-'} {self.workers}"


LOCAL = (
    *(Run("parameter_server", "", workers, 24 * workers) for workers in (1, 2, 4, 8, 16)),
    *(Run("multi_worker", "", workers, 30) for workers in (2, 4, 8, 16)),
    *(Run("parameter_server", "BackupWorkers(spares=1)", workers, 30) for workers in (4, 8)),
    *(Run("multi_worker", "ParameterAveraging(every_steps=4)", workers, 32) for workers in (2, 4, 8)),
)
PAIRS = tuple(Run("multi_worker", "", workers, 40) for workers in (1, 2, 1, 2))
SLOW = (
    *(Run("parameter_server", "", workers, 30 * workers) for workers in (1, 2, 4)),
    *(Run("multi_worker", "", workers, 16) for workers in (2, 4)),
)


def main(argv: list[str]) -> None:
    if argv[1:]:
        raise app.UsageError(f"machine.py takes flags only. Received: {' '.join(argv[1:])}")
    output = pathlib.Path(FLAGS.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = json.loads(output.read_text()) if output.exists() else []
    for name in FLAGS.network:
        if name != "local" and (problem := namespaces.missing()):
            sys.exit(f"machine.py: {problem}")
        size = FLAGS.size or ("tiny" if name == "local" else "1M")
        runs = [run for run in (PAIRS if FLAGS.size else LOCAL if name == "local" else SLOW) if _is_wanted(run)]
        with tempfile.TemporaryDirectory() as folder, _machines(name, 1 + max(2, *(r.workers + 1 for r in runs))) as at:
            measured_profile = _profile(pathlib.Path(folder), size)
            network = _network(pathlib.Path(folder), at)
            rows = [_predicted(run, name, measured_profile, network) for run in runs]
            found = [
                row for row in found if (row["network"], row["run"]) not in {(r["network"], r["run"]) for r in rows}
            ]
            found += rows
            cluster_runs.write(output, found)  # before anything is measured
            for row, run in zip(rows, runs, strict=True):
                made = _measured(run, size, pathlib.Path(folder), at)
                row["measured"], row["chief_cpu_ms"] = made["steps_per_sec"], made["chief_cpu_ms_per_step"]
                row["error"] = row["predicted"] / row["measured"] - 1
                row["measured_at"] = time.time()
                print(
                    f"{name:5} {run.name:50} predicted {row['predicted']:7.3f} measured {row['measured']:7.3f} steps/s "
                    f"{row['error']:+.1%} chief {row['chief_cpu_ms']:.1f} ms of CPU a step",
                    flush=True,
                )
                cluster_runs.write(output, found)
        if FLAGS.size:
            _compare_examples(runs, rows)
    if worst := max((abs(row["error"]) for row in found if row.get("measured")), default=0.0):
        print(f"worst error {worst:.1%}; wanted: {WITHIN:.0%}")
        sys.exit(worst > WITHIN)


def _compare_examples(runs: Sequence[Run], rows: Sequence[dict[str, Any]]) -> None:
    """Prints how many times the examples of one worker two workers make: median of the pairs of runs."""
    ratios: dict[str, list[float]] = {"predicted": [], "measured": []}
    for kind, found in ratios.items():
        ones, twos = ([row[kind] for run, row in zip(runs, rows, strict=True) if run.workers == n] for n in (1, 2))
        found += [2 * two / one for one, two in zip(ones, twos, strict=True)]
    predicted, measured = map(statistics.median, ratios.values())
    error = predicted / measured - 1
    print(f"examples of 2 workers over 1: predicted {predicted:.2f} measured {measured:.2f} {error:+.1%}")


def _is_wanted(run: Run) -> bool:
    return not FLAGS.run or any(text in run.name for text in FLAGS.run)


@dataclasses.dataclass(frozen=True)
class Machine:
    """Place of a process: a prefix of its command, and its host."""

    prefix: tuple[str, ...]
    host: str


@contextlib.contextmanager
def _machines(name: str, count: int) -> Iterator[Sequence[Machine]]:
    if name == "local":
        yield [Machine((), "127.0.0.1")] * count
        return
    with namespaces.joined(count, int(name)) as (spaces, hosts):
        yield [Machine(("ip", "netns", "exec", space), host) for space, host in zip(spaces, hosts, strict=True)]


def _profile(folder: pathlib.Path, size: str) -> profile.Profile:
    path = folder / "profile.json"
    command = [sys.executable, "-m", "tfdist", "profile", f"--secs={FLAGS.profile_secs}", f"--output={path}"]
    done = subprocess.run(
        [*command, str(SCRIPT), f"--size={size}"],
        env=cluster_runs.environment(),
        capture_output=True,
        text=True,
        timeout=_LIMIT_SECS,
    )
    if done.returncode:
        raise RuntimeError(f"tfdist profile failed:\n{done.stderr[-2000:]}")
    print(done.stderr.splitlines()[-1], flush=True)
    return profile.load(path)


def _network(folder: pathlib.Path, machines: Sequence[Machine]) -> networks.Network:
    path = folder / "network.json"
    cluster = {"worker": [_address(machine) for machine in machines[:2]]}
    tasks = [Task("worker", index) for index in range(2)]
    command = [sys.executable, "-m", "tfdist.doctor", "--measure", f"--json={path}"]
    commands = {task: [*machine.prefix, *command] for task, machine in zip(tasks, machines, strict=False)}
    cluster_runs.run_all(commands, cluster, _LIMIT_SECS)
    found = networks.from_flag(str(path), None, has_accelerators=False)
    print(f"network: {found.text}", flush=True)
    return found


def _address(machine: Machine) -> str:
    # In a namespace of its own each port is free.
    return f"{machine.host}:{_PORT if machine.prefix else next(_FREE_PORTS)}"


def _predicted(run: Run, name: str, measured: profile.Profile, network: networks.Network) -> dict[str, Any]:
    strategy = {"multi_worker": "MultiWorkerMirroredStrategy", "parameter_server": "ParameterServerStrategy"}[
        run.strategy
    ]
    every_steps = 4 if "ParameterAveraging" in run.policy else 1
    is_asynchronous = run.strategy == "parameter_server" and not run.policy
    result = prediction.simulate(
        measured,
        network,
        strategy,
        [tfdist.flags.parse_policy(run.policy)] if run.policy else [],
        run.workers,
        workers_per_machine=run.workers if network.is_one_machine else 1,
        num_updates=_SIMULATED_EPOCHS * run.steps if is_asynchronous else 200 * run.workers,
        # All workers begin the measured epoch together, and it ends with its last update.
        steps_per_epoch=run.steps if is_asynchronous else 0,
    )
    updates_per_sec = result.updates_per_sec if is_asynchronous else prediction.steady(result)[1]
    return {
        "network": name,
        "run": f"{run.name} {FLAGS.size}".strip(),
        "predicted": updates_per_sec * every_steps,
        "limit": result.limit,
        "network_measured": network.text,
        "predicted_at": time.time(),
    }


def _measured(run: Run, size: str, folder: pathlib.Path, machines: Sequence[Machine]) -> dict[str, float]:
    output = folder / "measured.json"
    output.unlink(missing_ok=True)
    command = [sys.executable, str(SCRIPT), f"--strategy={run.strategy}", f"--policy={run.policy}"]
    command += [f"--workers={run.workers}", f"--steps={run.steps}", f"--size={size}", f"--output={output}"]
    workers = [Task("worker", index) for index in range(run.workers)]
    tasks = [*workers, Task("ps", 0), Task("chief", 0)] if run.strategy == "parameter_server" else workers
    cluster: dict[str, list[str]] = {}
    for task, machine in zip(tasks, machines, strict=False):
        cluster.setdefault(task.type, []).append(_address(machine))
    commands = {task: [*machine.prefix, *command] for task, machine in zip(tasks, machines, strict=False)}
    cluster_runs.run_all(commands, cluster, _LIMIT_SECS)
    return json.loads(output.read_text())


if __name__ == "__main__":
    app.run(main)

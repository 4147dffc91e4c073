# SPDX-License-Identifier: Apache-2.0
"""Scaling of a recommender of tables against a dense model of as many bytes, over slow links: predicted, then measured.

python run.py                                     # all: 1 to 8 workers, links of 200 Mb/s; root, iproute2; 25 minutes
python run.py --model=sparse --workers=8          # a part; results of earlier calls are kept
python run.py --model=dense --workers=8 --long    # epochs of 40 steps of each worker
python run.py --chart                             # draws the plot, prints the table, and judges

Each task has a network namespace of its own. All predictions of a model are written before its first run.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import link_use
import sparse_chart
from absl import app, flags

from tfdist import Task
from tfdist.planning import prediction, profile, simulation
from tfdist.planning import prediction as networks

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "scaling"))
import cluster_runs
import namespaces

FLAGS = flags.FLAGS
HERE = pathlib.Path(__file__).resolve().parent
SCRIPT = HERE / "recommender.py"
flags.DEFINE_multi_enum("model", ["sparse", "dense"], ["sparse", "dense"], "Which models to run.")
flags.DEFINE_multi_integer("workers", [1, 2, 4, 8], "With how many workers.", lower_bound=1)
flags.DEFINE_integer("mbits", 200, "Megabits per second of each task's link, in each direction.", lower_bound=1)
flags.DEFINE_float("sleep", 0.4, "Mean seconds of a step's sleep, lognormal (s = 0.25).", lower_bound=0.01)
flags.DEFINE_string("output", str(HERE / "results" / "scaling.json"), "Where predictions and measurements go.")
flags.DEFINE_bool("chart", False, "Only draws, prints and judges what is in --output.")
flags.DEFINE_float("profile_secs", 30.0, "How long to profile one device.", lower_bound=5.0)
flags.DEFINE_bool("long", False, "Measures one epoch of 40 steps of each worker, instead of three of 30 or 14.")
SERVERS, BATCH = 2, 64
# Steps of each worker in an epoch, and epochs that are measured.
_STEPS = {"sparse": (30, 3), "dense": (14, 3)}
_LONG = (40, 1)
# Epochs that a prediction is the mean of.
_SIMULATED = 20
_LIMIT_SECS = 400.0
_PORT = 9100


def main(argv: list[str]) -> None:
    if argv[1:]:
        raise app.UsageError(f"run.py takes flags only. Received: {' '.join(argv[1:])}")
    output = pathlib.Path(FLAGS.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = json.loads(output.read_text()) if output.exists() else {}
    if not FLAGS.chart:
        if problem := namespaces.missing():
            sys.exit(f"run.py: {problem}")
        for model in FLAGS.model:
            _run(model, found.setdefault(model, {}), lambda: cluster_runs.write(output, found))
    print(sparse_chart.table(found))
    print(f"plot: {sparse_chart.save(output.with_name('sparse.png'), found)}")
    if missed := sparse_chart.misses(found):
        sys.exit("missed: " + "; ".join(missed))


def _run(model: str, entry: dict[str, Any], write: Any) -> None:
    """Predicts the model with all numbers of workers, unless that has been done, and measures the wanted ones."""
    most = max(FLAGS.workers)
    with tempfile.TemporaryDirectory() as name, namespaces.joined(most + SERVERS + 1, FLAGS.mbits) as (spaces, hosts):
        folder = pathlib.Path(name)
        if not entry:
            measured, network = _profile(folder, model), _network(folder, spaces, hosts)
            entry |= {"profile": _summary(measured), "network": network.text, "predicted_at": time.time()}
            for runs, steps in (("runs", _STEPS[model][0]), ("long_runs", _LONG[0])):
                entry[runs] = {str(each): _predicted(measured, network, each, steps) for each in (1, 2, 4, 8)}
            write()
        for workers in FLAGS.workers:
            run = entry["long_runs" if FLAGS.long else "runs"][str(workers)]
            run |= _measured(model, workers, folder, spaces, hosts)
            run["measured_at"] = time.time()
            write()
            rate = statistics.median(run["steps_per_sec"])
            print(
                f"{model}, {workers} workers: predicted {run['predicted']:.2f}, measured {rate:.2f} steps/s", flush=True
            )


def _profile(folder: pathlib.Path, model: str) -> profile.Profile:
    path = folder / "profile.json"
    command = [sys.executable, "-m", "tfdist", "profile", f"--secs={FLAGS.profile_secs}", f"--output={path}"]
    command += [str(SCRIPT), f"--model={model}", f"--sleep={FLAGS.sleep}", f"--batch={BATCH}"]
    done = subprocess.run(command, env=cluster_runs.environment(), capture_output=True, text=True, timeout=_LIMIT_SECS)
    if done.returncode:
        raise RuntimeError(f"tfdist profile failed:\n{done.stderr[-2000:]}")
    return profile.load(path)


def _summary(measured: profile.Profile) -> dict[str, Any]:
    return {
        "step_secs": statistics.fmean(measured.samples),
        "dense_bytes": measured.dense_bytes,
        "trainable_bytes": measured.trainable_bytes,
        "tables": [[each.name, each.rows, each.row_bytes, each.rows_per_step] for each in measured.tables],
    }


def _network(folder: pathlib.Path, spaces: Sequence[str], hosts: Sequence[str]) -> networks.Network:
    path = folder / "network.json"
    command = [sys.executable, "-m", "tfdist.doctor", "--measure", f"--json={path}"]
    _run_all({"worker": 2}, command, spaces, hosts)
    return networks.from_flag(str(path), None, has_accelerators=False)


def _predicted(measured: profile.Profile, network: networks.Network, workers: int, steps: int) -> dict[str, Any]:
    """Predicts epochs of so many steps of each worker; besides, what training without epochs would reach."""

    def simulated(num_updates: int, steps_per_epoch: int) -> simulation.Result:
        return prediction.simulate(
            measured,
            network,
            "ParameterServerStrategy",
            [],
            workers,
            servers=SERVERS,
            num_updates=num_updates,
            steps_per_epoch=steps_per_epoch,
        )

    found = simulated(_SIMULATED * steps * workers, steps * workers)
    without_end = prediction.steady(simulated(200 * workers, 0))[1]
    used = {name: use.utilisation for name, use in found.links.items()}
    return {"predicted": found.updates_per_sec, "steady": without_end, "limit": found.limit, "predicted_use": used}


def _measured(
    model: str, workers: int, folder: pathlib.Path, spaces: Sequence[str], hosts: Sequence[str]
) -> dict[str, Any]:
    output = folder / "measured.json"
    output.unlink(missing_ok=True)
    command = [sys.executable, str(SCRIPT), f"--model={model}", f"--workers={workers}", f"--sleep={FLAGS.sleep}"]
    steps, epochs = _LONG if FLAGS.long else _STEPS[model]
    steps *= workers
    command += [f"--batch={BATCH}", f"--steps={steps}", f"--rounds={epochs}", f"--output={output}"]
    used = spaces[: workers + SERVERS + 1]
    with link_use.Watch(used, range(workers, workers + SERVERS), FLAGS.mbits) as watch:
        _run_all({"worker": workers, "ps": SERVERS, "chief": 1}, command, spaces, hosts)
    found = json.loads(output.read_text())
    found["links"] = [watch.during(began, ended, steps) for began, ended in found.pop("spans")]
    return found


def _run_all(counts: dict[str, int], command: Sequence[str], spaces: Sequence[str], hosts: Sequence[str]) -> None:
    """Runs a command as all tasks of a cluster, each in a namespace of its own, until all have ended."""
    tasks = [Task(kind, index) for kind, count in counts.items() for index in range(count)]
    cluster: dict[str, list[str]] = {}
    for task, host in zip(tasks, hosts, strict=False):
        cluster.setdefault(task.type, []).append(f"{host}:{_PORT}")
    commands = {task: ["ip", "netns", "exec", space, *command] for task, space in zip(tasks, spaces, strict=False)}
    cluster_runs.run_all(commands, cluster, _LIMIT_SECS)


if __name__ == "__main__":
    app.run(main)

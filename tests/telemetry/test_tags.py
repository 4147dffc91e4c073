# SPDX-License-Identifier: Apache-2.0
"""Every tag of the table in docs/telemetry.md is in the files of a training, under every strategy, and no other.

The trainings on real processes also compare the bytes of reports with what `ss` says of the kernel's counters.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import shutil

import process_cluster
import programs
import pytest
import telemetry_files
from telemetry_files import expected

from tfdist.telemetry.update_log import Outcome, read_logs

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(shutil.which("ss") is None, reason="ss of iproute2 reads the kernel's counters"),
]

DECIDED, TIMED, MEASURED, INPUT, POLICY = "decided", "timed", "measured", "input", "policy"
STEPS = 48

TRAIN = f"""
import json, os, pathlib, re, subprocess, time

def train(strategy, directory):
    with strategy.scope():
        model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(256), keras.layers.Dense(256)])
        model.compile(keras.optimizers.SGD(1e-4), "mse")
    x = np.random.default_rng(0).normal(size=(64, 256)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, x)).batch(16, drop_remainder=True)
    callback = tfdist.callbacks.Telemetry(directory, update_freq=8)
    model.fit(data.repeat(), steps_per_epoch={STEPS // 2}, epochs=2, verbose=0, callbacks=[callback],
              validation_data=data)

def of_kernel(pids):
    # Bytes of the open sockets of each process, as another program reads them.
    found = {{pid: [0, 0] for pid in pids}}
    text = subprocess.run(["ss", "-tinpHO"], capture_output=True, text=True, check=True).stdout
    for line in text.splitlines():
        for pid in set(map(int, re.findall(r"pid=(\\d+)", line))) & set(pids):
            for index, name in enumerate(("bytes_sent", "bytes_received")):
                count = re.search(name + r":(\\d+)", line)
                found[pid][index] += int(count[1]) if count else 0
    return found
"""


def _assert_close_bytes(told: list[int], counted: list[int]) -> None:
    # 2 %, and what is sent between the two readings: a heartbeat or a question for counters is some hundred bytes.
    assert told == [pytest.approx(count, rel=0.02, abs=2000) for count in counted]
    assert max(counted) > 100_000


MULTI_WORKER = """
strategy = tfdist.MultiWorkerMirroredStrategy(policies={policies})
train(strategy, shared / "logs")
# The others' counters arrive within seconds.
from waiting import wait_until
others = lambda: [each for name, each in strategy.report().bytes_sent.items() if each > 100_000]
wait_until(lambda: len(others()) == 2)
found, name = strategy.report(), f"worker:{{index}}"
report("told", [found.bytes_sent[name], found.bytes_received[name]])
report("counted", of_kernel([os.getpid()])[os.getpid()])
report("report", str(found))
report("memory", found.memory_bytes[name])
# A worker that has ended tells the other no counters any more.
(shared / f"{{index}} has all").touch()
wait_until((shared / f"{{1 - index}} has all").exists)
"""
POLICIES = {"BackupWorkers": "tfdist.BackupWorkers(spares=0)", "ParameterAveraging": "tfdist.ParameterAveraging(4)"}


# An average's tags are those without a policy and its own.
@pytest.mark.parametrize("policy", [pytest.param("BackupWorkers", marks=pytest.mark.slow), "ParameterAveraging"])
def test_multi_worker_writes_each_tag_and_the_kernels_bytes(policy: str, tmp_path: pathlib.Path) -> None:
    script = f"import sys; sys.path.insert(0, {str(process_cluster.ROOT / 'tests' / 'support')!r})" + TRAIN
    script += MULTI_WORKER.format(policies=f"[{POLICIES[policy]}]")
    workers = process_cluster.run(script, tmp_path, timeout_secs=280)
    for found in workers:
        _assert_close_bytes(found["told"], found["counted"])
        assert found["memory"] > 100e6
    log_dir = tmp_path / "logs"
    features = [TIMED, INPUT, DECIDED, policy]
    features += [POLICY] if policy == "BackupWorkers" else [MEASURED, "Compression"]
    found = telemetry_files.tags(log_dir)
    assert found.pop(".") == expected("job", *features) | expected("process")
    assert found.pop("train") == expected("train")
    assert found.pop("validation") == expected("validation")
    assert not found
    assert _tasks_in_log(log_dir) == {"worker:0", "worker:1"}
    _check_log(log_dir, gradients=STEPS)


def _tasks_in_log(log_dir: pathlib.Path) -> set[str]:
    """Tasks of which the log has what they send and receive."""
    names = {tuple(name.split("/")) for name in read_logs(log_dir).scalars.scalar_name}
    tasks = {of for kind, of in names if kind == "sent"}
    assert names == {*itertools.product(("sent", "received"), tasks), ("loss", "train"), ("loss", "validation")}
    return tasks


def _check_log(log_dir: pathlib.Path, *, gradients: int | None) -> None:
    timeline = read_logs(log_dir)
    assert timeline.workers == ("worker:0", "worker:1")
    assert timeline.updates.step.tolist() == list(range(1, STEPS + 1))
    accepted = timeline.contributions.outcome == Outcome.ACCEPTED
    for worker in range(2):
        own = accepted & (timeline.contributions.worker == worker)
        assert gradients is None or own.sum() == gradients
    assert (timeline.contributions.start <= timeline.contributions.arrival).all()
    assert (timeline.updates.time[1:] >= timeline.updates.time[:-1] - 1e-3).all()


PARAMETER_SERVER = """
POLICIES = [tfdist.SoftSync(1), tfdist.StalenessScaling(), tfdist.Warmup(steps=8)]
strategy = tfdist.ParameterServerStrategy(num_workers=2, policies=POLICIES)
train(strategy, "logs")
pids = {name: strategy.distribution.serving.embedded.pid(name) for name in ("worker:0", "worker:1", "ps:0")}
pids["chief:0"] = os.getpid()
found, counted = strategy.report(), of_kernel(pids.values())
print(found)
result = {name: [[found.bytes_sent[name], found.bytes_received[name]], counted[pid]] for name, pid in pids.items()}
pathlib.Path("bytes.json").write_text(json.dumps(result))
"""


# Several workers have the tags of BackupWorkers above; without a policy there are some of these.
def test_parameter_server_writes_each_tag_and_the_kernels_bytes(tmp_path: pathlib.Path) -> None:
    with programs.running(TRAIN + PARAMETER_SERVER, tmp_path) as program:
        assert program.wait(200) == 0, program.output
    log_dir = tmp_path / "logs"
    found = telemetry_files.tags(log_dir)
    assert found.pop("train") == expected("train")
    assert found.pop("validation") == expected("validation")
    of_job = expected("job", DECIDED, POLICY, TIMED, INPUT, "event") | expected("process")
    assert found.pop(".") - {("tfdist/tasks/events", "text")} == of_job - {("tfdist/tasks/events", "text")}
    assert not found
    assert _tasks_in_log(log_dir) == {"worker:0", "worker:1", "ps:0", "chief:0"}
    for told, counted in json.loads((tmp_path / "bytes.json").read_text()).values():
        _assert_close_bytes(told, counted)
    _check_log(log_dir, gradients=None)

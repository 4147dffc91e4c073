# SPDX-License-Identifier: Apache-2.0
"""Jobs of several processes that are interrupted, and started again by the launcher, train as if they had not been."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

# What happens, to whom and in which attempt, stands in the variable MISFORTUNES: {attempt: [task, step, signal]}.
SCRIPT = """
import json, os, sys
import numpy as np, tensorflow as tf, keras
import tfdist

folder, policies = sys.argv[1:]
# State of dtypes that collectives don't add.
short = tfdist.transforms.GradientTransform(
    lambda variables: [tf.constant(False), tf.constant(0, tf.int8)],
    lambda gradients, state, info: (gradients, [~state[0], state[1] + 1]),
)
transforms = [tfdist.transforms.momentum_correction(0.5), tfdist.transforms.skip_nonfinite(), short]
# Refused beside these under workers that have copies of the model.
is_refused = "Warmup" in policies or "Averaging" in policies
strategy = tfdist.MultiWorkerMirroredStrategy(policies=eval(policies), transforms=[] if is_refused else transforms)
task = str(tfdist.Cluster.from_environment().task)
misfortunes, attempt = json.loads(os.environ["MISFORTUNES"]), os.environ["TFDIST_ATTEMPT"]
x = np.random.default_rng(0).normal(size=(90, 3)).astype("float32")


class Misfortune(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.whom, self.left, self.signal = misfortunes.get(attempt, ("", 0, 0))

    def on_train_batch_begin(self, batch, logs=None):
        self.left -= 1
        if self.whom == task and self.left == 0:
            os.kill(os.getpid(), self.signal)


def train(checkpoints, *callbacks):
    keras.utils.set_random_seed(7)
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).shuffle(90, seed=3).batch(8)
    with strategy.scope():
        layers = [keras.layers.Dense(4, "relu"), keras.layers.Dropout(0.2), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((3,)), *layers])
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    resume = tfdist.callbacks.Resume(f"{folder}/{checkpoints}", 5)
    history = model.fit(data, epochs=3, verbose=0, callbacks=[*callbacks, resume]).history
    variables = [*model.variables, *model.optimizer.variables]
    bits = [int(np.asarray(tf.convert_to_tensor(v.value)).astype("f4").view("u4").sum(dtype="u8")) for v in variables]
    iterations = int(tf.convert_to_tensor(model.optimizer.iterations.value))
    return {"steps": resume.step, "iterations": iterations, "bits": bits, "loss": history["loss"][-1]}

beginning = strategy.distribution.saved_state.state()
found = {"resumed": train("checkpoints", Misfortune())}
# A phase that is over begins again, too.
strategy.distribution.saved_state.restore(beginning, is_in_epoch=False)
# The attempt that comes to the end trains again, without an interruption.
found["calm"] = train("calm")
with open(f"{folder}/{task}-{attempt}.json", "w") as file:
    json.dump(found, file)
"""


def _launch(folder: pathlib.Path, flags: list[str], policies: str, misfortunes: dict[str, Any]) -> Any:
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    env = {**os.environ, "MISFORTUNES": json.dumps(misfortunes), "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-m", "tfdist", "launch", "local", "--restart_backoff_secs=0.1", *flags]
    command += [str(folder / "train.py"), str(folder), policies]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


SLOW = pytest.mark.slow
# First one that is not the chief hears that it will be ended, then the chief dies at once.
BOTH = {"0": ["worker:1", 8, 15], "1": ["worker:0", 9, 9]}
DIES = {"0": ["worker:0", 9, 9]}


@pytest.mark.parametrize(
    ("policies", "is_exact", "communication", "misfortunes"),
    [
        # All that is kept without a policy, and each worker's own state of a codec and of a transform.
        ("[tfdist.Compression(tfdist.compression.Threshold())]", True, "tensorflow", DIES),
        pytest.param("[]", True, "tensorflow", BOTH, marks=SLOW),
        pytest.param("[]", True, "mpi", BOTH, marks=SLOW),
        pytest.param("[tfdist.Compression(tfdist.compression.TopK(0.1))]", True, "mpi", BOTH, marks=SLOW),
        pytest.param("[tfdist.Compression(tfdist.compression.PowerSGD(1))]", True, "tensorflow", BOTH, marks=SLOW),
        pytest.param("[tfdist.Warmup(steps=15)]", True, "tensorflow", BOTH, marks=SLOW),
        pytest.param("[tfdist.ParameterAveraging(5)]", True, "tensorflow", BOTH, marks=SLOW),
        pytest.param("[tfdist.BackupWorkers(spares=0)]", True, "tensorflow", BOTH, marks=SLOW),
        pytest.param("[tfdist.BackupWorkers(spares=1)]", False, "tensorflow", BOTH, marks=SLOW),
    ],
)
def test_workers_go_on_together(
    tmp_path: pathlib.Path, policies: str, is_exact: bool, communication: str, misfortunes: dict[str, Any]
):
    flags = ["--num_workers=2", "--max_restarts=1", f"--communication={communication}"]
    ended = _launch(tmp_path / "cut off", flags, policies, misfortunes)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ("(preemption 1)" in ended.stderr) == (misfortunes is BOTH)
    assert "(restart 1 of 1)" in ended.stderr
    for task in ("worker:0", "worker:1"):
        found = json.loads((tmp_path / "cut off" / f"{task}-{len(misfortunes)}.json").read_text())
        resumed, expected = found["resumed"], found["calm"]
        assert resumed["steps"] == resumed["iterations"] == expected["steps"] == 36
        if is_exact:
            assert resumed["bits"] == expected["bits"]
            assert resumed["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    # Nobody but the chief wrote, and of its checkpoints the newest two are left.
    left = sorted(path.name for path in (tmp_path / "cut off" / "checkpoints").glob("step-*"))
    assert left[-1] == "step-0000000036"
    assert len(left) == 2

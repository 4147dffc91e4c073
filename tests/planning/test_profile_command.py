# SPDX-License-Identifier: Apache-2.0
"""tfdist profile on real scripts, in one process because each would import TensorFlow; and its command line."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import threading

import pytest
import waiting

from tfdist import _machine, cli
from tfdist.planning import measuring, profile

PLAIN = """
import keras, numpy as np
inputs = keras.Input((5,), dtype="int32")
hidden = keras.layers.Flatten()(keras.layers.Embedding(1000, 4)(inputs))
model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
model.compile("adam", "mse", metrics=["mae"])
rng = np.random.default_rng(0)
x, y = rng.integers(0, 1000, (640, 5)), rng.normal(3.0, size=(640, 1))
model.fit(x, y, 32, epochs=3, validation_split=0.1, callbacks=[keras.callbacks.ModelCheckpoint("never.keras")])
raise SystemExit("what follows fit is not run")
"""
# Under a strategy, with flags, a data set and the main function of absl.
SERVED = """
import keras, numpy as np, tensorflow as tf, tfdist
from absl import app, flags
flags.DEFINE_integer("batch", 8, "")
def main(argv):
    strategy = tfdist.ParameterServerStrategy(policies=[tfdist.BackupWorkers(spares=1)], num_workers=3)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    x = np.ones((256, 4), "float32")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :2])).batch(flags.FLAGS.batch).repeat()
    model.fit(data, steps_per_epoch=5)
app.run(main)
"""
SCRIPTS = {
    "plain.py": PLAIN,
    "served.py": SERVED,
    "no_fit.py": "import keras\n",
    "raises.py": "raise ZeroDivisionError('in the script')\n",
    "exits.py": "raise SystemExit(3)\n",
    "interrupted.py": "raise KeyboardInterrupt\n",
}
PROGRAM = """
import json, sys
from tfdist.planning import profile_command as command
codes = {}
for name in sys.argv[1:]:
    arguments = ["--batch=16"] if name == "served.py" else []
    codes[name] = command.main(["--secs=1", f"--output={name}.json", name, *arguments])
    sys.stderr.flush()
print(json.dumps(codes))
"""


@pytest.mark.processes
def test_scripts_are_profiled_or_say_why_not(tmp_path):
    for name, text in SCRIPTS.items():
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-c", PROGRAM, *SCRIPTS]
    environment = {
        **os.environ,
        "TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}',
    }
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    codes = {"plain.py": 0, "served.py": 0, "no_fit.py": 1, "raises.py": 1, "exits.py": 1, "interrupted.py": 130}
    assert json.loads(done.stdout.splitlines()[-1]) == codes
    lines = [line for line in done.stderr.splitlines() if line.endswith("no profile")]
    assert lines == [
        "tfdist profile: no_fit.py ended without calling model.fit, so there was nothing to measure; no profile",
        "tfdist profile: raises.py raised ZeroDivisionError, see above, before all was measured; no profile",
        "tfdist profile: exits.py ended with code 3 before model.fit; no profile",
        "tfdist profile: interrupted; no profile",
    ]
    assert "ZeroDivisionError: in the script" in done.stderr
    assert {path.name for path in tmp_path.glob("*.json")} == {"plain.py.json", "served.py.json"}
    assert not (tmp_path / "never.keras").exists()
    plain, served = (profile.load(tmp_path / f"{name}.json") for name in ("plain.py", "served.py"))
    assert plain.batch_size == 32
    assert [each.batch_size for each in plain.steps] == [8, 16, 32, 64, 128]
    assert plain.dense_bytes == 4 * 21 and plain.trainable_bytes == 4 * (21 + 4000)
    assert plain.optimizer_bytes > 2 * plain.trainable_bytes
    (table,) = plain.tables
    assert (table.rows, table.row_bytes) == (1000, 16) and 100 < table.rows_per_step <= 160
    assert plain.cores == _machine.usable_cpus() and 0 < plain.used_cores <= plain.cores
    assert (served.batch_size, served.dense_bytes) == (16, 4 * 10)


@pytest.mark.skipif(sys.platform != "linux", reason="the counters are Linux' own")
def test_a_process_sees_its_busy_cores():
    before, ended = _machine.busy_secs(), threading.Event()

    def compute() -> None:
        while not ended.is_set():
            pass

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        waiting.wait_until(lambda: _machine.busy_secs() > before)
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["absent.py"], "the script does not exist"),
        (["--output=nowhere/profile.json", __file__], "--output: the file can't be written (No such file or"),
    ],
)
def test_an_invalid_command_line_is_one_line(arguments, line, capsys):
    assert cli.main(["profile", *arguments]) == 2
    shown = capsys.readouterr().err
    assert line in shown and shown.count("\n") == 1


def norms(true: float, noise: float, batches: int, dimensions: int = 200, small: int = 8, parts: int = 4):
    """Squared norms of gradients with |G|^2 = true and trace S = noise, at `small` and at `small * parts` examples."""
    draws = random.Random(0)
    each, deviation = math.sqrt(true / dimensions), math.sqrt(noise / dimensions / small)
    found = []
    for _ in range(batches):
        gradients = [[draws.gauss(each, deviation) for _ in range(dimensions)] for _ in range(parts)]
        whole = [sum(column) / parts for column in zip(*gradients, strict=True)]
        found.append((sum(x * x for gradient in gradients for x in gradient) / parts, sum(x * x for x in whole)))
    return found


@pytest.mark.parametrize("noise", [10.0, 50.0, 200.0])
def test_the_interval_covers_the_true_noise_scale(noise):
    found = measuring.estimate_noise_scale(norms(1.0, noise, 32), 8, 32)
    assert found.low < noise < found.high
    assert found.value == pytest.approx(noise, rel=0.35)


def test_more_batches_make_the_interval_narrower():
    few, many = (measuring.estimate_noise_scale(norms(1.0, 100.0, count), 8, 32) for count in (4, 64))
    assert many.high / many.low < few.high / few.low


@pytest.mark.parametrize("found", [[], [(2.0, 1.0)], [(1.0, 1.0)] * 4, [(4.0, 1.0)] * 4])
def test_too_little_to_estimate_from_gives_none(found):
    assert measuring.estimate_noise_scale(found, 8, 32) is None

# SPDX-License-Identifier: Apache-2.0
"""TensorFlow's data service as docs/strategies.md shows it: each example is used once by all workers together."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import programs
import pytest

from tfdist.launchers.supervise.processes import PortReservation

TRAIN = """
class UsedOnce(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="once")
        self.counts = self.add_weight(shape=(64,), initializer="zeros", name="counts")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.counts.assign_add(tf.reduce_sum(tf.one_hot(tf.reshape(y_true, [-1]), 64), 0))

    def result(self):
        return tf.reduce_sum(tf.cast(self.counts == 1, "float32"))

    def reset_state(self):
        self.counts.assign(tf.zeros([64]))


strategy = tfdist.{strategy}()
with strategy.scope():
    made = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    made.compile(keras.optimizers.SGD(1e-6), "mse", metrics=[UsedOnce()])
dataset = tf.data.Dataset.range(64).map(lambda i: (tf.ones([1]), i)).batch(8)
{block}
history = made.fit(dataset, epochs=2, verbose=0).history
if tfdist.is_chief():
    print("used once", history["once"], flush=True)
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("strategy", "num_ps"),
    [("MultiWorkerMirroredStrategy", 0), ("ParameterServerStrategy", 1)],
    ids=["sums", "servers"],
)
def test_job_of_the_data_service_uses_each_example_once(tmp_path: pathlib.Path, strategy: str, num_ps: int) -> None:
    text = (
        (programs.ROOT / "docs" / "strategies.md").read_text(encoding="utf-8").split("### TensorFlow's data service")[1]
    )
    serve, block = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[:2]
    with PortReservation(1) as reserved:
        address = f"localhost:{reserved.ports[0]}"
        serve, block = serve.replace("5050", str(reserved.ports[0])), block.replace("localhost:5050", address)
        path = tmp_path / "train.py"
        path.write_text(programs._HEADER + TRAIN.format(strategy=strategy, block=block))
        flags = ["--num_workers=2", f"--num_ps={num_ps}"]
        command = [sys.executable, "-m", "tfdist", "launch", "local", *flags, str(path)]
        with programs.running(serve, tmp_path, name="serve") as server:
            done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=programs.ROOT)
            server.process.kill()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "used once [64.0, 64.0]" in done.stdout, done.stdout + done.stderr

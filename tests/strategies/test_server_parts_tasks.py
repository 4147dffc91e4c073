# SPDX-License-Identifier: Apache-2.0
"""`ParameterServerStrategy(devices_per_replica=2)`: devices of real tasks, and what is refused.

`test_server_parts.py` has what the workers compute.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
import types

import programs
import pytest
import tensorflow as tf

import tfdist
from tfdist.strategies import _devices

pytestmark = pytest.mark.processes

# Every task runs this script.
_SCRIPT = """
import keras, numpy as np, tensorflow as tf, tfdist
(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tfdist.ParameterServerStrategy(
    start_timeout_secs=60, devices_per_replica=2, policies=[tfdist.BackupWorkers(spares=0), tfdist.LazyRows()])
ids, y = np.arange(144).reshape(48, 3) % 100, np.arange(48.0)[:, None] / 48

def trained(strategy, place):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        layers = [keras.layers.Embedding(100, 7), keras.layers.Flatten(), keras.layers.Dense(31, "relu"),
                  keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((3,), dtype="int32"), *layers])
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    place(model)
    history = model.fit(ids, y, batch_size=8, epochs=2, shuffle=False, verbose=0, validation_data=(ids, y)).history
    return [*model.get_weights(), *history.values(), model.predict(ids, verbose=0)]

for one, found in zip(trained(tf.distribute.get_strategy(), id), trained(strategy, tfdist.split), strict=True):
    np.testing.assert_allclose(found, one, rtol=1e-5, atol=1e-5)
print("as one device", flush=True)
"""


@pytest.mark.slow  # `test_server_parts.py` has the parts of an embedded cluster.
@pytest.mark.timeout(200)
def test_tasks_have_the_logical_cpus_of_their_script(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(_SCRIPT)
    command = [sys.executable, "-m", "tfdist", "launch", "local", "--num_workers=2", "--num_ps=1", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, cwd=programs.ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "as one device" in done.stdout


@pytest.mark.parametrize(
    ("kind", "counts", "number", "words"),
    [
        (
            "CPU",
            (2, 1),
            2,
            r"devices of worker:1; use 1, or .*set_logical_device_configuration.*: worker:1 with 1 CPU$",
        ),
        ("CPU", (2, 2), 3, r"devices of worker:0; use 1 or 2, or .*Received: worker:0 with 2 CPUs$"),
        ("GPU", (4, 4), 3, r"devices of worker:0; use 1 or 2 or 4, or .*Received: worker:0 with 4 GPUs$"),
        ("GPU", (2, 0), 2, r"devices of worker:1; use 1, or .*Received: worker:1 with 0 GPUs$"),
    ],
)
def test_workers_without_the_devices_are_named(
    monkeypatch: pytest.MonkeyPatch, kind: str, counts: tuple[int, int], number: int, words: str
) -> None:
    names = [
        f"/job:worker/replica:0/task:{w}/device:{kind}:{i}" for w, count in enumerate(counts) for i in range(count)
    ]
    devices = [types.SimpleNamespace(name=name) for name in ["/device:CPU:0", *names]]
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: devices)
    extended = types.SimpleNamespace(worker_devices=(f"/device:{kind}:0",))
    strategy = types.SimpleNamespace(extended=extended)
    with pytest.raises(ValueError, match=rf"ParameterServerStrategy\(devices_per_replica={number}\): .*{words}"):
        _devices.span_workers(strategy, number, 2)  # pyright: ignore


def test_compression_takes_one_device() -> None:
    with pytest.raises(ValueError, match=r"devices_per_replica=2: .*encodes the gradients of one device per worker"):
        tfdist.ParameterServerStrategy(
            policies=[tfdist.Compression(tfdist.compression.Threshold())], devices_per_replica=2
        )

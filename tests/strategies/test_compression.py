# SPDX-License-Identifier: Apache-2.0
"""`Compression`: a codec that leaves out nothing trains as one device does, and what is reported is what is sent."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import numpy as np
import process_cluster
import pytest
from process_cluster import needs_mpi
from test_communication import PREPARED, assert_close

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

# How gradients come to the codec: after the step or within it, eagerly, in a loop, unscaled.
NAMES = ("several steps at once", "loss scale", "eagerly", "two optimizers")
CASES = """
def two_optimizers():
    class Pair(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.other = layers.Dense(4, "tanh"), layers.Dense(1), SGD(0.05)
        def call(self, given):
            return self.second(self.first(given))
        def train_step(self, data):
            given, wanted = data
            with tf.GradientTape(persistent=True) as tape:
                loss = self.compute_loss(given, wanted, self(given, training=True))
            for optimizer, layer in ((self.optimizer, self.first), (self.other, self.second)):
                weights = layer.trainable_variables
                optimizer.apply(tape.gradient(loss, weights), weights)
            return {"loss": loss}
    model = Pair()
    model(x[:1])
    model.other.build(model.second.trainable_variables)
    return model
CASES["two optimizers"] = (two_optimizers, x, lambda: Adam(0.01), {"metrics": None})
for name in NAMES:
    case = CASES[name]
    report(name, trained(strategy, *case))
    if index == 0:
        report(f"one device, {name}", trained(tf.distribute.get_strategy(), *case))
"""

# Plain SGD on whole batches: also an average after each step is one update.
BESIDE = """
x = np.random.default_rng(0).normal(size=(64, 6)).astype("float32")
def train(scope):
    keras.utils.set_random_seed(3)
    with scope():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(5, "tanh"), layers.Dense(1)])
        model.compile(SGD(0.1), "mse")
    model.fit(x, x[:, :1], batch_size=16, epochs=2, shuffle=False, verbose=0)
    return np.concatenate([each.ravel() for each in model.get_weights()])
weights = train(strategy.scope)
alone = train(tf.distribute.get_strategy().scope)
report("weights", [weights.tolist(), alone.tolist()])
report("sent", [strategy.report().message_bytes[f"worker:{index}"], weights.size])
"""

# The kernel counts what is on the wire.
TRAFFIC = """
from tfdist.coordination import usage
x = np.random.default_rng(0).normal(size=(64, 256)).astype("float32")
with strategy.scope():
    model = keras.Sequential([keras.Input((256,)), layers.Dense(512), layers.Dense(1)])
    model.compile(SGD(1e-4), "mse")
data = tf.data.Dataset.from_tensors((x[:16], x[:16, :1])).repeat()
model.fit(data, steps_per_epoch=4, verbose=0)
def sent():
    return sum(each.sent for each in usage.by_socket().values())
before, told = sent(), strategy.report().message_bytes[f"worker:{index}"]
model.fit(data, steps_per_epoch=32, verbose=0, callbacks=[tfdist.callbacks.Telemetry("logs", update_freq=8)])
told = strategy.report().message_bytes[f"worker:{index}"] - told
# The chief writes it for the job, as a mean over the workers.
paths = pathlib.Path("logs").glob("*tfevents*") if index == 0 else []
events = [event for path in paths for event in tf.compat.v1.train.summary_iterator(str(path))]
values = [value for event in events for value in event.summary.value]
report("shown", [each.simple_value for each in values if each.tag == "tfdist/network/counted_bytes_per_update"])
report("per step", [(sent() - before) / 32, told / 32, model.count_params()])
"""


def _prepared(codec: str, *others: str) -> str:
    policies = ", ".join([f"tfdist.Compression(tfdist.compression.{codec})", *others])
    policy = f"policies=[{policies}]"
    return PREPARED.replace("(start_timeout_secs=60)", f"(start_timeout_secs=60, {policy})")


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        pytest.param("tensorflow", NAMES, marks=pytest.mark.slow),
        ("tensorflow", ("several steps at once",)),
        # What is carried is a message of the codec, however the gradients came to it.
        pytest.param("mpi", ("two optimizers",), marks=needs_mpi),
    ],
    ids=["tensorflow, all", "tensorflow", "mpi"],
)
def test_a_codec_that_sends_all_trains_as_one_device(
    kind: str, names: Sequence[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TFDIST_COMMUNICATION", kind)
    script = f"NAMES = {names}" + _prepared("TopK(1.0, momentum=0)") + CASES
    first, second = process_cluster.run(script, tmp_path, timeout_secs=280)
    for name in names:
        assert_close(first[name], first[f"one device, {name}"])
        assert second[name] == first[name]


# `test_compression_parameter_server.py` has most codecs beside `BackupWorkers`.
@needs_mpi
def test_it_does_so_beside_another_policy(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TFDIST_COMMUNICATION", "mpi")
    script = _prepared("TopK(1.0, momentum=0)", "tfdist.ParameterAveraging(every_steps=1)") + BESIDE
    for found in process_cluster.run(script, tmp_path, timeout_secs=280):
        np.testing.assert_allclose(*found["weights"], rtol=1e-5, atol=1e-6)
        sent, count = found["sent"]
        assert sent > 4 * count


# Whatever the machine, a codec pays or none does.
AUTO = (
    """
from tfdist.compression import choice
choice.LEAST_GAIN = choice.LEAST_SAVED_SECS = -1e9 if TAKES_ANY else 1e9
choose = choice.choose
def noted(*arguments):
    found = choose(*arguments)
    report("auto", [repr(found[0]), found[1]])
    return found
choice.choose = noted
"""
    + BESIDE
)


@pytest.mark.parametrize("takes_any", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_auto_chooses_before_the_first_step(takes_any: bool, tmp_path: pathlib.Path):
    script = _prepared("None").replace("tfdist.Compression(tfdist.compression.None)", 'tfdist.Compression("auto")')
    script += f"TAKES_ANY = {takes_any}\n" + AUTO
    first, second = process_cluster.run(script, tmp_path, timeout_secs=280)
    assert first["auto"] == second["auto"]
    assert (first["auto"][0] == "None") is not takes_any
    for found in (first, second):
        # Any codec may be the fastest here; a wrong sum is worse than what a codec leaves for later.
        np.testing.assert_allclose(*found["weights"], rtol=0.2, atol=0.1)
        assert found["sent"][0] > 0


@pytest.mark.parametrize(
    ("codec", "share"), [("HalfPrecision('float16')", 2.0), pytest.param("SignSGD()", 1 / 8, marks=pytest.mark.slow)]
)
def test_what_is_reported_is_what_the_kernel_has_sent(codec: str, share: float, tmp_path: pathlib.Path):
    """`share` is the number of bytes for each parameter."""
    found = process_cluster.run(_prepared(codec) + TRAFFIC, tmp_path, timeout_secs=280)
    # The first batch is in no point; a mean of integers is no integer.
    mean = sum(each["per step"][1] for each in found) / len(found)
    assert [each["shown"] for each in found] == [[pytest.approx(mean, abs=1)] * 4, []]
    for sent, told, count in [each["per step"] for each in found]:
        # The logs of a step, a mean and its weight, are some bytes; so are the head and the padding of a message.
        assert share * count <= told <= share * count + 1200
        # Headers of TCP's payload, heartbeats and what Keras compares at its begin.
        assert told <= sent <= 1.1 * told + 4000

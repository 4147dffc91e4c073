# SPDX-License-Identifier: Apache-2.0
"""MultiWorkerMirroredStrategy with a policy, on real processes: no wait for stragglers, errors."""

from __future__ import annotations

import pathlib

import process_cluster
import pytest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

# 45 examples in batches of 8: the last batch has 5, which no number of workers shares evenly.
PREPARED = """
optimizers = keras.optimizers
rng = np.random.default_rng(0)
x, y = rng.random((45, 3), np.float32), rng.random((45, 1), np.float32)

def dense(optimizer, scope, layers=lambda: ()):
    keras.utils.set_random_seed(3)
    with scope.scope():
        hidden = [keras.Input((3,)), keras.layers.Dense(8, "relu"), *layers(), keras.layers.Dense(1)]
        model = keras.Sequential(hidden)
        model.compile(optimizer(), "mse", metrics=["mae"])
    return model
"""

# Worker 1 needs far longer for a contribution than the others do.
STRAGGLER = """
strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout_secs=60, policies=[tfdist.BackupWorkers(spares=1)])
layers = keras.layers
model = dense(
    lambda: optimizers.Adam(0.01),
    strategy,
    lambda: (layers.BatchNormalization(synchronized=True), layers.Dropout(0.3)))
class Count(keras.callbacks.Callback):
    examples = 0
    def on_epoch_end(self, epoch, logs=None):
        self.examples += int(tf.convert_to_tensor(model.metrics[0].count))
count = Count()

def generate():
    for start in range(0, 45, 8):
        yield x[start:start + 8], y[start:start + 8]
signature = (tf.TensorSpec((None, 3), tf.float32), tf.TensorSpec((None, 1), tf.float32))
unknown = tf.data.Dataset.from_generator(generate, output_signature=signature)
with tfdist.testing.Delays({"worker:1": tfdist.testing.constant(0.5)}):
    model.fit(x, y, batch_size=8, epochs=4, verbose=0, callbacks=[count])
    model.fit(unknown, epochs=2, verbose=0, callbacks=[count])
report("iterations", int(model.optimizer.iterations.numpy()))
counted = strategy.report()
report("accepted", counted.accepted)
report("dropped", counted.dropped)
report("examples", strategy.report().examples)
report("counted by metrics", count.examples)
report("weights", [weight.tolist() for weight in model.get_weights()])
report("slots", [np.asarray(variable).tolist() for variable in model.optimizer.variables])
report("evaluated", model.evaluate(x, y, batch_size=8, verbose=0))
predicted = model.predict(x, batch_size=8, verbose=0)
report("error", float(np.mean((predicted - y) ** 2)))
report("loss of a batch", float(model.train_on_batch(x, y)[0]))
report("weights at the end", [weight.tolist() for weight in model.get_weights()])
try:
    strategy.experimental_distribute_dataset(unknown, tf.distribute.InputOptions())
except ValueError as error:
    report("refused", str(error))
"""

ENDS = """
strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout_secs=60, policies=[tfdist.BackupWorkers(spares=1)])
model = dense(lambda: optimizers.SGD(0.01), strategy)
class At5(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 5 and index == 0:
            # The chief lives and goes on, and so do the collectives; only the quorum server is gone.
            strategy._quorum_server.close()
try:
    model.fit(x, y, batch_size=2, epochs=100, verbose=0, callbacks=[At5()])
except ConnectionError as error:
    report("error", str(error))
    (shared / f"done-{index}").touch()
    import time
    while len(list(shared.glob("done-*"))) < 2:
        time.sleep(0.01)
"""

ALONE = """
try:
    tfdist.MultiWorkerMirroredStrategy(policies=[tfdist.BackupWorkers(spares=2)])
except ValueError as error:
    report("error", str(error))
"""


def test_a_straggler_is_not_waited_for_and_leaves_no_trace(tmp_path: pathlib.Path):
    found = process_cluster.run(PREPARED + STRAGGLER, tmp_path, num_workers=3, timeout_secs=250)
    for other in found[1:]:
        # To the last bit, and the counts too.
        assert other == found[0]
    steps = found[0]["iterations"]
    assert steps == 6 * 6
    accepted = found[0]["accepted"]
    assert sum(accepted.values()) == 2 * steps
    assert accepted["worker:1"] < min(accepted["worker:0"], accepted["worker:2"])
    assert found[0]["dropped"]["worker:1"] > 0
    assert found[0]["counted by metrics"] == found[0]["examples"] < 6 * 45
    assert found[0]["evaluated"][0] == pytest.approx(found[0]["error"], rel=1e-4)
    assert found[0]["loss of a batch"] > 0
    assert "AutoShardPolicy" in found[0]["refused"] and "InputOptions" in found[0]["refused"]


def test_the_loss_of_the_quorum_server_is_an_error_of_all(tmp_path: pathlib.Path):
    found = process_cluster.run(PREPARED + ENDS, tmp_path)
    for each in found:
        assert "the quorum server of worker:0 at " in each["error"]
        assert "is gone" in each["error"] and "can't be made" in each["error"]


def test_spares_that_make_no_sense_are_refused_before_anybody_is_waited_for(tmp_path: pathlib.Path):
    # Of two workers one is started: it would wait for the other.
    with process_cluster.workers(ALONE, tmp_path, started=1) as (worker,):
        assert worker.wait() == 0
        assert "spares=2, total_num_replicas=2" in worker.found["error"]

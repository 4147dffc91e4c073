# SPDX-License-Identifier: Apache-2.0
"""Tables in shards train as on one device, and are saved and restored by their servers."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import programs
import pytest

pytestmark = pytest.mark.processes

MODEL = """
import glob, json, re
rng = np.random.default_rng(0)
O = keras.optimizers
# Each row once in each batch, or any rows.
EVERY = np.concatenate([rng.permutation(48).reshape(16, 3) for _ in range(3)])
SOME = rng.integers(0, 48, size=EVERY.shape)
TARGETS = rng.normal(size=(48, 1)).astype("float32")
def dense(optimizer):
    # Keras clips the gradient as a dense one, in which equal ids are added up.
    optimizer.global_clipnorm = 1e9
    return optimizer
def trained(strategy, optimizer, ids, rows=48):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        inputs = keras.Input((3,), dtype="int32")
        table = keras.layers.Embedding(rows, 8, name="table")
        made = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(table(inputs))))
        made.compile(optimizer(), "mse")
    made.fit(ids, TARGETS, batch_size=16, epochs=2, shuffle=False, verbose=0)
    return made
one = tf.distribute.get_strategy()
def same(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
def raises(text, function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except Exception as error:
        assert re.search(text, str(error)), error
        return
    raise SystemExit(f"no error with {text}")
OPTIMIZERS = {
    "SGD": lambda: O.SGD(0.05), "momentum": lambda: O.SGD(0.05, momentum=0.9), "Adam": lambda: O.Adam(0.01),
    "Adagrad": lambda: O.Adagrad(0.05), "Ftrl": lambda: O.Ftrl(0.05),
}
"""
DENSE = """
strategy = tfdist.ParameterServerStrategy(num_workers=1, num_ps=2, policies=[tfdist.BackupWorkers(spares=0)],
    variable_partitioner=tfdist.ShardedTables(min_bytes=1024))
for optimizer in [*MORE, lambda: O.AdamW(0.01, weight_decay=0.1)]:
    found = trained(strategy, optimizer, SOME)
    same(found.get_weights(), trained(one, lambda: dense(optimizer()), SOME).get_weights())
    for variable in [found.layers[1].embeddings, *found.optimizer.variables[2:3]]:
        if variable.shape == (48, 8):
            assert [shard.device[-19:-13] for shard in variable.value.variables] == ["task:0", "task:1"], variable
found.save("m.keras")
same(keras.models.load_model("m.keras").get_weights(), found.get_weights())
found.export("e", verbose=False)
served = tf.saved_model.load("e")
predictions = found.predict(SOME, verbose=0)
for serve in (served.serve, keras.layers.TFSMLayer("e", call_endpoint="serve")):
    same(serve(SOME.astype("int32")), predictions)
    same(serve(SOME.astype("int32") - 48), predictions)
assert [(each.name, each.shape[0]) for each in served.variables][0] == ("table/embeddings:0", 48)
# As TensorFlow Serving does.
with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    signature = tf.compat.v1.saved_model.load(session, ["serve"], "e").signature_def["serve"]
    [fed], [fetched] = signature.inputs.values(), signature.outputs.values()
    same(session.run(fetched.name, {fed.name: SOME.astype("int32")}), predictions)
# The servers have written their shards.
assert len(glob.glob("e/variables/variables.data-*-of-00003")) == 3
assert b"/task:" not in open("e/saved_model.pb", "rb").read()
with strategy.scope():
    again = keras.models.load_model("m.keras")
same(again.get_weights(), found.get_weights())
same([np.array(v) for v in again.optimizer.variables], [np.array(v) for v in found.optimizer.variables])
checkpoint = tf.train.Checkpoint(model=found)
path, before = checkpoint.save("checkpoint"), found.get_weights()
found.fit(SOME, TARGETS, batch_size=16, verbose=0)
checkpoint.restore(path)
same(found.get_weights(), before)
other = trained(one, lambda: O.AdamW(0.01, weight_decay=0.1), SOME)
tf.train.Checkpoint(model=other).restore(path).assert_existing_objects_matched()
same(other.get_weights(), before)
def ended(strategy):
    # A second program finds that the training has ended, and has its weights and slots.
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.layers.Embedding(48, 8), keras.layers.Flatten(), keras.layers.Dense(1)]
        made = keras.Sequential([keras.Input((3,), dtype="int32"), *layers])
        made.compile(O.Adam(0.01), "mse")
    made.fit(SOME, TARGETS, batch_size=16, epochs=2, shuffle=False, verbose=0, callbacks=[tfdist.callbacks.Resume("r")])
    return [*made.get_weights(), *(np.array(each) for each in made.optimizer.variables)]
first = ended(strategy)
same(ended(strategy), first)
# The table and both of its slots were written by rows.
assert len(json.load(open(glob.glob("r/step-*/state.json")[0]))["by_rows"]) == 3
same(ended(one), first)
# A tape of the chief, outside of functions: the gradients of a whole variable.
def taped(table):
    with tf.GradientTape() as tape:
        rows = tf.gather(table, [[3, 3], [47, 0]])
        looked_up = tf.reduce_sum(rows * rows)
    yield tape.gradient(looked_up, table)
    with tf.GradientTape() as tape:
        read = tf.reduce_sum(tf.matmul(tf.ones((2, 48)), table) ** 3)
        both = read + tf.reduce_sum(tf.gather(table, [3]) ** 2)
    yield tape.gradient(both, table)
    assert [each is table for each in tape.watched_variables()] == [True]
table = found.layers[1].embeddings.value
sparse, mixed = taped(table)
assert isinstance(sparse, tf.IndexedSlices), sparse
expected = list(taped(tf.Variable(table.read_value())))
same(map(tf.convert_to_tensor, (sparse, mixed)), map(tf.convert_to_tensor, expected))
expected = found.get_weights()[0] - 0.5 * tf.convert_to_tensor(sparse)
O.SGD(0.5).apply([sparse], [found.layers[1].embeddings])
same(found.get_weights()[:1], [expected])
outside = SOME.copy()
for wrong in (48, -60):
    outside[30, 1] = wrong
    text = rf"table/embeddings: ids must be in \\[0, 48\\), .* in \\[-48, 48\\). Received: {wrong}\\]"
    raises(text, found.predict, outside, verbose=0)
    raises(text, found.fit, outside, TARGETS, batch_size=16, verbose=0)
found.fit(SOME, TARGETS, batch_size=16, verbose=0)
with strategy.scope():
    # Fewer rows than servers, and scalars.
    for few in (keras.Variable(np.ones((1, 300))), keras.Variable(1.0)):
        assert not hasattr(few.value, "variables")
    half = keras.layers.Embedding(480, 8, name="half", dtype="float16")
    half.build()
    raises("takes no float16 variable in shards.*half/embeddings in 2 shards", tf.saved_model.save, half, "half")
"""
# Under optimizers that need the whole table, and in functions that are computed again.
WHOLE = """
strategy = tfdist.ParameterServerStrategy(num_workers=1, num_ps=2, policies=[tfdist.BackupWorkers(spares=0)],
    variable_partitioner=tfdist.ShardedTables(min_bytes=1024))
for optimizer in OPTIMIZERS_OF_WHOLE:
    found = trained(strategy, optimizer, SOME)
    assert hasattr(found.layers[1].embeddings.value, "variables")
    same(found.get_weights(), trained(one, lambda: dense(optimizer()), SOME).get_weights())
class Recomputed(keras.layers.Layer):
    def __init__(self, around):
        super().__init__()
        self.table, self.around = keras.layers.Embedding(48, 8), around
    def build(self, shape):
        self.table.build(shape)
    def call(self, ids):
        return self.around(lambda given: self.table(given))(ids)
def recomputed(around):
    with strategy.scope():
        layers = [Recomputed(around), keras.layers.Flatten(), keras.layers.Dense(1)]
        made = keras.Sequential([keras.Input((3,), dtype="int32"), *layers])
        made.compile("sgd", "mse")
    made.fit(SOME, TARGETS, batch_size=16, verbose=0)
recomputed(lambda function: function)
for around in (tf.recompute_grad, keras.remat):
    raises("keras.remat, can't take gradients of a variable in shards", recomputed, around)
"""
LAZY = """
class LazyAdam(O.Adam):
    # The formula of docs/large_models.md, written out.
    def update_step(self, gradient, variable, lr):
        if not isinstance(gradient, tf.IndexedSlices):
            return super().update_step(gradient, variable, lr)
        g = tf.convert_to_tensor(gradient)
        touched, index = tf.reduce_any(g != 0, 1, keepdims=True), self._get_variable_index(variable)
        m, v, t = self._momentums[index], self._velocities[index], tf.cast(self.iterations + 1, tf.float32)
        new_m = tf.where(touched, m + (g - m) * (1 - self.beta_1), m)
        new_v = tf.where(touched, v + (g * g - v) * (1 - self.beta_2), v)
        rate = lr * tf.sqrt(1 - self.beta_2**t) / (1 - self.beta_1**t)
        variable.assign(tf.where(touched, variable - rate * new_m / (tf.sqrt(new_v) + self.epsilon), variable))
        m.assign(new_m)
        v.assign(new_v)
partitioner = tfdist.ShardedTables(min_bytes=1024) if SHARDED else None
strategy = tfdist.ParameterServerStrategy(
    num_workers=1, num_ps=2, policies=[tfdist.LazyRows()], variable_partitioner=partitioner)
for optimizer in OPTIMIZERS.values():
    found, expected = trained(strategy, optimizer, EVERY), trained(one, lambda: dense(optimizer()), EVERY)
    same(found.get_weights(), expected.get_weights())
found, expected = trained(strategy, lambda: O.Adam(0.01), SOME), trained(one, lambda: LazyAdam(0.01), SOME)
same(found.get_weights(), expected.get_weights())
assert hasattr(found.layers[1].embeddings.value, "variables") == SHARDED
"""


# Lazy rows have the other optimizers, too.
@pytest.mark.parametrize("more", ["()", pytest.param("OPTIMIZERS.values()", marks=pytest.mark.slow)])
def test_tables_in_shards_train_save_and_restore_as_on_one_device(tmp_path: pathlib.Path, more: str) -> None:
    with programs.running(MODEL + f"MORE = {more}" + DENSE, tmp_path) as program:
        assert program.wait(280) == 0, program.output


WHOLE_OPTIMIZERS = {
    "lamb": "lambda: O.Lamb(0.01)",
    "others": "lambda: O.Adafactor(0.05), lambda: O.Muon(0.01, exclude_embeddings=False)",
}


@pytest.mark.slow
@pytest.mark.parametrize("optimizers", ["lamb", pytest.param("others", marks=pytest.mark.slow)])
def test_tables_in_shards_are_put_together_or_refused(tmp_path: pathlib.Path, optimizers: str) -> None:
    given = f"OPTIMIZERS_OF_WHOLE = [{WHOLE_OPTIMIZERS[optimizers]}]"
    with programs.running(MODEL + given + WHOLE, tmp_path) as program:
        assert program.wait(280) == 0, program.output


@pytest.mark.slow  # `test_shard_rows.py` updates rows.
@pytest.mark.parametrize("is_sharded", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["shards", "whole"])
def test_lazy_rows_update_the_rows_of_the_step(tmp_path: pathlib.Path, is_sharded: bool) -> None:
    with programs.running(MODEL + LAZY.replace("SHARDED", str(is_sharded)), tmp_path) as program:
        assert program.wait(200) == 0, program.output


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(sys.platform != "linux", reason="the limit and the highest values are Linux' own")
def test_no_task_holds_a_shard_of_256_mb_twice(tmp_path: pathlib.Path) -> None:
    # Initialises, trains, saves and loads; the program fails if a task had more than its share and this beside it.
    program = [sys.executable, programs.ROOT / "benchmarks" / "large_table.py", "--table_mb=1024", "--spare_mb=240"]
    done = subprocess.run(
        [*program, f"--output={tmp_path / 'found.json'}"], capture_output=True, text=True, timeout=380, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-20000:]

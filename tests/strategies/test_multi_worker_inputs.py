# SPDX-License-Identifier: Apache-2.0
"""MultiWorkerMirroredStrategy on two processes: variables of every dtype, and batches that are not dense or even."""

from __future__ import annotations

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import process_cluster

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

PROGRAM = """
strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout_secs=60)
dtypes = "int8", "uint8", "int16", "uint32", "bfloat16", "float16", "int64", "bool"
with strategy.scope():
    # The chief's values are those of all.
    variables = [tf.Variable(tf.cast([1 - index, 1], dtype)) for dtype in dtypes]
report("dtypes", [[variable.dtype.name, *tf.cast(variable, "int32").numpy().tolist()] for variable in variables])

with strategy.scope():
    half = keras.Sequential([keras.Input((3,), dtype="bfloat16"), keras.layers.Dense(1, dtype="bfloat16")])
    half.compile("sgd", "mse")
x, y = np.ones([8, 3], np.float32), np.ones([8, 1], np.float32)
half.fit(x, y, batch_size=4, verbose=0)
report("half", tf.cast(half.weights[0], "float32").numpy().tolist())

class Rows(keras.Model):
    def __init__(self):
        super().__init__()
        self.kernel = self.add_weight(shape=(3, 1), initializer="ones", name="k")
    def call(self, x):
        if isinstance(x, tf.SparseTensor):
            return tf.sparse.sparse_dense_matmul(x, tf.convert_to_tensor(self.kernel))
        return tf.matmul(x.to_tensor(shape=(None, 3)), tf.convert_to_tensor(self.kernel))

def trained(scope, rows):
    with scope.scope():
        model = Rows()
        model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(tf.data.Dataset.from_tensor_slices((rows, y[:6])).batch(4), epochs=2, verbose=0)
    return model.get_weights()[0]

ragged = tf.ragged.constant([[0.5], [1.0, 2.0, 0.1], [0.3, 0.4], [0.6], [0.1, 0.7], [0.2]])
for rows in (ragged, ragged.to_sparse()):
    one = trained(tf.distribute.get_strategy(), rows)
    report(type(rows).__name__, float(np.abs(one - trained(strategy, rows)).max()))

with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
gathered = [strategy.gather(tf.range(index + step, dtype=tf.float32), axis=0).numpy().tolist() for step in (1, 2, 3)]
traced = [function.experimental_get_tracing_count() for function in strategy._gathers.values()]
report("gathered", [gathered, traced, strategy.gather(tf.fill([2, index + 1], index), axis=1).numpy().tolist()])

scales = tf.ones([3])
try:
    model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(4).map(lambda x, y: ((scales, x), y)), verbose=0)
except ValueError as error:
    report("uneven", str(error))
"""


def test_dtypes_and_inputs_of_every_kind(tmp_path: pathlib.Path):
    first, second = process_cluster.run(PROGRAM, tmp_path, timeout_secs=200)
    dtypes = ["int8", "uint8", "int16", "uint32", "bfloat16", "float16", "int64", "bool"]
    for found in (first, second):
        assert found["dtypes"] == [[dtype, 1, 1] for dtype in dtypes]
        assert found["RaggedTensor"] < 1e-5
        assert found["SparseTensor"] < 1e-5
        expected = [[*range(step), *range(step + 1)] for step in (1, 2, 3)]
        assert found["gathered"] == [expected, [1], [[0, 1, 1]] * 2]
        assert "different numbers of examples" in found["uneven"]
        assert found["uneven"].endswith("Received examples: [3, 4, 4]")
    assert first["half"] == second["half"]

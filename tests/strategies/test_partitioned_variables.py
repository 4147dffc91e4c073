# SPDX-License-Identifier: Apache-2.0
"""With `variable_partitioner`, the rows of a variable are spread over parameter servers, and train as on one device."""

from __future__ import annotations

import pathlib

import programs
import pytest

SCRIPT = """
def trained(strategy, optimizer):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [keras.layers.Dense(600), keras.layers.Dense(300), keras.layers.Dense(1)]
        made = keras.Sequential([keras.Input((4,)), *layers])
        made.compile(optimizer(), "mse")
    made.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    return made
partitioner = tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)
policies = [tfdist.BackupWorkers(spares=0)]
partitioned = tfdist.ParameterServerStrategy(
    num_workers=1, num_ps=2, variable_partitioner=partitioner, policies=policies)
for optimizer in [lambda: keras.optimizers.SGD(0.01), lambda: keras.optimizers.SGD(0.01, momentum=0.9)]:
    found, expected = trained(partitioned, optimizer), trained(tf.distribute.get_strategy(), optimizer)
    assert len(found.layers[1].kernel.value.variables) == 2
    for one, other in zip(found.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
"""


@pytest.mark.processes
def test_partitioned_kernels_train_as_on_one_device(tmp_path: pathlib.Path) -> None:
    with programs.running(SCRIPT, tmp_path) as program:
        assert program.wait(200) == 0, program.output

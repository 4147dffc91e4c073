# SPDX-License-Identifier: Apache-2.0
"""Wide layers train as on one device, however their variables are spread over servers and cross the network."""

from __future__ import annotations

import pathlib

import programs
import pytest

BEGIN = """
def check_like_one_device(strategy, optimizer):
    found, expected = trained(strategy, optimizer), trained(tf.distribute.get_strategy(), optimizer)
    for one, other in zip(found.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    return found
def trained(strategy, optimizer):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [keras.layers.Dense(600), keras.layers.Dense(300), keras.layers.Dense(1)]
        made = keras.Sequential([keras.Input((4,)), *layers])
        made.compile(optimizer(), "mse")
    made.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    return made
"""
TRANSFER = """
strategy = tfdist.ParameterServerStrategy(num_workers=1, transfer="{transfer}")
check_like_one_device(strategy, lambda: keras.optimizers.SGD(0.001)).evaluate(X, Y, verbose=0)
print("TRANSFER", strategy.report().transfer, flush=True)
"""
PARTITIONED = """
partitioner = tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)
policies = [tfdist.BackupWorkers(spares=0)]
partitioned = tfdist.ParameterServerStrategy(
    num_workers=1, num_ps=2, variable_partitioner=partitioner, policies=policies)
for optimizer in [lambda: keras.optimizers.SGD(0.01), lambda: keras.optimizers.SGD(0.01, momentum=0.9)]:
    found = check_like_one_device(partitioned, optimizer)
    assert len(found.layers[1].kernel.value.variables) == 2
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("script", "said"),
    [
        (TRANSFER.format(transfer="plain"), "TRANSFER each variable and gradient sent whole"),
        (TRANSFER.format(transfer="auto"), "TRANSFER embedding rows gathered at the table"),
        (PARTITIONED, ""),
    ],
    ids=["plain", "auto", "partitioned"],
)
def test_a_wide_layer_trains_as_on_one_device(script: str, said: str, tmp_path: pathlib.Path) -> None:
    with programs.running(BEGIN + script, tmp_path) as program:
        assert program.wait(200) == 0, program.output
    assert said in program.output

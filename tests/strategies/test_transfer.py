# SPDX-License-Identifier: Apache-2.0
"""However variables and gradients cross the network, a wide layer trains as on one device."""

from __future__ import annotations

import pathlib

import programs
import pytest

SCRIPT = """
def trained(strategy):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [keras.layers.Dense(300), keras.layers.Dense(400), keras.layers.Dense(1)]
        made = keras.Sequential([keras.Input((4,)), *layers])
        made.compile(keras.optimizers.SGD(0.001), "mse")
    made.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    return made
strategy = tfdist.ParameterServerStrategy(num_workers=1, transfer="{transfer}")
found, expected = trained(strategy), trained(tf.distribute.get_strategy())
for one, other in zip(found.get_weights(), expected.get_weights(), strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
found.evaluate(X, Y, verbose=0)
print("TRANSFER", strategy.report().transfer, flush=True)
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("transfer", "said"),
    [("plain", "each variable and gradient sent whole"), ("auto", "embedding rows gathered at the table")],
)
def test_a_wide_layer_trains_as_on_one_device(transfer: str, said: str, tmp_path: pathlib.Path) -> None:
    with programs.running(SCRIPT.format(transfer=transfer), tmp_path) as program:
        assert program.wait(200) == 0, program.output
    assert f"TRANSFER {said}" in program.output

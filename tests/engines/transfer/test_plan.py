# SPDX-License-Identifier: Apache-2.0
"""The transfer of a strategy is decided once, from the server's speed and the workers that share it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tensorflow as tf

from tfdist.engines.transfer import plan
from tfdist.engines.transfer.plan import Speed

# 10 Gbit/s, and one core.
USUAL = Speed(bytes_per_sec=1.25e9, flops_per_sec=40e9)


@pytest.mark.parametrize(
    ("speed", "workers_per_server", "has_gpu", "rows"),
    [
        (USUAL, 1000.0, False, 64),
        (USUAL, 4.0, False, 85),
        (USUAL, 2.0, False, 128),
        (USUAL, 0.5, False, 128),
        (USUAL, 2.0, True, 64),
        (Speed(12.5e9, 40e9), 1000.0, False, 6),
        (Speed(1.25e9, 400e9), 1000.0, False, 640),
    ],
)
def test_rows_follow_network_server_and_workers(
    speed: Speed, workers_per_server: float, has_gpu: bool, rows: int
) -> None:
    assert plan.most_rows(speed, workers_per_server, has_gpu) == rows


def test_auto_measures_once_and_says_so_once() -> None:
    measured, said = [], []
    chosen = plan.choose_plan("auto", 4, 2, False, lambda: measured.append(1) or USUAL, said.append)
    assert "no step with a large kernel yet" in str(chosen)
    assert chosen.transfer is chosen.transfer
    assert chosen.transfer.product_rows == chosen.transfer.factor_rows == 128
    assert str(chosen) == (
        "embedding rows gathered at the table, small variables sent together, gradients sent as factors of up to 128 "
        "rows, products with kernels of up to 128 rows on the server (measured 1.25 GB/s, 40 GFLOP/s; 2 workers per "
        "server)"
    )
    assert said == [f"transfer: {chosen}"]
    assert measured == [1]


def raises(error: Exception) -> Callable[[], Speed]:
    def measure() -> Speed:
        raise error

    return measure


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError("no answer within 0.9 s"),
        tf.errors.UnavailableError(None, None, "no answer\nat all"),
        RuntimeError("no answer"),
    ],
)
def test_without_a_measurement_kernels_are_sent(error: Exception) -> None:
    said: list[str] = []
    transfer = plan.choose_plan("auto", 2, 1, False, raises(error), said.append).transfer
    assert transfer.gathers_rows
    assert transfer.bundles_small
    assert transfer.product_rows == transfer.factor_rows == 0
    assert "could not be measured: no answer" in said[0]
    assert "\n" not in said[0]


def test_plain_measures_nothing() -> None:
    chosen = plan.choose_plan("plain", 2, 1, False, raises(AssertionError()), lambda line: pytest.fail(line))
    assert str(chosen) == 'each variable and gradient sent whole (transfer="plain")'
    assert str(chosen.transfer) == str(chosen)
    specs = [tf.TensorSpec([2]), tf.TensorSpec([3])]
    assert len(chosen.bundles(specs, ["a", "a"]).devices) == 2
    assert len(plan.fixed(1).bundles(specs, ["a", "a"]).devices) == 1

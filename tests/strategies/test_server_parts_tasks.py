# SPDX-License-Identifier: Apache-2.0
"""`ParameterServerStrategy(devices_per_replica=2)`: what is refused.

`test_server_parts.py` has what the workers compute.
"""

from __future__ import annotations

import types

import pytest
import tensorflow as tf

import tfdist
from tfdist.strategies import _devices

pytestmark = pytest.mark.processes


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

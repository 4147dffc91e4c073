# SPDX-License-Identifier: Apache-2.0
"""Tests of the arguments of ParameterServerStrategy, without a cluster that runs."""

import json
import types
import warnings

import pytest
import tensorflow as tf

from tfdist.cluster import Cluster
from tfdist.strategies import _devices, parameter_server

JOBS = {"chief": ["a:1"], "worker": ["b:1", "b:2", "b:3"], "ps": ["c:1"]}
CLUSTER = Cluster.from_tf_config(json.dumps({"cluster": JOBS, "task": {"type": "chief", "index": 0}}))


def test_sizes_that_contradict_the_cluster_are_warned_of():
    with pytest.warns(RuntimeWarning, match=r"num_workers=5\) has no effect.* 3 worker tasks; .*--num_workers=5"):
        parameter_server.warn_of_sizes(CLUSTER, 5, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parameter_server.warn_of_sizes(CLUSTER, 3, 1)
        parameter_server.warn_of_sizes(CLUSTER, None, None)


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

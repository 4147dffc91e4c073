# SPDX-License-Identifier: Apache-2.0
"""States of codecs on their way to a checkpoint and from it: in blocks, for each of which the time limit holds anew."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfdist.compat.tensorflow import coordinator
from tfdist.compression import TopK, on_servers
from tfdist.engines import server_calls
from tfdist.engines.server_calls import CodecStates

pytestmark = pytest.mark.devices

SPECS = [tf.TensorSpec([400])]
GRADIENTS = [np.linspace(-1, 1, 400, dtype=np.float32)]
ENCODE = on_servers.encode_request(TopK(0.1), SPECS, "run/a")
BLOCK_BYTES = 1000


class Cluster:
    """Server functions of two workers in this process, in place of calls over the network.

    Attributes:
      servers: functions of the workers.
      waits: tasks that were waited for, in order.
      largest: most bytes of one argument or answer.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.servers = [on_servers.CodecServer(f"worker:{index}") for index in range(2)]
        self.waits: list[str] = []
        self.largest = 0
        monkeypatch.setattr(server_calls, "call_server", self._call)
        monkeypatch.setattr(server_calls, "within", self._within)
        monkeypatch.setattr(coordinator, "lost_workers", lambda coordinator: set())
        monkeypatch.setattr(server_calls, "optimizers_of", lambda model: [object()])
        encoding: Any = types.SimpleNamespace(codec=TopK(0.1), prefix_of=lambda optimizer: "run/")
        self.states = CodecStates(encoding, None, 2, timeout_secs=3.0, block_bytes=BLOCK_BYTES)

    def _call(self, task: str, request: bytes, *arguments: tf.Tensor) -> np.ndarray:
        (answer,) = self.servers[int(task[-1])](request, *(each.numpy() for each in arguments))
        self.largest = max(self.largest, answer.size, *(each.shape.num_elements() or 0 for each in arguments))
        return answer

    def _within(self, timeout_secs: float, task: str, function: Callable[[], Any]) -> Any:
        assert timeout_secs == 3.0
        self.waits.append(task)
        return function()


def test_states_are_moved_in_blocks_each_with_a_wait_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    for server in cluster.servers:
        server(ENCODE, *GRADIENTS)
    described, arrays = cluster.states.collect(None)
    blocks = [-(-each.size // BLOCK_BYTES) for each in arrays]
    assert min(blocks) >= 3
    assert cluster.waits == ["worker:0"] * blocks[0] + ["worker:1"] * blocks[1]
    assert not any(server._collected for server in cluster.servers)

    old, cluster.waits = cluster.servers, []
    cluster.servers = [on_servers.CodecServer(f"worker:{index}") for index in range(2)]
    cluster.states.distribute(None, described, arrays)
    assert cluster.waits == ["worker:0"] * blocks[0] + ["worker:1"] * blocks[1]
    assert not any(server._restored for server in cluster.servers)
    assert cluster.largest <= BLOCK_BYTES + 8
    # They go on as those do whose states were saved.
    for before, after in zip(old, cluster.servers, strict=True):
        np.testing.assert_array_equal(after(ENCODE, *GRADIENTS)[0], before(ENCODE, *GRADIENTS)[0])


def test_state_of_a_process_replaced_between_blocks_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    for server in cluster.servers:
        server(ENCODE, *GRADIENTS)

    def replaced(timeout_secs: float, task: str, function: Callable[[], Any]) -> Any:
        answer = function()
        if task == "worker:0":
            cluster.servers[0] = on_servers.CodecServer("worker:0")
        return answer

    monkeypatch.setattr(server_calls, "within", replaced)
    first, second = cluster.states.collect(None)[1]
    assert first.size == 0
    assert second.size > BLOCK_BYTES

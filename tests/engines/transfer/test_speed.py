# SPDX-License-Identifier: Apache-2.0
"""A parameter server's speed is measured within a time limit, also while a step is traced."""

from __future__ import annotations

import threading

import pytest
import tensorflow as tf

from tfdist.engines.transfer import plan

pytestmark = [pytest.mark.devices, pytest.mark.usefixtures("cpus")]

SERVER = "/job:localhost/replica:0/task:0/device:CPU:1"


def test_a_server_is_measured_while_a_step_is_traced() -> None:
    found = []

    @tf.function
    def step() -> tf.Tensor:
        found.append(plan.measure(SERVER, limit_secs=60.0))
        return tf.constant(1)

    operations = step.get_concrete_function().graph.get_operations()
    assert found[0].bytes_per_sec > 0
    assert found[0].flops_per_sec > 0
    assert not [each for each in operations if each.type == "MatMul"]


def test_an_unknown_server_is_an_error_of_tensorflow() -> None:
    with pytest.raises(tf.errors.OpError):
        plan.measure("/job:ps/replica:0/task:7/device:CPU:0", limit_secs=60.0)


def test_a_server_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()
    monkeypatch.setattr(plan, "_measure", lambda server, deadline: answer.wait())
    with pytest.raises(TimeoutError, match=r"no answer within 0\.01 s"):
        plan.measure(SERVER, limit_secs=0.01)
    answer.set()

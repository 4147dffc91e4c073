# SPDX-License-Identifier: Apache-2.0
"""Private parts of `ClusterCoordinator` that the engine uses exist and mean the same.

If one of these fails after an update of TensorFlow, `tfdist/compat/tensorflow/coordinator.py` is the file to change.
That the calls also do what is said there is shown on a real cluster, by `tests/strategies/test_parameter_server.py`.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tensorflow as tf
from tensorflow.python.distribute.coordinator import cluster_coordinator, coordinator_context
from tensorflow.python.eager import context

from tfdist.compat.tensorflow.coordinator import current_worker, has_failed, is_task_failure, raise_failure

pytestmark = pytest.mark.devices


def test_a_closure_calls_what_is_no_tf_function_as_it_is() -> None:
    calls = []
    manager = SimpleNamespace(get_cancelable_function=lambda function: pytest.fail("not a tf.function"))
    closure = cluster_coordinator.Closure(lambda *args: calls.append(args), manager, ("a", 1), {})
    worker = SimpleNamespace(device_name="/device:CPU:0", worker_index=0, executor=context.context().executor)
    closure.execute_on(worker)
    assert calls == [("a", 1)]


def test_what_can_not_be_mended_stands_in_the_queue_and_is_raised_once() -> None:
    queue = cluster_coordinator._CoordinatedClosureQueue()
    coordinator = object.__new__(cluster_coordinator.ClusterCoordinator)
    coordinator._cluster = SimpleNamespace(closure_queue=queue, done=queue.done, stop=queue.stop)
    assert not has_failed(coordinator)
    queue.put(SimpleNamespace(mark_cancelled=lambda: None))
    queue.get()
    queue.mark_failed(tf.errors.UnavailableError(None, None, "ps:0 is lost"))
    assert has_failed(coordinator)
    with pytest.raises(tf.errors.UnavailableError, match="ps:0 is lost"):
        raise_failure(coordinator)
    assert not has_failed(coordinator)
    raise_failure(coordinator)
    queue.stop()


def test_a_thread_knows_its_worker_only_inside_of_a_closure() -> None:
    assert current_worker() is None
    with coordinator_context.with_dispatch_context(SimpleNamespace(worker_index=3)):
        assert current_worker() == 3
    assert current_worker() is None


WORKER = "from /job:worker/replica:0/task:1"


@pytest.mark.parametrize(
    "error",
    [
        tf.errors.UnavailableError(None, None, f"connection reset by peer {WORKER}"),
        tf.errors.AbortedError(None, None, f"restarted {WORKER}"),
        tf.errors.CancelledError(None, None, f"cancelled {WORKER}"),
        tf.errors.InvalidArgumentError(None, None, f"Unable to find the relevant tensor remote_handle {WORKER}"),
        tf.errors.InvalidArgumentError(None, None, f"unknown device {WORKER}"),
    ],
    ids=lambda error: f"{type(error).__name__} {error.message[:14]}",
)
def test_a_failure_that_the_coordinator_mends_is_passed_on_to_it(error: Exception) -> None:
    assert cluster_coordinator._is_worker_failure(error)
    for wrapped in (
        error,
        cluster_coordinator.ClosureInputError(error),
        cluster_coordinator.ClosureAbortedError(error),
    ):
        assert is_task_failure(wrapped)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("mine"),
        tf.errors.InvalidArgumentError(None, None, f"NaN in my loss {WORKER}"),
        tf.errors.OutOfRangeError(None, None, "End of sequence"),
        tf.errors.ResourceExhaustedError(None, None, f"OOM {WORKER}"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_the_users_code_is_not(error: Exception) -> None:
    assert not is_task_failure(error)

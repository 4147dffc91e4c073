# SPDX-License-Identifier: Apache-2.0
"""One process of one contender: it trains for a number of steps whenever the arena says so.

Started by `arena.py`, never by hand. Messages from the arena are ("prepare", steps): begin to train in segments of so
many steps; and "go": do one segment. The answer to "go" is the segment's seconds. Between segments the process waits,
inside of `fit`, so that what a segment costs is what an epoch of a running `fit` costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from types import ModuleType
from typing import Any

from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_string("contender", None, "ROW/NAME, such as mirrored/stock.", required=True)
flags.DEFINE_string("size", None, "A key of models.SIZES.", required=True)
flags.DEFINE_string("address", None, "The arena's socket.", required=True)
flags.DEFINE_string("task", None, "What the arena calls this process.", required=True)


class NewSteps(Exception):  # noqa: N818, it is no error
    """The arena wants segments of another length, so this `fit` ends."""


class Gate:
    """What stands at both ends of a segment."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self.steps = self._prepared(connection.recv())

    def enter(self) -> None:
        """Waits until the arena wants a segment."""
        message = self._connection.recv()
        if message != "go":
            self.steps = self._prepared(message)
            raise NewSteps
        self._start = time.perf_counter()

    def leave(self) -> None:
        self._connection.send(time.perf_counter() - self._start)

    @staticmethod
    def _prepared(message: tuple[str, int]) -> int:
        return message[1]


Loop = Callable[[Gate], None]


def main(argv: list[str]) -> None:
    loop = CONTENDERS[FLAGS.contender]()
    connection = Client(FLAGS.address)
    connection.send(FLAGS.task)
    gate = Gate(connection)
    while True:
        try:
            loop(gate)
        except NewSteps:
            continue
        except EOFError:
            return  # The arena has seen enough.


def _fit_loop(keras: ModuleType, model: Any, data: Any) -> Loop:
    class Segments(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.gate.enter()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.gate.leave()

    def loop(gate: Gate) -> None:
        callback = Segments()
        callback.gate = gate
        model.fit(data, steps_per_epoch=gate.steps, epochs=10**6, verbose=0, callbacks=[callback])

    return loop


def _mirrored(strategy_class: Callable[[], Any]) -> Loop:
    import keras
    import models
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    size = models.SIZES[FLAGS.size]
    with strategy_class(["CPU:0", "CPU:1"]).scope():
        model = models.compiled(keras, size)
    return _fit_loop(keras, model, models.dataset(size, replicas=2))


def _mirrored_tfdist() -> Loop:
    import tfdist

    return _mirrored(tfdist.MirroredStrategy)


def _mirrored_stock() -> Loop:
    import tensorflow as tf

    return _mirrored(tf.distribute.MirroredStrategy)


def _multi_worker(keras: ModuleType, strategy: Any) -> Loop:
    import models

    size = models.SIZES[FLAGS.size]
    with strategy.scope():
        model = models.compiled(keras, size)
    return _fit_loop(keras, model, models.dataset(size, replicas=strategy.num_replicas_in_sync))


def _multi_worker_tfdist() -> Loop:
    import keras

    import tfdist

    return _multi_worker(keras, tfdist.MultiWorkerMirroredStrategy())


def _multi_worker_tf_keras() -> Loop:
    import tensorflow as tf
    import tf_keras

    return _multi_worker(tf_keras, tf.distribute.MultiWorkerMirroredStrategy())


def _parameter_server_tfdist() -> Loop:
    import tfdist

    strategy = tfdist.ParameterServerStrategy()  # In a worker's or ps' task this serves, and never returns.
    import keras
    import models

    size = models.SIZES[FLAGS.size]
    with strategy.scope():
        model = models.compiled(keras, size)
    return _fit_loop(keras, model, models.dataset(size))


def _parameter_server_tf_keras() -> Loop:
    import models
    import tensorflow as tf
    import tf_keras

    size = models.SIZES[FLAGS.size]
    strategy = tf.distribute.ParameterServerStrategy(_serve_or_resolver())
    with strategy.scope():
        model = models.compiled(tf_keras, size)
    return _fit_loop(tf_keras, model, tf_keras.utils.experimental.DatasetCreator(lambda _: models.dataset(size)))


def _parameter_server_bare() -> Loop:
    """A `ClusterCoordinator` that schedules Keras 3's own train_step and throws the results away."""
    import keras
    import models
    import tensorflow as tf

    size = models.SIZES[FLAGS.size]
    strategy = tf.distribute.ParameterServerStrategy(_serve_or_resolver())
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model = models.compiled(keras, size)
        model.optimizer.build(model.trainable_variables)

    @tf.function
    def step(iterator: Any) -> Any:
        return strategy.run(model.train_step, args=(next(iterator),))

    iterator = iter(coordinator.create_per_worker_dataset(lambda: models.dataset(size)))

    def loop(gate: Gate) -> None:
        while True:
            gate.enter()
            for _ in range(gate.steps):
                coordinator.schedule(step, args=(iterator,))
            coordinator.join()
            gate.leave()

    return loop


def _serve_or_resolver() -> Any:
    """In a worker's or ps' task of a stock cluster: serves, until the arena ends it. In the chief: the cluster."""
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        server = tf.distribute.Server(
            resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc"
        )
        server.join()
    return resolver


CONTENDERS: dict[str, Callable[[], Loop]] = {
    "mirrored/tfdist": _mirrored_tfdist,
    "mirrored/stock": _mirrored_stock,
    "multi_worker/tfdist": _multi_worker_tfdist,
    "multi_worker/tf_keras": _multi_worker_tf_keras,
    "parameter_server/tfdist": _parameter_server_tfdist,
    "parameter_server/bare": _parameter_server_bare,
    "parameter_server/tf_keras": _parameter_server_tf_keras,
}


if __name__ == "__main__":
    app.run(main)

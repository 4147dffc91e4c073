# SPDX-License-Identifier: Apache-2.0
"""One process of one contender: it trains for a number of steps whenever the arena says so.

Started by `arena.py`, never by hand. Messages from the arena are ("prepare", steps): begin to train in segments of so
many steps; and ("go", delays): do one segment with these delays. The answer to "go" is the segment's seconds. Between
segments the process waits, inside of `fit`, so that what a segment costs is what an epoch of a running `fit` costs.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client
from types import ModuleType
from typing import Any

from absl import app, flags
from segments import Gate, Loop, NewSteps, fit_loop

FLAGS = flags.FLAGS
flags.DEFINE_string("contender", None, "ROW/NAME, such as mirrored/stock.", required=True)
flags.DEFINE_string("size", None, "A key of models.SIZES.", required=True)
flags.DEFINE_string("address", None, "The arena's socket.", required=True)
flags.DEFINE_string("task", None, "What the arena calls this process.", required=True)
flags.DEFINE_integer("core", None, "The core that this process keeps to, if it is to keep to one.")


def main(argv: list[str]) -> None:
    if FLAGS.core is not None:
        # Before TensorFlow is imported, which then makes as many threads as there are cores.
        os.sched_setaffinity(0, {FLAGS.core})
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


def _mirrored(strategy_class: Callable[[Any], Any], num_devices: int = 2, late: Sequence[int] = ()) -> Loop:
    import keras
    import models
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * num_devices)
    size = models.SIZES[FLAGS.size]
    with strategy_class([f"CPU:{index}" for index in range(num_devices)]).scope():
        model = models.compiled(keras, size)
    return fit_loop(keras, model, models.dataset(size, replicas=num_devices), late)


def _tfdist(few_arenas: bool = True) -> ModuleType:
    """The package, set up for a process that does nothing but train, as a program that trains large models does."""
    import tfdist

    tfdist.keep_freed_memory(few_arenas)
    return tfdist


def _mirrored_tfdist() -> Loop:
    tfdist = _tfdist(few_arenas=False)

    return _mirrored(tfdist.MirroredStrategy)


def _mirrored_stock() -> Loop:
    import tensorflow as tf

    return _mirrored(tf.distribute.MirroredStrategy)


def _mirrored_spares(spares: int) -> Loop:
    tfdist = _tfdist(few_arenas=False)

    return _mirrored(
        lambda devices: tfdist.MirroredStrategy(devices, policies=[tfdist.BackupWorkers(spares=spares)]), num_devices=4
    )


def _mirrored_no_policy() -> Loop:
    tfdist = _tfdist(few_arenas=False)

    return _mirrored(tfdist.MirroredStrategy, num_devices=4, late=range(4))


def _multi_worker(
    keras: ModuleType,
    strategy: Any,
    late: Sequence[int] = (),
    counts_end_of_epoch: bool = True,
    steps_per_execution: int = 1,
) -> Loop:
    import models

    size = models.SIZES[FLAGS.size]
    with strategy.scope():
        model = models.compiled(keras, size, steps_per_execution=steps_per_execution)
    data = models.dataset(size, replicas=strategy.num_replicas_in_sync)
    return fit_loop(keras, model, data, late, counts_end_of_epoch)


def _multi_worker_tfdist(
    communication: str = "tensorflow",
    steps_per_execution: int = 1,
    num_threads: int = 0,
    codec: str = "",
    clips: bool = False,
) -> Loop:
    import keras
    import tensorflow as tf

    tfdist = _tfdist()
    tf.config.threading.set_intra_op_parallelism_threads(num_threads)
    how: dict[str, Any] = {"communication": communication}
    if codec:
        how["policies"] = [tfdist.Compression(codec)]
    if clips:
        how["transforms"] = [tfdist.transforms.clip_by_global_norm(1.0)]
    strategy = tfdist.MultiWorkerMirroredStrategy(**how)
    return _multi_worker(keras, strategy, steps_per_execution=steps_per_execution)


def _multi_worker_mpi_spinning() -> Loop:
    """Keeps its core while it waits, as an MPI library does that takes each core for its own."""
    from tfdist.transport import mpi

    start = mpi.Mpi.__init__

    def start_spinning(self: Any, *arguments: Any, **options: Any) -> None:
        start(self, *arguments, **options)
        self._spin_secs = self._yield_secs = float("inf")

    mpi.Mpi.__init__ = start_spinning
    return _multi_worker_tfdist("mpi", 1, 1)


def _multi_worker_torch(is_independent: bool = False) -> Loop:
    import torch_ddp

    return torch_ddp.loop_of(FLAGS.size, is_independent)


def _multi_worker_independent(steps_per_execution: int = 1) -> Loop:
    """Keras without a strategy, in a process that is set up as those of `_multi_worker_tfdist`."""
    import tensorflow as tf

    from tfdist import _machine

    # As a launched worker does: what the allocators save is not the cost of distribution.
    _machine.keep_if_launched(few_arenas=True)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    return _one_device(steps_per_execution)


def _multi_worker_warmup() -> Loop:
    """The phase lasts for as long as the arena wants."""
    import keras

    tfdist = _tfdist()

    strategy = tfdist.MultiWorkerMirroredStrategy(communication="tensorflow", policies=[tfdist.Warmup(steps=10**9)])
    return _multi_worker(keras, strategy, counts_end_of_epoch=False)


def _one_device(steps_per_execution: int = 1) -> Loop:
    import keras
    import models

    size = models.SIZES[FLAGS.size]
    model = models.compiled(keras, size, steps_per_execution=steps_per_execution)
    return fit_loop(keras, model, models.dataset(size), counts_end_of_epoch=False)


def _one_device_tfdist() -> Loop:
    tfdist = _tfdist(few_arenas=False)

    return _mirrored(tfdist.MirroredStrategy, num_devices=1)


def _one_device_keras(backend: str) -> Loop:
    """Keras on one of its other backends, as it is."""
    os.environ["KERAS_BACKEND"] = backend
    import keras
    import models

    size = models.SIZES[FLAGS.size]
    (batch,) = models.dataset(size).take(1).as_numpy_iterator()
    batch = tuple(map(keras.ops.convert_to_tensor, batch))
    # Keras takes a generator, and no other iterator.
    return fit_loop(keras, models.compiled(keras, size), (batch for _ in itertools.count()))


def _multi_worker_spares(spares: int) -> Loop:
    import keras

    tfdist = _tfdist()

    return _multi_worker(
        keras,
        tfdist.MultiWorkerMirroredStrategy(communication="tensorflow", policies=[tfdist.BackupWorkers(spares=spares)]),
    )


def _multi_worker_no_policy() -> Loop:
    import keras

    tfdist = _tfdist()

    strategy = tfdist.MultiWorkerMirroredStrategy(communication="tensorflow")
    return _multi_worker(keras, strategy, late=[strategy.cluster_resolver.task_id])


def _multi_worker_tf_keras() -> Loop:
    import tensorflow as tf
    import tf_keras

    return _multi_worker(tf_keras, tf.distribute.MultiWorkerMirroredStrategy())


def _parameter_server_tfdist(
    spares: int | None = None, steps_per_execution: int = 1, clips: bool = False, accumulates: bool = False
) -> Loop:
    import tfdist

    policies = [] if spares is None else [tfdist.BackupWorkers(spares=spares)]
    # Versions before the argument have none.
    how = {"transforms": [tfdist.transforms.clip_by_global_norm(1.0)]} if clips else {}
    # In a worker's or ps' task this serves, and never returns.
    strategy = tfdist.ParameterServerStrategy(policies=policies, **how)
    import keras
    import models

    size = models.SIZES[FLAGS.size]
    with strategy.scope():
        model = models.compiled(keras, size, accumulates, steps_per_execution=steps_per_execution)
    # With a policy, a batch is shared among the workers.
    replicas = 1 if spares is None else len(tfdist.Cluster.from_environment().jobs["worker"])
    return fit_loop(keras, model, models.dataset(size, replicas))


def _parameter_server_asynchronous(name: str, number: int) -> Loop:
    """Under the policy of this name. It tells the largest staleness of a gradient so far."""
    import tfdist

    strategy = tfdist.ParameterServerStrategy(policies=[getattr(tfdist, name)(number)])
    import keras
    import models

    size = models.SIZES[FLAGS.size]
    with strategy.scope():
        model = models.compiled(keras, size)
    loop = fit_loop(keras, model, models.dataset(size))

    def answering_loop(gate: Gate) -> None:
        gate.answer = lambda: max(strategy.report().staleness, default=0)
        loop(gate)

    return answering_loop


def _parameter_server_tf_keras() -> Loop:
    import models
    import tensorflow as tf
    import tf_keras

    size = models.SIZES[FLAGS.size]
    strategy = tf.distribute.ParameterServerStrategy(_serve_or_resolver())
    with strategy.scope():
        model = models.compiled(tf_keras, size)
    return fit_loop(tf_keras, model, tf_keras.utils.experimental.DatasetCreator(lambda _: models.dataset(size)))


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
    "multi_worker/tensorflow": functools.partial(_multi_worker_tfdist, "tensorflow", 1, 1),
    "multi_worker/tensorflow x16": functools.partial(_multi_worker_tfdist, "tensorflow", 16, 1),
    "multi_worker/auto": functools.partial(_multi_worker_tfdist, "tensorflow", 1, 1, "auto"),
    "multi_worker/mpi": functools.partial(_multi_worker_tfdist, "mpi", 1, 1),
    "multi_worker/mpi spinning": _multi_worker_mpi_spinning,
    "multi_worker/mpi x16": functools.partial(_multi_worker_tfdist, "mpi", 16, 1),
    "multi_worker/torch": _multi_worker_torch,
    "multi_worker/torch independent": functools.partial(_multi_worker_torch, is_independent=True),
    "multi_worker/independent": _multi_worker_independent,
    "multi_worker/independent x16": functools.partial(_multi_worker_independent, 16),
    "mirrored/tfdist": _mirrored_tfdist,
    "mirrored/stock": _mirrored_stock,
    "mirrored/no policy": _mirrored_no_policy,
    "multi_worker/tfdist": _multi_worker_tfdist,
    "multi_worker/clipped": functools.partial(_multi_worker_tfdist, clips=True),
    "multi_worker/tf_keras": _multi_worker_tf_keras,
    "multi_worker/no policy": _multi_worker_no_policy,
    "multi_worker/warmup": _multi_worker_warmup,
    "one_device/plain": _one_device,
    "one_device/tfdist": _one_device_tfdist,
    **{f"one_device/keras_{name}": functools.partial(_one_device_keras, name) for name in ("torch", "jax")},
    "parameter_server/tfdist": _parameter_server_tfdist,
    "parameter_server/x16": functools.partial(_parameter_server_tfdist, None, 16),
    "parameter_server/x16 accumulating": functools.partial(_parameter_server_tfdist, None, 16, accumulates=True),
    "parameter_server/clipped": functools.partial(_parameter_server_tfdist, clips=True),
    "parameter_server/bare": _parameter_server_bare,
    "parameter_server/tf_keras": _parameter_server_tf_keras,
    "parameter_server/soft_sync=1": functools.partial(_parameter_server_asynchronous, "SoftSync", 1),
    **{
        f"parameter_server/bound={bound}": functools.partial(_parameter_server_asynchronous, "BoundedStaleness", bound)
        for bound in (1, 2, 4, 8)
    },
    **{f"mirrored/spares={spares}": functools.partial(_mirrored_spares, spares) for spares in range(3)},
    **{f"multi_worker/spares={spares}": functools.partial(_multi_worker_spares, spares) for spares in range(3)},
    **{f"parameter_server/spares={spares}": functools.partial(_parameter_server_tfdist, spares) for spares in range(3)},
}


if __name__ == "__main__":
    app.run(main)

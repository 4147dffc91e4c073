# SPDX-License-Identifier: Apache-2.0
"""A data set that the workers read: who gets which batches, and how it gets there."""

from __future__ import annotations

import functools
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.python.distribute import input_lib

from tfdist.engines import closures
from tfdist.engines.dataset_graph import DatasetGraph, rebuild
from tfdist.engines.worker_data import WorkerIterator

if TYPE_CHECKING:
    from tfdist.engines.coordinated import CoordinatedEngine

# Protocol buffers end at 2 GiB; a data set is shipped inside one.
_MAX_SHIPPED_BYTES = 2**31 - 2**20


class WorkerDataset(input_lib.DistributedDataset):
    """A data set of which each worker reads its share.

    It says that it is the stock `DistributedDataset`, which shares nothing with it but its interface, because Keras
    goes by that class when it decides what `fit` takes.

    Args:
      engine: The engine whose workers read it.
      dataset: A `tf.data.Dataset` of batches.
      sharding: `"replicate"`: each worker reads all of it; `"shard"`: worker i of n reads the batches i, i + n, ...;
        `"dynamic"`: each batch goes to the worker that asks first (tf.data service).
    """

    def __init__(self, engine: CoordinatedEngine, dataset: tf.data.Dataset, sharding: str):
        self._engine = engine
        self._dataset = dataset
        self._sharding = sharding
        self._cardinality = int(dataset.cardinality())
        self._shipped: tf.distribute.coordinator.PerWorkerValue | None = None
        self._described: DatasetGraph | None = None

    @property
    def element_spec(self) -> Any:
        """The structure of `tf.TypeSpec`s of a batch."""
        return self._dataset.element_spec

    @property
    def cardinality(self) -> int:
        """Batches in one pass, or one of tf.data's constants for an unknown or endless number."""
        return self._cardinality

    @property
    def lives_in_python(self) -> bool:
        """Whether it calls Python of this process, so that only the chief can read it."""
        return self._graph().lives_in_python

    def _graph(self) -> DatasetGraph:
        if self._described is None:
            self._described = DatasetGraph(self._dataset)
        return self._described

    def __iter__(self) -> WorkerIterator:
        if not tf.executing_eagerly():
            raise RuntimeError("iter(dataset) must be called outside of a tf.function under ParameterServerStrategy.")
        return WorkerIterator(self._engine, self)

    def local_iterator(self) -> Iterator[Any]:
        """An iterator of the chief's own, over the whole."""
        return iter(self._dataset)

    def placeholder(self) -> Any:
        """One batch of zeros, for building a model; a real one where the shape or the kind of a component is open."""
        specs = tf.nest.flatten(self.element_spec)
        if all(
            isinstance(s, tf.TensorSpec) and s.shape.rank is not None and s.shape[1:].is_fully_defined() for s in specs
        ):
            return tf.nest.map_structure(_zeros, self.element_spec)
        return next(self.local_iterator())

    def share(self, worker: int) -> int | None:
        """How many batches of a pass fall to `worker`: `sys.maxsize` if endless, None if only reading tells."""
        total = self.cardinality
        if total == tf.data.UNKNOWN_CARDINALITY or self._sharding == "dynamic":
            return None
        if total == tf.data.INFINITE_CARDINALITY:
            return sys.maxsize
        return total if self._sharding == "replicate" else len(range(worker, total, self._engine.num_workers))

    def iterate_on_workers(self) -> tf.distribute.coordinator.PerWorkerValue:
        """Starts a pass: one iterator on each worker over its share."""
        create = functools.partial(closures.create_on_workers, self._engine.coordinator)
        if self._sharding == "dynamic":
            build = self._join_service()
            return create(lambda: iter(build()))
        if self._shipped is None:
            share = self._shares()
            self._shipped = create(lambda: share(closures.this_worker()))
        return create(iter, self._shipped)

    def _shares(self) -> Callable[[int], tf.data.Dataset]:
        """A function that rebuilds a worker's share, to be called where the worker is the default device."""
        if self._sharding == "shard":
            # Shares of different orders would overlap.
            self._graph().agree_on_order(secrets.randbelow(2**31))
        build = self._rebuilder(self._graph(), self._engine.num_workers if self._sharding == "shard" else 1)
        return lambda worker: build(tf.constant(worker if self._sharding == "shard" else 0, tf.int64))

    def _rebuilder(self, graph: DatasetGraph, num_shards: int) -> Callable[[tf.Tensor], tf.data.Dataset]:
        """A function from the index of a shard to the shard, which carries the data set inside."""
        if graph.num_bytes > _MAX_SHIPPED_BYTES:
            raise ValueError(
                f"The data set holds {graph.num_bytes / 2**30:.1f} GiB in memory, more than the 2 GiB that a worker "
                "can be sent; read it from files with tf.data instead of passing arrays."
            )
        text, spec = graph.serialize(), self.element_spec

        @tf.function(autograph=False)
        def build(shard: tf.Tensor) -> tf.data.Dataset:
            dataset = rebuild(text, spec)
            return dataset.shard(num_shards, shard) if num_shards > 1 else dataset

        return build.get_concrete_function(tf.TensorSpec([], tf.int64))

    def _join_service(self) -> Callable[[], tf.data.Dataset]:
        """A function that makes the worker a consumer of a new pass of the tf.data service."""
        service, address, spec = tf.data.experimental.service, self._engine.data_service_address(), self.element_spec
        dataset = self._dataset
        if self.cardinality >= 0:
            # Several producers would each end with a batch of their own that is not full, and there would be more
            # batches than the data set says it has. A source of one element can't be split: one producer makes all
            # batches.
            dataset = tf.data.Dataset.range(1).flat_map(lambda _: self._dataset)
        dataset_id, job = service.register_dataset(address, dataset), f"tfdist-{secrets.token_hex(8)}"

        @tf.function(autograph=False)
        def build() -> tf.data.Dataset:
            return service.from_dataset_id(
                service.ShardingPolicy.DYNAMIC, address, dataset_id, element_spec=spec, job_name=job
            )

        return build.get_concrete_function()


class WorkerDatasetFromFunction(WorkerDataset):
    """Data sets that the user made for each worker (`distribute_datasets_from_function`).

    Args:
      engine: The engine whose workers read them.
      datasets: One data set of batches for each worker, all of one structure.
    """

    def __init__(self, engine: CoordinatedEngine, datasets: Sequence[tf.data.Dataset]):
        super().__init__(engine, functools.reduce(tf.data.Dataset.concatenate, datasets), "given")
        self._datasets = datasets
        # Asked for here, on the chief: `share` is called where a worker is the default device.
        self._counts = [int(dataset.cardinality()) for dataset in datasets]

    def share(self, worker: int) -> int | None:
        """See `WorkerDataset.share`."""
        count = self._counts[worker]
        return None if count == tf.data.UNKNOWN_CARDINALITY else sys.maxsize if count < 0 else count

    def _shares(self) -> Callable[[int], tf.data.Dataset]:
        builds = [self._rebuilder(DatasetGraph(dataset), 1) for dataset in self._datasets]
        return lambda worker: builds[worker](tf.constant(0, tf.int64))


def _zeros(spec: tf.TensorSpec) -> tf.Tensor:
    shape = [1 if size is None else size for size in spec.shape]
    return tf.zeros(shape, spec.dtype) if spec.dtype != tf.string else tf.fill(shape, "")

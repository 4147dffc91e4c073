# SPDX-License-Identifier: Apache-2.0
"""Data that the workers read, and the handles by which the chief speaks of it.

Who owns what: the chief owns a `WorkerDataset` (a description, shipped to each worker once) and, per pass over it, a
`WorkerIterator`. The batches themselves live on the workers and never pass through the chief; what the chief's loop
gets from `next(iterator)` is a `WorkerBatch`, a ticket for "the next batch of this iterator, on whichever worker
takes the step".

There are two ways to feed a step:

* `worker`: each worker has an iterator over its own share, and takes its next batch from it. For training.
* `chief`: the chief reads the data once, in order, and sends each batch along with the step. For `evaluate` and
`predict`, which
  must see every example exactly once and in order, and for data that only exists in the chief's Python (generators).
"""

from __future__ import annotations

import collections
import functools
import itertools
import secrets
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfdist.engines import closures
from tfdist.engines.dataset_graph import DatasetGraph, rebuild

if TYPE_CHECKING:
    from tfdist.engines.coordinated import CoordinatedEngine

# Protocol buffers end at 2 GiB; a data set is shipped inside one.
_MAX_SHIPPED_BYTES = 2**31 - 2**20

_iterators: weakref.WeakValueDictionary[int, WorkerIterator] = weakref.WeakValueDictionary()
_iterator_ids = itertools.count()
_element_specs: dict[str, Any] = {}


class WorkerBatch(tf.experimental.ExtensionType, tf.distribute.DistributedValues):
    """A ticket for one batch that lives on the workers.

    It stands for the batch in `strategy.run(fn, args=(batch,))`; inside `fn` it is the batch itself. Its content
    cannot be read on the chief.

    Attributes:
      iterator_id: int64 scalar, the `WorkerIterator` it comes from.
      structure: What the elements look like, so that a `tf.function` is traced anew for another structure.
    """

    iterator_id: tf.Tensor
    structure: str

    @property
    def element_spec(self) -> Any:
        """The structure of `tf.TypeSpec`s of the batch."""
        return _element_specs[self.structure]

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(
            "This batch lives on the workers and can't be unpacked on the chief; give it whole to "
            "strategy.run(fn, args=(batch,)) "
            "and unpack it inside fn."
        )


def find_iterator(iterator_id: int) -> WorkerIterator:
    """Returns the iterator that a ticket came from."""
    return _iterators[iterator_id]


class WorkerDataset(tf.distribute.DistributedDataset):
    """A data set of which each worker reads its share.

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
            build = self._rebuild_share()
            self._shipped = create(lambda: build(tf.constant(closures.current_worker(), tf.int64)))
        return create(iter, self._shipped)

    def _rebuild_share(self) -> Callable[[tf.Tensor], tf.data.Dataset]:
        """A function from a worker's index to its share, which runs on the worker and carries the data set inside."""
        graph = self._graph()
        if graph.num_bytes > _MAX_SHIPPED_BYTES:
            raise ValueError(
                f"The data set holds {graph.num_bytes / 2**30:.1f} GiB in memory, more than the 2 GiB that a worker can "
                "be sent; read it from files with tf.data instead of passing arrays."
            )
        if self._sharding == "shard":
            # Shares of different orders would overlap.
            graph.agree_on_order(secrets.randbelow(2**31))
        text, spec, is_shard = graph.serialize(), self.element_spec, self._sharding == "shard"

        @tf.function(autograph=False)
        def build(worker: tf.Tensor) -> tf.data.Dataset:
            dataset = rebuild(text, spec)
            return dataset.shard(self._engine.num_workers, worker) if is_shard else dataset

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
        dataset_id, job = service.register_dataset(address, dataset), f"tfdist-{next(_iterator_ids)}"

        @tf.function(autograph=False)
        def build() -> tf.data.Dataset:
            return service.from_dataset_id(
                service.ShardingPolicy.DYNAMIC, address, dataset_id, element_spec=spec, job_name=job
            )

        return build.get_concrete_function()


class WorkerIterator:
    """One pass over a `WorkerDataset`, in the chief's hands. `next` gives tickets, never data.

    It is no `tf.distribute.DistributedIterator`, because Keras would hand such a one into a `tf.function` as a whole
    instead of taking one batch at a time. It ends with `StopIteration`, or with `tf.errors.OutOfRangeError` where not
    one ticket was given since `iter(self)`: Keras zips over it `steps_per_execution` at a time, and tells the two
    apart.
    """

    def __init__(self, engine: CoordinatedEngine, dataset: WorkerDataset):
        self._engine = engine
        self._dataset = dataset
        self._cardinality = dataset.cardinality
        self._tickets = 0
        self._given_since_iter = 0
        self._feed: str | None = None
        self._local: Iterator[Any] | None = None
        self._waiting: collections.deque[Any] = collections.deque()
        self._on_workers: tf.distribute.coordinator.PerWorkerValue | None = None
        self._lock = threading.Lock()
        self._taken: collections.Counter[int] = collections.Counter()
        self.exhausted: set[int] = set()
        self.ended = False
        self.id = next(_iterator_ids)
        structure = repr(dataset.element_spec)
        _element_specs.setdefault(structure, dataset.element_spec)
        self._ticket = WorkerBatch(iterator_id=tf.constant(self.id, tf.int64), structure=structure)
        _iterators[self.id] = self

    @property
    def element_spec(self) -> Any:
        """The structure of `tf.TypeSpec`s of a batch."""
        return self._dataset.element_spec

    def placeholder(self) -> Any:
        """See `WorkerDataset.placeholder`."""
        return self._dataset.placeholder()

    @property
    def counted(self) -> bool:
        """Whether the number of batches is known (or endless), so that tickets can be given ahead of the data."""
        return self._cardinality != tf.data.UNKNOWN_CARDINALITY

    @property
    def is_last(self) -> bool:
        """Whether the ticket given last was the last one."""
        return self.ended or self._tickets == self._cardinality

    def __iter__(self) -> WorkerIterator:
        self._given_since_iter = 0
        return self

    def __next__(self) -> WorkerBatch:
        self._engine.make_room()
        if self.ended or self._tickets == self._cardinality or not self._has_local_batch():
            if self._given_since_iter:
                raise StopIteration
            raise tf.errors.OutOfRangeError(None, None, "End of sequence")
        self._tickets += 1
        self._given_since_iter += 1
        return self._ticket

    def get_next(self) -> WorkerBatch:
        """The same as `next(self)`."""
        return next(self)

    def get_next_as_optional(self) -> Any:
        """Not available: only the workers know whether there is a next batch."""
        raise NotImplementedError(
            "get_next_as_optional() has no meaning for batches that live on the workers; use next(iterator)."
        )

    @property
    def shares_known(self) -> bool:
        """Whether each worker's number of batches is known before they are read."""
        return self.counted and self._dataset.share(0) is not None

    def has_batch(self, worker: int) -> bool:
        """Whether `worker` may have a batch left. Only that worker's thread asks."""
        share = self._dataset.share(worker)
        return worker not in self.exhausted and (share is None or self._taken[worker] < share)

    def took_batch(self, worker: int) -> None:
        """Counts a batch that `worker` is done with."""
        self._taken[worker] += 1

    def feed(self, by_chief: bool) -> str:
        """Decides, at the first step, who feeds this pass."""
        with self._lock:
            if self._feed is None:
                self._feed = "chief" if by_chief or self._dataset.lives_in_python else "worker"
                if self._feed == "chief":
                    self._local = self._dataset.local_iterator()
            return self._feed

    def on_workers(self) -> tf.distribute.coordinator.PerWorkerValue:
        """The iterators on the workers, made when the first step needs them."""
        with self._lock:
            if self._on_workers is None:
                self._on_workers = self._dataset.iterate_on_workers()
            return self._on_workers

    def next_local_batch(self) -> list[tf.Tensor]:
        """The chief's next batch, flat. Raises `tf.errors.OutOfRangeError` at the end."""
        if self._waiting:
            return self._waiting.popleft()
        if self._local is None:
            raise RuntimeError("next_local_batch() on data that the workers read.")
        try:
            return tf.nest.flatten(next(self._local), expand_composites=True)
        except StopIteration:
            self.ended = True
            raise tf.errors.OutOfRangeError(None, None, "End of sequence") from None

    def _has_local_batch(self) -> bool:
        """Reads ahead by one where the chief feeds, so that the end is known before a step is begun."""
        if self._local is None or self._waiting:
            return True
        try:
            self._waiting.append(self.next_local_batch())
        except tf.errors.OutOfRangeError:
            return False
        return True


def _zeros(spec: tf.TensorSpec) -> tf.Tensor:
    shape = [1 if size is None else size for size in spec.shape]
    return tf.zeros(shape, spec.dtype) if spec.dtype != tf.string else tf.fill(shape, "")

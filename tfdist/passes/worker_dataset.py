# SPDX-License-Identifier: Apache-2.0
"""A data set that the workers read: its division into shares, and its transfer to the workers."""

from __future__ import annotations

import dataclasses
import functools
import secrets
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist import _log
from tfdist.compat.tensorflow import coordinator, inputs, servers
from tfdist.passes import progress, splitting, worker_batch
from tfdist.passes.dataset_graph import DatasetGraph
from tfdist.passes.handle import DistributedDataset, refuse_graph

# Protocol buffers end at 2 GiB; a data set is shipped inside one.
_MAX_SHIPPED_BYTES = 2**31 - 2**20


@dataclasses.dataclass(eq=False)
class Pass:
    """A pass over the data by the workers, which its feed has.

    Attributes:
      number: see `WorkerDataset.begin_pass`.
      readers: the workers that have read their own shares; None if all of them do.
      is_irregular: True if a worker has read anything but its own share, once.
      reads: number of passes that workers had read before, those before the run was resumed included.
    """

    number: int
    readers: Collection[int] | None = None
    is_irregular: bool = False
    reads: int = 0


@dataclasses.dataclass
class _Share:
    """A share where it was rebuilt; the numbers of iterators over it, and of those that are read."""

    dataset: tf.data.Dataset
    # What draws an order for each iterator that is read; see `DatasetGraph.rebuilder`.
    below: Sequence[tf.data.Dataset]
    begun: int = 0
    reads: int = 0


class WorkerDataset(DistributedDataset):
    """Data set of which each worker reads its share.

    Args:
      engine: The engine whose workers read it: `num_workers`, of `coordinator`; by `splitting.with_end_marked` if it
        `marks_end`.
      dataset: A `tf.data.Dataset` of batches.
      sharding: `"replicate"`: each worker reads all of it; `"shard"`: worker i of n reads the batches i, i + n, ...;
        `"deal"`: worker i of n reads part i of n of every batch.
      num_parts: number of consecutive parts into which a worker's batches are cut.
    """

    def __init__(self, engine: Any, dataset: tf.data.Dataset, sharding: str, num_parts: int = 1):
        # By a job of the tf.data service, of which each worker is a consumer.
        self._is_handed_out = sharding != "given" and bool(inputs.service_jobs(dataset))
        if self._is_handed_out and sharding == "deal":
            raise ValueError(
                "dataset: under a policy of synchronous training each batch is divided among the workers, and a job of "
                "the tf.data service hands out whole batches; leave the policy away, or read without the service. "
                f"Received: job_name={inputs.service_jobs(dataset)[0]!r}"
            )
        if self._is_handed_out:
            sharding = "replicate"
        # A worker, or the chief, that deletes an iterator would hold up all others.
        dataset = inputs.read_ahead_untuned(dataset)
        super().__init__(engine, dataset, refuse_graph)
        self._sharding = sharding
        self._num_parts = num_parts
        # The service does not say how many batches a worker gets.
        self._cardinality = tf.data.UNKNOWN_CARDINALITY if self._is_handed_out else int(dataset.cardinality())
        self.marks_end = engine.marks_end and self._cardinality == tf.data.UNKNOWN_CARDINALITY
        # Each part comes with the number of examples of its batch, unless shapes say it.
        self._has_totals = self.num_parts > 1 and not splitting.has_even_parts(self.element_spec, self.num_parts)
        self.kind = worker_batch.kind_of(engine, dataset.element_spec, self.marks_end, self._has_totals)
        # Keras uses each batch once, so a single handle is enough for all.
        self.next_one = worker_batch.WorkerBatch(self.kind)
        self._shipped: tf.distribute.coordinator.PerWorkerValue | None = None
        # Rebuilds a share on the worker of the calling thread; set with `_shipped`.
        self._build: Any = None
        # Number of iterators that were made over the data, and of those that workers have read, those before the run
        # was resumed included.
        self.passes = self.reads = 0
        # The last one that workers have read.
        self._last = Pass(0)
        self._orders = progress.orders_of(dataset)
        # The share of each worker. Only that worker's thread uses it.
        self._own: dict[int, _Share] = {}

    @property
    def element_spec(self) -> Any:
        """The structure of `tf.TypeSpec`s of a batch."""
        return self.own.element_spec

    @property
    def part_spec(self) -> Any:
        """See `DistributedDataset.part_spec`."""
        return splitting.part_spec(self.element_spec, self.num_parts) if self.num_parts > 1 else self.element_spec

    @property
    def cardinality(self) -> int:
        """Number of batches in a pass, or tf.data's constant for an unknown or infinite number."""
        return self._cardinality

    @functools.cached_property
    def lives_in_python(self) -> bool:
        """True if only the chief can read the data set: it calls Python of this process, or has an order of its own."""
        if self._graph.lives_in_python:
            return True
        if is_kept := self._sharding != "given" and self._graph.keeps_own_order:
            _log.say(
                "dataset: its shuffle has no seed, and is not done again for each pass, so that only the chief has its "
                "order, and reads these data for all workers; with a seed, shuffle(..., seed=1), they read their shares"
            )
        return is_kept

    @property
    def _original_dataset(self) -> tf.data.Dataset:
        # `ClusterCoordinator.create_per_worker_dataset` asks a distributed data set for it.
        raise TypeError(
            "ClusterCoordinator.create_per_worker_dataset takes a tf.data.Dataset, or a function that returns one; "
            "give it the data set itself. Received: what strategy.experimental_distribute_dataset returned"
        )

    @functools.cached_property
    def _graph(self) -> DatasetGraph:
        return DatasetGraph(self.own)

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """See `tf.distribute.DistributedDataset`."""
        return functools.reduce(reduce_func, self, initial_state)

    def draw_below(self, reads: int) -> None:
        """See `progress.Restart.draw_below`: workers draw when they read the data."""
        self.reads += reads

    def after(self, passes: int, batches: int) -> WorkerDataset:
        """Returns the rest of a pass, shared among the workers; see `progress.Restart.after`."""
        rest = WorkerDataset(self._engine, self.own.skip(batches), self._sharding, self._num_parts)
        rest.lives_in_python = self.lives_in_python  # `skip` takes no part of what a cache keeps in order.
        return self._gone_on_with(rest, passes, batches)

    def _gone_on_with(self, rest: WorkerDataset, passes: int, batches: int) -> WorkerDataset:
        # The number of a pass determines its order on the workers; the rest has the same shuffle.
        self._orders.begun += passes
        rest.reads, self.reads = self.reads, self.reads + (batches > 0)
        rest.passes = self.passes + passes
        self.passes = rest.passes + (batches > 0)
        return rest

    @property
    def num_parts(self) -> int:
        """Number of parts into which each batch is cut."""
        return self._engine.num_workers if self._sharding == "deal" else self._num_parts

    def begin_pass(self) -> int:
        """Returns the number of a new iterator over the shuffle of the data, from 1 on, which may never be read.

        Keras makes iterators that it never reads, and on one device each iterator of a shuffle draws an order. So the
        order of a pass depends on this number.
        """
        self.passes += 1
        self._orders.begun += 1
        return self._orders.begun

    def local_iterator(self, number: int) -> Iterator[Any]:
        """Returns the chief's own iterator, over the whole data set, in the order of this pass."""
        begun, self._orders.by_chief = self._orders.by_chief, max(number, self._orders.by_chief)
        progress.begin_passes(self.own, number - 1 - begun)
        return iter(self.own)

    def share(self, worker: int) -> int | None:
        """Number of batches in the share of `worker` of a pass: `sys.maxsize` if endless, None if unknown."""
        total = self.cardinality
        if total == tf.data.UNKNOWN_CARDINALITY:
            return None
        if total == tf.data.INFINITE_CARDINALITY:
            return sys.maxsize
        if self._sharding in ("replicate", "deal"):
            return total
        return len(range(worker, total, self._engine.num_workers))

    @property
    def is_cut(self) -> bool:
        """True if workers read parts of batches."""
        return self._sharding == "deal" or self._num_parts > 1

    @property
    def can_move(self) -> bool:
        """True if any worker may read the rest of a lost worker's share: it is the same on all workers."""
        return self._sharding == "shard"

    def share_sizes(self) -> list[int | None]:
        """Returns `share` of each worker, in the units in which workers read: batches, or parts of batches."""
        sizes = map(self.share, range(self._engine.num_workers))
        return [size if size in (None, sys.maxsize) else size * self._num_parts for size in sizes]

    def iterate_on_workers(
        self, opened: Pass, position: Callable[[int], int] = lambda worker: 0
    ) -> tf.distribute.coordinator.PerWorkerValue:
        """Starts a pass: one iterator on each worker over its share.

        Args:
          opened: the pass.
          position: Returns the number of batches that a worker skips; a restarted worker continues its share.
        """
        number, reads = opened.number, self.reads
        opened.reads, self.reads = reads, reads + 1
        # What iterators have drawn that were not read, or read too far, is not known: the share is made anew.
        is_anew, self._last = self._is_irregular(self._last), opened
        may_read_too_far = self._sharding == "deal" and self._graph.shuffles
        create = functools.partial(coordinator.create_on_workers, self._engine.coordinator)
        if self._shipped is None:
            self._build = self._shares()
            self._shipped = create(self._build_own)

        def iterate(shipped: tf.data.Dataset) -> Iterator[Any]:
            del shipped  # Which may have been made anew.
            worker = coordinator.this_worker()
            if is_anew and (may_read_too_far or self._own[worker].below):
                self._own[worker] = self._build_share(worker)
            own, count = self._own[worker], position(worker)
            self._catch_up(own, number, reads)
            # On a worker that is back the iterators of former passes are made again, and nobody reads them.
            own.reads += reads + 1 == self.reads
            return iter(own.dataset.skip(count) if count else own.dataset)

        return create(iterate, self._shipped)

    def _is_irregular(self, ended: Pass) -> bool:
        """Returns True if workers have not all read their own shares of a pass, once."""
        workers = {worker for worker in range(self._engine.num_workers) if self.share(worker) != 0}
        return ended.is_irregular or (ended.readers is not None and not workers <= {*ended.readers})

    def iterate_piece(self, opened: Pass, share: int, start: int, step: int) -> Iterator[Any]:
        """Returns an iterator over every `step`-th batch of a share from `start` on, on the worker of this thread.

        Args:
          opened: the pass.
          share: index of the worker whose share it is.
          start: position in the share.
          step: distance of the batches.
        """
        built = self._build_share(share)
        self._catch_up(built, opened.number, opened.reads)
        return iter(built.dataset.skip(start).shard(step, 0))

    def _build_own(self) -> tf.data.Dataset:
        worker = coordinator.this_worker()
        try:
            servers.load_late_libraries()
        except tf.errors.InvalidArgumentError as error:
            # Only what uses these operations fails.
            coordinator.clear_error()
            _log.say(f"{error.message.splitlines()[0]}; import its package above the line that builds the strategy")
        self._own[worker] = self._build_share(worker)
        return self._own[worker].dataset

    def _build_share(self, share: int) -> _Share:
        dataset, cache, *below = self._build(share)
        is_left_early = self._sharding in ("shard", "deal") and self._cardinality >= 0
        if self._graph.can_fill_cache and (is_left_early or self.reads > 1):
            # A pass of known length ends with the worker's last batch, mostly before the end of the data. The cache
            # would stay incomplete, and be filled anew in another order than on the other workers. Data of unknown
            # length are read to their end, and endless ones have none.
            progress.read(cache)
        return _Share(dataset, below)

    def _catch_up(self, share: _Share, number: int, reads: int) -> None:
        """Advances a share to the order that pass `number` has on one device, and on the other workers.

        Args:
          share: of which each iterator draws a new order.
          number: of the pass.
          reads: number of passes that were read before.
        """
        # Each iterator joins another iteration of a job.
        if self._graph.shuffles or self._is_handed_out:
            progress.begin_passes(share.dataset, number - 1 - share.begun)
        for each in share.below:
            progress.begin_passes(each, reads - share.reads)
        share.begun, share.reads = max(share.begun, number), max(share.reads, reads)

    def _shares(self) -> Callable[[int], tuple[tf.data.Dataset, ...]]:
        """Returns a function that rebuilds a share, and what fills its cache, where a worker is the default device."""
        is_shared = self._sharding in ("shard", "deal")
        if is_shared:
            # Shares of different orders would overlap.
            self._graph.agree_on_order(secrets.randbelow(2**31))
        build = self._rebuilder(self._graph, self._engine.num_workers if is_shared else 1)
        return lambda share: build(tf.constant(share if is_shared else 0, tf.int64))

    def _rebuilder(self, graph: DatasetGraph, num_shards: int) -> Callable[[tf.Tensor], Any]:
        """Returns a function from the index of a shard to the shard, and to what fills its cache."""
        if graph.num_bytes > _MAX_SHIPPED_BYTES:
            raise ValueError(
                f"The data set holds {graph.num_bytes / 2**30:.1f} GiB in memory, more than the 2 GiB that a worker "
                "can be sent; read it from files with tf.data instead of passing arrays."
            )
        rebuilt = graph.rebuilder()

        @tf.function(autograph=False)
        def build(shard: tf.Tensor) -> tuple[tf.data.Dataset, ...]:
            dataset, *others = rebuilt()
            if self._sharding == "deal":
                # A single worker reads whole batches, of any structure.
                parts = self._dealt(dataset, [shard], num_shards) if num_shards > 1 else dataset
                parts = self._marked(parts).prefetch(1)
                # A worker whose contribution was withdrawn makes another one for the same update: it needs more data.
                return splitting.not_read_ahead(parts.repeat(2)) if self.cardinality >= 0 else parts, *others
            return self._marked(self._cut(dataset.shard(num_shards, shard) if num_shards > 1 else dataset)), *others

        return build.get_concrete_function(tf.TensorSpec([], tf.int64))

    def _marked(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        return splitting.with_end_marked(dataset) if self.marks_end else dataset

    def _cut(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        return dataset if self._num_parts == 1 else self._dealt(dataset, range(self._num_parts), self._num_parts)

    def _dealt(self, dataset: tf.data.Dataset, parts: Sequence[Any], num_parts: int) -> tf.data.Dataset:
        return splitting.deal(dataset, parts, num_parts, with_totals=self._has_totals)


class WorkerDatasetFromFunction(WorkerDataset):
    """Data sets that the user made for each worker (`distribute_datasets_from_function`).

    Args:
      engine: The engine whose workers read them.
      datasets: One data set of batches for each worker, all of one structure.
    """

    def __init__(self, engine: Any, datasets: Sequence[tf.data.Dataset], num_parts: int = 1):
        datasets = [inputs.read_ahead_untuned(dataset) for dataset in datasets]
        super().__init__(engine, functools.reduce(tf.data.Dataset.concatenate, datasets), "given", num_parts)
        self._datasets = datasets
        # Asked for here, on the chief: `share` is called where a worker is the default device.
        self._counts = [int(dataset.cardinality()) for dataset in datasets]

    def after(self, passes: int, batches: int) -> WorkerDataset:
        """See `WorkerDataset.after`. Each worker leaves out as many as fall to it."""
        each = [dataset.skip(batches // len(self._datasets)) for dataset in self._datasets]
        return self._gone_on_with(WorkerDatasetFromFunction(self._engine, each, self._num_parts), passes, batches)

    def share(self, worker: int) -> int | None:
        """See `WorkerDataset.share`."""
        count = self._counts[worker]
        return None if count == tf.data.UNKNOWN_CARDINALITY else sys.maxsize if count < 0 else count

    def _shares(self) -> Callable[[int], tuple[tf.data.Dataset, ...]]:
        builds = [self._rebuilder(DatasetGraph(dataset), 1) for dataset in self._datasets]
        return lambda worker: builds[worker](tf.constant(0, tf.int64))

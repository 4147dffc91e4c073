# SPDX-License-Identifier: Apache-2.0
"""Data sets, as Keras and TensorFlow hand them to replicas: their classes, pipelines, iterators and lengths."""

from __future__ import annotations

import contextlib
import copy
import functools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter
from tensorflow.python.data.ops import map_op, multi_device_iterator_ops
from tensorflow.python.distribute import input_lib

from tfdist.compat import patching
from tfdist.compat.keras import calls
from tfdist.compat.tensorflow import graphs, replicas

NEEDS = (
    "tensorflow.python.distribute.input_lib:DistributedDataset._enable_get_next_as_optional, _input_workers",
    "tensorflow.python.distribute.input_lib:DistributedDataset._type_spec",
    "tensorflow.python.distribute.input_lib:DistributedDatasetsFromFunction._cardinality, _options",
    "tensorflow.python.distribute.input_lib:InputWorkers.serialize",
    "keras.src.trainers.data_adapters.array_data_adapter:ArrayDataAdapter.num_batches",
    "keras.src.trainers.data_adapters.tf_dataset_adapter:TFDatasetAdapter._dataset",
    "tensorflow.python.data.ops.map_op:_MapDataset.__init__(use_inter_op_parallelism)",
    "tensorflow.python.data.ops.multi_device_iterator_ops:OwnedMultiDeviceIterator._devices, get_next(device)",
    "tensorflow.python.data.ops.multi_device_iterator_ops:_create_device_dataset",
    "tensorflow.python.data.ops.dataset_ops:DatasetV2._functions, _inputs",
    "tensorflow.python.data.experimental.ops.data_service_ops:_DataServiceDatasetV2._job_name",
    "tensorflow.python.data.ops.cache_op:CacheDataset._filename",
    "tensorflow.python.data.ops.snapshot_op:_SnapshotDataset._path",
    "tensorflow.python.data.ops.structured_function:StructuredFunctionWrapper.function",
    "tensorflow.python.distribute.input_lib:DistributedIterator._iterators",
    "tensorflow.python.distribute.input_lib:_SingleWorkerOwnedDatasetIterator._iterator",
    "tensorflow.python.distribute.input_lib:_SingleWorkerDatasetIteratorBase.get_next_as_list",
    "tensorflow.python.distribute.input_lib:_SingleWorkerDatasetIteratorBase.get_next_as_optional_list",
)


class DistributedDatasetBase(input_lib.DistributedDataset):
    """Base class of data sets, with no attribute of the private class's but those of the stock data set `whole`.

    As an argument of a `tf.function` it is the stock data set `in_graphs`: TensorFlow takes it apart by its private
    attributes.
    """

    whole: Any
    in_graphs: Any

    @property
    def _type_spec(self) -> Any:
        return self.in_graphs._type_spec

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") or name.startswith(("__", "_tfdist", "_make_whole")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.whole, name)


def assume_full_batches(distributed: Any) -> None:
    """Says that each batch has a part for every replica of every worker: TensorFlow would ask, for each batch."""
    distributed._enable_get_next_as_optional = False
    distributed._input_workers = copy.copy(distributed._input_workers)
    distributed._input_workers.__class__ = _WithFullBatches


class _WithFullBatches(input_lib.InputWorkers):
    """Keeps functions that were traced for full batches from being called with other data.

    TensorFlow compares the workers of data sets for that, and not if they ask. Of workers with data of different
    lengths, the one with less would end too soon, and the others would wait for it.
    """

    def serialize(self) -> tuple[Any, ...]:
        return (*super().serialize(), "full batches")


def steps_of(distributed: Any, num_replicas: int) -> int:
    """Returns the steps of a pass, each of an element for each replica of this worker; or a constant of tf.data's."""
    elements = int(distributed.cardinality)
    return elements if elements < 0 else -(-elements // num_replicas)


def set_length(distributed: Any, steps: int) -> None:
    """Says how many steps a pass has on all workers: TensorFlow takes the number of this worker's own elements."""
    distributed._cardinality = steps


def batch_size(dataset: tf.data.Dataset) -> int | None:
    """Returns the size of all batches but the last, or None if TensorFlow does not know it.

    The shapes of a data set tell no size if the last batch may be smaller.
    """
    size = int(tf.raw_ops.ComputeBatchSize(input_dataset=tf.data.experimental.to_variant(dataset)))
    return size if size > 0 else None


def mapped_inline(dataset: tf.data.Dataset, function: Callable[..., Any]) -> tf.data.Dataset:
    """Returns `dataset.map(function)`, for functions of a few operations: the thread that reads calls them.

    The public `map` hands each call to the pool of threads, which takes five times as long.
    """
    not_converted = tf.autograph.experimental.do_not_convert(function)
    return map_op._MapDataset(dataset, not_converted, use_inter_op_parallelism=False)


# Completes the data sets that Keras makes of arrays, for strategies: what tf.data need not tune, and their size.
#
# An iterator whose pipeline TensorFlow tunes has a thread that sleeps between looks at it, 10 ms at first and up to 60
# s later. To delete the iterator, TensorFlow wakes that thread, and only then marks the iterator as cancelled
# (`CancellationManager::StartCancel` in TensorFlow 2.21 runs its callbacks first). On a busy machine the thread often
# looks in between, and sleeps on for as long as the pass has taken. So does the program, which holds Python's lock. A
# pipeline that Keras makes of arrays has nothing that needs tuning.
#
# There is no public way to see that a data set was made of arrays: Keras' data adapter alone holds them.


def untuned(dataset: tf.data.Dataset, epoch_iterator: Any) -> tf.data.Dataset:
    """Switches tf.data's autotuning off if Keras has made `dataset` of arrays.

    Args:
      dataset: any data set.
      epoch_iterator: the caller of the distribution; Keras' epoch iterator in a model's loops.
    """
    is_of_arrays = _is_of_arrays(epoch_iterator) and isinstance(dataset, tf.data.Dataset)
    return without_tuning(dataset) if is_of_arrays else dataset


def read_ahead_untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Switches tf.data's autotuning off for data of which other processes wait, unless the user has decided about it.

    Parallel calls of `AUTOTUNE` then have the number with which TensorFlow begins: one for each core, up to 16. The
    buffer that TensorFlow adds at the end of a pipeline with its tuning alone is added here.
    """
    options = dataset.options()
    if options.autotune.enabled is not None:
        return dataset
    if options.experimental_optimization.inject_prefetch is not False:
        dataset = dataset.prefetch(tf.data.AUTOTUNE)
    return without_tuning(dataset)


def without_tuning(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The same data set, which TensorFlow does not tune."""
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def sized(dataset: tf.data.Dataset, epoch_iterator: Any) -> tf.data.Dataset:
    """Says how many batches Keras makes of arrays, which the data set that it makes for them does not.

    Only so is a step known to be the last one of its epoch, and its logs those of the whole epoch. For the arguments
    see `untuned`.
    """
    if not _is_of_arrays(epoch_iterator) or int(dataset.cardinality()) != tf.data.UNKNOWN_CARDINALITY:
        return dataset
    return dataset.apply(tf.data.experimental.assert_cardinality(epoch_iterator.data_adapter.num_batches))


def count_batches_of(epoch_iterator: Any, distributed: Any) -> None:
    """Makes Keras take the number of batches from a distributed data set, if it has made `tf.data` of the user's that.

    For the first argument see `untuned`.
    """
    adapter = getattr(epoch_iterator, "data_adapter", None)
    if isinstance(adapter, TFDatasetAdapter):
        adapter._dataset = distributed


def _is_of_arrays(epoch_iterator: Any) -> bool:
    return isinstance(getattr(epoch_iterator, "data_adapter", None), ArrayDataAdapter)


# Makes the pipelines with which TensorFlow hands batches to replicas cheap, not tuned.
#
# For each pass over a distributed data set TensorFlow makes, besides the user's pipeline, one for each device, which
# fetches that device's batches. Its options can't be set from outside. Each has a thread for tuning, where there is
# nothing to tune. It may hold up the program when it is deleted, as above.
#
# The function is replaced, for good and for the whole process: who iterates later, and in which thread, is not known
# here.


def leave_untuned() -> None:
    """Replaces the function, and what `DistributedIterator` reads with; does nothing if it was called before."""
    patching.once(multi_device_iterator_ops, "_create_device_dataset", _untuned)
    patching.once(input_lib.DistributedIterator, "__init__", _reading)


def _untuned(made: Any, *args: Any, **kwargs: Any) -> Any:
    return without_tuning(made(*args, **kwargs))


# Changes how the iterators of strategies read, on each iterator: in order, and observed.
#
# In a graph TensorFlow reads for all devices at once. An error of the data is raised for one of them, and for the next
# one the data are at their end. If end-of-data wins the race, the error is lost. Read one after the other, the error
# comes first.
#
# A `tf.function` that trains calls `next` of a distributed iterator. That reads on this worker first, and then
# exchanges the end of the data with the other workers. Only the first part is input, whose time `note_read` of the
# iterator's strategy takes, if it has one. There is no public way between the two.
#
# A `tf.function` makes its argument, an iterator, anew. So the constructor is replaced.


def _reading(original: Any, self: Any, /, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    for of_worker in self._iterators:
        for name in ("get_next_as_list", "get_next_as_optional_list"):
            patching.put_method(of_worker, name, _noted, name, self._strategy)
        of_devices = of_worker._iterator
        if isinstance(of_devices, multi_device_iterator_ops.OwnedMultiDeviceIterator):
            patching.put_method(of_devices, "get_next", _in_order)


def _noted(iterator: Any, name: str, strategy: Any, *args: Any, **kwargs: Any) -> Any:
    read = functools.partial(getattr(type(iterator), name), iterator, *args, **kwargs)
    note_read = getattr(strategy, "note_read", None)
    return read() if note_read is None else note_read(read)


def _in_order(iterator: Any, device: Any = None) -> Any:
    if device is not None:
        return type(iterator).get_next(iterator, device)
    found: list[Any] = []
    for each in iterator._devices:
        before = [leaf for leaf in tf.nest.flatten(found[-1:], expand_composites=True) if tf.is_tensor(leaf)]
        with tf.device(each), tf.control_dependencies(before):
            found.append(type(iterator).get_next(iterator, each))
    return found


# tf.data's own iterator, in place of TensorFlow's iterator for several devices, where a worker has a single CPU.
#
# TensorFlow's input library reads for every worker with an `OwnedMultiDeviceIterator`, whose background thread fetches
# batches for its devices. For one CPU it has nothing to fetch, costs two threads and a copy of the buffer, and its
# destructor has two defects (TensorFlow 2.21): destroyed soon after it was first read, its thread may read an iterator
# that is gone, which is a segmentation fault; and it may wait up to a minute for the thread that tunes the pipeline.
# The input library can do without, but the strategies for several workers don't let that option pass: there is no
# public way.


_DIRECTLY = tf.distribute.InputOptions(
    experimental_fetch_to_device=False, experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA
)


def read_directly(distributed: Any, devices: Sequence[str]) -> Any:
    """The data set that a strategy has made without options, which from now on is read with tf.data's own iterator.

    Args:
      distributed: what `distribute_datasets_from_function` has returned.
      devices: of this worker's replicas. If it is not one CPU, nothing is changed.
    """
    if len(devices) == 1 and tf.DeviceSpec.from_string(devices[0]).device_type == "CPU":
        distributed._options = _DIRECTLY
    return distributed


# The data sets that a `tf.data.Dataset` was made of, and the values that it was given.
#
# There is no public way: a data set keeps its inputs and arguments to itself. (Its graph has them, with copies of all
# arrays.)


def with_sources(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yields a data set, and then all that it reads from, the nearest first."""
    yield dataset
    for source in dataset._inputs():
        yield from with_sources(source)


def nearest_shuffle(dataset: tf.data.Dataset) -> tf.data.Dataset | None:
    """Returns the last shuffle on the way to a data set; None if there is none."""
    return next((each for each in with_sources(dataset) if "Shuffle" in type(each).__name__), None)


def operations_of(dataset: tf.data.Dataset) -> set[str]:
    """Returns the types of the operations in the functions of a data set and its sources, as of `map` and `filter`."""
    return graphs.types_in(*(each.function.graph for one in with_sources(dataset) for each in one._functions()))


def service_jobs(dataset: tf.data.Dataset) -> list[str]:
    """Returns the job name, "" for none, of each tf.data service that a data set reads from."""
    return [_text(each._job_name) for each in with_sources(dataset) if "DataService" in type(each).__name__]


def files_written(dataset: tf.data.Dataset) -> list[str]:
    """Returns the paths to which `cache` and `snapshot` write a data set and its sources while they are read."""
    found = {"CacheDataset": "_filename", "_SnapshotDataset": "_path"}
    sources = [(each, found.get(type(each).__name__)) for each in with_sources(dataset)]
    return [path for each, name in sources if name and (path := _text(getattr(each, name)))]


def _text(value: Any) -> str:
    return value.numpy().decode() if hasattr(value, "numpy") else str(value)


# Lets `train_on_batch`, `test_on_batch` and `predict_on_batch` count each example of their batch once.
#
# Every replica computes the whole batch, and Keras concatenates predictions of all of them. Neither `Strategy.run` nor
# what Keras calls for the concatenation says that the batch was not divided. Workers may have been given one batch, or
# different ones, which only its content shows.


# The square of this bound, summed over 2**15 workers, is an int64.
_CONTENT_BITS = 24


def count_single_batch(strategy: Any, call: calls.Call) -> None:
    """Makes a call of a method on a single batch, of a model of this strategy, count each example once."""
    if not call.kind.endswith("_on_batch"):
        return
    if call.predicts:
        call.change = lambda outputs: _own(outputs, call.arguments.get("x"), strategy)
    elif replicas.has_other_workers(strategy):
        call.around = _single(strategy, call.arguments)


def content(strategy: tf.distribute.Strategy) -> tf.Variable:
    """Returns the variable of a number for the content of the batch in `train_on_batch` and `test_on_batch`.

    In any other step each worker has another number there: Keras may run one traced step in both.
    """

    def make() -> tf.Variable:
        with tf.device("/device:CPU:0"):
            return tf.Variable(-1 - replicas.worker_index(strategy), trainable=False, dtype=tf.int64)

    facts = replicas.facts_of(strategy)
    if facts.content is None:
        facts.content = graphs.call_outside(make)
    return facts.content


@contextlib.contextmanager
def _single(strategy: tf.distribute.Strategy, given: Mapping[str, Any]) -> Iterator[None]:
    found, batch = 0, [given.get(name) for name in ("x", "y", "sample_weight", "class_weight")]
    for leaf in tf.nest.flatten(batch, expand_composites=True):
        array = np.asarray(leaf)
        found = zlib.crc32(str(array.tolist()).encode() if array.dtype == object else array.tobytes(), found)
    content(strategy).assign(found % 2**_CONTENT_BITS)
    try:
        yield
    finally:
        content(strategy).assign(-1 - replicas.worker_index(strategy))


def _own(outputs: Any, x: Any, strategy: Any) -> Any:
    """Picks the rows of outputs that this process' examples have; of several replicas in a process, those of one."""
    copies, workers = strategy.num_replicas_in_sync, 1
    counts, index = [], 0
    if replicas.has_other_workers(strategy):
        workers, index = replicas.worker_count(strategy), replicas.worker_index(strategy)
        # Workers may have been given different examples: the first axis of each input, of each worker.
        axes = [np.shape(leaf)[0] for leaf in keras.tree.flatten(x) if len(np.shape(leaf))]
        found = strategy.gather(tf.constant([axes], tf.int64), axis=0).numpy()[:workers]
        # An input of more rows than another one is that of the examples, and not a table.
        counts = sorted((count for count in found.T if count.sum()), key=sum, reverse=True)

    def own(output: Any) -> Any:
        # Keras puts the first replica of each worker first.
        rows, rest = divmod(output.shape[0] * workers, copies)
        for count in [] if rest else [*counts, np.ones(workers, np.int64)]:
            # The same number of rows for each example.
            factor, rest = divmod(rows, count.sum())
            if not rest:
                start = factor * count[:index].sum()
                return output[start : start + factor * count[index]]
        return output

    return outputs if copies == 1 else keras.tree.map_structure(own, outputs)

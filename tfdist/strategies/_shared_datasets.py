# SPDX-License-Identifier: Apache-2.0
"""Data sets whose batches the workers of a MultiWorkerMirroredStrategy divide among themselves."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import hashlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import _log
from tfdist.compat.keras import calls
from tfdist.compat.tensorflow import inputs
from tfdist.engines.agreement import Agreement
from tfdist.passes.dataset_graph import DatasetGraph, fingerprint_of, rebuild, seeds_of
from tfdist.passes.handle import DistributedDataset
from tfdist.strategies import _common, _shared_calls

_POLICY = tf.data.experimental.AutoShardPolicy
# So many rows of an array tell it from another one's share.
_ROWS = 16
# Policies by which the workers deal out the batches.
_DEALT = (_POLICY.AUTO, _POLICY.DATA)

_UNORDERED = (
    "each worker has other examples, so predictions would not be in the order of the input; give all workers the same "
    "data set, without shard and without the option"
)

_SAME = (
    "dataset: every worker must be given the same data set, of which it takes its share: {remedy}, seed what is drawn "
    "at random, or shard it yourself with AutoShardPolicy.OFF. Received: {received}"
)
_UNSHARDED, _EQUALLY_MANY = "remove x[rank::n] or dataset.shard(...)", "read equally many examples on all workers"

_OTHER_FUNCTIONS = (
    "dataset: the functions of {names} differ between the workers. Of each batch of its own data each worker "
    "uses its part, so of examples that only one worker has, some are never used: give all workers the same data set, "
    "or shard it yourself with AutoShardPolicy.OFF"
)
_MAY_DIFFER = "Functions that leave the examples as they are may differ"
_OTHER_ORDERS = (
    "the workers shuffle in different orders: an epoch would have some examples twice and others never; give all "
    "of them the same seed in keras.utils.set_random_seed, or tf.random.set_seed, and in dataset.shuffle(..., seed=...)"
)
_OTHER_EXAMPLES = (
    "dataset: the Python generators, or PyDatasets, of {own} and {others} return different examples. Of each batch of "
    "its own each worker uses its part, and the rest is never used: return the same examples on all workers, or give "
    "each its own with strategy.distribute_datasets_from_function. Examples that are drawn at random may differ"
)
_OTHER_PREDICTIONS = (
    "predict: the Python generators, or PyDatasets, of the workers return different examples, so the predictions are "
    "not those of the input: return the same examples on all workers"
)
_RECEIVE_SECS = 0.05


class Division(enum.Enum):
    """Division of the batches of a data set.

    DEALT: all have the same data set, and each worker takes its part of every batch.
    OWN: each worker has a data set of its own, of which it uses everything.
    HANDED_OUT: a service gives each batch to one worker, which uses everything that it gets.
    TENSORFLOW: TensorFlow's auto-sharding gives each worker its files, or its shard.
    """

    DEALT = enum.auto()
    OWN = enum.auto()
    HANDED_OUT = enum.auto()
    TENSORFLOW = enum.auto()


@dataclasses.dataclass(frozen=True)
class Described:
    """Traits of a worker's data set, which are exchanged as JSON.

    Attributes:
      kind: its auto-shard policy, or the jobs of the tf.data service that it reads.
      structure: of its elements, with their dtypes.
      shapes: of the tensors of an element, with None for one that is not known.
      lengths: numbers of batches, and of rows of what it reads, by name.
      checksums: of examples, and of names of files.
      functions: for each function of `map` and `filter`, whether it filters, and its fingerprint.
      orders: seeds by which it shuffles, or chooses elements.
      num_generators: number of Python generators that it reads.
      files: paths that it writes.
      fingerprint: see `DatasetGraph.fingerprint`; only with AutoShardPolicy.OFF.
      unknown: why the fingerprint says nothing of the examples; empty if it does.
    """

    kind: str
    structure: str
    shapes: list[list[int | None] | None]
    lengths: dict[str, list[int]]
    checksums: list[str]
    functions: list[list[Any]]
    orders: list[str]
    num_generators: int
    files: list[str]
    fingerprint: str = ""
    unknown: str = ""

    @classmethod
    def of(cls, dataset: tf.data.Dataset, kind: str, is_off: bool) -> Described:
        """Returns the traits of a data set; what it does is compared by its fingerprint if AutoShardPolicy is OFF."""
        return cls(
            kind,
            *_spec(dataset.element_spec),
            *_lengths_and_checksums(dataset),
            [] if is_off else _functions(dataset),
            _orders(dataset),
            len(inputs.generated_of(dataset)),
            inputs.files_written(dataset),
            *(_content(dataset) if is_off else ()),
        )


def compare(dataset: tf.data.Dataset, agreement: Agreement | None, is_for_predict: bool, is_apart: bool) -> Division:
    """Compares the workers' data sets, and returns how the workers divide them; by the auto-shard policy.

    Args:
      dataset: this worker's.
      agreement: with the other workers; None for a worker alone, which reads everything.
      is_for_predict: predictions must be in the order of the input.
      is_apart: see `_shared_calls.gather_and_compare`.

    Raises:
      ValueError: the workers' data sets don't go together, it can't be known which examples each worker has, or
        predictions would have no order.
    """
    if agreement is None:
        return Division.DEALT
    policy, is_handed_out = dataset.options().experimental_distribute.auto_shard_policy, _common.is_handed_out(dataset)
    if policy == _POLICY.HINT and not DatasetGraph(dataset).has_shard_hints:
        raise ValueError(
            "dataset: with AutoShardPolicy.HINT and without dataset.shard(tf.data.experimental.SHARD_HINT, "
            "tf.data.experimental.SHARD_HINT) all workers would use the same examples; leave the option away"
        )
    kind = f"AutoShardPolicy.{policy.name}"
    if is_handed_out:
        kind = f"job_name={', '.join(map(repr, inputs.service_jobs(dataset)))} of the tf.data service"
    own = dataclasses.asdict(Described.of(dataset, kind, policy == _POLICY.OFF))
    found = _shared_calls.gather_and_compare(agreement, own, "comparing the data sets", is_apart)
    described = {task: Described(**traits) for task, traits in found.items()}
    _check_same({task: [each.kind] for task, each in described.items()})
    _common.check_files({task: each.files for task, each in described.items()})
    division = Division.DEALT
    if is_handed_out:
        division = Division.HANDED_OUT
    elif policy == _POLICY.OFF and _are_own(described):
        division = Division.OWN
    elif policy == _POLICY.HINT or (policy == _POLICY.FILE and not is_for_predict):
        # Files have no order, so predictions need all of them on each worker.
        division = Division.TENSORFLOW
    if is_for_predict and division is not Division.DEALT:
        raise ValueError(f"predict: {_UNORDERED}. Received: {kind}")
    if division in (Division.OWN, Division.HANDED_OUT):
        return division
    _check_specs(described)
    _check_lengths({task: each.lengths for task, each in described.items()})
    _check_same({task: each.checksums for task, each in described.items()})
    if policy != _POLICY.HINT:
        _check_functions({task: each.functions for task, each in described.items()}, is_for_predict)
        generated = inputs.generated_of(dataset)
        if not is_for_predict:
            _say_generated_differ(generated, agreement)
        elif any(each.num_generators for each in described.values()):
            _compare_generated_after(generated, agreement)
    if division is Division.TENSORFLOW:
        if policy == _POLICY.FILE:
            _check_files(dataset, len(described))
        return division
    if len({tuple(each.orders) for each in described.values()}) > 1:
        shown = ", ".join(f"{' and '.join(each.orders) or 'no shuffle'} on {task}" for task, each in described.items())
        raise ValueError(f"dataset: {_OTHER_ORDERS}. Received: global and own seeds {shown}")
    return division


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Raises a ValueError of one line where TensorFlow can't divide a data set by its files."""
    try:
        yield
    except (tf.errors.NotFoundError, tf.errors.InvalidArgumentError) as error:
        reason = (
            str(error)
            .partition("}} ")[2]
            .splitlines()[0]
            .partition(". If you")[0][:200]
            .removesuffix(" goo.gle/debugonly  ")
            .strip()
        )
    else:
        return
    raise ValueError(
        "dataset: AutoShardPolicy.FILE needs a data set that reads files, at least one for each worker; leave the "
        f"option away: each worker then reads all, and takes its part of each batch. Received: {reason}"
    )


def _check_files(dataset: tf.data.Dataset, num_workers: int) -> None:
    """Raises ValueError if there are fewer files than workers, which TensorFlow would find in a step.

    The first worker's share counts the files when it is read. Data that need Python of this process are not read.
    """
    graph = DatasetGraph(dataset)
    if graph.lives_in_python:
        return
    with explained():
        share = tf.raw_ops.AutoShardDataset(
            input_dataset=tf.data.experimental.to_variant(rebuild(graph.without_shuffles(), dataset.element_spec)),
            num_workers=num_workers,
            index=0,
            auto_shard_policy=_POLICY.FILE.value,
            output_types=[tf.variant],
            output_shapes=[[]],
        )
        next(iter(tf.data.experimental.from_variant(share, dataset.element_spec)), None)


def _content(dataset: tf.data.Dataset) -> tuple[str, str]:
    """Returns `Described.fingerprint` and `Described.unknown`."""
    try:
        graph = DatasetGraph(dataset)
        return graph.fingerprint(), "a Python generator" if graph.is_generated else ""
    except Exception as error:  # of an operation, or of a message of more than 2 GiB
        return "", f"a data set that can't be compared ({(str(error).splitlines() or [''])[0][:80]})"


def _are_own(described: Mapping[Any, Described]) -> bool:
    """Returns True if each worker has a data set of its own, and False if all have the same one.

    Raises:
      ValueError: some workers have the same one and others not, or it can't be known.
    """
    prints = [each.fingerprint for each in described.values()]
    if len(set(prints)) == len(prints):
        return True
    unknown = next((each.unknown for each in described.values() if each.unknown), "")
    if not unknown and len(set(prints)) == 1:
        return False
    problem = f"{unknown} may be the same on all or not" if unknown else "some have the same and others not"
    raise ValueError(
        f"dataset: with AutoShardPolicy.OFF each worker needs a data set of its own, or all the same, but {problem}; "
        "leave the option away if all have the same, or give each its own with "
        "strategy.distribute_datasets_from_function(lambda context: dataset)"
    )


def _check_same(traits: Mapping[Any, Sequence[str]]) -> None:
    """Raises ValueError if the workers' data sets, or their sources, show different examples or options."""
    # Traits of the sources show different shares of arrays, and numbers of files.
    for each in itertools.zip_longest(*traits.values(), fillvalue="nothing"):
        if len(set(each)) > 1:
            shown = ", ".join(f"{task}: {trait}" for task, trait in zip(traits, each, strict=True))
            raise ValueError(_SAME.format(remedy=_UNSHARDED, received=shown))


def _check_lengths(lengths: Mapping[Any, Mapping[str, Sequence[int]]]) -> None:
    """Raises ValueError if the workers' data sets, or the arrays that these read, have different lengths."""
    first, *_ = lengths.values()
    for name in first:
        counts = {task: each.get(name, []) for task, each in lengths.items()}
        if len(set(map(tuple, counts.values()))) > 1:
            shown = ", ".join(
                f"{' and '.join(map(_length, each)) or 'no'} {name} on {task}" for task, each in counts.items()
            )
            # Shards of the same data set differ by one at most.
            is_shard = all(max(each) - min(each) < 2 for each in zip(*counts.values(), strict=False))
            raise ValueError(_SAME.format(remedy=_UNSHARDED if is_shard else _EQUALLY_MANY, received=shown))


def _length(count: int) -> str:
    return {tf.data.INFINITE_CARDINALITY: "endless", tf.data.UNKNOWN_CARDINALITY: "unknown"}.get(count, str(count))


def _check_specs(described: Mapping[Any, Described]) -> None:
    """Raises ValueError if the workers' elements have different structures, dtypes or shapes.

    A function of Python's on one worker alone, such as a map that waits, leaves shapes open.
    """
    first, *others = described.values()
    if all(
        each.structure == first.structure
        and all(
            tf.TensorShape(one).is_compatible_with(other) for one, other in zip(first.shapes, each.shapes, strict=True)
        )
        for each in others
    ):
        return
    shown = ", ".join(f"{task}: {each.structure} of shapes {each.shapes}" for task, each in described.items())
    raise ValueError(
        "dataset: every worker must be given the same data set, whose elements have the same structure, dtypes and "
        f"shapes; make it on every worker by the same lines. Received: {shown}"
    )


def _spec(element_spec: Any) -> tuple[str, list[Any]]:
    """Returns the structure and dtypes of elements, and their shapes, with None for one that is not known."""
    names = tf.nest.map_structure(lambda each: getattr(getattr(each, "dtype", None), "name", str(each)), element_spec)
    shapes = [tf.TensorShape(getattr(each, "shape", None)) for each in tf.nest.flatten(element_spec)]
    return str(names), [None if shape.rank is None else shape.as_list() for shape in shapes]


def longest(steps: int, agreement: Agreement, has_policy: bool) -> int:
    """Returns the steps of a pass in which each worker reads a data set of its own: those of the longest one.

    A worker whose data have ended makes the others' steps with them, without examples.

    Args:
      steps: of this worker's data set, or one of tf.data's constants for an unknown or endless number.
      agreement: with the other workers.
      has_policy: policies decide about the updates, which need a gradient of each worker.

    Raises:
      ValueError: the data of some workers have no end, and those of others have; with a policy, lengths differ.
    """
    found = agreement.gather(steps, "comparing the lengths of the workers' data sets")
    endless = [task for task, count in found.items() if count == tf.data.INFINITE_CARDINALITY]
    if endless and len(endless) < len(found):
        raise ValueError(
            "distribute_datasets_from_function: the data sets of all workers must have an end, or none; call repeat() "
            f"on all. Received: endless on {', '.join(map(str, endless))} only"
        )
    if has_policy and len(set(found.values())) > 1:
        raise ValueError(
            "dataset: under a policy the workers' own data sets must have equally many batches; give all workers the "
            "same data set, or call take(number) on each. Received: "
            + ", ".join(f"{count} batches on {task}" for task, count in found.items())
        )
    is_unknown = tf.data.UNKNOWN_CARDINALITY in found.values()
    return tf.data.UNKNOWN_CARDINALITY if is_unknown else max(found.values())


def check_shared(dataset: Any, options: Any, kind: str = "a data set of another AutoShardPolicy") -> None:
    """Raises ValueError for what a strategy with a policy is given and can't divide, unless it has made it itself."""
    if isinstance(dataset, DistributedDataset):
        return
    received = f"options={options}" if options is not None else kind
    raise ValueError(
        "experimental_distribute_dataset: under a policy the batches of a data set are divided among the workers; "
        "leave options away and its AutoShardPolicy at AUTO or DATA, or give each worker its own with "
        f"distribute_datasets_from_function. Received: {received}"
    )


def _functions(dataset: tf.data.Dataset) -> list[list[Any]]:
    """Returns, of a data set and its sources, fingerprints of the functions and whether these filter."""
    return [
        [inputs.is_filter(each), fingerprint_of(function)]
        for each in inputs.with_sources(dataset)
        for function in inputs.functions_of_dataset(each)
    ]


def _check_functions(functions: Mapping[Any, Sequence[Any]], is_for_predict: bool) -> None:
    """Raises ValueError if functions choose other examples on some workers; warns if they may change examples."""

    def differing(of: Callable[[Any], Any]) -> str:
        (first, *_), texts = functions, {task: str(of(each)) for task, each in functions.items()}
        return ", ".join(str(task) for task, text in texts.items() if text != texts[first])

    if others := differing(lambda each: [text for filters, text in each if filters]):
        raise ValueError(f"{_OTHER_FUNCTIONS.format(names='filter')}. Received: other functions on {others}")
    if others := differing(lambda each: each):
        if is_for_predict:
            raise ValueError(f"predict: {_UNORDERED}. Received: other functions of map on {others}")
        warnings.warn(f"{_OTHER_FUNCTIONS.format(names='map')}. {_MAY_DIFFER}", RuntimeWarning, stacklevel=3)


def _lengths_and_checksums(dataset: tf.data.Dataset) -> tuple[dict[str, list[int]], list[str]]:
    """Returns lengths by name, and checksums, of a data set and of the validation data of the `fit` that begins.

    The latter would be compared after its first epoch. Those of data sets that TensorFlow, or the user, shards by a
    policy are left out.
    """
    lengths, checksums = _described(dataset)
    fit = calls.iterating_fit()
    given = None if fit is None else fit.arguments.get("validation_data")
    if isinstance(given, tf.data.Dataset):
        is_dealt = given.options().experimental_distribute.auto_shard_policy in _DEALT
        more = _described(given) if is_dealt else ({}, [])
    else:
        arrays = [each for each in tf.nest.flatten(given) if isinstance(each, np.ndarray)]
        rows = [tf.convert_to_tensor(_some_rows(each)) for each in arrays]
        more = {"rows": _rows(arrays)}, [f"examples of checksum {_checksum(rows)}"] if rows else []
    lengths |= {f"{name} of validation_data": counts for name, counts in more[0].items()}
    return lengths, [f"validation_data: {text}" for text in more[1]] + checksums


def _described(dataset: tf.data.Dataset) -> tuple[dict[str, list[int]], list[str]]:
    """Returns lengths by name, and checksums, of what a data set and its sources were made with."""
    found = [values for each in inputs.with_sources(dataset) if (values := inputs.values_of_dataset(each))]
    rows = _rows([value for values in found for value in values if value.dtype not in (tf.variant, tf.resource)])
    lengths = {"rows": rows, "batches": [int(dataset.cardinality())]}
    return lengths, [f"examples of checksum {_checksum(values)}" for values in found]


def _rows(arrays: Sequence[Any]) -> list[int]:
    """Returns the different numbers of rows of arrays, or of files."""
    return list(dict.fromkeys(int(array.shape[0]) for array in arrays if len(array.shape)))


def _orders(dataset: tf.data.Dataset) -> list[str]:
    """Returns the seeds by which a data set and its sources shuffle, as Keras does arrays, or choose elements."""
    found: list[str] = []
    for each in inputs.with_sources(dataset):
        drawing = "Random" if inputs.is_filter(each) else "RandomShuffle"
        found += inputs.seeds_of_dataset(each)
        found += [seeds for function in inputs.functions_of_dataset(each) for seeds in seeds_of(function, drawing)]
    return found


def _compare_generated_after(generated: Sequence[inputs.FirstElements], agreement: Agreement) -> None:
    """Lets the open `predict` raise ValueError if the workers' generators have returned different elements."""

    def compare(predictions: Any) -> Any:
        found = agreement.gather([each.digest for each in generated], "comparing the data sets")
        for digests in itertools.zip_longest(*found.values()):
            if len({digest for digest in digests if digest is not None}) > 1:
                raise ValueError(f"{_OTHER_PREDICTIONS}. Received: different first examples")
        return predictions

    call = calls.current()
    if call is not None and call.change is None:
        call.change = compare


def _say_generated_differ(generated: Sequence[inputs.FirstElements], agreement: Agreement) -> None:
    """Says so in a line once the workers' generators have returned different elements; without a wait.

    It is no error: elements may be drawn at random. Whichever worker reads last sees what the others have read.
    """
    # All workers come here after the same number of exchanges.
    place, own = f"generated/{agreement.count}", str(agreement.task)

    def compared_at(key: str) -> Callable[[str], None]:
        def told(digest: str) -> None:
            agreement.publish(f"{key}/{own}", digest)
            with contextlib.suppress(ConnectionError):
                others = {task: agreement.receive(f"{key}/{task}", _RECEIVE_SECS) for task in agreement.tasks}
                differing = [str(task) for task, each in others.items() if each not in (None, digest)]
                if differing:
                    _log.say(_OTHER_EXAMPLES.format(own=own, others=" and ".join(differing)))

        return told

    for index, first in enumerate(generated):
        first.listen(compared_at(f"{place}/{index}"))


def _some_rows(array: Any) -> Any:
    """Returns rows from all parts of a NumPy array or a tensor."""
    if not len(array.shape) or (count := int(array.shape[0])) <= _ROWS:
        return array
    rows = np.linspace(0, count - 1, _ROWS, dtype=np.int64)
    return array[rows] if isinstance(array, np.ndarray) else tf.gather(array, rows)


def _checksum(values: Sequence[tf.Tensor]) -> str:
    """Returns a checksum of some rows of arrays, and of the names of files, whose directories may differ."""
    digest = hashlib.blake2b(digest_size=4)
    for value in values:
        if value.dtype in (tf.variant, tf.resource):
            continue
        array = _some_rows(value).numpy()
        if value.dtype == tf.string:
            array = [text.rpartition(b"/")[2] for text in np.ravel(array)]
        digest.update(repr(array).encode() if isinstance(array, list) else np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()

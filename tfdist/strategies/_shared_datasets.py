# SPDX-License-Identifier: Apache-2.0
"""Data sets whose batches the workers of a MultiWorkerMirroredStrategy divide among themselves, and their comparison.

All workers must read the same batches in the same order, of which each takes its part. When a data set is distributed,
its structure and length are compared in the exchange that begins each call. The content is compared as it is read
(`SameBatches`), whatever it was made by: arrays, files, functions, seeds of shuffles, Python.
"""

from __future__ import annotations

import contextlib
import enum
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import _log
from tfdist.compat.tensorflow import inputs
from tfdist.engines.agreement import Agreement
from tfdist.passes.dataset_graph import DatasetGraph
from tfdist.passes.handle import DistributedDataset
from tfdist.strategies import _common, _shared_calls

_POLICY = tf.data.experimental.AutoShardPolicy
# Sums of a component of a batch that are compared, the passes in which they are, and the relative difference that
# rounding on other processors can make.
_SUMS, _PASSES, _TOLERANCE = 16, 3, 1e-5
# Wait for others that read the very first batch later, and for an answer about one.
_WAIT_SECS, _LOOK_SECS = 5.0, 0.001
# Operations that draw at random; those that choose and order examples draw the same on all workers.
_DRAWING = re.compile(r"Random(?!Shuffle|Dataset|SeedGenerator)|Multinomial")
_PYTHON = re.compile(r"PyFunc|GeneratorDataset")
# TensorFlow's words for data that it can't divide by files.
_NO_FILES = re.compile(r"the dataset only has \d+ file\(s\)|an unshardable source dataset")

_UNORDERED = (
    "each worker has other examples, so predictions would not be in the order of the input; give all workers the same "
    "data set, without shard and without the option"
)
_SAME = (
    "dataset: every worker must be given the same data set, of which it takes its share: {remedy}, seed what is drawn "
    "at random, or shard it yourself with AutoShardPolicy.OFF. Received: {received}"
)
_UNSHARDED, _EQUALLY_MANY = "remove x[rank::n] or dataset.shard(...)", "read equally many examples on all workers"
_DIFFERENT = f"{_UNSHARDED}, give shuffle the same seed on all"
_MAY_DIFFER = (
    "dataset: {received}. Of each batch of its own data each worker uses its part, so of examples that only one worker "
    "has, some are never used: give all workers the same data set, or each its own with "
    "strategy.distribute_datasets_from_function. Examples that are drawn at random may differ"
)
_OTHER_DATA = (
    "dataset: every worker must be given the same data set, of which it gets its share. Those of the workers differ, "
    "if only in paths of files: some examples may be used twice or never"
)


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


def compare(
    dataset: tf.data.Dataset, agreement: Agreement | None, is_for_predict: bool, is_apart: bool, is_watched: bool = True
) -> Division:
    """Compares the workers' data sets, and returns how the workers divide them; by the auto-shard policy.

    Args:
      dataset: this worker's.
      agreement: with the other workers; None for a worker alone, which reads everything.
      is_for_predict: predictions must be in the order of the input.
      is_apart: see `_shared_calls.gather_and_compare`.
      is_watched: the batches are compared as they are read (`SameBatches`); else what the data set was made by is.

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
    is_compared = policy in (_POLICY.OFF, _POLICY.FILE, _POLICY.HINT) or not is_watched
    own = {
        "kind": kind,
        "files written": inputs.files_written(dataset),
        "spec": _spec(dataset.element_spec),
        "batches": int(dataset.cardinality()),
        # Text that differs where the data sets do, and why it says nothing of the examples.
        "fingerprint": _fingerprint(dataset) if is_compared else ["", ""],
    }
    found = _shared_calls.gather_and_compare(agreement, own, "comparing the data sets", is_apart)

    def of_all(name: str) -> dict[Any, Any]:
        return {task: traits[name] for task, traits in found.items()}

    if len({*of_all("kind").values()}) > 1:
        received = ", ".join(f"{task}: {each}" for task, each in of_all("kind").items())
        raise ValueError(_SAME.format(remedy=_UNSHARDED, received=received))
    _common.check_files(of_all("files written"))
    division = Division.DEALT
    if is_handed_out:
        division = Division.HANDED_OUT
    elif policy == _POLICY.OFF and _are_own([*of_all("fingerprint").values()]):
        division = Division.OWN
    elif policy == _POLICY.HINT or (policy == _POLICY.FILE and not is_for_predict):
        # Files have no order, so predictions need all of them on each worker.
        division = Division.TENSORFLOW
    if is_for_predict and division is not Division.DEALT:
        raise ValueError(f"predict: {_UNORDERED}. Received: {kind}")
    if division in (Division.OWN, Division.HANDED_OUT):
        return division
    _check_specs(of_all("spec"))
    _check_lengths(of_all("batches"))
    if len({first for first, _ in of_all("fingerprint").values()}) > 1:
        _log.say(_OTHER_DATA)
    return division


class SameBatches:
    """Compares the batches that the workers read, while they read them; see `watching`.

    Args:
      agreement: with the other workers.
    """

    def __init__(self, agreement: Agreement) -> None:
        self._agreement, self._own = agreement, str(agreement.task)
        self._lock = threading.Lock()
        # The number of exchanges of the workers, and that of the data sets since the last one.
        self._place = -1, 0

    def watching(
        self, dataset: tf.data.Dataset, is_for_predict: bool, has_quorum: bool = False
    ) -> Callable[..., tf.data.Dataset]:
        """Returns a method as `dataset.map`, also without a function, that compares elements with the other workers'.

        Both are one stage of tf.data, as another one costs 50 us an element. Compared are the batches 0, 1, 2, 4, 8 ...
        and the last one of the first passes, by sums of each component. All workers read a batch before they make a
        step, so the last one to read it finds a difference before the step. With the very first batch the others wait a
        little for it, and all of them raise.

        Args:
          dataset: its elements are global batches.
          is_for_predict: predictions must be those of the input.
          has_quorum: steps are made without late workers. Such a worker may leave out a whole pass, so the first pass
            alone is compared, without a wait, and a difference is a line.

        Raises:
          ValueError: while it is read, wrapped by TensorFlow (`explain`): batches differ in all components. In data
            that are drawn at random, or by Python, it is a line. So it is where a component is the same that is not
            constant: then the functions of `map` differ.
        """
        count, number = self._place
        self._place = self._agreement.count, number + 1 if count == self._agreement.count else 0
        place = f"data/{'/'.join(map(str, self._place))}"
        last, passes, is_said = int(dataset.cardinality()) - 1, 0, False

        def compare(of_pass: int, index: int, sums: np.ndarray) -> np.int64:
            nonlocal passes, is_said
            if index == 0:
                with self._lock:
                    of_pass = passes = passes + 1
            if of_pass <= (1 if has_quorum else _PASSES):
                wait_secs = _WAIT_SECS if of_pass == 1 and index == 0 and not has_quorum else 0.0
                difference = self._difference(f"{place}/{of_pass}/{index}", sums, wait_secs)
                if difference:
                    other, is_partial = difference
                    received = f"another batch {index} on {self._own} than on {other}"
                    draws, in_python = _operations(dataset)
                    if not (has_quorum or is_partial or draws) and (is_for_predict or not in_python):
                        raise ValueError(_SAME.format(remedy=_DIFFERENT, received=received))
                    if not is_said and not (draws and is_partial):
                        is_said = True
                        _log.say(_MAY_DIFFER.format(received=received))
            return np.int64(of_pass)

        def look(function: Callable[..., Any] | None, state: Any, batch: Any) -> Any:
            of_pass, index = state
            is_due = (tf.bitwise.bitwise_and(index, index - 1) == 0) | (index == last)
            of_pass = tf.cond(
                is_due,
                lambda: tf.ensure_shape(tf.numpy_function(compare, [of_pass, index, _sums(batch)], tf.int64), []),
                lambda: of_pass,
            )
            if function is not None:
                batch = function(*batch) if isinstance(batch, tuple) else function(batch)
            return (of_pass, index + 1), batch

        def mapped(function: Callable[..., Any] | None = None) -> tf.data.Dataset:
            zero = tf.constant(0, tf.int64)
            not_converted = tf.autograph.experimental.do_not_convert(lambda *given: look(function, *given))
            return dataset.scan((zero, zero), not_converted)

        return mapped

    def _difference(self, key: str, sums: np.ndarray, wait_secs: float) -> tuple[str, bool] | None:
        """Returns a worker whose batch differs, and if it is partly the same; None if no worker has read another one.

        Workers that have not read the batch within `wait_secs` compare it later themselves.
        """
        self._agreement.publish(f"{key}/{self._own}", json.dumps(sums.tolist()))
        until = time.monotonic() + wait_secs
        with contextlib.suppress(ConnectionError):  # A step says so.
            for task in self._agreement.tasks:
                text = self._agreement.receive(f"{key}/{task}", max(_LOOK_SECS, until - time.monotonic()))
                same = are_same(sums, np.asarray(json.loads(text))) if text else np.array([True])
                if not all(same):
                    return str(task), any(_varies(each) for each in sums[same])
        return None


def _sums(batch: Any) -> tf.Tensor:
    """Returns numbers of each component: its tolerance, size, sum of absolute values, and the sums of its 16 parts."""
    found = [tf.zeros([3 + _SUMS], tf.float64)]
    for leaf in tf.nest.flatten(batch, expand_composites=True):
        if not isinstance(leaf, tf.Tensor) or leaf.dtype in (tf.resource, tf.variant):
            continue
        tolerance = _TOLERANCE if leaf.dtype.is_floating or leaf.dtype.is_complex else 0.0
        if leaf.dtype == tf.string:
            # Directories of files may differ.
            leaf = tf.strings.to_hash_bucket_fast(tf.strings.regex_replace(leaf, ".*/", ""), 2**30)
        leaf = tf.math.real(leaf) if leaf.dtype.is_complex else leaf
        numbers = tf.cast(tf.reshape(leaf, [-1]), tf.float64)
        numbers = tf.where(tf.math.is_finite(numbers), numbers, tf.zeros_like(numbers))
        parts = tf.reshape(tf.pad(numbers, [[0, -tf.size(numbers) % _SUMS]]), [_SUMS, -1])
        size, total = tf.cast(tf.size(numbers), tf.float64), tf.reduce_sum(tf.abs(numbers))
        found.append(tf.concat([[tolerance, size, total], tf.reduce_sum(parts, 1)], 0))
    return tf.stack(found[1:] or found)


def are_same(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Returns, for each component of two batches, if its sums are the same up to rounding; see `_sums`."""
    if one.shape != other.shape:
        return np.zeros(len(one), bool)
    most = one[:, 0] * np.maximum(one[:, 2], other[:, 2]) / _SUMS
    return (one[:, 1] == other[:, 1]) & (np.abs(one[:, 3:] - other[:, 3:]).max(1) <= most)


def _varies(sums: np.ndarray) -> bool:
    """Returns True if the parts of a component differ: a constant one says nothing of the examples."""
    size = int(sums[1])
    full = sums[3 : 3 + size // max(1, -(-size // _SUMS))]
    return bool(len(full) and np.ptp(full) > sums[0] * sums[2])


def _operations(dataset: tf.data.Dataset) -> tuple[bool, bool]:
    """Returns if functions of a data set and its sources draw at random, and if they call Python."""
    names = " ".join(inputs.operations_of(dataset))
    return _DRAWING.search(names) is not None, _PYTHON.search(names) is not None


def explain(error: tf.errors.OpError) -> ValueError | None:
    """Returns an error of one line if TensorFlow's is about data that differ or can't be divided, else None."""
    if found := re.search(rf"ValueError: ({_SAME[:50]}.*)", str(error)):
        return ValueError(found[1])
    if found := _NO_FILES.search(str(error)):
        return ValueError(
            "dataset: AutoShardPolicy.FILE needs a data set that reads files, at least one for each worker; leave the "
            f"option away: each worker then reads all, and takes its part of each batch. Received: {found[0]}"
        )
    return None


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Raises the error of `explain` in place of TensorFlow's."""
    try:
        yield
    except tf.errors.OpError as error:
        raise explain(error) or error from None


def _fingerprint(dataset: tf.data.Dataset) -> list[str]:
    """Returns `DatasetGraph.fingerprint`, and why it says nothing of the examples: "" if it does."""
    try:
        graph = DatasetGraph(dataset)
        return [graph.fingerprint(), "a Python generator" if graph.is_generated else ""]
    except Exception as error:  # of an operation, or of a message of more than 2 GiB
        return ["", f"a data set that can't be compared ({(str(error).splitlines() or [''])[0][:80]})"]


def _are_own(fingerprints: Sequence[Sequence[str]]) -> bool:
    """Returns True if each worker has a data set of its own, and False if all have the same one.

    Raises:
      ValueError: some workers have the same one and others not, or it can't be known.
    """
    different = {text for text, _ in fingerprints}
    if len(different) == len(fingerprints):
        return True
    unknown = next((reason for _, reason in fingerprints if reason), "")
    if not unknown and len(different) == 1:
        return False
    problem = f"{unknown} may be the same on all or not" if unknown else "some have the same and others not"
    raise ValueError(
        f"dataset: with AutoShardPolicy.OFF each worker needs a data set of its own, or all the same, but {problem}; "
        "leave the option away if all have the same, or give each its own with "
        "strategy.distribute_datasets_from_function(lambda context: dataset)"
    )


def _check_lengths(batches: Mapping[Any, int]) -> None:
    """Raises ValueError if the workers' data sets have different numbers of batches."""
    if len({*batches.values()}) > 1:
        shown = ", ".join(f"{_length(count)} batches on {task}" for task, count in batches.items())
        # Shards of the same data set differ by one at most.
        is_shard = max(batches.values()) - min(batches.values()) < 2
        raise ValueError(_SAME.format(remedy=_UNSHARDED if is_shard else _EQUALLY_MANY, received=shown))


def _length(count: int) -> str:
    return {tf.data.INFINITE_CARDINALITY: "endless", tf.data.UNKNOWN_CARDINALITY: "unknown"}.get(count, str(count))


def _check_specs(specs: Mapping[Any, Any]) -> None:
    """Raises ValueError if the workers' elements have different structures, dtypes or shapes.

    A function of Python's on one worker alone, such as a map that waits, leaves shapes open.
    """
    (structure, shapes), *others = specs.values()
    if all(
        other == structure
        and all(tf.TensorShape(one).is_compatible_with(each) for one, each in zip(shapes, found, strict=True))
        for other, found in others
    ):
        return
    shown = ", ".join(f"{task}: {structure} of shapes {shapes}" for task, (structure, shapes) in specs.items())
    raise ValueError(
        "dataset: every worker must be given the same data set, whose elements have the same structure, dtypes and "
        f"shapes; make it on every worker by the same lines. Received: {shown}"
    )


def _spec(element_spec: Any) -> list[Any]:
    """Returns the structure and dtypes of elements, and their shapes, with None for one that is not known."""
    names = tf.nest.map_structure(lambda each: getattr(getattr(each, "dtype", None), "name", str(each)), element_spec)
    shapes = [tf.TensorShape(getattr(each, "shape", None)) for each in tf.nest.flatten(element_spec)]
    return [str(names), [None if shape.rank is None else shape.as_list() for shape in shapes]]


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

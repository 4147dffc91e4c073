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
from collections.abc import Callable, Sequence
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

_UNORDERED = (
    "each worker has other examples, so predictions would not be in the order of the input; give all workers the same "
    "data set, without shard and without the option"
)
_SAME = (
    "dataset: every worker must be given the same data set, of which it takes its share: remove x[rank::n] or "
    "dataset.shard(...), give shuffle the same seed on all, seed what is drawn at random, or shard it yourself with "
    "AutoShardPolicy.OFF"
)
_MAY_DIFFER = (
    "dataset: {received}. Of each batch of its own data each worker uses its part, so of examples that only one worker "
    "has, some are never used: give all workers the same data set, or each its own with "
    "strategy.distribute_datasets_from_function. Examples that are drawn at random may differ"
)


class Division(enum.Enum):
    """Division of the batches of a data set.

    DEALT: all have the same data set, and each worker takes its part of every batch.
    OWN: each worker has batches of its own, or a service gives each batch to one; a worker uses all that it gets.
    TENSORFLOW: TensorFlow's auto-sharding gives each worker its files, or its shard.
    """

    DEALT = enum.auto()
    OWN = enum.auto()
    TENSORFLOW = enum.auto()


def compare(
    dataset: tf.data.Dataset,
    agreement: Agreement | None,
    is_for_predict: bool,
    is_apart: bool,
    is_watched: bool = True,
    has_policy: bool = False,
) -> Division:
    """Compares the workers' data sets, and returns how the workers divide them; by the auto-shard policy.

    Args:
      dataset: this worker's.
      agreement: with the other workers; None for a worker alone, which reads everything.
      is_for_predict: predictions must be in the order of the input.
      is_apart: see `_shared_calls.gather_and_compare`.
      is_watched: the batches are compared as they are read (`SameBatches`); else what the data set was made by is.
      has_policy: a policy decides about updates or replicas, which needs the batches of a data set that all have.

    Raises:
      ValueError: the workers' data sets don't go together, it can't be known which examples each worker has, or
        predictions would have no order.
    """
    if agreement is None:
        return Division.DEALT
    policy = dataset.options().experimental_distribute.auto_shard_policy
    is_handed_out = _common.accept_handed_out(dataset)
    if policy == _POLICY.HINT and not DatasetGraph(dataset).has_shard_hints:
        raise ValueError(
            "dataset: with AutoShardPolicy.HINT and without dataset.shard(tf.data.experimental.SHARD_HINT, "
            "tf.data.experimental.SHARD_HINT) all workers would use the same examples; leave the option away"
        )
    divided_by = f"AutoShardPolicy.{policy.name}"
    if is_handed_out:
        divided_by = f"job_name={', '.join(map(repr, inputs.service_jobs(dataset)))} of the tf.data service"
    is_compared = policy in (_POLICY.OFF, _POLICY.FILE, _POLICY.HINT) or not is_watched
    # Without shapes: a function of Python's on one worker alone leaves them open.
    name_of = lambda each: getattr(getattr(each, "dtype", None), "name", str(each))  # noqa: E731
    structure = tf.nest.map_structure(name_of, dataset.element_spec)
    own = {
        "divided by": divided_by,
        "files written": inputs.files_written(dataset),
        "spec": {"elements": str(structure), "batches": _length(int(dataset.cardinality()))},
        "fingerprint": _fingerprint(dataset) if is_compared else None,
    }
    found = _shared_calls.gather_and_compare(agreement, own, "comparing the data sets", is_apart)
    _shared_calls.check_same(_SAME, {task: {"data divided by": each["divided by"]} for task, each in found.items()})
    _common.check_files({task: each["files written"] for task, each in found.items()})
    fingerprints, division = [each["fingerprint"] for each in found.values()], Division.DEALT
    if is_handed_out or (policy == _POLICY.OFF and _are_own(fingerprints)):
        division = Division.OWN
    elif policy == _POLICY.HINT or (policy == _POLICY.FILE and not is_for_predict):
        # Files have no order, so predictions need all of them on each worker.
        division = Division.TENSORFLOW
    if is_for_predict and division is not Division.DEALT:
        raise ValueError(f"predict: {_UNORDERED}. Received: {divided_by}")
    if has_policy and (is_handed_out or division is Division.TENSORFLOW):
        check_shared(dataset, divided_by)
    if division is not Division.OWN:
        _shared_calls.check_same(_SAME, {task: each["spec"] for task, each in found.items()})
        if len({*fingerprints}) > 1:
            _log.say(f"{_SAME}. Received: other operations, arrays or paths of files on each; some may be used twice")
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
                    names = " ".join(inputs.operations_of(dataset))
                    draws, in_python = _DRAWING.search(names), _PYTHON.search(names)
                    if not (has_quorum or is_partial or draws) and (is_for_predict or not in_python):
                        raise ValueError(f"{_SAME}. Received: {received}")
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
                batch = function(*batch) if type(batch) is tuple else function(batch)
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
                other = np.asarray(json.loads(text)) if text else sums
                if other.shape != sums.shape:
                    return str(task), False
                same = np.abs(other[:, 2:] - sums[:, 2:]).max(1) <= np.maximum(other[:, 1], sums[:, 1])
                if not all(same):
                    # A constant component says nothing of the examples.
                    return str(task), any(sums[same, 0])
        return None


def _sums(batch: Any) -> tf.Tensor:
    """Returns numbers of each component: 1 if it varies, how much rounding changes a sum, and the sums of 16 parts."""
    found = [tf.zeros([2 + _SUMS], tf.float64)]
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
        varies = tf.cast(tf.reduce_max(numbers) > tf.reduce_min(numbers), tf.float64)
        rounding = tolerance * tf.reduce_sum(tf.abs(numbers)) / _SUMS
        found.append(tf.concat([[varies, rounding], tf.reduce_sum(parts, 1)], 0))
    return tf.stack(found[1:] or found)


def explain(error: tf.errors.OpError) -> ValueError | None:
    """Returns an error of one line if TensorFlow's is about data that differ, else None."""
    found = re.search(rf"ValueError: ({_SAME[:50]}.*)", str(error))
    return ValueError(found[1]) if found else None


def _fingerprint(dataset: tf.data.Dataset) -> str | None:
    """Returns text that differs where the data sets do; None if that can't be known."""
    try:
        graph = DatasetGraph(dataset)
        return None if graph.is_generated else graph.fingerprint()
    except Exception:  # of an operation, or of a message of more than 2 GiB
        return None


def _are_own(fingerprints: Sequence[str | None]) -> bool:
    """Returns True if each worker has a data set of its own, and False if all have the same one.

    Raises:
      ValueError: some workers have the same one and others not, or it can't be known.
    """
    different = {*fingerprints}
    if None not in different and len(different) in (1, len(fingerprints)):
        return len(different) > 1
    problem = "a Python generator, or what is too large, may be" if None in different else "some of the given ones are"
    raise ValueError(
        f"dataset: with AutoShardPolicy.OFF each worker needs a data set of its own, or all the same, but {problem} "
        "the same on all or not; leave the option away if all have the same, or give each its own with "
        "strategy.distribute_datasets_from_function(lambda context: dataset)"
    )


def _length(count: int) -> str:
    return {tf.data.INFINITE_CARDINALITY: "endless", tf.data.UNKNOWN_CARDINALITY: "unknown"}.get(count, str(count))


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
    _shared_calls.check_same(
        "distribute_datasets_from_function: the data sets of all workers must have an end, or none; call repeat() "
        "on all",
        {task: {"endless": count == tf.data.INFINITE_CARDINALITY} for task, count in found.items()},
    )
    if has_policy:
        _shared_calls.check_same(
            "dataset: under a policy the workers' own data sets must have equally many batches; give all workers the "
            "same data set, or call take(number) on each",
            {task: {"batches": _length(count)} for task, count in found.items()},
        )
    is_unknown = tf.data.UNKNOWN_CARDINALITY in found.values()
    return tf.data.UNKNOWN_CARDINALITY if is_unknown else max(found.values())


def check_shared(dataset: Any, received: str) -> None:
    """Raises ValueError for what a strategy with a policy is given and can't divide, unless it has made it itself."""
    if not isinstance(dataset, DistributedDataset):
        raise ValueError(
            "experimental_distribute_dataset: under a policy the batches of a data set are divided among the workers; "
            "leave options away and its AutoShardPolicy at AUTO or DATA, or give each worker its own with "
            f"distribute_datasets_from_function. Received: {received}"
        )

# SPDX-License-Identifier: Apache-2.0
"""Tells losses that are sums over the examples from those that are means, and notices means of fewer numbers."""

from __future__ import annotations

import contextlib
import functools
import math
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist import _log
from tfdist.compat.keras import models
from tfdist.compat.tensorflow import graphs, replicas
from tfdist.passes import splitting
from tfdist.step import contribution

# Losses that a line was written for; the step may be traced several times.
_noticed: weakref.WeakSet[Any] = weakref.WeakSet()
# Operations that give numbers of chosen examples their places among all examples.
_PUTS_BACK = re.compile(".*Scatter|.*Segment|RaggedTensorToTensor|SparseToDense")


def is_sum(loss: Any) -> bool:
    """Returns True if a loss is a sum over the examples, and not a mean."""
    return getattr(loss, "reduction", "mean") in ("sum", "none", None)


def _lack(found: Any, *given: Any) -> str:
    """Returns why a loss has fewer numbers than examples, as far as is known while it is traced; "" if it has all."""
    if not isinstance(found, tf.Tensor):
        return ""
    if found.shape.rank and found.shape[0] is not None:
        rows = {each.shape[0] for each in given if isinstance(each, tf.Tensor) and each.shape.rank}
        return "has fewer numbers than examples" if rows and found.shape[0] not in rows else ""
    # `Where` gives the places where a mask is true, as for `tf.boolean_mask`.
    if not tf.is_symbolic_tensor(found):
        return ""
    sources = {each.op for each in given if tf.is_symbolic_tensor(each)}
    sources |= {each for each in found.graph.get_operations() if _PUTS_BACK.match(each.type)}
    behind = graphs.operations_behind(found.op, sources)
    is_masked = found.op not in sources and any(operation.type == "Where" for operation in behind)
    return "leaves examples out" if is_masked else ""


# A loss of one number may be a mean over the examples, or not. The loss itself tells, by its values for made-up ones.

EXAMPLES = 4
_MOST_NUMBERS = 2**24
# Of an axis that padding makes as long as the longest example.
_UNKNOWN_SIZE = 32
# Operations whose effects would be seen, and that may give other values the next time.
EFFECTS = re.compile(
    "Assign(Add|Sub)?$|.*PyFunc|Print|Write|Save|Lookup.*(Insert|Remove|Import)|Queue|StackP|.*Iterator.*GetNext"
)
# Of these, what can't be undone.
_LASTING = re.compile(".*PyFunc|Write|Save|Lookup.*(Insert|Remove|Import)|Queue|StackP|.*Iterator.*GetNext")


def joined(*batches: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the examples of flat batches as one."""
    return [np.concatenate(leaves) for leaves in zip(*batches, strict=True)]


def made_up(leaves: Sequence[Any], count: int, seed: int) -> list[np.ndarray] | None:
    """Returns examples in [0, 1] like those of flat tensors; None if a shape or dtype does not tell enough."""
    random, made = np.random.default_rng(seed), list[np.ndarray]()
    for leaf in leaves:
        if not isinstance(leaf, tf.Tensor | tf.TensorSpec) or not leaf.shape.rank:
            return None
        shape = [count, *(_UNKNOWN_SIZE if size is None else size for size in leaf.shape[1:])]
        if not (leaf.dtype.is_floating or leaf.dtype.is_integer) or math.prod(shape) > _MOST_NUMBERS:
            return None
        values = random.integers(0, 2, shape) if leaf.dtype.is_integer else random.uniform(size=shape)
        made.append(values.astype(leaf.dtype.as_numpy_dtype))
    return made


# The losses of a replica's step, by which several replicas train as one device.
#
# Within `counted_as_one` a replica is a single device: neither Keras nor `tf.nn.compute_average_loss` divides. So each
# loss is the mean over the replica's own examples, and its gradient is weighted by their share of the batch. A loss
# that is a sum is divided by this share before, which makes it an estimate of the sum over the whole batch.


class Sums(NamedTuple):
    """Numbers of a user's step that are sums over its examples, and not means; see `trials`.

    Attributes:
      optimizers: ids of the optimizers that are given gradients of such a loss.
      metrics: ids of the metrics that are given such a number.
      logs: positions of such numbers among the flat logs.
    """

    optimizers: frozenset[int] = frozenset()
    metrics: frozenset[int] = frozenset()
    logs: frozenset[int] = frozenset()


NO_SUMS = Sums()
Gather = Callable[[tf.Tensor], tf.Tensor]

# One trace at a time sets it, whatever engine traces: two threads may fit two models.
_TRACING = threading.RLock()


@contextlib.contextmanager
def counted_as_one(strategy: Any) -> Iterator[None]:
    """Within this block, in replica context, `strategy.num_replicas_in_sync` is 1."""
    with _TRACING:
        facts = replicas.facts_of(strategy)
        before, facts.counts_as_one_replica = facts.counts_as_one_replica, True
        try:
            yield
        finally:
            facts.counts_as_one_replica = before


def are_sums(model: keras.Model) -> bool:
    """Returns True if all losses given to `compile` are sums over the examples.

    Raises:
      ValueError: there are losses of both kinds.
    """
    kinds = {is_sum(loss) for loss in models.compiled_losses(model)}
    if len(kinds) > 1:
        raise ValueError(
            "compile(loss=...): under policies all losses must have one kind of reduction, a sum or a mean, where the "
            "number of examples of a batch is not known; use one kind, or data of a known batch size with "
            "batch(..., drop_remainder=True). Received: both kinds"
        )
    return True in kinds


def patches(
    model: keras.Model,
    share: Callable[[], Any],
    weight_of_number: Callable[[Any], Any] | None = None,
    weighs_loss: bool = False,
    sums: Sums = NO_SUMS,
    gather: Gather | None = None,
    may_differ: bool = False,
) -> list[tuple[Any, str, Any]]:
    """Returns patches by which the losses of a replica, and metrics of them, count as on one device.

    Args:
      model: the model.
      share: returns the replica's share of the batch, 0 to 1.
      weight_of_number: returns the weight of a number of the batch that a metric is given; `share` by default.
      weighs_loss: True to weigh the loss of Keras' own train step by `share`, instead of its gradients.
      sums: the numbers that are sums in a user's step.
      gather: returns the examples of all replicas, whose gradient is that of this replica's own; None where they can't
        be gathered, and a loss that needs them raises a ValueError, where it is traced.
      may_differ: True for updates unlike those of one device: it is computed with a replica's own then, after a line.
    """
    weigh = weight_of_number or (lambda metric: share())

    def weight_of(metric: Any) -> Callable[[bool], Any]:
        return lambda is_number: weigh(metric) if is_number else None

    # Keras has a step weigh the mean of its loss, but no number that a step or a metric's function computes.
    means, changes = models.means_in(model.metrics), list[tuple[Any, str, Any]]()
    for metric in {id(metric): metric for metric in [*model.metrics, *means]}.values():
        plain = update = metric.update_state
        if id(metric) in sums.metrics:
            update = functools.partial(_update_by_whole, update, share)
        if type(metric) is keras.metrics.Sum:
            update = functools.partial(models.update_weighing, update, weight_of(metric))
        if update is not plain:
            changes.append((metric, "update_state", update))
    changes += [models.weighed_numbers(mean, weight_of(mean)) for mean in means]
    for mean in means:
        if models.function_of(mean) is not None:
            changes.append(models.with_function(mean, _of_all(mean, models.function_of(mean), share, gather)))
    of_calls = [loss for loss in models.compiled_losses(model) if hasattr(loss, "call")]
    changes += [(loss, "call", _counted(loss, share, gather, may_differ)) for loss in of_calls]
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        weighs_loss = weighs_loss and id(optimizer) not in sums.optimizers
        changes.append((optimizer, "scale_loss", _scaling(optimizer.scale_loss, share, weighs_loss)))
    return changes


def _update_by_whole(
    update_state: Callable[..., Any], share: Callable[[], Any], values: Any, sample_weight: Any = None
) -> Any:
    """Updates a metric by an estimate of a sum over the whole batch, from that over a replica's part."""
    values = tf.convert_to_tensor(values)
    return update_state(values if values.shape.rank else whole(values, share), sample_weight)


def _counted(loss: Any, share: Callable[[], Any], gather: Gather | None, may_differ: bool) -> Callable[..., Any]:
    call = loss.call

    def of_whole_batch(found: tf.Tensor) -> tf.Tensor:
        # The gradient by a replica's part counts in full, and not by its share.
        scaled = whole(found, share)
        return scaled + tf.stop_gradient(found - scaled)

    computed = _of_all(loss, call, share, gather, of_whole_batch, may_differ)

    def counted(y_true: Any, y_pred: Any) -> Any:
        if getattr(loss, "reduction", None) == "sum":
            return whole(tf.convert_to_tensor(call(y_true, y_pred)), share)
        if is_sum(loss):
            return call(y_true, y_pred)
        return computed(y_true, y_pred)

    return counted


def _of_all(
    owner: Any,
    call: Callable[..., Any],
    share: Callable[[], Any],
    gather: Gather | None,
    then: Callable[[Any], Any] | None = None,
    may_differ: bool = True,
) -> Callable[..., Any]:
    """Returns a loss or metric that computes with the examples of all replicas, where it needs them together.

    That is one of one number which is neither a mean nor a sum over examples, such as the Dice coefficient of a batch,
    and a loss of fewer numbers than examples. A sum is estimated from the replica's own.

    Args:
      owner: the Keras loss or metric.
      call: a function of labels and predictions.
      share: see `patches`.
      gather: see `patches`.
      then: of a loss; called with what is computed from the examples of all.
      may_differ: where they can't be gathered, True to compute with the replica's own after a line, and False to raise
        a ValueError.
    """

    def computed(*given: Any, **named: Any) -> Any:
        found = call(*given, **named)
        is_number = getattr(found, "shape", None) == ()
        kind = _kind_of_number(functools.partial(call, **named), *given) if is_number else "mean"
        does = "computes with all examples together" if kind == "other" else ""
        if kind == "mean" and not ((is_number or then is not None) and (does := _lack(found, *given))):
            return found
        if kind == "sum":
            return whole(found, share)
        if kind == "unknown":
            _say_unknown(owner)
            return found
        if gather is not None:
            whole_batch = call(*map(gather, given), **named)
            return whole_batch if then is None else then(whole_batch)
        _notice(owner, does, may_differ)
        return found

    return computed


def _notice(owner: Any, does: str, may_differ: bool) -> None:
    """Writes a line, or raises a ValueError, for a loss or metric of all examples that gets a replica's own."""
    kind = "loss" if isinstance(owner, keras.losses.Loss) else "metric"
    name = getattr(owner, "name", None) or type(owner).__name__
    if not may_differ:
        raise ValueError(
            f"policies: the {kind} {name!r} {does}, and a replica under a policy has its own examples alone; use one "
            "with a number for each example, 0 for those left out, such as keras.losses.Dice(axis=(1, 2, 3)) for "
            f"images, or train without a policy. Received: a {kind} of the whole batch"
        )
    if owner not in _noticed:
        _noticed.add(owner)
        _log.say(
            f"the {kind} {name!r} {does}: it is the mean of the replicas' means, and not that of one device; return a "
            "number for each example, 0 for those left out"
        )


def _say_unknown(owner: Any) -> None:
    if owner not in _noticed:
        _noticed.add(owner)
        _log.say(
            f"{getattr(owner, 'name', None) or type(owner).__name__!r} calls Python, or changes what is not its own, "
            "such as an iterator, so whether its number is a mean or a sum over the examples can't be tried: it counts "
            "as a mean; return a number for each example"
        )


def _kind_of_number(call: Callable[..., Any], *given: Any) -> str:
    """Returns "mean", "sum" or "other", by made-up examples; "mean" if they don't suit the function.

    It is "unknown" of a function whose trial would be seen, such as one that reads an iterator.
    """
    first, second = (made_up(given, EXAMPLES, seed) for seed in range(2))
    if first is None or second is None:
        return "mean"
    try:
        with tf.init_scope():
            traced = tf.function(call, autograph=False).get_concrete_function(*map(tf.constant, first))
            if any(map(_LASTING.match, graphs.types_in(traced.graph))):
                return "unknown"
            written = graphs.written_in(traced.graph)

            def value(*batches: list[np.ndarray]) -> float:
                with restored(written):
                    return float(call(*map(tf.constant, joined(*batches))))

            kinds = {_kind_by(value, first, second)}
            for mark in _MARKS if "other" not in kinds else ():
                # In another part of each: what they are divided by must differ.
                marked = (_marked(each, mark, every) for each, every in ((first, 2), (second, 4)))
                with contextlib.suppress(Exception):  # of a label that is none for this function
                    kinds.add(_kind_by(value, *marked))
    except Exception:
        return "mean"
    kinds.discard("")
    if len(kinds) < 2 and "other" not in kinds:
        return kinds.pop() if kinds else "mean"
    # It would be called with the replica's examples and with all: what it writes would count twice.
    return "mean" if written else "other"


# Labels that losses leave out, or count apart.
_MARKS = (0, 1, -1, -100, 255, np.nan)


def _marked(batch: Sequence[np.ndarray], mark: float, every: int) -> list[np.ndarray]:
    """Returns a flat batch whose first tensor has only this label in some rows; raises if it can't hold it."""
    labels, *others = batch
    labels = labels.copy()
    labels[::every] = mark
    return [labels, *others]


def _kind_by(value: Callable[..., float], first: list[np.ndarray], second: list[np.ndarray]) -> str:
    """Returns "mean", "sum" or "other" by the values of two batches, or "" if these tell nothing."""
    one, other, twice, both = value(first), value(second), value(first, first), value(first, second)
    if not np.isfinite(both) or one == other == twice == both:
        return ""
    if np.isclose(both, (one + other) / 2, rtol=1e-3) and np.isclose(twice, one, rtol=1e-3):
        return "mean"
    return "sum" if np.isclose(both, one + other, rtol=1e-3) else "other"


@contextlib.contextmanager
def restored(written: Sequence[tf.Variable]) -> Iterator[None]:
    """Gives variables the values of before again at the end of this block; outside of graphs."""
    before = [each.read_value() for each in written]
    try:
        yield
    finally:
        for variable, value in zip(written, before, strict=True):
            variable.assign(value)


def _scaling(scale_loss: Callable[[Any], Any], share: Callable[[], Any], weighs_loss: bool) -> Callable[[Any], Any]:
    def scale(loss: Any) -> Any:
        # The numbers of a loss without a reduction, whose gradients Keras' step adds up.
        loss = tf.convert_to_tensor(loss)
        found = tf.convert_to_tensor(scale_loss(whole(loss, share) if loss.shape.rank else loss))
        return found * tf.cast(share(), found.dtype) if weighs_loss else found

    return scale


def whole(part: Any, share: Callable[[], Any]) -> Any:
    """Returns an estimate of a sum over the batch, or of its gradient, from that over a replica's part."""
    known = share()
    return contribution.times(part, 1 / known if isinstance(known, float) else tf.math.reciprocal_no_nan(known))


def share_of_batch(batch: Any, batch_rows: tf.Tensor | None, num_replicas: int) -> tf.Tensor | float:
    """Returns the part of the global batch, 0 to 1, that a replica has.

    Args:
      batch: the replica's part.
      batch_rows: number of examples in all parts together; where it is not known, all parts with examples count alike.
      num_replicas: largest number of replicas.
    """
    rows = splitting.rows(batch)
    # In a graph parts have a known size only where all have the same; outside every size is known.
    is_even = bool(splitting.static_size(batch)) and not tf.executing_eagerly()
    if rows is None or is_even:
        return 1 / num_replicas
    if batch_rows is None:
        return tf.where(rows > 0, tf.constant(1 / num_replicas, tf.float64), 0.0)
    return rows / tf.maximum(batch_rows, 1)

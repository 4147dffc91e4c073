# SPDX-License-Identifier: Apache-2.0
"""A Keras train step in two halves: the contribution of one replica, and the update from several contributions.

    contribute(batch)        on a replica: the user's train_step. It writes to no variable: the gradients and all
                             intended writes are returned as a `ReplicaContribution`. `unless_empty` calls it, or not
    add_up(contributions)    sums contributions; the engine chooses the method and the device
    update(total)            one update of the model, equal to the update of a single device with all examples
    logs(...)                the logs for Keras

So a dropped contribution changes nothing: no weight, no metric, and no statistics of a BatchNormalization. Work that is
done once per update (clipping, weight decay, loss scaling, EMA, constraints, the count of iterations) is in `update`,
in the real `optimizer.apply`.

Writes are held back as follows. `optimizer.apply` is replaced on the optimizer instances while the step is traced. The
rest of the step runs in a `keras.StatelessScope` (`recording`), in which Keras' variables are read and written in a
mapping. Variables in which a metric counts (aggregation "sum") start at zero there, so that their final values are this
batch's counts. Values written before `optimizer.apply`, such as a learning rate, are assigned before the update, and
the others after it. A `tf.Variable` that Keras has not made is written at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import _log
from tfdist.compat.keras import models, optimizers, placement
from tfdist.compat.tensorflow import graphs, variables
from tfdist.passes import handle as handles
from tfdist.passes import splitting
from tfdist.step import logs as logs_of_metrics
from tfdist.step import losses, one_replica, recording, replicas
from tfdist.step.contribution import ReplicaContribution, RowsByShard, nothing, of_shape, times
from tfdist.step.gradients import Transforms
from tfdist.step.recording import Applied, Findings, Recording, capture
from tfdist.step.step import Step
from tfdist.transforms import ARRIVAL

# Operations that write summaries, at once or under a condition.
_SUMMARY = re.compile(r"^Write\w*Summary |summary_cond")

Place = Callable[[Any], contextlib.AbstractContextManager]
Assign = Callable[[Any, tf.Tensor], Any]
Apply = Callable[[Any, Sequence[Any], Sequence[Any]], Any]


@dataclasses.dataclass
class _Layout:
    """Targets of the parts of a contribution: optimizers, variables and logs; complete once the step was traced."""

    applied: list[Applied] = dataclasses.field(default_factory=list)
    counters: list[Any] = dataclasses.field(default_factory=list)
    # Ids of the counters whose sums are divided by the examples of all contributions.
    by_examples: set[int] = dataclasses.field(default_factory=set)
    states: list[StateWrite] = dataclasses.field(default_factory=list)
    # For each gradient: True if it has rows that all replicas look up alike, to be added up row by row.
    has_common_rows: list[bool] = dataclasses.field(default_factory=list)
    # The structure of the step's result, with a function that computes each leaf after the update.
    logs: Any = None


class SplitTrainStep:
    """The two halves of a model's `train_step`.

    Args:
      step: a model's `train_step`.
      total_num_replicas: largest number of replicas that contribute.
      is_relative: True if a contribution has the difference of each state, and not its new value: for replicas that
        begin with different values.
      can_take_maxima: True if contributions are summed by `add_up`, and a metric's variable is no sum of copies.
      transforms: those of the strategy; none by default.
      arrives_at_update: True if `arrived` is called for each contribution to an update.
      sums: the numbers that are sums over the examples in a user's step.
    """

    def __init__(
        self,
        step: Step | Callable[..., Any],
        total_num_replicas: int,
        is_relative: bool = False,
        can_take_maxima: bool = False,
        transforms: Transforms | None = None,
        arrives_at_update: bool = False,
        sums: losses.Sums = losses.NO_SUMS,
    ) -> None:
        self._step = Step.of(step)
        self.model: keras.Model = self._step.model
        self._total_num_replicas = total_num_replicas
        self._is_relative = is_relative
        self._can_take_maxima = can_take_maxima or total_num_replicas == 1
        self._transforms = transforms or Transforms(())
        self._arrives_at_update = arrives_at_update
        self._sums = sums
        self._findings = Findings()
        self._layout = _Layout()
        # True if all replicas are known to have equally many examples.
        self._is_even = False
        # Examples of a contribution, where that is so.
        self._rows: int | None = None
        self._said: set[str] = set()

    @property
    def counters(self) -> list[Any]:
        """The variables that `ReplicaContribution.counts` belongs to."""
        return self._layout.counters

    def settled(self, trace: Callable[[], Any]) -> Any:
        """Calls `trace`, which traces `contribute`, until a trace finds nothing new; returns its result."""
        return self._findings.settled(trace)

    def written_past_keras(self, written: Any) -> None:
        """Requests a stand-in for a Keras variable whose `tf.Variable` the step writes directly.

        Raises:
          TraceAgain: the step has to be traced anew; see `settled`.
          ValueError: the write is after `optimizer.apply`.
        """
        of_optimizer = getattr(self.model.optimizer, "variables", ())
        for variable in (*self.model.variables, *self.model.metrics_variables, *of_optimizer):
            if variables.tf_variable(variable) is written:
                self._findings.ask_for_stand_in(variable)
                raise ValueError(
                    "policies: after optimizer.apply a train_step must not write variables past Keras, because the "
                    "update is made later; use variable.assign(value) of the Keras variable. Received: a write of "
                    f"{variable.path!r}"
                )

    def unless_empty(
        self,
        strategy: tf.distribute.Strategy,
        compute: Callable[[Any, tf.Tensor | None], ReplicaContribution],
        pack: Callable[[ReplicaContribution], list[tf.Tensor]],
        batch: Any,
        batch_rows: tf.Tensor | None = None,
    ) -> list[tf.Tensor]:
        """Returns a replica's flat contribution, which has weight 0 and no rows if its part of the batch is empty.

        No layer runs then, not even on examples that are made up: a layer may refuse values it does not know. `compute`
        is traced as a function of its own. In a branch, variables are not looked up, read and placed as elsewhere.

        Args:
          strategy: in whose scope it is traced.
          compute: computes the contribution from these two arguments, by `contribute`; it enters the replica itself.
          pack: returns the tensors of a contribution.
          batch: see `contribute`.
          batch_rows: likewise.
        """
        if self._total_num_replicas == 1 or not replicas.may_lack_examples([batch]):
            return pack(compute(batch, batch_rows))
        given, made = (batch, () if batch_rows is None else batch_rows), list[ReplicaContribution]()

        def of_examples(*flat: tf.Tensor) -> list[tf.Tensor]:
            supply = iter(flat)
            filled = [leaf if leaf is None else next(supply) for leaf in leaves]
            part, total = tf.nest.pack_sequence_as(given, filled, expand_composites=True)
            made.append(compute(part, total if tf.is_tensor(total) else None))
            return pack(made[-1])

        leaves = tf.nest.flatten(given, expand_composites=True)
        flat = [leaf for leaf in leaves if leaf is not None]
        specs = [tf.TensorSpec(replicas.shape_of_any_size(each), each.dtype) for each in flat]
        # Here, where what a worker has of a lookup table is captured: not in the branch.
        call = graphs.bare_call(one_replica.trace(strategy, of_examples, specs))
        rows: Any = splitting.rows(batch)
        # A list of one is returned as its element.
        return tf.nest.flatten(
            tf.cond(rows > 0, lambda: call(*flat), lambda: pack(nothing(made[-1], self._extremes())))
        )

    def _extremes(self) -> list[tf.Tensor]:
        """Returns the current values of the states that are maxima or minima, as `ReplicaContribution.maxima`."""
        extremes = [each for each in self._layout.states if each.is_extreme]
        values = [(tf.convert_to_tensor(each.variable), each.mode) for each in extremes]
        return [value if mode == recording.MAXIMUM else -value for value, mode in values]

    def contribute(self, batch: Any, batch_rows: tf.Tensor | None = None) -> ReplicaContribution:
        """Computes a replica's contribution from its part of the batch; call it in a graph, in replica context.

        Args:
          batch: the replica's part, with an example.
          batch_rows: int64 scalar, the number of examples in all parts together, if known. Without it numbers that the
            step computes from the batch count alike for all replicas.

        Raises:
          TraceAgain: the step has to be traced anew; see `settled`.
        """
        before, self._layout = self._layout, _Layout()
        try:
            with placement.following(tf.distribute.get_strategy()):
                return self._contributed(batch, batch_rows)
        except BaseException:
            # Other contributions, and the updates from them, were traced with that one.
            self._layout = before
            raise

    def _contributed(self, batch: Any, batch_rows: tf.Tensor | None) -> ReplicaContribution:
        layout = self._layout
        starts = self._starts()
        scope = Recording(starts, self._findings)
        changed = [(o, "apply", capture(o, layout.applied, scope)) for o in optimizers.optimizers_of(self.model)]
        share = functools.partial(losses.share_of_batch, batch, batch_rows, self._total_num_replicas)
        weight, rows = self._weight(batch), splitting.rows(batch)
        is_unknown = batch_rows is None and not self._is_even
        if self._total_num_replicas > 1:
            weight_of = self._weight_of_number(rows, share) if is_unknown else None
            changed += losses.patches(self.model, share, weight_of, sums=self._sums, may_differ=self._is_relative)
        told = logs_of_metrics.MetricResults(self.model.metrics)
        changed += told.changes()
        if self._total_num_replicas > 1:
            changed += one_replica.without_others(self._step.name, self._total_num_replicas, self._say_once)
        with optimizers.patched_attributes(changed), scope:
            models.forget_added(self.model)
            # As Keras traces it, which represents None as an empty Optional.
            result = tf.autograph.experimental.do_not_convert(self._step.function)(handles.without_optionals(batch))
            self._notice_summaries()
        writes = scope.writes()
        counts, new_states, maxima = self._sort(writes, {id(variable): start for variable, start in starts}, weight)
        are_sums = is_unknown and losses.are_sums(self.model)
        for call in layout.applied:
            call.are_sums = are_sums or (is_unknown and id(call.optimizer) in self._sums.optimizers)
        about = {"contributors": self._total_num_replicas, "examples": rows}
        on_replica = functools.partial(self._transforms.on_replica, with_arrival=not self._arrives_at_update, **about)
        gradients = [
            times(gradient, 1.0 if call.are_sums else weight)
            for call in layout.applied
            for gradient in on_replica(call.optimizer, self._of_whole(call, share), call.trained())
        ]
        layout.has_common_rows = [optimizers.are_common_rows(gradient) for gradient in gradients]
        logs = self._shipped(result, told, writes, weight, functools.partial(losses.whole, share=share), is_unknown)
        weight, one = tf.convert_to_tensor(weight), tf.constant(1.0)
        return ReplicaContribution(gradients, counts, new_states, logs, weight, one, tuple(maxima))

    def _of_whole(self, call: Applied, share: Callable[[], Any]) -> list[Any]:
        """Returns the gradients of a call; those of a sum as an estimate of that over the whole batch."""
        is_sum = id(call.optimizer) in self._sums.optimizers
        given = map(of_shape, call.gradients, call.trained())
        return [losses.whole(gradient, share) if is_sum else gradient for gradient in given]

    def _notice_summaries(self) -> None:
        """Writes a line for a step that writes summaries, which the graph that is traced has now."""
        traced = () if tf.executing_eagerly() else tf.compat.v1.get_default_graph().get_operations()
        writes = any(_SUMMARY.search(f"{operation.type} {operation.name}") for operation in traced)
        if writes and self._total_num_replicas > 1:
            self._say_once(
                "policies: tf.summary in a train_step writes once for each replica, of its own part of the "
                "batch, also where its gradient is dropped; return the value in the step's logs. "
                f"Received: {self._step.name}, {self._total_num_replicas} replicas"
            )

    def _say_once(self, line: str) -> None:
        """Writes a line; the step may be traced several times."""
        if line not in self._said:
            self._said.add(line)
            _log.say(line)

    def _weight_of_number(self, rows: Any, share: Callable[[], Any]) -> Callable[[Any], Any]:
        """Returns the weight of a number that a metric is given, where the examples of the whole batch are not known.

        It is the replica's examples, and counts are divided at the update. An estimate of a sum over the whole batch
        counts as one of its replicas.
        """

        def weight(metric: Any) -> Any:
            if id(metric) in self._sums.metrics:
                return share()
            # Those of `Mean`, or of `Sum`. What a subclass counts besides is a sum.
            self._layout.by_examples |= {id(getattr(metric, name, None)) for name in ("total", "count")}
            return rows

        return weight

    def _starts(self) -> list[tuple[Any, tf.Tensor]]:
        """Returns the variables whose value before the step is asked for, with that value: zero for metrics' sums."""
        metrics = self.model.metrics_variables
        counters = [v for v in metrics if v.aggregation == "sum" and id(v) not in self._findings.states]
        counted = {id(variable) for variable in counters}
        others = [variable for variable in metrics if id(variable) not in counted]
        if self._is_relative:
            others += self.model.non_trainable_variables
        kept = {id(variable): (variable, tf.identity(tf.convert_to_tensor(variable))) for variable in others}
        zeros = [(variable, tf.zeros(variable.shape, variable.dtype)) for variable in counters]
        return [*zeros, *kept.values()]

    def _sort(
        self, writes: Sequence[recording.Write], starts: dict[int, tf.Tensor], weight: Any
    ) -> tuple[list[tf.Tensor], list[tf.Tensor], list[tf.Tensor]]:
        """Sorts writes into counts, states and maxima.

        Args:
          writes: those of the step.
          starts: values before the step by variable id.
          weight: of the replica's means.
        """
        counts, new_states, maxima = [], [], []
        metrics = {id(variable) for variable in self.model.metrics_variables}
        for variable, value, position in writes:
            start = starts.get(id(variable))
            mode = self._mode(variable, value, start) if id(variable) in metrics else "mean"
            if mode == "count":
                self._layout.counters.append(variable)
                counts.append(value)
                continue
            state = StateWrite(variable, mode, position)
            self._layout.states.append(state)
            if state.is_extreme:
                maxima.append(value if mode == recording.MAXIMUM else -value)
            else:
                new_states.append(summable(change(value, start if self._is_relative else None), weight))
        return counts, new_states, maxima

    def _mode(self, variable: Any, value: tf.Tensor, start: tf.Tensor | None) -> str:
        """Returns the reduction over replicas of a metric's variable."""
        is_sum, is_state = variable.aggregation == "sum", id(variable) in self._findings.states
        is_readable = id(variable) not in self._findings.stand_ins
        kind = recording.kind(value, start) if is_readable and start is not None else recording.OTHER
        if is_sum and not is_state:
            if is_readable and kind == recording.ADDITION:
                return "count"
            self._findings.ask_for_state(variable)
        is_extreme = kind in (recording.MAXIMUM, recording.MINIMUM) and variable.dtype != "bool"
        if is_extreme and self._can_take_maxima:
            return kind
        if is_sum and self._total_num_replicas > 1:
            raise recording.refuse_state(variable)
        return "mean"

    def _weight(self, batch: Any) -> tf.Tensor | float:
        rows = splitting.rows(batch)
        self._is_even = rows is None or bool(splitting.static_size(batch))
        self._rows = splitting.static_size(batch) or None
        return 1.0 if self._is_even else tf.cast(rows, tf.float32)

    def _shipped(
        self,
        result: Any,
        told: logs_of_metrics.MetricResults,
        writes: Sequence[recording.Write],
        weight: Any,
        whole: Callable[[Any], Any],
        are_sums_counted: bool,
    ) -> list[Any]:
        """Returns the tensors by which the logs are computed after the update, besides metrics; and says how."""
        metrics = {id(variable) for variable in self.model.metrics_variables}
        counted = [write for write in writes if id(write.variable) in metrics]
        sums = {id(leaf) for index, leaf in enumerate(tf.nest.flatten(result)) if index in self._sums.logs}
        shipped: list[Any] = []

        def ship(tensor: Any, is_counted: bool = False) -> Callable[[ReplicaContribution], Any]:
            shipped.append(times(tf.cast(tensor, tf.float32), 1.0 if is_counted else weight))
            at = len(shipped) - 1
            return lambda total: tf.math.divide_no_nan(total.logs[at], total.replicas if is_counted else total.weight)

        def log(leaf: Any) -> Callable[[ReplicaContribution], Any]:
            if isinstance(leaf, keras.Variable | tf.Variable):
                # As on one device: its value after the step.
                return lambda total: tf.convert_to_tensor(leaf)
            if told.has(leaf):
                return lambda total: told.after(leaf)
            if tf.is_symbolic_tensor(leaf) and leaf.graph is tf.compat.v1.get_default_graph():
                formula = logs_of_metrics.Formula(leaf, [write.value for write in counted])
                if formula.counts:
                    variables = [next(w.variable for w in counted if w.value is count) for count in formula.counts]
                    others = [ship(each) for each in formula.others]
                    return lambda total: formula.value(
                        [tf.convert_to_tensor(each) for each in variables], [other(total) for other in others]
                    )
            return ship(whole(leaf), are_sums_counted) if id(leaf) in sums else ship(leaf)

        is_dict = isinstance(result, dict)
        in_place = functools.partial(tf.nest.map_structure, log)
        self._layout.logs = {key: in_place(value) for key, value in result.items()} if is_dict else in_place(result)
        return shipped

    # The second half.

    def counts(self, total: ReplicaContribution) -> list[tf.Tensor]:
        """Returns the increments of `counters`, from the sum of contributions.

        Those of a single contribution are its part of the sum, if `weight` is that of the sum.
        """
        return [
            tf.math.divide_no_nan(count, tf.cast(total.weight, count.dtype))
            if id(counter) in self._layout.by_examples
            else count
            for counter, count in zip(self.counters, total.counts, strict=True)
        ]

    def arrived(
        self, contribution: ReplicaContribution, weight: Any, staleness: Any, contributors: int, is_scaled: bool
    ) -> list[Any]:
        """Returns the gradients of a contribution, transformed at their arrival; see `Transforms.run`.

        Args:
          contribution: with a gradient for each of `targets`.
          weight: that the policy gives it, by which it is not multiplied yet.
          staleness: of its gradients.
          contributors: number of contributions to the update.
          is_scaled: False if the scale of losses was removed.
        """
        gradients, found = iter(contribution.gradients), list[Any]()
        about: dict[str, Any] = {"weight": weight, "staleness": staleness, "contributors": contributors}
        for call in self._layout.applied:
            is_mean, of = call.are_sums or self._is_even, call.trained()
            given = [next(gradients) for _ in of]
            unit = 1 if is_mean else tf.math.reciprocal_no_nan(contribution.weight)
            about |= {"is_scaled": is_scaled, "examples": self._rows if is_mean else contribution.weight}
            found += self._transforms.run((ARRIVAL,), call.optimizer, given, of, unit, **about)
        return found

    def states(self) -> list[Any]:
        """Returns the variable of each of `ReplicaContribution.states`."""
        return [state.variable for state in self._layout.states if not state.is_extreme]

    def targets(self) -> list[tuple[Any, Any]]:
        """Returns optimizer and variable of each gradient, in the order of `ReplicaContribution.gradients`."""
        return [(each.optimizer, variable) for each in self._layout.applied for variable in each.trained()]

    def variables(self) -> list[Any]:
        """Returns the variables of the gradients, in the order of `ReplicaContribution.gradients`."""
        return [variable for _, variable in self.targets()]

    def calls(self) -> list[Applied]:
        """Returns the call of `optimizer.apply` that each of these gradients was given to."""
        return [each for each in self._layout.applied for has_gradient in each.present if has_gradient]

    def update(
        self,
        total: ReplicaContribution,
        place: Place = lambda variable: contextlib.nullcontext(),
        num_contributions: int | None = None,
        assign: Assign = lambda variable, value: variable.assign(value),
        are_final: bool = False,
        apply: Apply = lambda optimizer, gradients, variables: optimizer.apply(gradients, variables),
    ) -> None:
        """Updates the model from the sum of contributions; `counts` are left to the engine.

        Args:
          total: the sum of the contributions.
          place: returns a context in which a variable's gradient is scaled, on the device of the variable.
          num_contributions: number of contributions, if it is constant; it may save a pass over the gradients.
          assign: assigns the new value of a variable of `states`.
          are_final: whether gradients were multiplied by `factor` before they were summed.
          apply: updates from an optimizer, gradients and their variables.
        """
        gradients, assign_states = iter(self._with_rows_added_up(total)), self._assigner(total, assign)
        for position, each in enumerate(self._layout.applied):
            assign_states(position)
            factor = 1.0 if are_final else self.factor(total, each, num_contributions)
            scaled: list[Any] = []
            for variable, has_gradient in zip(each.variables, each.present, strict=True):
                with place(variable):
                    scaled.append(times(next(gradients), factor) if has_gradient else None)
            about = {"contributors": total.replicas, "examples": functools.partial(self._examples, total)}
            scaled = self._transforms.at_update(each.optimizer, scaled, each.variables, **about)
            apply(each.optimizer, scaled, each.variables)
        assign_states(len(self._layout.applied))

    def _examples(self, total: ReplicaContribution) -> Any:
        """Returns the number of examples of an update; None if it is not known."""
        if not self._is_even:
            return total.weight
        return None if self._rows is None else self._rows * total.replicas

    def _with_rows_added_up(self, total: ReplicaContribution) -> list[Any]:
        """Returns the gradients, with the rows that all replicas look up alike added up."""
        if self._total_num_replicas == 1:
            return total.gradients
        count = tf.maximum(tf.cast(total.replicas, tf.int32), 1)
        return [
            optimizers.added_up_rows(gradient, count)
            if is_common and not isinstance(gradient, RowsByShard)
            else gradient
            for gradient, is_common in zip(total.gradients, self._layout.has_common_rows, strict=True)
        ]

    def _assigner(self, total: ReplicaContribution, assign: Assign) -> Callable[[int], None]:
        """Returns a function that assigns the states written after a number of calls of `apply`."""
        values, maxima = iter(total.states), iter(total.maxima)
        new = [(state, next(maxima if state.is_extreme else values)) for state in self._layout.states]

        def value_of(state: StateWrite, value: tf.Tensor) -> tf.Tensor:
            if state.mode == "mean":
                return (moved if self._is_relative else mean)(state.variable, value, total)
            return tf.cast(-value if state.mode == recording.MINIMUM else value, state.variable.dtype)

        def assign_at(position: int) -> None:
            for state, value in new:
                if state.position == position:
                    assign(state.variable, value_of(state, value))

        return assign_at

    def factor(self, total: ReplicaContribution, call: Applied, num_contributions: int | None = None) -> Any:
        """Returns the factor from the sum of a call's gradients to those of one device; float64, for float64 models.

        It is computed from the sum of all but gradients.
        """
        if call.are_sums or self._is_even:
            return 1 / (num_contributions or tf.cast(total.replicas, tf.float64))
        return tf.math.reciprocal_no_nan(tf.cast(total.weight, tf.float64))

    def logs(self, total: ReplicaContribution, counts: Sequence[tf.Tensor] | None = None) -> Any:
        """Returns the logs for Keras: results of the metrics so far, and the other logs of this update's batch.

        Args:
          total: the sum of the contributions.
          counts: values of `counters`, if reading the variables would give other values.
        """
        mapping = list(zip(self.counters, counts, strict=True)) if counts is not None else []
        with keras.StatelessScope(mapping) if mapping else contextlib.nullcontext():
            return tf.nest.map_structure(lambda log: log(total), self._layout.logs)


# Computes the values that an update assigns to non-trainable variables from the values on the replicas.


@dataclasses.dataclass
class StateWrite:
    """Non-trainable variable, with the reduction of its values over replicas."""

    variable: Any
    # Reduction over replicas: "mean", "maximum" or "minimum".
    mode: str
    # Number of calls of `apply` before the write.
    position: int

    @property
    def is_extreme(self) -> bool:
        """True if its values are in `ReplicaContribution.maxima`, and not in `states`."""
        return self.mode in (recording.MAXIMUM, recording.MINIMUM)


def summable(value: tf.Tensor, weight: Any) -> tf.Tensor:
    """Returns a value that can be summed over replicas."""
    return times(value, weight) if value.dtype.is_floating else tf.cast(value, tf.int64) * tf.cast(weight, tf.int64)


def change(value: tf.Tensor, before: tf.Tensor | None) -> tf.Tensor:
    """Returns the new value of a state, or its difference from `before`."""
    if before is None:
        return value
    return value - before if value.dtype.is_floating else tf.cast(value, tf.int64) - tf.cast(before, tf.int64)


def moved(variable: Any, change: tf.Tensor, total: ReplicaContribution) -> tf.Tensor:
    """Returns the new value of a state, from differences of replicas that began with different values."""
    now = tf.convert_to_tensor(variable)
    if change.dtype.is_floating:
        return now + tf.cast(tf.math.divide_no_nan(change, tf.cast(total.weight, change.dtype)), now.dtype)
    return tf.cast(tf.cast(now, tf.int64) + change // tf.maximum(tf.cast(total.weight, tf.int64), 1), now.dtype)


def mean(variable: Any, value: tf.Tensor, total: ReplicaContribution) -> tf.Tensor:
    """Returns the mean of a state over the replicas' examples."""
    weight = tf.cast(total.weight, value.dtype)
    # Seeds and counts: all replicas of a step begin with the same value, and end with the same value.
    average = tf.math.divide_no_nan(value, weight) if value.dtype.is_floating else value // tf.maximum(weight, 1)
    # Contributions without examples leave the value unchanged.
    unchanged = tf.cast(tf.convert_to_tensor(variable), value.dtype)
    return tf.cast(tf.where(total.weight > 0, average, unchanged), variable.dtype)

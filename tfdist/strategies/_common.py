# SPDX-License-Identifier: Apache-2.0
"""Common base of MirroredStrategy and MultiWorkerMirroredStrategy: Keras' steps, and checks of arguments."""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import _checks, model_parallel
from tfdist.compat.keras import calls, fit, models, saving
from tfdist.compat.keras.optimizers import SumGradients
from tfdist.compat.keras.scope import (
    adopt_seed_generators,
    allow_loops_without_run,
    build_in_scope,
    carrying_global_seed,
    remember_lines,
)
from tfdist.compat.tensorflow import graphs, inputs, replicas, variables
from tfdist.engines.averaging import AveragingEngine
from tfdist.engines.synchronous import SynchronousEngine
from tfdist.engines.warmup import WarmupEngine
from tfdist.passes import handle as handles
from tfdist.passes.handle import BatchHandle, part_spec
from tfdist.policies.base import Aggregation
from tfdist.policies.warmup import Warmup
from tfdist.step import rehearsal, scope
from tfdist.step.replicas import (
    REDUCED,
    build_optimizer,
    check_fixed_sizes,
    check_model,
    mark_reduced,
    part_of_replica,
    run_prediction,
)
from tfdist.step.step import Step
from tfdist.step.step_times import StepClock, Timed
from tfdist.strategies.distribution import Closing
from tfdist.telemetry.report import Report


def accept_handed_out(dataset: tf.data.Dataset) -> bool:
    """Returns True if a job of the tf.data service gives each batch of a data set to one of several workers.

    Keras then takes each pass to its end, as a worker has another number of batches in each.

    Raises:
      ValueError: it is no job that all workers share, so it can't be known which worker has which batches.
    """
    jobs = inputs.service_jobs(dataset)
    if "" in jobs:
        raise ValueError(
            "dataset: without a job_name the tf.data service gives each worker all batches, in an order of its own, so "
            "examples would be left out or used twice; give all workers the same job_name in "
            "tf.data.experimental.service.distribute. Each batch then goes to one worker, which trains on all of it. "
            "Received: job_name=None under several workers"
        )
    if jobs and calls.epochs_being_made() is not None:
        fit.take_any_length(calls.epochs_being_made())
    return bool(jobs)


def check_files(paths: Mapping[Any, Sequence[str]]) -> None:
    """Raises ValueError if several tasks write one file of `cache` or `snapshot`.

    Args:
      paths: by task, the paths that its data set writes.
    """
    counts = collections.Counter(path for each in paths.values() for path in {*each})
    shared = [path for path, count in counts.items() if count > 1]
    if shared:
        raise ValueError(
            "dataset: cache(filename) and snapshot(path) of several workers would write one file at the same time; use "
            "cache() without a name, or save the elements once with dataset.save(path) and give all workers "
            f"tf.data.Dataset.load(path). Received: {', '.join(shared)} on {' and '.join(map(str, paths))}"
        )


class KerasSteps(tf.distribute.Strategy, Closing):
    """Mixed into a `tf.distribute.Strategy`: takes over the steps that Keras hands to `run`, and what it reduces."""

    # The engine of `ParameterAveraging`: replicas train alone.
    _averaging: AveragingEngine | None = None
    _warming: WarmupEngine | None = None
    _warmup: Warmup | None = None
    # The policy that decides about each update after the phase.
    _aggregation: Aggregation | None = None
    # Number of gradients in the last update, if another process decides.
    _num_contributed = 0
    # True if the loops of all models share an object of the strategy, so that one thread at a time may be in a loop.
    _is_exclusive = False

    # Text on how a model that was made outside of the scope would be trained; for the refusal.
    _trained_alone = ""

    def build_model(self, model: keras.Model, data: Any, step: str) -> None:
        """Builds a model for a call of Keras that begins.

        Args:
          model: the model.
          data: the distributed data set of the call, of which nothing is read, or a batch.
          step: name of the method that the call hands to `run`.
        """
        # Keras begins like this if a data set is distributed already.
        calls.refuse_overlap(self, self._is_exclusive)
        build_model(self, model, data, step)

    def _before_call(self, call: calls.Call) -> None:
        """Looks at a call of any model of this process before it begins."""
        scope.begin(self, call, self._trained_alone)
        if call.model.distribute_strategy is self:
            models.leave_building_to_strategy(call.model)
            inputs.count_single_batch(self, call)
            if call.kind.endswith("_on_batch") and calls.current() is None:
                # What an interrupted `fit` has left.
                if self._averaging:
                    self._averaging.synchronize()
                if self._warming:
                    self._warming.meet(is_ended=True)
        # A model may be kept on one device on purpose, beside others: it is trained.
        distribution = getattr(self, "distribution", None)
        is_alive = distribution is not None and not distribution.is_closed
        if call.trains and call.strategy is None and is_alive and self.num_replicas_in_sync > 1:
            scope.warn(call, f"it trains on one device, and {type(self).__name__} has {self.num_replicas_in_sync}")

    @property
    def num_replicas_in_sync(self) -> int:
        """See the stock property. On a replica, in a Keras step: 1."""
        context: Any = tf.distribute.get_replica_context()
        # Outside of any scope there is a context too, of another strategy.
        is_counted = context is not None and context.strategy is self and replicas.facts_of(self).counts_as_one_replica
        if is_counted or getattr(context, "replica_of", None) is self:
            return 1
        return super().num_replicas_in_sync

    @property
    def replicas_to_aggregate(self) -> int:
        """Number of gradients in the current update: 1 while one replica trains alone in a warmup phase."""
        if self._warmup is not None and not self._warmup.is_over:
            return self._warmup.num_taking_part
        if self._aggregation is None:
            return self.num_replicas_in_sync
        return self._num_contributed or self._aggregation.replicas_to_aggregate

    def run(self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        """Runs `fn` on every replica, as `tf.distribute.Strategy.run` does.

        The steps of a Keras model return logs that are equal on all replicas: those of the global batch.
        """
        self.distribution.check_open()
        self.distribution.check_function(fn)
        step = Step(fn)
        is_train = len(args) == 1 and not kwargs and step.is_bound and step.kind == "train"
        if is_train and isinstance(args[0], Timed):
            self._prepare(step.model)
            return tf.nest.map_structure(mark_reduced, (self._averaging or self._synchronous_engine).run(step, args[0]))

        # Loops of callbacks over data of their own have such elements, too, within `fit`.
        def untimed(given: Any) -> Any:
            return self._batch_of_timed(step, given) if isinstance(given, Timed) else given

        args, kwargs = tuple(map(untimed, args)), kwargs and {name: untimed(each) for name, each in kwargs.items()}
        if any(isinstance(leaf, BatchHandle) for leaf in tf.nest.flatten((args, kwargs))):
            if not is_train or not isinstance(args[0], BatchHandle):
                raise handles.refused(f"strategy.run({fn!r}, ...) with a batch")
            if not step.model.built or models.has_unbuilt_metrics(step.model):
                self._build_for(step, args[0].kind.element_spec)
            return tf.nest.map_structure(mark_reduced, args[0].engine.run(step, args[0]))
        if not step.is_bound or len(args) != 1 or kwargs:
            return self._run_function(step, args, kwargs, options)
        if not tf.executing_eagerly():
            self._build_for(step, args[0])
        if step.kind == "train":
            self._prepare(step.model)
        else:
            check_model(self, step.model)
        return self._synchronous_engine.step(step, args[0], options)

    def _batch_of_timed(self, step: Step, timed: Timed) -> Any:
        """The batch of such an element, as distributed values for a function that is no method of the model."""
        if self._averaging is None:
            return self._synchronous_engine.batch_of(timed)
        if step.kind == "train":
            raise _no_method(step.function)
        raise handles.refused(f"strategy.run({step.function!r}, ...) with a batch")

    @functools.cached_property
    def _synchronous_engine(self) -> SynchronousEngine:
        """Makes the steps that no policy takes apart."""
        return SynchronousEngine(self, self._run_stock, self._sum_over_workers, self._sum_gradients)

    def function_of(self, model: keras.Model, kind: str, stock: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns what makes an execution; see `calls.ask_strategies`.

        Engines that run Python in each step of `fit` are called by a function in plain Python. All other steps are in
        the graph of the function that Keras has made.
        """
        step = Step(model.train_step)
        if kind != "train":
            return stock
        is_method = step.is_bound and step.kind == "train"
        if not is_method and self._aggregation is None and self._warming is None:
            return stock

        def prepare(handle: BatchHandle) -> Callable[[Any, BatchHandle], Any]:
            self.distribution.check_open()
            if not is_method:
                raise _no_method(model.train_step)
            return handle.engine.prepared(step, handle)

        return handles.executions(model, stock, prepare)

    @property
    def note_read(self) -> Callable[[Callable[[], Any]], Any] | None:
        """Reads a batch and notes the times, or None: see `inputs.leave_untuned`."""
        times = self._synchronous_engine.times
        return times.note_read if times else None

    def _take_times(self, num_rows: int, own_row: int | None, device: str, averages: bool = False) -> StepClock:
        """Begins to take the times of train steps; see `StepClock`. An engine that averages records them later."""
        times, recorder = StepClock(num_rows, own_row, device), self.distribution.recorder
        if not averages:
            self._synchronous_engine.times, recorder.is_complete = times, True

        # A monitor of the user's may ask for a report beside the callback of a fit.
        lock = threading.Lock()

        def collect() -> None:
            with lock:
                untimed, updates, contributions = times.take()
                recorder.add_untimed(untimed)
                recorder.record_steps(updates, contributions)

        self.distribution.collect, self.distribution.gradients_per_batch = collect, lambda: num_rows
        return times

    def _run_stock(self, fn: Any, args: Any, kwargs: Any = None, options: Any = None, model: Any = None) -> Any:
        """Runs a function by the stock method; `model` is that of a step."""
        on_replica = carrying_global_seed(fn)
        if model is not None and len(self.extended.worker_devices) > 1:
            on_replica = models.losses_kept_by_replica(model, on_replica)
        return super().run(on_replica, args=args, kwargs=kwargs, options=options)

    def _run_function(self, step: Step, args: Any, kwargs: Any, options: Any) -> Any:
        """Runs a function that is no train or test step of Keras, by the stock method."""
        if not tf.executing_eagerly():
            rehearsal.before(self, step.function, *part_of_replica(self, (list(args), dict(kwargs or {})), 0))
        if step.kind == "predict" and len(args) == 1 and not kwargs:
            if (model := step.model_in_use) is not None:
                model_parallel.check_placement(self, model)
            run = lambda function, data: self._run_stock(function, (data,), options=options)  # noqa: E731
            return run_prediction(self, run, step.function, args[0])
        with self.distribution.transforms.refused(step.function, args, kwargs):
            return self._run_stock(step.function, args, kwargs, options)

    def _build_for(self, step: Step, data: Any) -> None:
        """Makes the variables of a Keras step that `fit` does not build: in a loop of the user's own."""
        model = step.model
        if rehearsal.is_built(model) and not models.has_unbuilt_metrics(model):
            return
        batch = part_of_replica(self, data, 0)
        rehearsal.before(self, step.function, [batch])
        if models.has_unbuilt_metrics(model) and models.is_dense(batch):
            with tf.init_scope(), self.scope():
                models.build_model(model, batch)

    def reduce(self, reduce_op: tf.distribute.ReduceOp | str, value: Any, axis: Any = None) -> Any:
        """Reduces over replicas, as `tf.distribute.Strategy.reduce` does, and also structures of values."""
        return tf.nest.map_structure(lambda leaf: self._reduce_one(reduce_op, leaf, axis), value)

    def _reduce_one(self, reduce_op: Any, value: Any, axis: Any) -> Any:
        if isinstance(value, keras.Variable):
            value = value.value
        is_mean = str(getattr(reduce_op, "value", reduce_op)).upper() == "MEAN"
        # An unknown attribute of a variable that is averaged on read would be looked for on its mean: no end of it.
        if is_mean and isinstance(value, tf.Tensor) and getattr(value, REDUCED, False):
            return value
        return super().reduce(reduce_op, value, axis=None if self._is_scalar(value) else axis)

    def _is_scalar(self, value: Any) -> bool:
        # A variable that is aggregated when it is read would be reduced for that.
        first = getattr(value, "values", None) or self.experimental_local_results(value)
        shape = first[0].shape if hasattr(first[0], "shape") else np.shape(first[0])
        return tf.TensorShape(shape).rank == 0

    def report(self) -> Report:
        """Returns the counts since the strategy was built, equal on all workers."""
        self.distribution.collect()
        report = self.distribution.recorder.report()
        return self.distribution.complete(self._averaging.complete(report) if self._averaging else report)

    def _accepted(self, dataset: Any) -> tuple[Any, Any]:
        """Checks a data set that is to be distributed; returns it as it is read, and Keras' iterator that asks."""
        self.distribution.check_open()
        calls.refuse_overlap(self, self._is_exclusive)
        epoch_iterator = calls.epochs_being_made()
        check_fixed_sizes(self, dataset, self.num_replicas_in_sync, self._aggregation is None)
        if epoch_iterator is not None and isinstance(dataset, tf.data.Dataset):
            dataset = handles.without_optional_components(dataset)
        return inputs.untuned(dataset, epoch_iterator), epoch_iterator

    def _prepare(self, model: keras.Model) -> None:
        """Checks a model and builds its optimizer, before its train step is traced; all workers call it alike."""
        check_model(self, model)
        build_optimizer(self, model)

    def _sum_gradients(self, in_step: bool = False) -> SumGradients | None:
        """Returns what sums gradients, if they aren't sent as they are; see `SynchronousEngine`."""
        del in_step

    def _sum_over_workers(self, tensors: Sequence[tf.Tensor], in_step: bool = False) -> list[tf.Tensor]:
        del in_step
        return list(tensors)


def build_model(strategy: tf.distribute.Strategy, model: keras.Model, data: Any, step: str, spec: Any = None) -> None:
    """Builds a model; for the arguments see `KerasSteps.build_model`. `spec` is that of a replica's part, if known."""
    is_distributed = isinstance(data, tf.distribute.DistributedDataset)
    batch = (part_spec(data) if spec is None else spec) if is_distributed else data
    with strategy.scope():
        if is_distributed:
            models.build_model(model, batch)
        rehearsal.before_keras(strategy, model, step)
        models.build_by_keras(model, batch)
    model_parallel.check_placement(strategy, model)


def _no_method(function: Any) -> ValueError:
    return ValueError(
        "train_step: a policy takes a model's step apart, so it must be a method; define train_step in a subclass of "
        f"keras.Model. Received: train_step={function!r}"
    )


def mend_keras(strategy: tf.distribute.Strategy) -> None:
    """Mends what Keras and TensorFlow do differently for variables, batches and collectives of several replicas."""
    fit.shorten_tracebacks()
    graphs.leave_library()
    saving.clear_tasks()
    remember_lines()
    calls.before_each(strategy._before_call)
    calls.ask_strategies("train")
    replicas.give_keys(strategy)
    build_in_scope(strategy, scope.redirected)
    saving.wait_for_variables()
    variables.replace_colocation(strategy, lambda stock: scope.colocating(strategy, strategy.scope, stock))
    allow_loops_without_run()
    adopt_seed_generators(strategy)
    variables.define_numbers()


def check_timeouts(**secs: float) -> None:
    """Raises ValueError unless each of these arguments, given by name, is a positive number of seconds."""
    for name, value in secs.items():
        if not _checks.is_number(value, is_finite=False) or not value > 0:
            raise ValueError(f"{name} must be a positive number of seconds. Received: {name}={value!r}")

# SPDX-License-Identifier: Apache-2.0
"""`strategy.distribution`: the parts of a strategy that checkpoints, telemetry, fault injection and callbacks use."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist import _log
from tfdist.compat.keras import calls
from tfdist.coordination.usage import Sampler, Usage
from tfdist.engines.agreement import Agreement
from tfdist.engines.base import Engine
from tfdist.launchers import environment
from tfdist.passes import splitting
from tfdist.policies.base import Policy
from tfdist.policies.saved_state import SavedState, WorkerState
from tfdist.policies.warmup import Warmup
from tfdist.serving.embedded import Attachment
from tfdist.step.gradients import Transforms
from tfdist.telemetry.callback import Telemetry
from tfdist.telemetry.recorder import Recorder
from tfdist.telemetry.report import Report, with_usage


@dataclasses.dataclass
class Distribution:
    """Parts of a tfdist strategy for other parts of tfdist; set by the strategy's constructor.

    Those parts are layers below the strategies and can't import them, so they read
    `model.distribute_strategy.distribution`. Stock strategies have no such attribute.

    Attributes:
      recorder: statistics of the updates; records none without a policy.
      saved_state: state of the policies and engines, for checkpoints.
      engines: the engines that the strategy has chosen.
      agreement: exchange of small values between workers; None if this process trains alone.
      broadcast: gives the chief's values to variables on all workers; needed only if there is an `agreement`.
      serving: the cluster's worker and ps processes, under ParameterServerStrategy only.
      bytes_sent: returns the bytes that each worker has sent so far, where tfdist counts them itself; else none.
      usage: returns the counters of the tasks' processes, by task; fetches them where they are elsewhere.
      own_usage: returns the counters of this process.
      task: name of this process, such as "chief:0".
      spares: returns the number of replicas that the current update doesn't wait for; None without `BackupWorkers`.
      is_warming: returns True during a warmup phase.
      policies: the user's policies.
      transforms: the gradient transforms of the strategy.
      job: identifier of the job, the same on all workers.
      gradients_per_batch: number of gradients that are computed from one batch; 0 where the engine counts examples.
      replicas: indices of the replicas of this process; None for all.
      served_tasks: names of the worker and ps tasks that run no program of their own.
      shown: numbers of tasks or devices, by name, for the strategy's `repr`.
      on_close: functions that end what the strategy has started; called by `close`, the last one first.
      is_closed: True after `close`.
      collect: records the steps whose times the graph has kept; to be called before the recorder is read.
    """

    recorder: Recorder
    saved_state: SavedState = dataclasses.field(default_factory=SavedState)
    engines: Sequence[Engine] = ()
    agreement: Agreement | None = None
    broadcast: Callable[[Sequence[Any]], None] = lambda variables: None
    serving: Attachment | None = None
    bytes_sent: Callable[[], Sequence[int]] = lambda: ()
    usage: Callable[[], dict[str, Usage]] = dataclasses.field(init=False)
    own_usage: Callable[[], Usage] = dataclasses.field(default_factory=lambda: Sampler().sample)
    task: str = "chief:0"
    spares: Callable[[], int | None] = lambda: None
    is_warming: Callable[[], bool] = lambda: False
    policies: Sequence[Policy] = ()
    transforms: Transforms = dataclasses.field(default_factory=lambda: Transforms(()))
    job: str = dataclasses.field(default_factory=lambda: secrets.token_hex(8))
    gradients_per_batch: Callable[[], int] = lambda: 0
    replicas: Sequence[int] | None = None
    served_tasks: Sequence[str] = ()
    shown: dict[str, Any] = dataclasses.field(default_factory=dict)
    on_close: list[Callable[[], object]] = dataclasses.field(default_factory=list)
    is_closed: bool = False
    collect: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        # Of a program without other processes.
        self.usage = lambda: {self.task: self.own_usage()}

    def take(
        self, policies: Sequence[Policy], *engines: Engine | None, of_workers: Mapping[str, WorkerState] | None = None
    ) -> None:
        """Takes the policies of the strategy, and its engines; None is an engine that the strategy does not need.

        Args:
          policies: the user's argument.
          *engines: the engines.
          of_workers: see `SavedState`.
        """
        _add_telemetry()
        self.policies = tuple(policies)
        self.engines = [engine for engine in engines if engine is not None]
        warmup = next((policy for policy in policies if isinstance(policy, Warmup)), None)
        if warmup is not None:
            self.is_warming = lambda: not warmup.is_over
        own = {"transforms": self.transforms} if self.transforms.list else {}
        self.saved_state = SavedState(policies, self.engines, {**(of_workers or {}), **own})

    def explained(self, error: Exception) -> BaseException | None:
        """Returns what Keras' calls raise in place of TensorFlow's error, or None."""
        for engine in self.engines:
            if (raised := engine.raised_in_step(error)) is not None:
                return raised
        of_data = splitting.explain(error) if isinstance(error, tf.errors.InvalidArgumentError) else None
        return of_data or (self.agreement.failure_behind(error) if self.agreement else None)

    def complete(self, report: Report) -> Report:
        """Returns a report with the phase, the spares, and the counters of the tasks' processes."""
        sent, usage = self.bytes_sent(), self.usage()
        report = dataclasses.replace(
            report,
            phase="warmup" if self.is_warming() else "all",
            spares=self.spares(),
            restarts={name: each.restarts for name, each in usage.items() if each.restarts},
        )
        return with_usage(report, usage, dict(zip(report.bytes_sent, sent, strict=True)) if sent else {})

    def barrier(self, writes: bool = False) -> None:
        """Waits for the steps of all engines; see `Engine.barrier`.

        Raises:
          RuntimeError: the strategy is closed, and its variables are gone with the parameter servers.
        """
        if self.serving is not None:
            self.check_open()
        for engine in self.engines:
            engine.barrier(writes)

    def close(self) -> None:
        """Ends the threads of all engines and what else the strategy has started; may be called again."""
        self.is_closed = True
        for engine in self.engines:
            engine.close()
        while self.on_close:
            self.on_close.pop()()

    def check_open(self) -> None:
        """Raises RuntimeError after `close`."""
        if self.is_closed:
            raise RuntimeError(
                "this strategy is closed: its threads and processes have ended with strategy.close(); build a new "
                "strategy, and the model in its scope. Received: a call after close()"
            )

    def check_function(self, function: Any) -> None:
        """Refuses `fit` of a model of tf_keras, of whose gradients no policy and no transform would know.

        Raises:
          ValueError: the function is the train step of such a `fit`, and there are policies or transforms.
        """
        function = getattr(function, "python_function", function)
        is_fit = "make_train_function" in getattr(function, "__qualname__", "")
        given = [*self.policies, *self.transforms.list]
        if given and is_fit and str(function.__module__).startswith("tf_keras."):
            raise ValueError(
                "policies and transforms are for models of Keras 3: make the model of `import keras`, or leave them "
                f"away. Received: a model of tf_keras beside {given!r}"
            )


class Closing:
    """Mixed into all strategies: `close`, a `repr` that shows workers and policies, and a check of arguments' names."""

    distribution: Distribution

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Refuses arguments that the strategy does not take, with the remedy.

        Raises:
          TypeError: there is no argument of this name.
        """
        taken = inspect.signature(cls.__init__).parameters
        takes_any = any(each.kind is each.VAR_KEYWORD for each in taken.values())
        for name in () if takes_any else kwargs.keys() - taken.keys():
            near = "".join(difflib.get_close_matches(name, taken, 1))
            remedy = f"did you mean {near}=...?" if near else "leave it away."
            if name in ("num_workers", "num_ps"):
                remedy = f"to start tasks, use tfdist launch local --{name}={kwargs[name]} SCRIPT."
            raise TypeError(f"{cls.__name__} takes no {name}; {remedy} Received: {name}={kwargs[name]!r}")
        return super().__new__(cls)

    def close(self) -> None:
        """Ends what this strategy has started: threads, connections, and an embedded cluster's processes.

        A script doesn't need it: all of that ends with the program. In a notebook it makes room for another strategy.
        Steps that are under way are cancelled, and the strategy can't train, evaluate or predict any more. Variables on
        parameter servers are gone; save the model before. Under `tfdist launch` the servers end with code 0, as at the
        end of the program. May be called again.
        """
        self.distribution.close()

    def explained(self, error: Exception) -> BaseException | None:
        """See `Distribution.explained`; Keras' calls ask for it."""
        distribution = getattr(self, "distribution", None)
        return None if distribution is None else distribution.explained(error)

    def __repr__(self) -> str:
        """Returns the name of the class, the workers or devices, and the policies."""
        distribution = getattr(self, "distribution", None)
        if distribution is None:  # An error of the constructor.
            return super().__repr__()
        shown = [f"{name}={value}" for name, value in distribution.shown.items()]
        state = ["closed"] if distribution.is_closed else []
        shown += [f"transforms={list(distribution.transforms.list)}"] if distribution.transforms.list else []
        return f"<tfdist.{' '.join([type(self).__name__, *shown, f'policies={list(distribution.policies)}', *state])}>"


def _add_telemetry() -> None:
    """Adds `Telemetry` to each `fit`, if a launcher was started with --telemetry."""
    directory = os.environ.get(environment.TELEMETRY_VARIABLE)
    if not directory:
        return

    def added(model: Any, callbacks: Sequence[Any]) -> list[Any]:
        distribution = getattr(model.distribute_strategy, "distribution", None)
        has_one = any(isinstance(each, Telemetry) for each in callbacks)
        if has_one or not isinstance(distribution, Distribution):
            return []
        if distribution.replicas is None or 0 in distribution.replicas:
            say_where()
        return [Telemetry(directory)]

    @functools.cache
    def say_where() -> None:
        _log.say(f"telemetry is written to {directory}; to see it: tfdist watch {directory}")

    calls.add_to_fit(added)

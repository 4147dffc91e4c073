# SPDX-License-Identifier: Apache-2.0
"""Parameter averaging (local SGD): replicas train independently and average their parameters every H steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol, runtime_checkable

from tfdist import _checks
from tfdist.policies import base

_STATES = ("average", "local", "reset")


@runtime_checkable
class OuterOptimizer(Protocol):
    """A Keras optimizer, without an import of Keras."""

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        """Applies gradients."""

    def get_config(self) -> Any:
        """Returns the arguments of the constructor."""


class ParameterAveraging(base.Policy):
    """Lets each replica train alone, without communication, and averages the parameters every H steps.

    Evaluation, saving and checkpoints use the average. At the end of `fit` an unfinished period is averaged, too.

    Sources: McMahan et al. 2017, arXiv 1602.05629 (averaging). Lin et al. 2018, arXiv 1808.07217 (local SGD). Douillard
    et al. 2023, DiLoCo, arXiv 2311.08105, algorithm 1; its outer optimizer is Nesterov with a learning rate of 0.7 and
    a momentum of 0.9.

    Args:
      every_steps: H, the number of steps of each replica between two averages; 1 or more. With H=1 and plain SGD it is
        synchronous SGD.
      optimizer_state: treatment of the optimizer's slots at each average. "average" averages them, too; "local" keeps
        each replica's own until the end of `fit`; "reset" sets them to the values of a new optimizer.
      outer: "mean", or a Keras optimizer. The gradient of the optimizer is the mean of (parameters at the last average
        - parameters now). It is applied to the parameters of the last average. Each model gets its own copy of the
        optimizer. On several workers pass a function that makes the optimizer: building one initializes TensorFlow,
        which must happen after the strategy was built.

    Raises:
      ValueError: an argument is invalid.
    """

    def __init__(
        self,
        every_steps: int,
        *,
        optimizer_state: Literal["average", "local", "reset"] = "average",
        outer: OuterOptimizer | Callable[[], OuterOptimizer] | Literal["mean"] = "mean",
    ) -> None:
        super().__init__()
        _checks.check_count("ParameterAveraging", "every_steps", every_steps)
        if optimizer_state not in _STATES:
            raise ValueError(
                f"ParameterAveraging(optimizer_state=...) must be one of {', '.join(map(repr, _STATES))}. "
                f"Received: optimizer_state={optimizer_state!r}"
            )
        if outer != "mean" and not _is_optimizer(outer) and not callable(outer):
            raise ValueError(
                'ParameterAveraging(outer=...): give "mean" or a Keras optimizer such as '
                "keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True), or a function that makes one. "
                f"Received: outer={outer!r}"
            )
        self.every_steps = every_steps
        self.optimizer_state = optimizer_state
        self.outer: Any = outer

    def make_outer(self) -> Any:
        """Builds a new outer optimizer. Only for an `outer` other than "mean".

        Raises:
          ValueError: the user's function returned no Keras optimizer.
        """
        if _is_optimizer(self.outer):
            return type(self.outer).from_config(self.outer.get_config())
        made = self.outer()
        if not _is_optimizer(made):
            raise ValueError(
                f"ParameterAveraging(outer=...): the function must return a Keras optimizer. Received: {made!r}"
            )
        return made

    def __repr__(self) -> str:
        state = "" if self.optimizer_state == "average" else f", optimizer_state={self.optimizer_state!r}"
        outer = "" if self.outer == "mean" else f", outer={_name(self.outer)}(...)"
        return f"{type(self).__name__}(every_steps={self.every_steps}{state}{outer})"

    def check_replicas(self, total_num_replicas: int, strategy: str) -> None:
        """See `Policy.check_replicas`."""
        if total_num_replicas == 1:
            raise ValueError(
                f"{self!r} needs a second replica to average with, and {strategy} has only one; leave it away. "
                f"Received: total_num_replicas={total_num_replicas}"
            )
        if strategy == "MultiWorkerMirroredStrategy" and _is_optimizer(self.outer):
            name = _name(self.outer)
            raise ValueError(
                "ParameterAveraging(outer=...): on several workers nothing of TensorFlow may be made before the "
                f"strategy; give a function that makes the optimizer, such as outer=lambda: {name}(...). "
                f"Received: outer={self.outer!r}"
            )


def _is_optimizer(outer: Any) -> bool:
    return not isinstance(outer, type) and isinstance(outer, OuterOptimizer)


def _name(outer: Any) -> str:
    return type(outer).__name__ if _is_optimizer(outer) else getattr(outer, "__name__", "function")

# SPDX-License-Identifier: Apache-2.0
"""Makes a Keras optimizer update with gradients that the caller has accumulated.

There is no public way: an optimizer that is made with `gradient_accumulation_steps` adds gradients up in variables of
its own, and decides by a count of its own when it updates. Everything that is changed is restored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfdist.compat import optimizer_patches

NEEDS = (
    "keras.src.backend.tensorflow.optimizer:TFOptimizer._backend_update_step",
    "keras.src.optimizers.base_optimizer:BaseOptimizer._backend_apply_gradients",
    "keras.src.optimizers.base_optimizer:BaseOptimizer._iterations",
    "keras.src.optimizers.base_optimizer:BaseOptimizer.gradient_accumulation_steps",
)

_STEPS = "gradient_accumulation_steps"


@contextlib.contextmanager
def replaced_apply(optimizer: Any, apply: Callable[..., None]) -> Iterator[None]:
    """Within this block, the optimizer's `apply` is this one."""
    with optimizer_patches.attributes([(optimizer, "apply", apply)]):
        yield


def apply_accumulated(
    optimizer: Any, apply: Callable[..., None], gradients: Sequence[Any], variables: Sequence[Any]
) -> None:
    """Updates with gradients that are the means of as many steps as the optimizer accumulates.

    Args:
      optimizer: a Keras optimizer with `gradient_accumulation_steps`.
      apply: its own `apply`.
      gradients: the means.
      variables: theirs.
    """
    count = int(getattr(optimizer, _STEPS))
    # An update counts for as many gradients as it is made of, as on one device.
    optimizer._iterations.assign_add(count - 1)
    whole, update = optimizer._backend_apply_gradients, optimizer._backend_update_step

    def whole_without(*args: Any) -> Any:
        # First read: decides if the optimizer accumulates.
        object.__setattr__(optimizer, _STEPS, None)
        return whole(*args)

    def update_with(*args: Any) -> Any:
        # Later reads, for the iterations: number of steps.
        object.__setattr__(optimizer, _STEPS, count)
        return update(*args)

    changes = [
        (optimizer, _STEPS, count),
        (optimizer, "_backend_apply_gradients", whole_without),
        (optimizer, "_backend_update_step", update_with),
    ]
    with optimizer_patches.attributes(changes):
        apply(gradients, variables)

# SPDX-License-Identifier: Apache-2.0
"""The functions that Keras calls for each execution of its loops, which it makes of a model's steps.

Keras makes them to call `strategy.run` within a `tf.function`. A strategy whose engine runs Python in each step gives a
function of its own instead. So no graph has to call Python, and exceptions are Python's own. There is no public way to
give one, so `make_train_function`, `make_test_function` and `make_predict_function` are replaced, once in a process. A
model that overrides them, and doesn't call the inherited ones, keeps what it makes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfdist.compat import patching
from tfdist.compat.keras import calls


def ask_strategies(*kinds: str) -> None:
    """From now on Keras asks `function_of` of a model's strategy, if it has one, for its functions of these kinds.

    It is called with the model, "train", "test" or "predict", and the function that Keras has made. What it returns
    makes an execution: of an iterator, whose logs it returns, or for "predict" of a list of batches.
    """
    for kind in kinds:
        patching.once(calls.TRAINER, f"make_{kind}_function", _making, f"{kind}_function", kind)


# A program may have put a function of its own in the method's place, of any name and signature.
def _making(original: Callable[..., Any], name: str, kind: str, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    before = getattr(self, name)
    made = original(self, *args, **kwargs)
    function_of, function = getattr(self.distribute_strategy, "function_of", None), getattr(self, name)
    if function_of is not None and function is not None and function is not before:
        setattr(self, name, function_of(self, kind, function))
    return made

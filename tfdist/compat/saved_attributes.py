# SPDX-License-Identifier: Apache-2.0
"""Makes Keras find out, on all workers together, which attributes it leaves out when it saves and loads.

Keras makes an optimizer, among others, for that whenever it loads a file: it keeps the table under another name than
the one that it looks for. Where the chief alone loads, in the strategy's scope, the other workers don't take part in
making the optimizer's variables, and the chief waits for ever. The table has no public name.
"""

from __future__ import annotations

import contextlib

from keras.src.backend.common import global_state
from keras.src.saving import saving_lib

NEEDS = (
    "keras.src.backend.common.global_state:set_global_attribute",
    "keras.src.saving.saving_lib:get_attr_skipset",
)

_KINDS = ("Layer", "Functional", "Sequential", "Metric", "Optimizer", "Loss", "Cross", "Feature")


def find_out() -> None:
    """Fills Keras' table; all workers call this at the same place."""
    for kind in _KINDS:
        with contextlib.suppress(ValueError):  # a kind that this version of Keras does not have
            global_state.set_global_attribute(f"saving_attr_skiplist_{kind}", saving_lib.get_attr_skipset(kind))

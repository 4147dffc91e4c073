# SPDX-License-Identifier: Apache-2.0
"""Facts about TensorFlow's runtime: which of its calls wait for other workers."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.python.eager import context, execute

from tfdist.compat.tensorflow.context import collective_in


# Names are bytes where TensorFlow has to convert the arguments, as for the first value of a variable.
@pytest.mark.parametrize(
    "name, found", [("CollectiveBcastRecv", True), (b"CollectiveBcastRecv", True), (b"Abs", False)]
)
def test_collective_is_found_by_a_name_of_bytes(name: Any, found: bool) -> None:
    with pytest.raises(tf.errors.OpError) as raised:
        execute.quick_execute(name, 1, [], (), context.context())
    *_, frame = [each for each, _ in traceback.walk_tb(raised.tb) if each.f_code.co_name == "quick_execute"]
    assert collective_in(frame) == ("CollectiveBcastRecv" if found else None)

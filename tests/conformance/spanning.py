# SPDX-License-Identifier: Apache-2.0
"""Places the layers of models that know nothing of placement, one after the other on the devices of their replica."""

from __future__ import annotations

import itertools
from typing import Any

import keras
import pytest
import tensorflow as tf

from tfdist.compat.keras import placement


def place_alternately(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Places layers that are made in the scope of a strategy alternately, and other weights on the first part."""
    new, part_of, turns = keras.Layer.__new__, placement.part_of, itertools.cycle((0, 1))

    def make(cls: Any, *args: Any, **kwargs: Any) -> Any:
        layer = new(cls, *args, **kwargs)
        if tf.distribute.get_strategy() is strategy and not isinstance(layer, keras.Sequential):
            placement.place(layer, next(turns))
        return layer

    monkeypatch.setattr(keras.Layer, "__new__", make)
    monkeypatch.setattr(placement, "part_of", lambda variable: part_of(variable) or 0)

# SPDX-License-Identifier: Apache-2.0
"""Keras' Trainer, the part of a model that has `fit`.

A layer that is mixed with it trains like a `keras.Model` and is none. Keras exports no name for the class; it is one of
the bases of `keras.Model`.
"""

from __future__ import annotations

from typing import Any

import keras

_BASES = tuple(base for base in keras.Model.__mro__ if {"fit", "compile"} <= vars(base).keys())


def is_trainer(value: Any) -> bool:
    """Returns True if `value` has Keras' `fit`: a `keras.Model`, or a layer that inherits from Keras' Trainer."""
    return isinstance(value, (keras.Model, *_BASES))

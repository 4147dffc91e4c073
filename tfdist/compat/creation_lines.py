# SPDX-License-Identifier: Apache-2.0
"""Remembers at which line of the user's program a variable or a layer was made, for messages that ask to move the line.

TensorFlow keeps a stack for operations of a graph only, and Keras keeps none. What was made before the first strategy
has no line.
"""

from __future__ import annotations

import os
import pathlib
import sys
import sysconfig
import weakref
from types import FrameType
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from tfdist.compat import keras_variables, replacing

NEEDS = ("tensorflow.python.ops.resource_variable_ops:ResourceVariable.__init__",)

_ATTRIBUTE = "_tfdist_creation_line"
_of_layers: weakref.WeakKeyDictionary[keras.Layer, str] = weakref.WeakKeyDictionary()
# Directories of files that are not the user's: the standard library, and what is installed.
_LIBRARIES = tuple(
    f"{path}{os.sep}"
    for path in (
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
        *(pathlib.Path(module.__file__ or "").parent for module in (tf, keras)),
        pathlib.Path(__file__).parents[1],
    )
)
# Python's own loaders, and the code that AutoGraph writes.
_GENERATED = ("<frozen", "__autograph_generated_file")


def remember() -> None:
    """Makes variables and layers remember the line of the program that creates them, from now on."""
    replacing.once(resource_variable_ops.ResourceVariable, "__init__", _remembering)
    replacing.once(keras.Layer, "__new__", _remembering_layer)


def of(variable: Any) -> str:
    """Returns the line of the program that made a variable, such as "train.py:12", or "".

    Args:
      variable: of TensorFlow or of Keras.
    """
    return getattr(keras_variables.tf_variable(variable), _ATTRIBUTE, "")


def of_layer(layer: keras.Layer) -> str:
    """Returns the line of the program that made a layer, or a model, such as "train.py:12", or ""."""
    return _of_layers.get(layer, "")


def _remembering(make: Any) -> Any:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        setattr(self, _ATTRIBUTE, _caller(sys._getframe(1)))

    return init


def _remembering_layer(make: Any) -> Any:
    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        layer = make(cls, *args, **kwargs)
        _of_layers[layer] = _caller(sys._getframe(1))
        return layer

    return new


def _caller(frame: FrameType | None) -> str:
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_LIBRARIES):
            name = pathlib.PurePath(path).name
            if not name.startswith(_GENERATED):
                return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""

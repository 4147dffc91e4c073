# SPDX-License-Identifier: Apache-2.0
"""With this folder on PYTHONPATH, Keras imports as in an installation without the extras for experiments.

Keras imports scikit-learn and Matplotlib wherever they are installed. That takes more than a third of the 4 seconds
of CPU which a process needs to import TensorFlow, and tests start hundreds. A program's own import of either finds it.
"""

from __future__ import annotations

import importlib.abc
import sys
from typing import Any

_HIDDEN = {"matplotlib", "matplotlib.pyplot", "sklearn"}


class _HiddenFromKeras(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in _HIDDEN and _importer().startswith("keras."):
            raise ModuleNotFoundError(f"tests hide {name} from Keras", name=name)


def _importer() -> str:
    """The module that has the import statement that is being carried out."""
    frame: Any = sys._getframe(2)
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in ("importlib", "_frozen_importlib"):
        frame = frame.f_back
    return frame.f_globals.get("__name__", "") if frame else ""


sys.meta_path.insert(0, _HiddenFromKeras())

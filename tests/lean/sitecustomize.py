# SPDX-License-Identifier: Apache-2.0
"""With this folder on PYTHONPATH, a process imports TensorFlow and Keras in less CPU time; tests start hundreds.

Keras imports as in an installation without the extras for experiments: it imports scikit-learn and Matplotlib wherever
they are installed, for more than a third of the 4 seconds of CPU which an import takes, and the old Keras within
TensorFlow imports SciPy. Keras imports IPython and JAX where it finds them. A program's own import of any of them finds
it.

Python's collector runs seldom: it goes through the objects of TensorFlow's modules again and again while they are
imported and while steps are traced, for a fifth of that CPU. `gc.collect()` is as ever.
"""

from __future__ import annotations

import gc
import sys

# Nothing else is imported here: each Python that a test starts would wait for it.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_HIDDEN = {"IPython", "jax", "matplotlib", "matplotlib.pyplot", "scipy", "scipy.sparse", "sklearn"}


class _HiddenFromKeras:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in _HIDDEN and _importer().startswith(("keras.", "tensorflow.python.keras.")):
            raise ModuleNotFoundError(f"tests hide {name} from Keras", name=name)


def _importer() -> str:
    """The module that has the import statement that is being carried out."""
    frame: Any = sys._getframe(2)
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in ("importlib", "_frozen_importlib"):
        frame = frame.f_back
    return frame.f_globals.get("__name__", "") if frame else ""


sys.meta_path.insert(0, _HiddenFromKeras())
gc.set_threshold(100_000, 50, 50)

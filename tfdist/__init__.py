# SPDX-License-Identifier: Apache-2.0
"""tfdist: the distribution toolkit for TensorFlow and Keras 3.

Importing this package starts nothing and imports no TensorFlow: the public names below are resolved on first use (PEP
562), so that `tfdist launch --help` and `tfdist.cluster` answer at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdist.cluster import Cluster, ClusterError, Task
    from tfdist.strategies.mirrored import MirroredStrategy
    from tfdist.strategies.multi_worker import MultiWorkerMirroredStrategy
    from tfdist.strategies.parameter_server import ParameterServerStrategy

__version__ = "0.1.0"

__all__ = [
    "Cluster",
    "ClusterError",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "Task",
    "__version__",
]

# Where each public name lives. `tests/test_layers.py` holds it against `__all__` and the modules themselves.
_HOME = {
    "Cluster": "tfdist.cluster",
    "ClusterError": "tfdist.cluster",
    "Task": "tfdist.cluster",
    "MirroredStrategy": "tfdist.strategies.mirrored",
    "MultiWorkerMirroredStrategy": "tfdist.strategies.multi_worker",
    "ParameterServerStrategy": "tfdist.strategies.parameter_server",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tfdist' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

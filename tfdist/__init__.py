# SPDX-License-Identifier: Apache-2.0
"""The distribution toolkit for TensorFlow and Keras 3.

Importing this package starts nothing and imports no TensorFlow. The public names below are resolved on first use (PEP
562), so `tfdist launch --help` and `tfdist.cluster` load fast.
"""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tfdist.callbacks as callbacks  # noqa: F401
    import tfdist.compression as compression  # noqa: F401
    import tfdist.flags as flags  # noqa: F401
    import tfdist.policies as policies  # noqa: F401
    import tfdist.schedules as schedules  # noqa: F401
    import tfdist.simulation as simulation  # noqa: F401
    import tfdist.testing as testing  # noqa: F401
    import tfdist.transforms as transforms  # noqa: F401
    import tfdist.update_log as update_log  # noqa: F401
    from tfdist._machine import keep_freed_memory
    from tfdist.cluster import Cluster, ClusterError, Task, is_chief, num_workers, task, worker_index
    from tfdist.flags import strategy_from_flags
    from tfdist.model_parallel import placement, split
    from tfdist.policies.backup_workers import BackupWorkers
    from tfdist.policies.compression import Compression
    from tfdist.policies.lazy_rows import LazyRows
    from tfdist.policies.parameter_averaging import ParameterAveraging
    from tfdist.policies.staleness import BoundedStaleness, DropStale, SoftSync, StalenessScaling
    from tfdist.policies.warmup import Warmup
    from tfdist.strategies.mirrored import MirroredStrategy
    from tfdist.strategies.multi_worker import MultiWorkerMirroredStrategy
    from tfdist.strategies.parameter_server import ParameterServerStrategy
    from tfdist.tables.sharded_tables import ShardedTables

__version__ = "0.2.0"

__all__ = [
    "BackupWorkers",
    "BoundedStaleness",
    "Cluster",
    "ClusterError",
    "Compression",
    "DropStale",
    "LazyRows",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "ParameterAveraging",
    "ParameterServerStrategy",
    "ShardedTables",
    "SoftSync",
    "StalenessScaling",
    "Task",
    "Warmup",
    "__version__",
    "is_chief",
    "keep_freed_memory",
    "num_workers",
    "placement",
    "split",
    "strategy_from_flags",
    "task",
    "worker_index",
]

# Module of each public name. `tests/test_layers.py` compares it with `__all__` and the modules themselves.
MODULE_OF = {
    "BackupWorkers": "tfdist.policies.backup_workers",
    "BoundedStaleness": "tfdist.policies.staleness",
    "Compression": "tfdist.policies.compression",
    "DropStale": "tfdist.policies.staleness",
    "LazyRows": "tfdist.policies.lazy_rows",
    "ParameterAveraging": "tfdist.policies.parameter_averaging",
    "SoftSync": "tfdist.policies.staleness",
    "StalenessScaling": "tfdist.policies.staleness",
    "Warmup": "tfdist.policies.warmup",
    "Cluster": "tfdist.cluster",
    "ClusterError": "tfdist.cluster",
    "Task": "tfdist.cluster",
    "is_chief": "tfdist.cluster",
    "num_workers": "tfdist.cluster",
    "task": "tfdist.cluster",
    "worker_index": "tfdist.cluster",
    "ShardedTables": "tfdist.tables.sharded_tables",
    "placement": "tfdist.model_parallel",
    "split": "tfdist.model_parallel",
    "MirroredStrategy": "tfdist.strategies.mirrored",
    "MultiWorkerMirroredStrategy": "tfdist.strategies.multi_worker",
    "ParameterServerStrategy": "tfdist.strategies.parameter_server",
    "keep_freed_memory": "tfdist._machine",
    "strategy_from_flags": "tfdist.flags",
}

# Modules that users reach by `import tfdist` alone.
_MODULES = (
    *("callbacks", "compression", "flags", "policies", "schedules"),
    *("simulation", "testing", "transforms", "update_log"),
)

# Names that are looked for here: those of public modules, and those of Horovod, PyTorch and accelerate.
_COUNTERPARTS = {
    **{name: f"callbacks.{name}" for name in ("Resume", "ScaleLearningRate", "Telemetry")},
    **{name: f"compression.{name}" for name in ("HalfPrecision", "PowerSGD", "SignSGD", "Threshold", "TopK")},
    **{name: f"testing.{name}" for name in ("Delays", "Faults")},
    "LinearScaling": "schedules.LinearScaling",
    **dict.fromkeys(("rank", "get_rank", "process_index", "local_rank"), "worker_index"),
    **dict.fromkeys(("size", "world_size", "get_world_size", "num_processes", "process_count"), "num_workers"),
    **dict.fromkeys(("is_main_process", "is_master"), "is_chief"),
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"tfdist.{name}")
    if name not in MODULE_OF:
        raise AttributeError(f"module 'tfdist' has no attribute {name!r}{_hint(name)}")
    value = getattr(importlib.import_module(MODULE_OF[name]), name)
    globals()[name] = value
    return value


def _hint(name: str) -> str:
    """Returns the end of a message with the name that was probably meant; imports nothing."""
    meant = _COUNTERPARTS.get(name) or "".join(difflib.get_close_matches(name, [*MODULE_OF, *_MODULES], 1, 0.75))
    return f"; did you mean tfdist.{meant}?" if meant else ""


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])

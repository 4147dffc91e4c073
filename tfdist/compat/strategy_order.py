# SPDX-License-Identifier: Apache-2.0
"""In which order strategies may be built in one program.

Joining a parameter-server cluster gives this process' devices new incarnations. Two things don't survive it:

* A variable that was made before can still be read, but `assign` to it is lost without a word: TensorFlow writes to a
  new resource of the same name, and reads the old one.
* Collectives: whoever used the devices in one (MirroredStrategy, from two devices up) holds the old incarnations, and
  TensorFlow ends all collectives of the process for good.
"""

from __future__ import annotations

import gc

from tensorflow.python.distribute import cross_device_utils
from tensorflow.python.ops import resource_variable_ops

NEEDS = (
    "tensorflow.python.distribute.cross_device_utils:CollectiveReplicaLauncher._ordering_token",
    "tensorflow.python.ops.resource_variable_ops:BaseResourceVariable",
)

_mirrored_trained = False
_joined = False
_joined_after = False


def join_cluster() -> None:
    """Called by ParameterServerStrategy before it starts anything.

    Raises:
      RuntimeError: This process has joined a cluster already, and TensorFlow would abort it later on; or it has
        variables, which could not be written any more.
    """
    if _joined:
        raise RuntimeError(
            "A program can build one ParameterServerStrategy, and this one has built it before: a process of "
            "TensorFlow's belongs to one cluster. Use the first one again, also for further models."
        )
    found = _variables()
    if found:
        raise RuntimeError(
            "ParameterServerStrategy must be built before the first model or variable: TensorFlow can't write "
            "variables that were made before a process joins a cluster. Move the line that builds "
            "ParameterServerStrategy to the top of the program, or delete what was made before it. Received: "
            f"{len(found)} variables, {found[0]!r} among them"
        )


def joined_cluster() -> None:
    """Called by ParameterServerStrategy when it has joined its cluster."""
    global _joined, _joined_after
    _joined, _joined_after = True, _mirrored_trained


def mirrored_trains() -> None:
    """Called by MirroredStrategy before its replicas exchange anything.

    Raises:
      RuntimeError: A MirroredStrategy was at work before ParameterServerStrategy was built, and none can be since.
    """
    global _mirrored_trained
    if _joined_after:
        raise RuntimeError(
            "MirroredStrategy trained before ParameterServerStrategy was built and can't go on after it: TensorFlow's "
            "collectives don't survive joining a cluster. Move the line that builds ParameterServerStrategy above the "
            "first fit, evaluate, predict or run under MirroredStrategy."
        )
    _mirrored_trained = True


def _variables() -> list[str]:
    """The names of the variables that are alive in this process, but for those that strategies themselves have."""
    gc.collect()
    things = gc.get_objects()
    own = {id(thing._ordering_token) for thing in things if type(thing) is cross_device_utils.CollectiveReplicaLauncher}
    variables = [thing for thing in things if isinstance(thing, resource_variable_ops.BaseResourceVariable)]
    return [str(variable.name) for variable in variables if id(variable) not in own]

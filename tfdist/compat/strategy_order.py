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
import weakref

from tensorflow.python.distribute import cross_device_utils
from tensorflow.python.ops import resource_variable_ops

from tfdist.compat import process_variable
from tfdist.compat.cluster_joining import CHIEF_JOB

NEEDS = (
    "tensorflow.python.distribute.cross_device_utils:CollectiveReplicaLauncher._ordering_token",
    "tensorflow.python.ops.resource_variable_ops:BaseResourceVariable",
)

_mirrored_trained = False
_joined = False
_joined_after = False
_has_ended = False
# Variables of clusters that were left, by their id, because they can't be hashed.
_lost: dict[int, weakref.ref[resource_variable_ops.BaseResourceVariable]] = {}


def join_cluster() -> None:
    """Called by ParameterServerStrategy before it starts anything.

    Raises:
      RuntimeError: This process has joined a cluster already, and TensorFlow would abort it later on; or it has
        variables, which could not be written any more.
    """
    if _joined:
        raise RuntimeError(
            "A program can have one ParameterServerStrategy at a time, and this one has built it before: a process of "
            "TensorFlow's belongs to one cluster. Use the first one again, also for further models; or end it with its "
            "close(), or restart the kernel of a notebook, before you build another."
        )
    if _has_ended:
        raise RuntimeError(
            "This program has closed a ParameterServerStrategy, and the tasks of the cluster in TF_CONFIG have ended "
            "with it. Start the job again, or restart the kernel of a notebook."
        )
    found = _variables()
    if found:
        raise RuntimeError(
            "ParameterServerStrategy must be built before the first model or variable: TensorFlow can't write "
            "variables that were made before a process joins a cluster. Move the line that builds "
            "ParameterServerStrategy to the top of the program, or delete what was made before it; in a notebook, "
            "restart the kernel and run that line first. Received: "
            f"{len(found)} variables, {found[0]!r} among them"
        )


def joined_cluster() -> None:
    """Called by ParameterServerStrategy when it has joined its cluster."""
    global _joined, _joined_after
    _joined, _joined_after = True, _mirrored_trained


def leave_cluster(can_join_again: bool) -> None:
    """Called by ParameterServerStrategy before it leaves its cluster.

    Args:
      can_join_again: False if the tasks of the next cluster would be those that have just ended.
    """
    global _joined, _has_ended
    # Now, because TensorFlow crashes if it is asked later for the device of a variable on a lost server.
    held = [each for each in gc.get_objects() if isinstance(each, resource_variable_ops.BaseResourceVariable)]
    lost = [each for each in held if _is_lost(each) or CHIEF_JOB not in each.device]
    _lost.clear()
    _lost.update({id(each): weakref.ref(each) for each in lost})
    _joined, _has_ended = False, not can_join_again


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
            "first fit, evaluate, predict or run under MirroredStrategy; in a notebook, restart the kernel and run "
            "that line first."
        )
    _mirrored_trained = True


def _variables() -> list[str]:
    """The names of the variables that are alive in this process, but for those that strategies themselves have."""
    gc.collect()
    things = gc.get_objects()
    own = {id(thing._ordering_token) for thing in things if type(thing) is cross_device_utils.CollectiveReplicaLauncher}
    variables = [thing for thing in things if isinstance(thing, resource_variable_ops.BaseResourceVariable)]
    variables = [each for each in variables if id(each) not in own and not process_variable.is_of_clock(each)]
    return [str(each.name) for each in variables if not _is_lost(each)]


def _is_lost(variable: resource_variable_ops.BaseResourceVariable) -> bool:
    known = _lost.get(id(variable))
    return known is not None and known() is variable

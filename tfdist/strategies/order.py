# SPDX-License-Identifier: Apache-2.0
"""In which order strategies may be built in one program.

Joining a parameter-server cluster gives this process' devices new incarnations. Whoever used them in a collective
before (MirroredStrategy, from two devices up) holds the old ones, and TensorFlow ends all collectives of the process
for good.
"""

from __future__ import annotations

_mirrored_trained = False
_joined = False
_joined_after = False


def join_cluster() -> None:
    """Called by ParameterServerStrategy before it starts anything.

    Raises:
      RuntimeError: This process has joined a cluster already; TensorFlow would abort it later on.
    """
    if _joined:
        raise RuntimeError(
            "A program can build one ParameterServerStrategy, and this one has built it before: a process of "
            "TensorFlow's belongs to one cluster. Use the first one again, also for further models."
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

# SPDX-License-Identifier: Apache-2.0
"""Simulation of policies on a model of a cluster. The names are those of `tfdist.planning.simulation`."""

from tfdist.planning.simulation import *  # noqa: F403
from tfdist.planning.simulation import __all__ as __all__

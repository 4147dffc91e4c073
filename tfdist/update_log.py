# SPDX-License-Identifier: Apache-2.0
"""Reader and writer of update logs. The names are those of `tfdist.telemetry.update_log`."""

from tfdist.telemetry.update_log import *  # noqa: F403
from tfdist.telemetry.update_log import __all__ as __all__

# SPDX-License-Identifier: Apache-2.0
"""Number of logical CPUs of a worker's server, as whoever starts `python -m tfdist.serving.task` hands it over."""

from __future__ import annotations

import os

from tfdist.cluster import ClusterError

# The environment variable with the number.
VARIABLE = "TFDIST_LOGICAL_CPUS"


def wanted() -> int:
    """Returns the value of `VARIABLE`, or 1 if it is not set.

    Raises:
      ClusterError: the value is no integer of at least 1.
    """
    text = os.environ.get(VARIABLE, "1")
    if not (text.isascii() and text.isdigit() and len(text) < 4 and int(text) > 0):
        raise ClusterError(
            f"{VARIABLE} must be an integer from 1 to 999: the number of logical CPUs of a worker's "
            f"server; unset it for one. Received: {text!r}"
        )
    return int(text)

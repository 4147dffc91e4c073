# SPDX-License-Identifier: Apache-2.0
"""Command `tfdist`, run as `python -m tfdist`: that of this Python, wherever its script is."""

from __future__ import annotations

import sys

from tfdist import cli

if __name__ == "__main__":
    sys.exit(cli.main())

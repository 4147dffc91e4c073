# SPDX-License-Identifier: Apache-2.0
"""For pyright only: anything goes. What the package says about its types is wrong in too many places."""

from typing import Any

def __getattr__(name: str) -> Any: ...

# SPDX-License-Identifier: Apache-2.0
"""Numbers and times as text, for tables and recommendations."""

from __future__ import annotations


def number(value: float) -> str:
    """Returns a number with three digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def duration(secs: float) -> str:
    """Returns a time such as 90 s, 12 min or 3.5 h."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if secs >= 2 * size:
            return f"{secs / size:.3g} {unit}"
    return f"{secs:.3g} s"

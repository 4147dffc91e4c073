# SPDX-License-Identifier: Apache-2.0
"""Bandwidths, sizes and times as people write them: "10Gbit", "100MB", "50us"."""

from __future__ import annotations

import math
import re

_TEXT = re.compile(r"\s*(\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*([A-Za-z/]*)\s*")
_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_PREFIXES = {**_DECIMAL, **_BINARY}
_BYTES = {f"{prefix}B": factor for prefix, factor in _PREFIXES.items()}
_BITS = {f"{prefix}bit": factor / 8 for prefix, factor in _PREFIXES.items()}
_RATES = {
    **{f"{unit}{end}": factor for unit, factor in (*_BITS.items(), *_BYTES.items()) for end in ("", "/s")},
    **{f"{prefix}b{end}": factor / 8 for prefix, factor in _DECIMAL.items() for end in ("/s", "ps")},
}
_SECS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0, "d": 86400.0}


def bytes_per_sec(value: object, name: str = "bandwidth") -> float:
    """Returns a bandwidth in bytes per second: a number as it is, "10Gbit" and "10Gb/s" as bits, "1GB/s" as bytes.

    Raises:
      ValueError: the value is not greater than 0, or its unit is unknown.
    """
    return _number(value, name, _RATES, "10Gbit or 1GB/s", least=None)


def num_bytes(value: object, name: str = "size") -> float:
    """Returns a size in bytes: a number as it is, "100MB" as 1e8, "1GiB" as 2**30.

    Raises:
      ValueError: the value is negative, or its unit is unknown.
    """
    return _number(value, name, _BYTES, "100MB", least=0.0)


def secs(value: object, name: str = "time") -> float:
    """Returns a time in seconds: a number as it is, "50us" and "10ms" by their units.

    Raises:
      ValueError: the value is negative, or its unit is unknown.
    """
    return _number(value, name, _SECS, "50us or 0.1s", least=0.0)


def _number(value: object, name: str, units: dict[str, float], example: str, least: float | None) -> float:
    number, unit = value, ""
    if isinstance(value, str):
        match = _TEXT.fullmatch(value)
        if match is None or (match[2] and match[2] not in units):
            raise ValueError(f"{name} has no known unit; write it like {example}. Received: {value!r}")
        number, unit = float(match[1]), match[2]
    if not isinstance(number, int | float) or isinstance(number, bool) or math.isnan(number):
        raise ValueError(f"{name} must be a number, or text like {example}. Received: {value!r}")
    result = float(number) * (units[unit] if unit else 1.0)
    if result < 0 or (least is None and result == 0):
        raise ValueError(f"{name} must be {'greater than 0' if least is None else '0 or more'}. Received: {value!r}")
    return result

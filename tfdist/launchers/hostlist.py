# SPDX-License-Identifier: Apache-2.0
"""Parser of Slurm's compressed host lists, such as "rack[0-1]n[08-11]-ib,login"."""

from __future__ import annotations

import itertools
import re

from tfdist.launchers.requests import LaunchError

# Slurm's own limit for one expression. Jobs are far smaller; a mistyped range may exceed it.
MAX_HOSTS = 1 << 16
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\],\s]+)", re.ASCII)
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", re.ASCII)
_EXAMPLE = 'write it as Slurm does, such as "n[01-04,7],login"'


class HostlistError(LaunchError):
    """Invalid host list. The message is one line."""


def expand(text: str) -> list[str]:
    """Expands a host list into names, in its order, with repetitions.

    Args:
      text: names with ranges in brackets, separated by commas. A range is padded with zeros to the width of its first
        number; several brackets in one name count like digits, the last one fastest.

    Raises:
      HostlistError: the text is invalid, or names more than 65536 hosts.
    """
    hosts: list[str] = []
    for expression in _split(text):
        hosts.extend(_expand_one(expression, text))
        if len(hosts) > MAX_HOSTS:
            raise _wrong(text, f"names more than {MAX_HOSTS} hosts")
    return hosts


def expand_counts(text: str) -> list[int]:
    """Expands Slurm's numbers of tasks per host: "2(x3),1" is [2, 2, 2, 1].

    Raises:
      HostlistError: the text is invalid, or is for more than 65536 hosts.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", item, re.ASCII)
        times = int(match[2] or 1) if match else 0
        if match is None or times < 1 or len(counts) + times > MAX_HOSTS:
            raise HostlistError(
                f"the tasks per host are not written as Slurm does, such as 2(x3),1. Received: {text!r}"
            )
        counts.extend([int(match[1])] * times)
    return counts


def _split(text: str) -> list[str]:
    """Splits at the commas outside of brackets."""
    expressions, depth, start = [], 0, 0
    for position, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise _wrong(text, f"has a bracket too many at character {position + 1}")
        if char == "," and depth == 0:
            expressions.append(text[start:position])
            start = position + 1
    if depth:
        raise _wrong(text, "has a bracket that is not closed")
    return [*expressions, text[start:]]


def _expand_one(expression: str, text: str) -> list[str]:
    parts: list[list[str]] = []
    position = 0
    while position < len(expression):
        match = _PART.match(expression, position)
        if match is None:
            raise _wrong(text, f"has {expression[position]!r} in a name")
        parts.append([match[2]] if match[2] else _expand_ranges(match[1], text))
        position = match.end()
    if not parts:
        raise _wrong(text, "has an empty name" if text else "is empty")
    count = 1
    for part in parts:
        count *= len(part)
    if count > MAX_HOSTS:
        raise _wrong(text, f"names more than {MAX_HOSTS} hosts")
    return ["".join(names) for names in itertools.product(*parts)]


def _expand_ranges(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for item in ranges.split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise _wrong(text, f"has {item!r} in brackets, which is no range of numbers")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise _wrong(text, f"has the range {item}, which runs backwards")
        if last - first >= MAX_HOSTS or len(numbers) > MAX_HOSTS:
            raise _wrong(text, f"names more than {MAX_HOSTS} hosts")
        numbers.extend(f"{number:0{len(match[1])}d}" for number in range(first, last + 1))
    return numbers


def _wrong(text: str, problem: str) -> HostlistError:
    shown = text if len(text) <= 120 else f"{text[:117]}..."
    return HostlistError(f"the host list {problem}; {_EXAMPLE}. Received: {shown!r}")

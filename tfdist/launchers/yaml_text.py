# SPDX-License-Identifier: Apache-2.0
"""Writes plain data as YAML that people can read: dicts, lists, text, numbers and booleans, nothing else.

A YAML library would be one more dependency for what is thirty lines here, and would leave open how text is quoted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

# Text that every YAML reader takes for text. What is left out, such as "on", "1e3" and "~", goes into quotes.
_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./=-]*(?: [A-Za-z0-9_./=-]+)*", re.ASCII)
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", ".nan", ".inf"}
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def documents(objects: Iterable[Mapping[str, Any]]) -> str:
    """Several documents in one text."""
    return "---\n".join(document(value) for value in objects)


def document(value: Mapping[str, Any]) -> str:
    """One document, ended by a newline."""
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Any) -> list[str]:
    if isinstance(value, Mapping) and value:
        return [line for key, item in value.items() for line in _entry(f"{_scalar(key)}:", item, indent="  ")]
    if isinstance(value, list | tuple) and value:
        return [line for item in value for line in _item(item)]
    return [_scalar(value)]


def _entry(head: str, value: Any, indent: str) -> list[str]:
    lines = _lines(value)
    if not isinstance(value, Mapping | list | tuple) or not value:
        return [f"{head} {lines[0]}"]
    # Lists stand at the column of their key, as kubectl writes them.
    indent = "" if isinstance(value, list | tuple) else indent
    return [head, *(indent + line for line in lines)]


def _item(value: Any) -> list[str]:
    first, *rest = _lines(value)
    return [f"- {first}", *(f"  {line}" for line in rest)]


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        plain = _PLAIN.fullmatch(value) and value.lower() not in _WORDS and not re.fullmatch(r"[.0-9_-]+", value)
        return value if plain else f'"{"".join(map(_escaped, value))}"'
    if not value and isinstance(value, Mapping | list | tuple):
        return "{}" if isinstance(value, Mapping) else "[]"
    raise TypeError(f"only text, numbers, booleans, dicts and lists can be written. Received: {value!r}")


def _escaped(char: str) -> str:
    if char in _ESCAPES:
        return _ESCAPES[char]
    if char.isprintable():
        return char
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"

# SPDX-License-Identifier: Apache-2.0
"""Writes plain data as readable YAML, in which every YAML parser reads text as text.

PyYAML itself writes text such as 1e3 without quotes, which the YAML library of Kubernetes reads as a number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

# Text that every YAML parser reads as text. Other text, such as "on", "1e3" and "~", is quoted.
_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./=-]*(?: [A-Za-z0-9_./=-]+)*", re.ASCII)
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", ".nan", ".inf"}


def documents(objects: Iterable[Mapping[str, Any]]) -> str:
    """Returns several YAML documents in one text."""
    return "---\n".join(document(value) for value in objects)


def document(value: Mapping[str, Any]) -> str:
    """Returns one YAML document, ended by a newline.

    Raises:
      yaml.representer.RepresenterError: a value is no dict, list, text, number or boolean.
    """
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=float("inf"))


class _Dumper(yaml.SafeDumper):
    """YAML writer that quotes ambiguous text, and writes no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        """Writes a value that occurs twice two times instead of as an anchor, which is easier to read."""
        del data
        return True


def _text(dumper: _Dumper, value: str) -> yaml.Node:
    is_plain = _PLAIN.fullmatch(value) and value.lower() not in _WORDS and not re.fullmatch(r"[.0-9_-]+", value)
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if is_plain else '"')


_Dumper.add_representer(str, _text)

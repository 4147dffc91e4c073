# SPDX-License-Identifier: Apache-2.0
"""Prose is plain: sentences of pages are short, and docstrings begin with a verb or with the thing itself."""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("experiments/*/README.md")})
# 25 are the aim; the rest is for names and numbers.
_MOST_WORDS = 30
_ITEM = re.compile(r"\s*(?:[-*]|\d+\.)\s|\||#")
_VAGUE = re.compile(r"(?:Has|How|It|Its|Nobody|None|That|Their|These|They|This|Those|What|Where|Whether|Who|Whose)\b")


def _sentences(page: pathlib.Path) -> Iterator[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    # Each item of a list, and each cell of a table, is a paragraph.
    text = "\n".join(f"\n{line.replace('|', chr(10) * 2)}" if _ITEM.match(line) else line for line in text.splitlines())
    for paragraph in re.split(r"\n\s*\n", text):
        yield from re.split(r"(?<=[.!?:;])\s+(?=[A-Z`*\[(\"'])", " ".join(paragraph.split()))


def _num_words(sentence: str) -> int:
    """Number of words, of which a piece of code and a link's text have one each."""
    plain = re.sub(r"`[^`]*`", "X", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", sentence))
    return sum(re.search(r"\w", word) is not None for word in plain.split())


def test_sentences_of_a_page_are_short() -> None:
    assert [(page, each) for page in PAGES for each in _sentences(page) if _num_words(each) > _MOST_WORDS] == []


def test_docstrings_begin_with_a_verb_or_a_thing() -> None:
    found = []
    for path in (ROOT / "tfdist").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and _VAGUE.match(
                ast.get_docstring(node) or ""
            ):
                found.append(f"{path.relative_to(ROOT)}: {ast.get_docstring(node).splitlines()[0]}")
    assert found == []

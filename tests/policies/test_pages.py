# SPDX-License-Identifier: Apache-2.0
"""Examples of the page about policies, and of the package's docstring, have the results shown there."""

from __future__ import annotations

import doctest
import itertools
import pathlib
import re

import pytest

from tfdist import policies

_DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"


def test_the_example_of_the_package_runs():
    assert doctest.testmod(policies) == doctest.TestResults(failed=0, attempted=11)


@pytest.mark.parametrize("page", ["policies.md", "asynchronous.md"])
def test_the_simulation_in_the_page_prints_what_the_page_says(page: str, capsys: pytest.CaptureFixture[str]):
    blocks = re.findall(r"^```\w*\n(.*?)^```$", (_DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    ((code, printed),) = [pair for pair in itertools.pairwise(blocks) if "simulate_policy(" in pair[0]]
    exec(compile(code, f"docs/{page}", "exec"), {})
    assert capsys.readouterr().out == printed

# SPDX-License-Identifier: Apache-2.0
"""Examples of the page about policies, and of the package's docstring, have the results shown there."""

from __future__ import annotations

import doctest
import itertools
import pathlib
import re

import made
import pytest

from tfdist import policies
from tfdist.simulation import simulate_policy

_DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"


def test_the_example_of_the_package_runs():
    assert doctest.testmod(policies) == doctest.TestResults(failed=0, attempted=11)


@pytest.mark.parametrize("page", ["policies.md", "asynchronous.md"])
def test_the_simulation_in_the_page_prints_what_the_page_says(page: str, capsys: pytest.CaptureFixture[str]):
    blocks = re.findall(r"^```\w*\n(.*?)^```$", (_DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    ((code, printed),) = [pair for pair in itertools.pairwise(blocks) if "simulate_policy(" in pair[0]]
    exec(compile(code, f"docs/{page}", "exec"), {})
    assert capsys.readouterr().out == printed


def test_the_own_policy_of_the_page_shares_updates_fairly():
    slow = lambda replica, attempt: 1.0 if replica else 3.0  # noqa: E731
    assert simulate_policy(policies.BackupWorkers(spares=1), slow, 60, 3).accepted == (0, 60, 60)
    accepted = simulate_policy(made.own_policy(spares=1, lead=3), slow, 60, 3).accepted
    assert sum(accepted) == 120 and max(accepted) - min(accepted) <= 3

# SPDX-License-Identifier: Apache-2.0
"""Update logs for tests: random records. The policy of the page about policies."""

from __future__ import annotations

import pathlib
import re
from typing import Any

from hypothesis import strategies as st

from tfdist.policies import Contribution
from tfdist.telemetry.update_log import Header, UpdateRecord

WORKERS = 3


def own_policy(**arguments: Any) -> Any:
    """The policy that docs/policies.md shows how to write."""
    page = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "policies.md").read_text(encoding="utf-8")
    (code,) = (
        block for block in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S) if "class FairShare" in block
    )
    names: dict[str, Any] = {}
    exec(compile(code, "docs/policies.md", "exec"), names)
    return names["FairShare"](**arguments)


def header(**changes) -> Header:
    values = {"job": "job1", "writer": "chief:0", "workers": tuple(f"worker:{i}" for i in range(WORKERS))}
    return Header(**{**values, "strategy": "S", "policies": ("P()",), "origin_secs": 1e9, **changes})


# Numbers that float32 holds exactly, so that what is read equals what was written.
EIGHTHS = st.integers(0, 8000).map(lambda value: value / 8)
# (worker, ago, secs, outcome, staleness, held)
GRADIENTS = st.tuples(st.integers(0, WORKERS - 1), EIGHTHS, EIGHTHS, st.integers(0, 2), st.integers(0, 70), EIGHTHS)
ROWS = st.lists(
    st.tuples(st.integers(1, 3), EIGHTHS, EIGHTHS, st.integers(0, 99), st.lists(GRADIENTS, max_size=5)), max_size=40
)


@st.composite
def records(draw) -> list[UpdateRecord]:
    """Updates in order, whose step sometimes skips a number."""
    made, step, time = [], 0, 0.0
    for more, secs, wait, examples, gradients in draw(ROWS):
        step, time = step + more, time + secs
        contributions = [
            Contribution(worker, time - ago - took, time - ago, outcome, staleness, float(not outcome), held)
            for worker, ago, took, outcome, staleness, held in gradients
        ]
        made.append(UpdateRecord(step, time, secs, wait, examples, step % 2, contributions))
    return made

# SPDX-License-Identifier: Apache-2.0
"""Update logs for tests: random records, and columns of any size. The policy of the page about policies."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tfdist.policies import Contribution
from tfdist.telemetry.update_log import Contributions, Header, UpdateRecord, Updates

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


def columns(num_updates: int, workers: int) -> tuple[Updates, Contributions]:
    """Each worker contributes to each update; one in ten gradients is dropped."""
    random = np.random.default_rng(0)
    total = num_updates * workers
    secs = random.gamma(4.0, 0.025, total)
    updates = Updates.of(
        step=np.arange(1, num_updates + 1),
        time=0.1 * np.arange(1, num_updates + 1),
        opened=np.full(num_updates, 0.1),
        wait=random.random(num_updates) / 10,
        examples=np.full(num_updates, 32 * workers),
        phase=np.zeros(num_updates),
        count=np.full(num_updates, workers),
        reduce=np.zeros(num_updates),
    )
    outcome = random.random(total) < 0.1
    contributions = Contributions.of(
        worker=np.tile(np.arange(workers), num_updates),
        start=-secs - 0.01,
        arrival=np.full(total, -0.01),
        outcome=outcome,
        staleness=random.integers(0, 3, total),
        weight=1.0 - outcome,
        held=random.random(total) / 100,
        input=np.zeros(total),
    )
    return updates, contributions

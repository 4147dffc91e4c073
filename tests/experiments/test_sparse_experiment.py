# SPDX-License-Identifier: Apache-2.0
"""The sparse experiment: its published runs are as its page says, misses are named, and the ids follow their law."""

from __future__ import annotations

import copy
import importlib
import json
import pathlib
from types import SimpleNamespace

import numpy as np
import pytest

pytestmark = pytest.mark.slow

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "experiments" / "sparse"


@pytest.fixture
def sparse(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(FOLDER))
    return SimpleNamespace(**{name: importlib.import_module(name) for name in ("sparse_chart", "recommender_data")})


def test_published_runs_are_as_the_page_says(sparse: SimpleNamespace, tmp_path: pathlib.Path) -> None:
    published = json.loads((FOLDER / "published.json").read_text())
    assert sparse.sparse_chart.misses(published) == []
    assert {1, 2, 4, 8} == set(sparse.sparse_chart.rates(published["sparse"]))
    # What the page shows is what the file has.
    assert sparse.sparse_chart.table(published) in (FOLDER / "README.md").read_text()
    assert sparse.sparse_chart.save(tmp_path / "sparse.png", published).stat().st_size > 10_000
    worse = copy.deepcopy(published)
    worse["sparse"]["runs"]["8"]["steps_per_sec"] = [1.0]
    worse["dense"]["runs"]["8"]["steps_per_sec"] = [100.0]
    missed = [text.split(":")[0] for text in sparse.sparse_chart.misses(worse)]
    assert missed[:3] == ["sparse", "dense", "sparse, 8 workers"] and "dense, 8 workers" in missed


def test_ids_follow_a_zipf_law(sparse: SimpleNamespace) -> None:
    ids = sparse.recommender_data.zipf(np.random.default_rng(0), 1000, (200_000,), 1.05)
    counts = np.sort(np.bincount(ids, minlength=1000))[::-1]
    weights = np.arange(1, 1001) ** -1.05
    np.testing.assert_allclose(counts[:20] / len(ids), weights[:20] / weights.sum(), rtol=0.1)
    features, clicks = sparse.recommender_data.visits(100)
    assert features["recent"].shape == (100, 8) and set(np.unique(clicks)) == {0.0, 1.0}

# SPDX-License-Identifier: Apache-2.0
"""MultiWorkerMirroredStrategy and its policies on two real processes: see `multi_worker_conformance_checks.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection

import child_pytest
import pytest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1860)]

WITHOUT_POLICY = frozenset({"", "TestMultiWorker"})


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], child_pytest.Outcomes]:
    """Returns the outcomes of the checks of a class, or of those without one. A process has one strategy."""

    @functools.cache
    def of(owners: Collection[str]) -> child_pytest.Outcomes:
        shared = tmp_path_factory.mktemp("workers")
        return child_pytest.run(request, "multi_worker_cluster", shared, 1800, num_workers=2, owners=owners)

    return lambda owner: of(WITHOUT_POLICY if owner in WITHOUT_POLICY else frozenset({owner}))


@pytest.mark.parametrize("check", child_pytest.checks(child_pytest.files("multi_worker")))
def test_on_two_workers(outcomes: Callable[[str], child_pytest.Outcomes], check: child_pytest.Check) -> None:
    child_pytest.expect_success(outcomes(check.owner), check)

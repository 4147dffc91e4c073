# SPDX-License-Identifier: Apache-2.0
"""`Compression` under `ParameterServerStrategy`, on one embedded cluster; see `compressed_training.py`."""

from __future__ import annotations

import child_pytest
import pytest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(660)]

FILES = [child_pytest.HERE / "strategies" / "compressed_training.py"]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> child_pytest.Outcomes:
    return child_pytest.run(request, "compressed_cluster", tmp_path_factory.mktemp("cluster"), 600)


@pytest.mark.parametrize("check", child_pytest.checks(FILES))
def test_on_a_cluster(outcomes: child_pytest.Outcomes, check: child_pytest.Check) -> None:
    child_pytest.expect_success(outcomes, check)

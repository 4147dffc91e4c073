# SPDX-License-Identifier: Apache-2.0
"""`ParameterServerStrategy(devices_per_replica=2)`, on one embedded cluster of two workers with two logical CPUs each.

The checks themselves are in `server_parts_*.py`, there and in `tests/conformance`.
"""

from __future__ import annotations

import child_pytest
import pytest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(960)]

PLUGIN = "server_parts_cluster"
FILES = sorted(path for path in child_pytest.HERE.glob("*/server_parts_*.py") if path.stem != PLUGIN)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> child_pytest.Outcomes:
    return child_pytest.run(request, PLUGIN, tmp_path_factory.mktemp("cluster"), 900)


@pytest.mark.parametrize("check", child_pytest.checks(FILES))
def test_on_a_cluster(outcomes: child_pytest.Outcomes, check: child_pytest.Check) -> None:
    child_pytest.expect_success(outcomes, check)

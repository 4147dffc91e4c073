# SPDX-License-Identifier: Apache-2.0
"""`ParameterServerStrategy` under unmodified Keras, on one embedded cluster of three workers.

The checks themselves stand in `parameter_server_*.py`.
"""

from __future__ import annotations

import child_pytest
import pytest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1560)]

PLUGIN = "parameter_server_cluster"
FILES = sorted(path for path in child_pytest.HERE.glob("*/parameter_server_*.py") if path.stem != PLUGIN)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> child_pytest.Outcomes:
    return child_pytest.run(request, PLUGIN, tmp_path_factory.mktemp("cluster"), 1500)


@pytest.mark.parametrize("check", child_pytest.checks(FILES))
def test_on_a_cluster(outcomes: child_pytest.Outcomes, check: child_pytest.Check) -> None:
    child_pytest.expect_success(outcomes, check)

# SPDX-License-Identifier: Apache-2.0
"""`ParameterServerStrategy` under unmodified Keras, on one embedded cluster of four workers.

The checks themselves stand in `parameter_server_*.py`.
"""

from __future__ import annotations

import child_pytest
import pytest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1560)]

PLUGIN = "parameter_server_cluster"
FILES = sorted(path for path in child_pytest.HERE.glob("parameter_server_*.py") if path.stem != PLUGIN)
CHECKS = child_pytest.checks(FILES)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> child_pytest.Outcomes:
    report = tmp_path_factory.mktemp("parameter_server") / "report.xml"
    return child_pytest.run(child_pytest.selected(request), PLUGIN, report, 1500)


@pytest.mark.parametrize(("file", "name"), CHECKS, ids=[name for _, name in CHECKS])
def test_on_a_cluster(outcomes: child_pytest.Outcomes, file: str, name: str) -> None:
    child_pytest.expect_success(outcomes, file, name)

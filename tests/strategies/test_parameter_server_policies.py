# SPDX-License-Identifier: Apache-2.0
"""`ParameterServerStrategy` with a policy, on one embedded cluster of four workers and two parameter servers.

The checks themselves stand in `aggregated_*checks.py`.
"""

from __future__ import annotations

import child_pytest
import pytest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(3060)]

outcomes = child_pytest.outcomes_of("aggregated_cluster", timeout_secs=3000)


@pytest.mark.parametrize("check", child_pytest.checks(child_pytest.files("aggregated")))
def test_on_a_cluster(outcomes: child_pytest.Outcomes, check: child_pytest.Check) -> None:
    child_pytest.expect_success(outcomes, check)

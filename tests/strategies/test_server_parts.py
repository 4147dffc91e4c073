# SPDX-License-Identifier: Apache-2.0
"""`ParameterServerStrategy(devices_per_replica=2)`, on one embedded cluster of two workers with two logical CPUs each.

The checks themselves are in `server_parts_*checks.py`, there and in `tests/conformance`.
"""

from __future__ import annotations

import child_pytest
import pytest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1860)]

outcomes = child_pytest.outcomes_of("server_parts_cluster", timeout_secs=1800)


@pytest.mark.parametrize("check", child_pytest.checks(child_pytest.files("server_parts")))
def test_on_a_cluster(outcomes: child_pytest.Outcomes, check: child_pytest.Check) -> None:
    child_pytest.expect_success(outcomes, check)

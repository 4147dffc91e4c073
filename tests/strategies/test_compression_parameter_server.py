# SPDX-License-Identifier: Apache-2.0
"""`Compression` under `ParameterServerStrategy`, on one embedded cluster; see `compressed_training_checks.py`."""

from __future__ import annotations

import child_pytest
import pytest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(660)]

outcomes = child_pytest.outcomes_of("compressed_cluster", timeout_secs=600)


@pytest.mark.parametrize("check", child_pytest.checks(child_pytest.files("compressed")))
def test_on_a_cluster(outcomes: child_pytest.Outcomes, check: child_pytest.Check) -> None:
    child_pytest.expect_success(outcomes, check)

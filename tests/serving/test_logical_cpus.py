# SPDX-License-Identifier: Apache-2.0
"""Tests of `tfdist.serving.logical_cpus`."""

import pytest

from tfdist.cluster import ClusterError
from tfdist.serving import logical_cpus


def test_logical_cpus_of_a_server_are_checked(monkeypatch):
    monkeypatch.delenv(logical_cpus.VARIABLE, raising=False)
    assert logical_cpus.wanted() == 1
    monkeypatch.setenv(logical_cpus.VARIABLE, "2")
    assert logical_cpus.wanted() == 2
    for wrong in ("0", "two", "", "1.5", "-1", "1000"):
        monkeypatch.setenv(logical_cpus.VARIABLE, wrong)
        with pytest.raises(ClusterError, match=rf"TFDIST_LOGICAL_CPUS must be .* Received: '{wrong}'"):
            logical_cpus.wanted()

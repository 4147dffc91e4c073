# SPDX-License-Identifier: Apache-2.0
"""Tests of `tfdist.serving.task`."""

import pytest

from tfdist.cluster import ClusterError
from tfdist.serving import task


def test_logical_cpus_of_a_server_are_checked(monkeypatch):
    monkeypatch.delenv(task.VARIABLE, raising=False)
    assert task.wanted() == 1
    monkeypatch.setenv(task.VARIABLE, "2")
    assert task.wanted() == 2
    for wrong in ("0", "two", "", "1.5", "-1", "1000"):
        monkeypatch.setenv(task.VARIABLE, wrong)
        with pytest.raises(ClusterError, match=rf"TFDIST_LOGICAL_CPUS must be .* Received: '{wrong}'"):
            task.wanted()

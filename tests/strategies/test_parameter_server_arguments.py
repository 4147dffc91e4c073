# SPDX-License-Identifier: Apache-2.0
"""Tests of the arguments of ParameterServerStrategy, without a cluster that runs."""

import json
import warnings

import pytest

from tfdist.cluster import Cluster
from tfdist.strategies import parameter_server

JOBS = {"chief": ["a:1"], "worker": ["b:1", "b:2", "b:3"], "ps": ["c:1"]}
CLUSTER = Cluster.from_tf_config(json.dumps({"cluster": JOBS, "task": {"type": "chief", "index": 0}}))


def test_sizes_that_contradict_the_cluster_are_warned_of():
    with pytest.warns(RuntimeWarning, match=r"num_workers=5\) has no effect.* 3 worker tasks; .*--num_workers=5"):
        parameter_server.warn_of_sizes(CLUSTER, 5, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parameter_server.warn_of_sizes(CLUSTER, 3, 1)
        parameter_server.warn_of_sizes(CLUSTER, None, None)

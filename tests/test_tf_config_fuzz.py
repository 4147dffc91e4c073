# SPDX-License-Identifier: Apache-2.0
"""TF_CONFIG with ten thousand mutations: a right answer or one line of error, from the parser and from the doctor."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cluster_properties import SHAPED, VALUES

import tfdist
from tfdist.doctor import __main__ as doctor

JOBS = '{"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": {"0": "d:1"}}'
CONFIG = f'{{"cluster": {JOBS}, "task": {{"type": "worker", "index": 1}}}}'
CASES = pytest.mark.parametrize(
    "cases", [300, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)


@st.composite
def mutations(draw):
    """A good one, with a few characters taken out, put in or doubled."""
    text = CONFIG
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(text)))
        until = draw(st.integers(at, min(len(text), at + 8)))
        text = (
            text[:at]
            + draw(st.sampled_from(["", '"', "{", "}", "[", ",", ":", "1", "-", "null", text[at:until] * 2]))
            + text[until:]
        )
    return text


@CASES
def test_a_right_answer_or_one_line(cases):
    @settings(max_examples=cases, deadline=None, database=None)
    @given(mutations() | (VALUES | SHAPED).map(json.dumps) | st.text(max_size=30))
    def check(text):
        try:
            cluster = tfdist.Cluster.from_tf_config(text)
        except tfdist.ClusterError as error:
            assert len(str(error).splitlines()) == 1
        else:
            assert tfdist.Cluster.from_tf_config(cluster.to_tf_config()) == cluster
            (finding,) = doctor.strategy(cluster)
            assert len(str(finding).splitlines()) == 1

    check()

# SPDX-License-Identifier: Apache-2.0
"""Properties of cluster descriptions: what is written is read back, and anything else is refused in one way."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.cluster import Cluster, ClusterError, Task
from tfdist.doctor import __main__ as doctor

HOSTS = st.integers(0, 255).map(lambda n: f"10.0.0.{n}") | st.integers(0, 99).map(lambda n: f"host{n}.example")
ADDRESSES = st.builds("{}:{}".format, HOSTS, st.integers(1, 65535))


@st.composite
def clusters(draw):
    addresses = draw(st.lists(ADDRESSES, min_size=1, max_size=12, unique=True))
    jobs = {}
    for address in addresses:
        job = draw(st.sampled_from(("worker", "ps", "evaluator")))
        jobs.setdefault(job, {})[draw(st.integers(0, 50).filter(lambda i, j=job: i not in jobs[j]))] = address
    job = draw(st.sampled_from(sorted(jobs)))
    return Cluster(jobs, Task(job, draw(st.sampled_from(sorted(jobs[job])))))


@given(clusters())
def test_what_is_written_is_read_back(described):
    assert Cluster.from_tf_config(described.to_tf_config()) == described


@given(clusters())
def test_exactly_one_task_leads_or_nobody(described):
    leaders = [task for task in described.tasks if described.with_task(task).is_chief]
    assert leaders == ([described.chief] if described.chief else [])


WORDS = st.sampled_from(
    ["cluster", "task", "type", "index", "worker", "ps", "chief", "master", "evaluator", "a:1", "b:2", "0"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS | st.text(max_size=3), inner, max_size=4),
    max_leaves=15,
)
SHAPED = st.fixed_dictionaries(
    {"cluster": st.dictionaries(WORDS, st.lists(WORDS | VALUES, max_size=3) | VALUES, max_size=4)},
    optional={"task": st.fixed_dictionaries({"type": WORDS | VALUES, "index": st.integers(-1, 3) | VALUES}) | VALUES},
)


@given(st.text() | st.binary() | st.integers() | st.lists(st.text()))
def test_no_text_raises_anything_else(text):
    try:
        assert Cluster.from_tf_config(text).task
    except ClusterError as error:
        assert len(str(error).splitlines()) == 1


@given(VALUES, VALUES, VALUES)
def test_no_python_value_raises_anything_else(jobs, job, index):
    try:
        Cluster({"worker": jobs}, Task(job, index))
    except ClusterError as error:
        assert len(str(error).splitlines()) == 1


JOBS = '{"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": {"0": "d:1"}}'
CONFIG = f'{{"cluster": {JOBS}, "task": {{"type": "worker", "index": 1}}}}'


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


@pytest.mark.parametrize("cases", [300, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_a_right_answer_or_one_line(cases):
    """From the parser and from the doctor."""

    @settings(max_examples=cases, deadline=None, database=None)
    @given(mutations() | (VALUES | SHAPED).map(json.dumps) | st.text(max_size=30))
    def check(text):
        try:
            cluster = Cluster.from_tf_config(text)
        except ClusterError as error:
            assert len(str(error).splitlines()) == 1
        else:
            assert Cluster.from_tf_config(cluster.to_tf_config()) == cluster
            (finding,) = doctor.strategy(cluster)
            assert len(str(finding).splitlines()) == 1

    check()

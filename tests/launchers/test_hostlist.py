# SPDX-License-Identifier: Apache-2.0
"""Host lists as Slurm writes them: ranges, padding, suffixes; whatever else is typed is one line of error."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.launchers.requests import LaunchError
from tfdist.launchers.slurm import task as slurm_task


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n1,n2", ["n1", "n2"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[008,10,7]", ["n008", "n10", "n7"]),
        ("n[9-10]-ib,login", ["n9-ib", "n10-ib", "login"]),
        ("r[0-1]n[1-2].x", ["r0n1.x", "r0n2.x", "r1n1.x", "r1n2.x"]),
        ("[1-2]", ["1", "2"]),
        ("n[5-5],n5", ["n5", "n5"]),
    ],
)
def test_lists(text, hosts):
    assert slurm_task.expand_hosts(text) == hosts


@pytest.mark.parametrize(
    "text",
    ["", "a,,b", "n[1-3", "n1-3]", "n[[1]]", "n[]", "n[a-c]", "n[3-1]", "n 1"],
)
def test_what_is_no_list(text):
    with pytest.raises(LaunchError, match="the host list is not written as Slurm does"):
        slurm_task.expand_hosts(text)


@pytest.mark.parametrize(("text", "counts"), [("2(x3),1", [2, 2, 2, 1]), ("4", [4]), ("1,2", [1, 2])])
def test_tasks_per_host(text, counts):
    assert slurm_task.expand_counts(text) == counts


@pytest.mark.parametrize("text", ["", "x", "2x3", "2(x0)", "-1", "²"])
def test_what_are_no_tasks_per_host(text):
    with pytest.raises(LaunchError, match="the tasks per host are not written as Slurm does"):
        slurm_task.expand_counts(text)


NAMES = st.text("abcxyz0189-._", min_size=1, max_size=6)
RANGES = st.tuples(st.integers(0, 1200), st.integers(0, 30), st.integers(0, 6))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(NAMES, RANGES, NAMES), min_size=1, max_size=5))
def test_a_list_written_from_hosts_gives_them_back(parts):
    hosts, texts = [], []
    for prefix, (first, more, width), suffix in parts:
        numbers = [f"{number:0{width}d}" for number in range(first, first + more + 1)]
        hosts += [f"{prefix}{number}{suffix}" for number in numbers]
        texts.append(f"{prefix}[{numbers[0]}-{numbers[-1]}]{suffix}")
    assert slurm_task.expand_hosts(",".join(texts)) == hosts

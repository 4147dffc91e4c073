# SPDX-License-Identifier: Apache-2.0
"""The process manager that an MPI library finds in its own process."""

from __future__ import annotations

import os
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.transport import mpi


class Exchange:
    """Key-value store of several workers' servers, in place of a coordination service."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count, timeout=10)
        self._stored: dict[str, str] = {}

    def __call__(self, new: dict[str, str]) -> dict[str, str]:
        self._stored.update(new)
        self._barrier.wait()
        return dict(self._stored)


def alone() -> mpi.PmiServer:
    return mpi.PmiServer("job-1", 0, ["here"], dict)


def test_the_questions_of_the_start_are_answered_as_pmi_1_has_it():
    server = mpi.PmiServer("job-1", 1, ["here", "here"], dict)
    assert server.answer("cmd=init pmi_version=1 pmi_subversion=1\n") == (
        "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"
    )
    assert server.answer("cmd=get_maxes\n") == "cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024 rc=0"
    assert server.answer("cmd=get_my_kvsname\n") == "cmd=my_kvsname kvsname=job-1 rc=0"
    assert server.answer("cmd=get_universe_size\n") == "cmd=universe_size size=2 rc=0"
    assert server.answer("cmd=finalize\n") == "cmd=finalize_ack rc=0"


def test_a_stored_value_is_seen_after_the_barrier_only():
    server = alone()
    assert server.answer("cmd=put kvsname=job-1 key=card value=addr#1=x\n") == "cmd=put_result rc=0 msg=success"
    assert server.answer("cmd=get kvsname=job-1 key=card\n") == "cmd=get_result rc=-1 msg=key_not_found"
    assert server.answer("cmd=barrier_in\n") == "cmd=barrier_out rc=0"
    assert server.answer("cmd=get kvsname=job-1 key=card\n") == "cmd=get_result rc=0 msg=success value=addr#1=x"


def test_a_question_that_pmi_1_does_not_have_is_refused_with_its_line():
    with pytest.raises(ValueError, match=r"PMI-1 does not have. Received: 'cmd=spawn nprocs=2'"):
        alone().answer("cmd=spawn nprocs=2\n")


def test_libraries_find_each_other_over_their_sockets():
    exchange, cards = Exchange(3), {}

    def library(rank: int) -> None:
        server = mpi.PmiServer("job-1", rank, ["here"] * 3, exchange)
        server.start()
        assert server.environment["PMI_RANK"] == str(rank) and server.environment["PMI_SIZE"] == "3"
        with socket.socket(fileno=os.dup(int(server.environment["PMI_FD"]))) as given, given.makefile("rw") as stream:

            def ask(line: str) -> str:
                stream.write(line + "\n")
                stream.flush()
                return stream.readline().strip()

            ask(f"cmd=put kvsname=job-1 key=card{rank} value=port{rank}")
            ask("cmd=barrier_in")
            cards[rank] = [ask(f"cmd=get kvsname=job-1 key=card{other}").rpartition("=")[2] for other in range(3)]
            ask("cmd=finalize")

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(library, range(3)))
    assert cards == {key: ["port0", "port1", "port2"] for key in range(3)}


def _nodes(mapping: str) -> list[int]:
    """The place of each worker, as an MPI library reads it."""
    runs = [tuple(map(int, run)) for run in re.findall(r"\((\d+),(\d+),(\d+)\)", mapping)]
    return [first + node for first, nodes, count in runs for node in range(nodes) for _ in range(count)]


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=8))
def test_workers_share_memory_where_their_places_are_the_same(places: list[str]):
    numbers = _nodes(mpi.process_mapping(places) or "")
    assert len(numbers) == len(places)
    for one, first in zip(places, numbers, strict=True):
        assert [place == one for place in places] == [number == first for number in numbers]


@pytest.mark.parametrize(("machines", "workers"), [(1, 64), (500, 1), (300, 8), (1000, 2)])
def test_the_places_of_many_machines_are_a_short_value(machines: int, workers: int):
    places = [f"machine {number // workers}" for number in range(machines * workers)]
    assert mpi.process_mapping(places) == f"(vector,(0,{machines},{workers}))"


def test_places_that_need_too_long_a_value_are_not_told():
    places = [f"machine {number * 7919 % 400}" for number in range(400)]
    assert mpi.process_mapping(places) == "(vector,(0,400,1))"
    assert mpi.process_mapping([*places, *reversed(places)]) is None
    server = mpi.PmiServer("job", 0, [*places, *reversed(places)], dict)
    assert "key_not_found" in server.answer("cmd=get kvsname=job key=PMI_process_mapping")


def test_processes_of_one_machine_have_one_place():
    assert mpi.own_place() == mpi.own_place() != ""

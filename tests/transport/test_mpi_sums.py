# SPDX-License-Identifier: Apache-2.0
"""The sums of `transport.mpi`, by threads with queues in place of processes with an MPI library."""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.transport import mpi


class Request:
    def __init__(self, done: Any) -> None:
        self._done = done

    def is_done(self) -> bool:
        return self._done()


class Module:
    """Stands for `mpi4py.MPI`."""

    IN_PLACE = object()
    Exception = OSError

    class Request:
        @staticmethod
        def Testall(requests: list[Request]) -> bool:  # noqa: N802
            return all(request.is_done() for request in requests)


class Communicator:
    """One thread's end of queues between all threads."""

    def __init__(self, rank: int, queues: list[list[queue.Queue]], whole: dict[int, list[Any]]) -> None:
        self.rank, self.size = rank, len(queues)
        self._queues = queues
        self._whole = whole
        self._count = 0

    def Isend(self, array: np.ndarray, dest: int, tag: int) -> Request:  # noqa: N802
        self._queues[self.rank][dest].put(array.copy())
        return Request(lambda: True)

    def Irecv(self, array: np.ndarray, source: int, tag: int) -> Request:  # noqa: N802
        received: list[bool] = []

        def done() -> bool:
            if not received:
                try:
                    array[:] = self._queues[source][self.rank].get_nowait()
                except queue.Empty:
                    return False
                received.append(True)
            return True

        return Request(done)

    def Iallreduce(self, sent: Any, total: np.ndarray) -> Request:  # noqa: N802
        parts = self._whole.setdefault(self._count, [])
        self._count += 1
        parts.append((total if sent is Module.IN_PLACE else sent).copy())

        def done() -> bool:
            if len(parts) < self.size:
                return False
            total[:] = sum(parts)
            return True

        return Request(done)


def summed(arrays: list[np.ndarray], in_place: bool, repeat: int = 1) -> list[np.ndarray]:
    """The sums that each of the workers with these arrays has."""
    count = len(arrays)
    queues: list[list[queue.Queue]] = [[queue.Queue() for _ in range(count)] for _ in range(count)]
    whole: dict[int, list[Any]] = {}

    def work(rank: int) -> Any:
        sums, total = mpi.Mpi(Module, Communicator(rank, queues, whole), lambda: None), None
        for _ in range(repeat):
            total = sums.sum(arrays[rank].copy() if repeat > 1 else arrays[rank], in_place)
        return total

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))


@pytest.fixture(autouse=True, scope="module")
def small_segments() -> Any:
    before = mpi._SMALL_BYTES, mpi._SEGMENT_BYTES
    mpi._SMALL_BYTES, mpi._SEGMENT_BYTES = 16, 24
    yield
    mpi._SMALL_BYTES, mpi._SEGMENT_BYTES = before


@given(
    st.integers(1, 5),
    st.integers(0, 60),
    st.booleans(),
    st.sampled_from([np.float32, np.float64, np.int64]),
    st.booleans(),
)
def test_all_workers_have_the_same_sum(count: int, length: int, in_place: bool, dtype: Any, is_read_only: bool):
    generator = np.random.default_rng(length)
    arrays = [generator.normal(size=length).astype(dtype) * 7 for _ in range(count)]
    before = [array.copy() for array in arrays]
    for array in arrays:
        array.flags.writeable = not is_read_only or count == 1
    in_memory = in_place and arrays[0].flags.writeable
    found = summed(arrays, in_place)
    for one, array, untouched in zip(found, arrays, before, strict=True):
        np.testing.assert_allclose(one, np.sum(before, 0), rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(one, found[0])
        assert one.dtype == dtype
        is_small = array.nbytes <= mpi._SMALL_BYTES and count > 1
        assert (one is array) == (in_memory and not is_small)
        if not in_memory or is_small:
            np.testing.assert_array_equal(array, untouched)


def test_sums_follow_each_other():
    arrays = [np.full(40, rank + 1.0, np.float32) for rank in range(3)]
    for one in summed(arrays, in_place=True, repeat=20):
        np.testing.assert_array_equal(one, np.full(40, 6.0, np.float32))


def test_what_the_check_raises_is_raised_by_every_later_sum_and_its_memory_is_kept(monkeypatch: pytest.MonkeyPatch):
    def check() -> None:
        raise ConnectionError("worker:1 has ended")

    monkeypatch.setattr(mpi, "_CHECK_SECS", 0.01)
    sums = mpi.Mpi(Module, Communicator(0, [[queue.Queue()] * 2] * 2, {}), check)
    for _ in range(2):
        with pytest.raises(ConnectionError, match="worker:1 has ended"):
            sums.sum(np.zeros(2, np.float32))
    assert isinstance(sums.failure, ConnectionError)
    assert any(isinstance(each, np.ndarray) and each.size == 3 for held in sums._abandoned for each in held)


@pytest.mark.parametrize("lost", [True, False])
def test_an_error_of_the_library_names_who_was_lost(monkeypatch: pytest.MonkeyPatch, lost: bool):
    class Failing(Module):
        class Request:
            @staticmethod
            def Testall(requests: list[Request]) -> bool:  # noqa: N802
                raise OSError("MPI_ERR_OTHER")

    def check() -> None:
        if lost:
            raise ConnectionError("worker:1 has ended")

    monkeypatch.setattr(mpi, "_BLAME_SECS", 0.05)
    monkeypatch.setattr(mpi, "_CHECK_SECS", 0.01)
    sums = mpi.Mpi(Failing, Communicator(0, [[queue.Queue()] * 2] * 2, {}), check)
    expected = "worker:1 has ended" if lost else r"has failed in the MPI library: MPI_ERR_OTHER"
    with pytest.raises(ConnectionError, match=expected):
        sums.sum(np.zeros(2, np.float32))


@pytest.mark.parametrize(("one", "other"), [((2, np.float32), (2, np.int32)), ((40, np.float64), (40, np.int64))])
def test_workers_that_come_to_different_sums_are_told(one: Any, other: Any):
    """An array of another length can't be tried here: it is an error of the library."""
    queues: list[list[queue.Queue]] = [[queue.Queue() for _ in range(2)] for _ in range(2)]
    whole: dict[int, list[Any]] = {}

    def work(rank: int, size: int, dtype: Any) -> None:
        with pytest.raises(RuntimeError, match="the workers have come to different sums"):
            mpi.Mpi(Module, Communicator(rank, queues, whole), lambda: None).sum(np.zeros(size, dtype))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2), *zip(one, other, strict=True)))


@pytest.mark.parametrize("name", ["MPICH 5.0.2", "Intel(R) MPI 2021.19", "MVAPICH 4.0", "Open MPI 5.0.11"])
def test_libraries_that_speak_pmi_1_need_no_launcher(name: str):
    assert mpi.needs_launcher(name) == name.startswith("Open MPI")

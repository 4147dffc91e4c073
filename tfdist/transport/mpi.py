# SPDX-License-Identifier: Apache-2.0
"""Sums of arrays over the workers by MPI, through mpi4py.

    start(...)       initializes the MPI library: by the launcher that has started this process as a part of an MPI job
                     (mpiexec, srun --mpi), or else by `pmi`, which needs none
    Mpi.sum(array)   the sum over all workers

How an array is summed. Up to `_SMALL_BYTES` the library's own all-reduce is used. A larger one is cut into a block for
each worker, and goes twice around a ring of workers (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for
clusters of workstations", 2009): in the first round each block is added up, in the second one all get it. Blocks
travel in segments, so that one is added while the next one is under way, and still in the cache when it goes on. All
workers have the same sums, bit by bit, because each block is added up in one place.

Nothing here waits within the library. A wait asks for progress again and again, at first at once and then with pauses,
so that a worker that waits leaves its core to those that compute; and it looks whether the others live.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib.util
import itertools
import os
import pathlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tfdist.launchers.requests import TRY_AGAIN_EXIT_CODE
from tfdist.runtime import cpus, messages
from tfdist.transport import pmi

# Variables that MPI launchers set for their processes.
_LAUNCHED = ("PMI_RANK", "PMI_FD", "PMI_PORT", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
# Libraries that can be started without a launcher, by the beginning of their names for themselves.
_WITHOUT_LAUNCHER = ("MPICH", "Intel(R) MPI", "MVAPICH")
_THREAD_MULTIPLE = 3

_SMALL_BYTES = 2**16
_SEGMENT_BYTES = 2**19
_TAG = 1
# For so long a wait spins, and then yields, before it begins to sleep; with more workers than cores it sleeps at once.
_SPIN_SECS, _YIELD_SECS = 50e-6, 500e-6
_SLEEP_SECS = 50e-6
_CHECK_SECS = 1.0
_FINISH_SECS = 10.0


def is_installed() -> bool:
    """Returns True if mpi4py can be imported."""
    return importlib.util.find_spec("mpi4py") is not None


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns True if an MPI launcher has started this process."""
    return any(name in environment for name in _LAUNCHED)


def library() -> str:
    """Returns the MPI library's name and version, in one line; loads it, and starts nothing.

    Raises:
      ImportError: there is no mpi4py, or no library for it.
      RuntimeError: mpi4py finds no MPI library.
    """
    version = " ".join(_mpi4py().Get_library_version().split())
    found = re.match(r"(MPICH|Open MPI|Intel\(R\) MPI|MVAPICH\S*)\D*([\d.]+\d)?", version)
    return " ".join(part for part in found.groups() if part) if found else version[:40]


def needs_launcher(name: str) -> bool:
    """Returns True if a library of this name (see `library`) can't be started without an MPI launcher."""
    return not name.startswith(_WITHOUT_LAUNCHER)


def start(job: str, index: int, places: Sequence[str], exchange: pmi.Exchange, check: Callable[[], None]) -> Mpi:
    """Initializes the library; all workers call it.

    Args:
      job: see `pmi.Server`.
      index: number of this worker.
      places: see `pmi.Server`; one for each worker.
      exchange: see `pmi.Server`.
      check: called about once a second while a sum is waited for; raises if it will never come.

    Raises:
      RuntimeError: the library can't be initialized, or its job has another number of processes.
    """
    module, server = _mpi4py(), None
    if not module.Is_initialized():
        added: dict[str, str] = {}
        if not is_launched():
            server = pmi.Server(job, index, places, exchange)
            server.start()
            added = server.environment
        os.environ.update(added)
        try:
            with _ending_if_alone(check):
                code = _initialize()
        finally:
            for name in added:
                del os.environ[name]
        if code:
            raise RuntimeError(f"MPI can't be initialized: {(server and server.error) or f'error {code}'}")
    world = module.COMM_WORLD
    if len(places) != world.size:
        raise RuntimeError(
            f"the MPI job has another number of processes than the cluster; start one for each worker. Received: "
            f"{world.size} processes, {len(places)} workers"
        )
    # Its processes may have other numbers than the workers.
    communicator = world.Split(0, index)
    if server is not None:
        _remove_names_of_shared_memory()
    else:
        # A launcher takes a process that ends without it for a failure.
        atexit.register(_finish, module)
    return Mpi(module, communicator, check, is_polite=places.count(places[index]) > cpus.usable())


def _finish(module: Any) -> None:
    """Finishes MPI, which waits for the others, unless they have failed: then not for long."""
    thread = threading.Thread(target=module.Finalize, name="tfdist-mpi-end", daemon=True)
    thread.start()
    thread.join(_FINISH_SECS)


def _remove_names_of_shared_memory() -> None:
    """Removes the files of the library's shared memory, which all have opened; a killed process would leave them."""
    for path in {line.split()[-1] for line in _maps() if re.search(r" /dev/shm/mpi", line)}:
        pathlib.Path(path).unlink(missing_ok=True)


@contextlib.contextmanager
def _ending_if_alone(check: Callable[[], None]) -> Iterator[None]:
    """Ends this process if others fail within the block: nothing else ends a call into the library."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(_CHECK_SECS):
            try:
                check()
            except ConnectionError as error:
                messages.say(f"tfdist: MPI can't be initialized: {error}")
                os._exit(TRY_AGAIN_EXIT_CODE)

    threading.Thread(target=watch, name="tfdist-mpi-start", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def _mpi4py() -> Any:
    import mpi4py

    # To finish waits for all others, also for those that have failed.
    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI

    return MPI


def _initialize() -> int:
    """Calls MPI_Init_thread of the library that mpi4py has loaded. mpi4py's own call would keep Python's lock."""
    (path, *_) = sorted({line.split()[-1] for line in _maps() if re.search(r"/libmpi(_abi)?\.so", line)})
    provided = ctypes.c_int()
    return ctypes.CDLL(path).MPI_Init_thread(None, None, ctypes.c_int(_THREAD_MULTIPLE), ctypes.byref(provided))


def _maps() -> list[str]:
    return pathlib.Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()


class Mpi:
    """The workers' sums.

    Args:
      module: `mpi4py.MPI`, initialized.
      communicator: of all workers, in their order.
      check: see `start`.
      is_polite: whether waits sleep at once, because the workers of this machine share its cores.
    """

    def __init__(self, module: Any, communicator: Any, check: Callable[[], None], is_polite: bool = False) -> None:
        self._module = module
        self._comm = communicator
        self._rank, self._size = communicator.rank, communicator.size
        self._before, self._after = (self._rank - 1) % self._size, (self._rank + 1) % self._size
        self._check = check
        self._spin_secs, self._yield_secs = (0.0, 0.0) if is_polite else (_SPIN_SECS, _YIELD_SECS)
        self._lock = threading.Lock()
        self._segments: dict[Any, tuple[np.ndarray, np.ndarray]] = {}

    def sum(self, array: np.ndarray, in_place: bool = False) -> np.ndarray:
        """Returns the sum of the workers' 1-D arrays, which have one size and dtype; in place, or in a new array."""
        if self._size == 1:
            return array if in_place else array.copy()
        total = array if in_place else np.empty_like(array)
        with self._lock:
            if array.nbytes <= _SMALL_BYTES:
                self._wait([self._comm.Iallreduce(self._module.IN_PLACE if in_place else array, total)])
            else:
                self._sum_in_ring(array, total)
        return total

    def _sum_in_ring(self, array: np.ndarray, total: np.ndarray) -> None:
        rank, size = self._rank, self._size
        bounds = [len(array) * block // size for block in range(size + 1)]
        spans = [slice(start, stop) for start, stop in itertools.pairwise(bounds)]
        for step in range(size - 1):
            sent, added = spans[(rank - step) % size], spans[(rank - step - 1) % size]
            # What was added up in the step before goes on; in the first one, what this worker has.
            self._add_block((total if step else array)[sent], array[added], total[added])
        for step in range(size - 1):
            self._pass_on(total[spans[(rank + 1 - step) % size]], total[spans[(rank - step) % size]])

    def _add_block(self, sent: np.ndarray, own: np.ndarray, total: np.ndarray) -> None:
        """Sends a block to the next worker; the sum of the one of the worker before and `own` goes to `total`."""
        length = _SEGMENT_BYTES // sent.itemsize
        out = [sent[start : start + length] for start in range(0, len(sent), length)]
        into = [slice(start, min(start + length, len(own))) for start in range(0, len(own), length)]
        # A segment is received while the one before is added.
        places = self._places_for(sent.dtype, length)
        waiting = self._exchange(out[:1], into[:1], places[0])
        for number in range(max(len(out), len(into))):
            after = slice(number + 1, number + 2)
            following = self._exchange(out[after], into[after], places[(number + 1) % 2])
            self._wait(waiting)
            for span in into[number : number + 1]:
                np.add(own[span], places[number % 2][: span.stop - span.start], out=total[span])
            waiting = following

    def _exchange(self, out: Sequence[np.ndarray], into: Sequence[slice], place: np.ndarray) -> list[Any]:
        received = [self._comm.Irecv(place[: span.stop - span.start], self._before, _TAG) for span in into]
        return [*received, *(self._comm.Isend(segment, self._after, _TAG) for segment in out)]

    def _pass_on(self, sent: np.ndarray, received: np.ndarray) -> None:
        self._wait([self._comm.Irecv(received, self._before, _TAG), self._comm.Isend(sent, self._after, _TAG)])

    def _places_for(self, dtype: Any, length: int) -> tuple[np.ndarray, np.ndarray]:
        if dtype not in self._segments:
            self._segments[dtype] = np.empty(length, dtype), np.empty(length, dtype)
        return self._segments[dtype]

    def _wait(self, requests: list[Any]) -> None:
        """Waits until these requests are done."""
        testall = self._module.Request.Testall
        if testall(requests):
            return
        began = checked = time.perf_counter()
        while not testall(requests):
            now = time.perf_counter()
            waited = now - began
            if waited >= self._yield_secs:
                time.sleep(_SLEEP_SECS)
            elif waited >= self._spin_secs:
                os.sched_yield()
            if now - checked > _CHECK_SECS:
                checked = now
                self._check()

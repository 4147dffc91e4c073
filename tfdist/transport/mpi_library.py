# SPDX-License-Identifier: Apache-2.0
"""The MPI library of this process: which one it is, how it is started, and how it ends.

    size_of_job()   how many processes an MPI launcher has started with this one (mpiexec, srun --mpi), if one has
    start(...)      initializes the library: by that launcher, or by `pmi`, which needs none

The library's own calls may wait for ever, and mpi4py's start and end keep Python's lock meanwhile. So these two are
called past mpi4py, and a thread looks after the other workers and ends the process where they have failed.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib.util
import os
import pathlib
import re
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tfdist.launchers.requests import TRY_AGAIN_EXIT_CODE
from tfdist.runtime import cpus, messages
from tfdist.transport import pmi
from tfdist.transport.mpi import Mpi

# Libraries that can be started without a launcher, by the beginning of their names for themselves.
_WITHOUT_LAUNCHER = ("MPICH", "Intel(R) MPI", "MVAPICH")
# Variables by which a launcher speaks to the library; another job's must not be heard.
_OF_LAUNCHERS = ("PMI_", "PMIX_", "OMPI_", "PRTE_")
_THREAD_SERIALIZED, _THREAD_MULTIPLE = 2, 3
_CHECK_SECS = 1.0
_STALL_SECS = 30.0
# For so long a process that has ended waits for the others, whose last messages may still be on their way.
_LEAVE_SECS, _FINISH_SECS = 10.0, 60.0


def is_installed() -> bool:
    """Returns True if mpi4py can be imported."""
    return importlib.util.find_spec("mpi4py") is not None


def size_of_job(environment: Mapping[str, str] = os.environ) -> int | None:
    """Returns the number of processes in the MPI job that a launcher has made this process a part of; None for none.

    A variable alone says nothing: a shell within `srun` or `mpiexec` hands it down to all that it starts. MPICH's
    launchers also give an address, or an open socket.
    """
    size = environment.get("PMI_SIZE", "")
    if size.isdecimal() and ("PMI_PORT" in environment or _is_socket(environment.get("PMI_FD", ""))):
        return int(size)
    if "PMIX_RANK" in environment or "OMPI_COMM_WORLD_RANK" in environment:
        sizes = [environment.get(name, "") for name in ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")]
        return next((int(size) for size in sizes if size.isdecimal()), None)
    return None


def _is_socket(number: str) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(int(number)).st_mode)
    except (ValueError, OSError):
        return False


def name() -> str:
    """Returns the MPI library's name and version, in one line; loads it, and starts nothing.

    Raises:
      ImportError: there is no mpi4py, or no library for it.
      RuntimeError: mpi4py finds no MPI library.
    """
    version = " ".join(_mpi4py().Get_library_version().split())
    found = re.match(r"(MPICH|Open MPI|Intel\(R\) MPI|MVAPICH\S*)\D*([\d.]+\d)?", version)
    return " ".join(part for part in found.groups() if part) if found else version[:40]


def needs_launcher(name: str) -> bool:
    """Returns True if a library of this name (see `name`) can't be started without an MPI launcher."""
    return not name.startswith(_WITHOUT_LAUNCHER)


def start(
    index: int,
    places: Sequence[str],
    exchange: pmi.Exchange | None,
    job: str,
    check: Callable[[], None],
    timeout_secs: float,
) -> Mpi:
    """Initializes the library; all workers call it.

    Args:
      index: number of this worker.
      places: see `pmi.Server`; one for each worker.
      exchange: see `pmi.Server`; None if the launcher of an MPI job has started all workers.
      job: see `pmi.Server`.
      check: called about once a second while the others are waited for; raises ConnectionError if they have failed.
      timeout_secs: for so long they are waited for.

    Raises:
      RuntimeError: the library can't be initialized, or its job has another number of processes.
    """
    module, server = _mpi4py(), None
    with _ending_if_alone(check, timeout_secs):
        if not module.Is_initialized():
            if exchange is not None:
                server = pmi.Server(job, index, places, exchange)
                server.start()
            with _environment(server.environment) if server else contextlib.nullcontext():
                code = _initialize()
            if code:
                raise RuntimeError(f"MPI can't be initialized: {(server and server.error) or f'error {code}'}")
            # By default the library ends the process, also where a worker is lost.
            for communicator in (module.COMM_WORLD, module.COMM_SELF):
                communicator.Set_errhandler(module.ERRORS_RETURN)
        world = module.COMM_WORLD
        if len(places) != world.size:
            raise RuntimeError(
                f"the MPI job has another number of processes than the cluster; start one for each worker. Received: "
                f"{world.size} processes, {len(places)} workers"
            )
        # Its processes may have other numbers than the workers.
        communicator, farewell = world.Split(0, index), world.Split(0, index)
    if server is not None:
        _remove_names_of_shared_memory()
    sums = Mpi(module, communicator, check, is_polite=places.count(places[index]) > cpus.usable())
    # A launcher takes a process that ends without MPI_Finalize for a failure.
    atexit.register(_leave, sums, module, farewell, check, server is None)
    return sums


def _leave(sums: Mpi, module: Any, communicator: Any, check: Callable[[], None], finishes: bool) -> None:
    """Waits at the end of a process until the others are at theirs, unless something has failed."""
    if sums.failure is not None or getattr(sys, "last_value", None) is not None:
        return
    if finishes:
        thread = threading.Thread(target=_library().MPI_Finalize, name="tfdist-mpi-end", daemon=True)
        thread.start()
        is_over, limit = lambda: not thread.is_alive(), _FINISH_SECS
    else:
        request = communicator.Ibarrier()
        is_over, limit = (lambda: module.Request.Test(request)), _LEAVE_SECS
    began = checked = time.monotonic()
    with contextlib.suppress(ConnectionError, module.Exception):
        while not is_over() and (now := time.monotonic()) - began < limit:
            time.sleep(0.001)
            if now - checked > _CHECK_SECS:
                checked = now
                check()


def _remove_names_of_shared_memory() -> None:
    """Removes the files of the library's shared memory, which all have opened; a killed process would leave them."""
    for path in {line.split()[-1] for line in _maps() if re.search(r" /dev/shm/mpi", line)}:
        pathlib.Path(path).unlink(missing_ok=True)


@contextlib.contextmanager
def _ending_if_alone(check: Callable[[], None], timeout_secs: float) -> Iterator[None]:
    """Ends this process if others fail within the block, or don't come: nothing else ends a call into the library."""
    is_over = threading.Event()

    def watch() -> None:
        began = said = time.monotonic()
        while not is_over.wait(_CHECK_SECS):
            now = time.monotonic()
            try:
                check()
                if now - began > timeout_secs:
                    raise ConnectionError(f"not all workers have come within {timeout_secs:g} s")
            except ConnectionError as error:
                messages.say(f"tfdist: MPI can't be initialized: {error}")
                os._exit(TRY_AGAIN_EXIT_CODE)
            if now - said > _STALL_SECS:
                said = now
                messages.say(f"tfdist: the start of MPI has not completed after {now - began:.0f} s")

    threading.Thread(target=watch, name="tfdist-mpi-start", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


@contextlib.contextmanager
def _environment(added: Mapping[str, str]) -> Iterator[None]:
    """Within the block, these variables take the place of those of any MPI launcher."""
    before = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(_OF_LAUNCHERS)}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
        os.environ.update(before)


def _mpi4py() -> Any:
    import mpi4py

    # To finish waits for all others, also for those that have failed.
    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI

    return MPI


def _initialize() -> int:
    """Calls MPI_Init_thread; mpi4py's own call would keep Python's lock."""
    provided = ctypes.c_int()
    code = _library().MPI_Init_thread(None, None, ctypes.c_int(_THREAD_MULTIPLE), ctypes.byref(provided))
    if not code and provided.value < _THREAD_SERIALIZED:
        raise RuntimeError("the MPI library serves one thread only; use one that was built with threads")
    return code


def _library() -> ctypes.CDLL:
    """Returns the MPI library that mpi4py has loaded."""
    paths = sorted({line.split()[-1] for line in _maps() if re.search(r"/libmpi[^/]*\.so", line)})
    for path in paths:
        library = ctypes.CDLL(path)
        if hasattr(library, "MPI_Init_thread"):
            return library
    raise RuntimeError(f"mpi4py has loaded no library with MPI_Init_thread. Found: {', '.join(paths) or 'none'}")


def _maps() -> list[str]:
    return pathlib.Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()

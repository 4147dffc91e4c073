# SPDX-License-Identifier: Apache-2.0
"""Sums and messages of arrays over the workers by MPI, through mpi4py (`mpi` starts it).

How an array is summed. Up to `_SMALL_BYTES` the library's own all-reduce is used. A larger one is cut into a block for
each worker, and goes twice around a ring of workers. In the first round each block is added up, in the second one all
get it (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009). Blocks are
sent in segments: one is added while the next is under way. All workers have the same sums, bit by bit, because each
block is added up in one place.

Nothing here waits within the library. A wait polls for progress, at first at once and then with pauses, so that its
core is free for workers that compute. It also checks that the others live.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import itertools
import math
import os
import pathlib
import re
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tfdist import _forks, _log, _machine
from tfdist.launchers.requests import TRY_AGAIN_EXIT_CODE

_SMALL_BYTES = 2**16
# Each segment has two waits for another process: smaller ones took more CPU time, and larger ones hardly less.
_SEGMENT_BYTES = 2**22
_TAG = 1
# Marks are below it: small enough for a sum of many of them to be exact in any dtype.
_MARKS = 1021
# For so long a wait spins, and then yields, before it begins to sleep; with more workers than cores it sleeps at once.
_SPIN_SECS, _YIELD_SECS = 50e-6, 500e-6
_SLEEP_SECS = 50e-6
_CHECK_SECS = 1.0
FIRST_SUMS_SECS = 20.0
# Longest search for the lost worker after an error of the library.
_BLAME_SECS = 12.0


class Mpi:
    """The workers' sums.

    Args:
      module: `mpi4py.MPI`, initialized.
      communicator: of all workers, in their order.
      check: called about once a second while a sum is waited for; raises ConnectionError if it will never come.
      is_polite: whether waits sleep at once, because the workers of this machine share its cores.

    Attributes:
      failure: what the first sum that failed has raised; all later ones raise it again.
    """

    def __init__(self, module: Any, communicator: Any, check: Callable[[], None], is_polite: bool = False) -> None:
        self._module = module
        self._comm = communicator
        self._rank, self._size = communicator.rank, communicator.size
        self._before, self._after = (self._rank - 1) % self._size, (self._rank + 1) % self._size
        self._check = check
        self._spin_secs, self._yield_secs = (0.0, 0.0) if is_polite else (_SPIN_SECS, _YIELD_SECS)
        # Longest wait, and the text of the error after it.
        self._limit_secs, self._late = math.inf, ""
        self._lock = threading.Lock()
        self._segments: dict[Any, tuple[np.ndarray, np.ndarray]] = {}
        self._count = 0
        self._mark = np.zeros(1, np.int64)
        self.failure: Exception | None = None
        # Requests of the sum under way, and what they read and write.
        self._held: list[Any] = []
        # Those of failed sums: the library may still write there.
        self._abandoned: list[Any] = []

    def sum(self, array: np.ndarray, in_place: bool = False) -> np.ndarray:
        """Returns the sum of the workers' 1-D arrays, of one size and dtype, without gaps; in place, or in a new array.

        Small and read-only arrays are never summed in place.

        Raises:
          ConnectionError: a worker has ended or failed, or the library reports an error.
          RuntimeError: the workers have come to different sums.
        """
        if self._size == 1:
            return array if in_place else array.copy()
        return self._noting_failure(lambda: self._sum(array, in_place), array)

    def try_out(self) -> Any:
        """Sums a small and a large array, so that the workers' connections come up; all workers call it.

        Returns:
          Another communicator of the same workers.

        Raises:
          ConnectionError: one of them is not done within `FIRST_SUMS_SECS`.
        """
        self._limit_secs = FIRST_SUMS_SECS
        self._late = (
            f"MPI's first sum has not completed within {FIRST_SUMS_SECS:g} s; a firewall may keep its connections, on "
            "ports of its own, from coming up: let all ports pass between the workers"
        )
        for size in (1, _SMALL_BYTES // 8 + self._size):
            self.sum(np.ones(size))
        other, request = self._comm.Idup()
        self._wait([request])
        self._limit_secs = math.inf
        return other

    def _noting_failure(self, call: Callable[[], Any], array: np.ndarray) -> Any:
        with self._lock:
            if self.failure is not None:
                raise self.failure
            self._held = [array]
            try:
                result = call()
            except BaseException as error:
                self._abandoned.append(self._held)
                if isinstance(error, Exception):
                    self.failure = error
                raise
            self._held = []
            return result

    def gather(self, message: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Gathers a message of each worker.

        Args:
          message: 1-D uint8; each worker has one of its own length.

        Returns:
          The messages, uint8 [workers, longest], padded with zeros, and their lengths, int64.

        Raises:
          ConnectionError, RuntimeError: see `sum`.
        """
        return self._noting_failure(lambda: self._gather(message), message)

    def _gather(self, message: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self._count += 1
        self._meet((7919 * self._count + 1) % _MARKS)
        lengths = np.zeros(self._size, np.int64)
        lengths[self._rank] = len(message)
        self._wait([self._comm.Iallgather(self._module.IN_PLACE, lengths)], lengths)
        gathered = np.zeros([self._size, int(lengths.max())], np.uint8)
        starts = np.arange(self._size) * gathered.shape[1]
        place = [gathered, lengths, starts, self._module.BYTE]
        self._wait([self._comm.Iallgatherv([message, self._module.BYTE], place)], message, gathered, lengths, starts)
        return gathered, lengths

    def _sum(self, array: np.ndarray, in_place: bool) -> np.ndarray:
        self._count += 1
        mark = (7919 * self._count + 31 * array.nbytes + array.dtype.num) % _MARKS
        if array.nbytes <= _SMALL_BYTES:
            marked = np.empty(len(array) + 1, array.dtype)
            marked[:-1], marked[-1] = array, mark
            self._wait([self._comm.Iallreduce(self._module.IN_PLACE, marked)], marked)
            self._check_mark(marked[-1], mark)
            return marked[:-1]
        self._meet(mark)
        total = array if in_place and array.flags.writeable else np.empty_like(array)
        self._held.append(total)
        self._sum_in_ring(array, total)
        return total

    def _meet(self, mark: int) -> None:
        self._mark[0] = mark
        self._wait([self._comm.Iallreduce(self._module.IN_PLACE, self._mark)])
        self._check_mark(self._mark[0], mark)

    def _check_mark(self, found: Any, mark: int) -> None:
        """Raises RuntimeError unless all workers have the same call before them, by its number, and size and dtype."""
        if int(found) != self._size * mark:
            raise RuntimeError(
                "the workers have come to different sums: one of them has made a call that the others have not, such "
                f"as evaluate on the chief only. All workers must run the same program. Received: sum {self._count}"
            )

    def _sum_in_ring(self, array: np.ndarray, total: np.ndarray) -> None:
        rank, size = self._rank, self._size
        bounds = [len(array) * block // size for block in range(size + 1)]
        spans = [slice(start, stop) for start, stop in itertools.pairwise(bounds)]
        for step in range(size - 1):
            sent, added = spans[(rank - step) % size], spans[(rank - step - 1) % size]
            # Sends the block that was added up in the step before; in the first step, the worker's own.
            self._add_block((total if step else array)[sent], array[added], total[added])
        for step in range(size - 1):
            sent, received = total[spans[(rank + 1 - step) % size]], total[spans[(rank - step) % size]]
            self._wait([self._comm.Irecv(received, self._before, _TAG), self._comm.Isend(sent, self._after, _TAG)])

    def _add_block(self, sent: np.ndarray, own: np.ndarray, total: np.ndarray) -> None:
        """Sends a block to the next worker; the sum of the one of the worker before and `own` goes to `total`."""
        length, dtype = _SEGMENT_BYTES // sent.itemsize, sent.dtype
        if dtype not in self._segments:
            self._segments[dtype] = np.empty(length, dtype), np.empty(length, dtype)
        places = self._segments[dtype]

        def exchange(number: int) -> tuple[list[Any], np.ndarray, slice]:
            span = slice(number * length, (number + 1) * length)
            place = places[number % 2][: len(own[span])]
            requests = [self._comm.Irecv(place, self._before, _TAG)] if len(place) else []
            if len(sent[span]):
                requests.append(self._comm.Isend(sent[span], self._after, _TAG))
            return requests, place, span

        following = exchange(0)
        for number in range(-(-max(len(sent), len(own)) // length)):
            # A segment is received while the one before is added.
            (requests, place, span), following = following, exchange(number + 1)
            self._wait(requests)
            np.add(own[span], place, out=total[span])

    def _wait(self, requests: list[Any], *kept: Any) -> None:
        """Waits until these requests, which use what is kept, are done."""
        self._held += [*requests, *kept]
        self.wait_until(functools.partial(self._are_done, requests), self._limit_secs, self._late)

    def wait_until(self, is_done: Callable[[], bool], limit_secs: float, late: str) -> None:
        """Waits; raises ConnectionError if a worker is lost, and after this time, with this text."""
        if is_done():
            return
        began = checked = time.perf_counter()
        while not is_done():
            now = time.perf_counter()
            waited = now - began
            if waited >= self._yield_secs:
                time.sleep(_SLEEP_SECS)
            elif waited >= self._spin_secs:
                os.sched_yield()
            if now - checked > _CHECK_SECS:
                checked = now
                self._check()
                if waited > limit_secs:
                    raise ConnectionError(late)

    def _are_done(self, requests: list[Any]) -> bool:
        try:
            return self._module.Request.Testall(requests)
        except self._module.Exception as error:
            # Soon the check names the worker that is lost.
            text = f"a sum over all workers has failed in the MPI library: {error}"
            self.wait_until(lambda: False, _BLAME_SECS, text)
            raise


# The MPI library of this process: which one it is, how it is started, and how it ends.
#
#     size_of_job()   how many processes an MPI launcher has started with this one (mpiexec, srun --mpi), if one has
#     start(...)      initializes the library: by that launcher, or by `pmi`, which needs none
#
# The library's own calls may wait for ever, and mpi4py's start and end keep Python's lock meanwhile. So these two are
# called past mpi4py, and a thread looks after the other workers and ends the process where they have failed.


# Libraries that can be started without a launcher, by the beginning of their names for themselves.
_WITHOUT_LAUNCHER = ("MPICH", "Intel(R) MPI", "MVAPICH")
# Variables by which a launcher speaks to the library; another job's must not be heard.
_OF_LAUNCHERS = ("PMI_", "PMIX_", "OMPI_", "PRTE_")
_THREAD_SERIALIZED, _THREAD_MULTIPLE = 2, 3
_CHILD_SECS = 30.0
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


def library_name() -> str:
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


def untried(name: str) -> str:
    """Returns why a library of this name is not taken unasked; "" if it is, and could be started by a child process."""
    if not name.startswith("MPICH"):
        return f"{name} is taken if communication='mpi' asks for it"
    environment = {key: value for key, value in os.environ.items() if not key.startswith(_OF_LAUNCHERS)}
    try:
        # An error within the library's start, such as of its shared memory, may end the process.
        command = [sys.executable, "-c", "from mpi4py import MPI"]
        child = subprocess.run(command, env=environment, capture_output=True, timeout=_CHILD_SECS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{name} could not be started: {error}"
    said = " ".join(child.stderr.decode(errors="replace").split())[-200:]
    return f"{name} could not be started: {said or child.returncode}" if child.returncode else ""


def start(
    index: int,
    places: Sequence[str],
    exchange: Exchange | None,
    job: str,
    check: Callable[[], None],
    timeout_secs: float,
) -> Mpi:
    """Initializes the library; all workers call it.

    Args:
      index: number of this worker.
      places: see `PmiServer`; one for each worker.
      exchange: see `PmiServer`; None if the launcher of an MPI job has started all workers.
      job: see `PmiServer`.
      check: called about once a second while the others are waited for; raises ConnectionError if they have failed.
      timeout_secs: for so long they are waited for.

    Raises:
      RuntimeError: the library can't be initialized, or its job has another number of processes.
      ConnectionError: see `Mpi.try_out`.
    """
    module, server = _mpi4py(), None
    with _ending_if_alone(check, timeout_secs):
        if not module.Is_initialized():
            if exchange is not None:
                server = PmiServer(job, index, places, exchange)
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
        is_polite = places.count(places[index]) > _machine.usable_cpus()
        farewell = Mpi(module, world, check, is_polite).try_out()
        # The processes of the MPI job may have other numbers than the workers.
        sums = Mpi(module, world if server else world.Split(0, index), check, is_polite)
    if server is not None:
        # The library's shared memory, which all have opened; a killed process would leave its files.
        for path in {*re.findall(r" (/dev/shm/mpi\S*)", pathlib.Path("/proc/self/maps").read_text(encoding="utf-8"))}:
            pathlib.Path(path).unlink(missing_ok=True)
    # A launcher takes a process that ends without MPI_Finalize for a failure.
    _forks.at_exit(_leave, sums, module, farewell, server is None)
    return sums


def _leave(sums: Mpi, module: Any, communicator: Any, finishes: bool) -> None:
    """Waits at the end of a process until the others are at theirs, unless something has failed."""
    if sums.failure is not None or _forks.has_failed():
        return
    if finishes:
        thread = threading.Thread(target=_library().MPI_Finalize, name="tfdist-mpi-end", daemon=True)
        thread.start()
        is_over, limit_secs = lambda: not thread.is_alive(), _FINISH_SECS
    else:
        is_over, limit_secs = communicator.Ibarrier().Test, _LEAVE_SECS
    with contextlib.suppress(ConnectionError, module.Exception):
        sums.wait_until(is_over, limit_secs, "the others have not ended")


@contextlib.contextmanager
def _ending_if_alone(check: Callable[[], None], timeout_secs: float) -> Iterator[None]:
    """Ends this process if others fail within the block, or don't come: nothing else ends a call into the library."""
    is_over = threading.Event()

    def watch() -> None:
        began = time.monotonic()
        while not is_over.wait(_CHECK_SECS):
            try:
                check()
                if time.monotonic() - began > timeout_secs:
                    raise ConnectionError(f"not all workers have come within {timeout_secs:g} s")
            except ConnectionError as error:
                _log.say(f"MPI can't be initialized: {error}")
                os._exit(TRY_AGAIN_EXIT_CODE)

    threading.Thread(target=watch, name="tfdist-mpi-start", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def _environment(added: Mapping[str, str]) -> contextlib.AbstractContextManager:
    """Within the block, these variables take the place of those of any MPI launcher."""
    of_launchers = [name for name in os.environ if name.startswith(_OF_LAUNCHERS)]
    return _machine.environment({**dict.fromkeys(of_launchers), **added})


def _mpi4py() -> Any:
    import mpi4py

    # MPI's finalization waits for all other workers, also for failed ones.
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
    """Returns the MPI library, by mpi4py's module, which is linked with it."""
    return ctypes.CDLL(_mpi4py().__file__)


# A process manager for MPI that each worker brings along: no MPI launcher is needed.
#
# The processes of an MPI job find each other through a process manager. Each process speaks with it over a socket. It
# stores its own address under a key, waits until all have (a barrier), and reads the others' addresses. Usually
# `mpiexec` starts the processes and is that manager. Here each worker has one, a thread of its own process. The
# cluster's coordination service, which tfdist has already, exchanges what they have stored:
#
#     MPI library  --socket-->  Server (this process)  --exchange-->  Servers of the other workers
#
# So tasks stay those of whoever started them (any launcher, or none), nobody listens on the network for it, and no
# worker can be taken for another.
#
# The protocol is PMI-1, lines of `key=value`: "PMI: A Scalable Parallel Process-Management Interface" (Balaji et al.
# 2010), and `src/pmi/src/pmi_v1.c` of MPICH. MPICH and its derivatives (Intel MPI, MVAPICH) speak it; Open MPI does
# not.


# Given what this worker has stored since the last barrier, returns what all have.
Exchange = Callable[[Mapping[str, str]], Mapping[str, str]]

# MPICH's own limits.
_MOST_CHARACTERS = 1024
_LIMITS = f"kvsname_max=256 keylen_max=64 vallen_max={_MOST_CHARACTERS}"
_MAPPING = "PMI_process_mapping"


class PmiServer:
    """Answers the MPI library of this process.

    Args:
      job: a name that no other job on these machines has: the library names its shared memory by it.
      rank: number of this worker.
      places: for each worker, text that is the same for workers that can share memory.
      exchange: called in the server's thread at each barrier, the same number of times on all workers.
    """

    def __init__(self, job: str, rank: int, places: Sequence[str], exchange: Exchange) -> None:
        self._job, self._rank, self._size = job, rank, len(places)
        self._exchange = exchange
        mapping = process_mapping(places)
        self._stored: dict[str, str] = {} if mapping is None else {_MAPPING: mapping}
        self._new: dict[str, str] = {}
        self._own, self._given = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="tfdist-pmi", daemon=True)
        self.error: BaseException | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables by which an MPI library of this process finds the server."""
        return {"PMI_FD": str(self._given.fileno()), "PMI_RANK": str(self._rank), "PMI_SIZE": str(self._size)}

    def start(self) -> None:
        """Starts to answer, in a thread of its own, until the library says that it has finished."""
        self._thread.start()

    def _serve(self) -> None:
        with self._own, self._own.makefile("rw", encoding="ascii", newline="\n") as stream:
            try:
                for line in stream:
                    stream.write(self.answer(line) + "\n")
                    stream.flush()
            except BaseException as error:
                # Seen by the library as the end of the connection, which it reports as a failure.
                self.error = error

    def answer(self, line: str) -> str:
        """Returns the answer to a line of the library; waits for the other workers where the line is a barrier."""
        given = dict(part.split("=", 1) for part in line.split() if "=" in part)
        command = given.get("cmd", "")
        if command == "put":
            self._new[given["key"]] = given["value"]
            return "cmd=put_result rc=0 msg=success"
        if command == "get":
            value = self._stored.get(given["key"])
            found = f"rc=0 msg=success value={value}"
            return f"cmd=get_result {'rc=-1 msg=key_not_found' if value is None else found}"
        if command == "barrier_in":
            new, self._new = self._new, {}
            self._stored |= self._exchange(new)
            return "cmd=barrier_out rc=0"
        plain = {
            "init": "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0",
            "get_maxes": f"cmd=maxes {_LIMITS} rc=0",
            "get_appnum": "cmd=appnum appnum=0 rc=0",
            "get_my_kvsname": f"cmd=my_kvsname kvsname={self._job} rc=0",
            "get_universe_size": f"cmd=universe_size size={self._size} rc=0",
            "finalize": "cmd=finalize_ack rc=0",
        }
        if command not in plain:
            raise ValueError(f"the MPI library asks for something that PMI-1 does not have. Received: {line.strip()!r}")
        return plain[command]


def process_mapping(places: Sequence[str]) -> str | None:
    """Returns which workers share memory, in PMI-1's form: runs of (first place, number of places, workers on each).

    None if it would be longer than a value may be; the library then takes each worker for a machine of its own.
    """
    numbers = {place: number for number, place in enumerate(dict.fromkeys(places))}
    runs: list[list[int]] = []
    for number, group in itertools.groupby(numbers[place] for place in places):
        count = len(list(group))
        if runs and number == runs[-1][0] + runs[-1][1] and count == runs[-1][2]:
            runs[-1][1] += 1
        else:
            runs.append([number, 1, count])
    text = f"(vector,{','.join(f'({first},{nodes},{count})' for first, nodes, count in runs)})"
    return text if len(text) < _MOST_CHARACTERS else None


def own_place() -> str:
    """Returns text that two processes have in common if they can share memory: one machine, one container."""
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id")
    machine = boot.read_text(encoding="ascii").strip() if boot.exists() else socket.gethostname()
    spaces = [str(pathlib.Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("ipc", "pid", "mnt")]
    shared = pathlib.Path("/dev/shm")
    return " ".join([machine, *spaces, str(shared.stat().st_dev if shared.exists() else "")])

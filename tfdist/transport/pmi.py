# SPDX-License-Identifier: Apache-2.0
"""A process manager for MPI that each worker brings along: no MPI launcher is needed.

The processes of an MPI job find each other through a process manager, with which each speaks over a socket: it stores
its own address under a key, waits until all have (a barrier), and asks for those of the others. Usually `mpiexec`
starts the processes and is that manager. Here each worker has one, a thread of its own process, and what they have
stored is sent by the cluster's coordination service, which tfdist has already:

    MPI library  --socket-->  Server (this process)  --exchange-->  Servers of the other workers

So tasks stay those of whoever started them (any launcher, or none), nobody listens on the network for it, and no worker
can be taken for another.

The protocol is PMI-1, lines of `key=value`: "PMI: A Scalable Parallel Process-Management Interface" (Balaji et al.
2010), and `src/pmi/src/pmi_v1.c` of MPICH. MPICH and its derivatives (Intel MPI, MVAPICH) speak it; Open MPI does not.
"""

from __future__ import annotations

import itertools
import pathlib
import socket
import threading
from collections.abc import Callable, Mapping, Sequence

# Given what this worker has stored since the last barrier, returns what all have.
Exchange = Callable[[Mapping[str, str]], Mapping[str, str]]

# MPICH's own limits.
_MOST_CHARACTERS = 1024
_LIMITS = f"kvsname_max=256 keylen_max=64 vallen_max={_MOST_CHARACTERS}"
_MAPPING = "PMI_process_mapping"


class Server:
    """Answers the MPI library of this process.

    Args:
      job: a name that no other job on these machines has: the library names its shared memory by it.
      rank: number of this worker.
      places: for each worker, text that is the same for those who can share memory.
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

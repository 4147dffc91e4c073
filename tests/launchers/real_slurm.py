# SPDX-License-Identifier: Apache-2.0
"""A real Slurm cluster of four nodes on this machine: munged, slurmctld and four slurmd, in namespaces of their own.

Each node has its own network, host name and address, as a host of a cluster has; all nodes share the file system. The
whole cluster lives in one process namespace, so that nothing of it outlives the program that started it. Needs root.

    with real_slurm.start(tmp_path / "slurm") as cluster:
        cluster.run(["sbatch", ...], cwd=tmp_path)
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

NODES = tuple(f"node{number}" for number in range(1, 5))
_ADDRESS = "10.77.0.{}"
# A requeued job waits for this long; 120 s by default.
REQUEUE_DELAY_SECS = 5
# Generous: on a busy machine the tasks need most of a minute to save and end.
GRACE_SECS = 180
_START_TIMEOUT_SECS = 90.0
_CONF = """\
ClusterName=tfdist
SlurmctldHost=head({head})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={run}/munge.socket,cred_expire={requeue_delay}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,sched_min_interval=100000,batch_sched_delay=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
MinJobAge=300
SlurmctldPidFile={run}/slurmctld.pid
SlurmdPidFile={run}/slurmd.%n.pid
SlurmdSpoolDir={run}/spool.%n
StateSaveLocation={run}/state
SlurmctldLogFile={run}/slurmctld.log
SlurmdLogFile={run}/slurmd.%n.log
SlurmctldDebug=info
SlurmdDebug=info
{nodes}
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace}
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
_TOOLS = ("slurmctld", "slurmd", "munged", "sbatch", "ip", "unshare", "nsenter", "mount")


def missing() -> str | None:
    """Reason why no cluster can be started here; None if it can."""
    if os.geteuid() != 0:
        return "a Slurm cluster in namespaces needs root"
    absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
    return f"not installed: {', '.join(absent)}" if absent else None


class Cluster:
    """A running cluster.

    Args:
      init: the first process of its process namespace, as seen from here.
      run: directory with configuration, state and log files.
    """

    def __init__(self, init: int, run: pathlib.Path) -> None:
        self._enter = ["nsenter", f"--target={init}", "--mount", "--net", "--uts", "--pid"]
        self.directory = run
        self.env = {**os.environ, "SLURM_CONF": str(run / "slurm.conf")}

    def command(self, command: Sequence[str], cwd: str | os.PathLike[str]) -> list[str]:
        """The command that runs another one on the head of the cluster; it needs `env`."""
        return [*self._enter, f"--wd={cwd}", *command]

    def run(
        self, command: Sequence[str], cwd: str | os.PathLike[str] = "/", timeout_secs: float = 100
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on the head of the cluster to its end."""
        return subprocess.run(
            self.command(command, cwd), env=self.env, capture_output=True, text=True, timeout=timeout_secs
        )

    def show(self, job: str) -> dict[str, str]:
        """The fields of `scontrol show job`, empty where the job is not known."""
        words = self.run(["scontrol", "--oneliner", "show", "job", job]).stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_state(self, job: str, *states: str) -> dict[str, str]:
        """Waits until the job is in one of these states; returns its fields."""
        deadline = time.monotonic() + 200
        while (fields := self.show(job)).get("JobState") not in states:
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {job} is {fields.get('JobState')}, not {states}: {fields}")
            time.sleep(0.2)
        return fields

    def clear(self) -> None:
        """Cancels all jobs, and waits until no node runs anything."""
        self.run(["scancel", "--user=root"])
        deadline = time.monotonic() + 60
        while self.run(["squeue", "--noheader"]).stdout.strip() and time.monotonic() < deadline:
            time.sleep(0.2)

    def ready(self) -> bool:
        """Returns True if all nodes are idle."""
        found = self.run(["sinfo", "--noheader", "--partition=low", "--Node", "--format=%T"]).stdout.split()
        return found == ["idle"] * len(NODES)


@contextlib.contextmanager
def start(directory: pathlib.Path) -> Iterator[Cluster]:
    """Starts a cluster, and ends it with all that runs on it."""
    directory.mkdir(mode=0o755)
    unshare = ["unshare", "--mount", "--net", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
    with (directory / "init.log").open("wb") as log:
        process = subprocess.Popen(
            [*unshare, sys.executable, __file__, str(directory)], stdin=subprocess.PIPE, stdout=log, stderr=log
        )
    try:
        yield _wait_ready(process, directory)
    finally:
        process.kill()  # --kill-child: the first process of the namespace goes, and all others with it.
        process.communicate()


def _wait_ready(process: subprocess.Popen[bytes], directory: pathlib.Path) -> Cluster:
    deadline = time.monotonic() + _START_TIMEOUT_SECS
    while process.poll() is None and time.monotonic() < deadline:
        children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        if children and (directory / "started").exists():
            cluster = Cluster(int(children[0]), directory)
            if cluster.ready():
                return cluster
        time.sleep(0.2)
    logs = [path.read_text(errors="replace")[-2000:] for path in sorted(directory.glob("*.log"))]
    raise RuntimeError("Slurm did not start:\n" + "\n".join(logs))


# From here on: inside of the namespaces.


def _main(run: pathlib.Path) -> None:
    """First process of the namespace: starts the daemons, collects what ends, ends with the program that started it."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _configure(run)
    _sh("ip link set lo up", "ip link add br0 type bridge", "ip link set br0 up", "hostname head")
    _sh(f"ip addr add {_ADDRESS.format(1)}/24 dev br0", f"mount --bind {run}/hosts /etc/hosts")
    os.environ["SLURM_CONF"] = str(run / "slurm.conf")
    names = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log"}
    munge = [f"--{option}={run / name}" for option, name in names.items()]
    subprocess.run(["munged", "--force", f"--seed-file={run}/munge.seed", *munge], check=True)
    subprocess.Popen(["slurmctld", "-D"])
    for number, name in enumerate(NODES):
        _start_node(number, name)
    (run / "started").touch()
    while True:
        with contextlib.suppress(ChildProcessError):
            os.wait()


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def _configure(run: pathlib.Path) -> None:
    addresses = {name: _ADDRESS.format(11 + number) for number, name in enumerate(NODES)}
    gpus = "Gres=gpu:2 CPUs=8 RealMemory=4000 State=UNKNOWN"
    nodes = [f"NodeName={name} NodeHostname={name} NodeAddr={address} {gpus}" for name, address in addresses.items()]
    head = _ADDRESS.format(1)
    text = _CONF.format(head=head, run=run, nodes="\n".join(nodes), requeue_delay=REQUEUE_DELAY_SECS, grace=GRACE_SECS)
    (run / "slurm.conf").write_text(text)
    # Any two character devices do: Slurm only counts them and sets CUDA_VISIBLE_DEVICES.
    (run / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
    hosts = ["127.0.0.1 localhost", f"{head} head", *(f"{address} {name}" for name, address in addresses.items())]
    (run / "hosts").write_text("\n".join(hosts) + "\n")
    (run / "munge.key").write_bytes(os.urandom(1024))
    (run / "munge.key").chmod(0o600)
    (run / "state").mkdir()


def _start_node(number: int, name: str) -> None:
    """Starts a slurmd that sees a network card and a host name of its own."""
    ready, waiting = os.pipe()
    inner = f"read _ <&{ready}; hostname {name}; exec slurmd -D"
    node = subprocess.Popen(["unshare", "--net", "--uts", "sh", "-c", inner], pass_fds=[ready])
    networks = [pathlib.Path(f"/proc/{pid}/ns/net") for pid in (node.pid, "self")]
    while networks[0].readlink() == networks[1].readlink():
        time.sleep(0.01)
    _sh(f"ip link add v{number} type veth peer name eth0 netns {node.pid}", f"ip link set v{number} master br0 up")
    for command in ("link set lo up", f"addr add {_ADDRESS.format(11 + number)}/24 dev eth0", "link set eth0 up"):
        _sh(f"nsenter --target={node.pid} --net ip {command}")
    os.write(waiting, b"\n")
    os.close(waiting)
    os.close(ready)


def _sh(*commands: str) -> None:
    for command in commands:
        subprocess.run(command.split(), check=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests.
    _main(pathlib.Path(sys.argv[1]))

# SPDX-License-Identifier: Apache-2.0
"""Rules for Linux' firewall (nftables) that admit only a job's hosts and its user to its ports. No TensorFlow import.

TensorFlow's servers listen on all interfaces and authenticate no peer. So on a shared network only a firewall keeps
other hosts out. `rules` is pure: it returns text for `nft -f`, to be loaded by root.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Sequence

from tfdist import _addresses
from tfdist.cluster import Cluster

_Ip = ipaddress.IPv4Address | ipaddress.IPv6Address


def rules(
    cluster: Cluster, also: Iterable[str], user: int, system_ports: str, resolve: Callable[[str], Sequence[str]]
) -> str:
    """Returns the rules for the machine of `cluster.task`.

    Args:
      cluster: all tasks of the job.
      also: more addresses, "host:port", at which the job listens.
      user: id of the user that runs the tasks.
      system_ports: this machine's range of ephemeral ports, such as "32768-60999".
      resolve: returns the IP addresses of a host's name.

    Returns:
      A script for `nft -f`. Loading it again replaces its earlier rules for the same ports.

    Raises:
      ValueError: a host's name can't be resolved.
    """
    tasks = [cluster.address(task) for task in cluster.tasks]
    here = _addresses.key(cluster.address())[0]
    ports = sorted({port for host, port in map(_addresses.key, [*tasks, *also]) if host == here})
    hosts = sorted({address for each in tasks for address in _resolved(_addresses.split(each)[0], resolve)}, key=str)
    sources = [each for each in (_sources(hosts, 4), _sources(hosts, 6)) if each]
    to_ports = f"tcp dport {{ {', '.join(map(str, ports))} }} {_OPENING}"
    to_system = f"tcp dport {system_ports} {_OPENING}"
    return _SCRIPT.format(
        task=cluster.task,
        table=f"tfdist_{ports[0]}",
        user=user,
        to_ports=to_ports,
        to_system=to_system,
        allowed="\n".join(f"    {each} {to_ports} accept" for each in sources),
        system_allowed="\n".join(f"    # {each} {to_system} accept" for each in sources),
    )


def _resolved(host: str, resolve: Callable[[str], Sequence[str]]) -> Sequence[_Ip]:
    found = resolve(host)
    if not found:
        remedy = "mend DNS, or use its IP address in TF_CONFIG"
        raise ValueError(f"the host {host} can't be resolved here, so no rule can let it in; {remedy}")
    return [ipaddress.ip_address(each.partition("%")[0]) for each in found]


def _sources(hosts: Sequence[_Ip], version: int) -> str:
    of_version = [str(host) for host in hosts if host.version == version]
    return f"{'ip' if version == 4 else 'ip6'} saddr {{ {', '.join(of_version)} }}" if of_version else ""


# Matches the first packet of a connection; later packets may be answers to a program that uses such a port by chance.
_OPENING = "tcp flags & (syn | ack) == syn"
# Deleting an absent table is an error, so the script creates it first. A packet must pass the rules of all tables.
_SCRIPT = """\
# Only the hosts of this job, and on this machine only user {user} and root, reach the ports of its tasks here.
# For the machine of {task}. Load it as root with nft -f FILE; remove it with: nft delete table inet {table}
table inet {table}
delete table inet {table}
table inet {table} {{
  chain from_other_machines {{
    type filter hook input priority -10; policy accept;
    iif lo accept
{allowed}
    {to_ports} reject with tcp reset
    # A tf.data service (data_sharding="dynamic") listens at ports that the system chooses. Where nothing else offers
    # anything to other machines there, close those, too:
{system_allowed}
    # {to_system} reject with tcp reset
  }}
  chain from_this_machine {{
    type filter hook output priority -10; policy accept;
    oif lo {to_ports} meta skuid != {{ 0, {user} }} reject with tcp reset
  }}
}}
"""

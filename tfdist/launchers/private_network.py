# SPDX-License-Identifier: Apache-2.0
"""Private network namespace for a job on one machine, with only a loopback interface. No TensorFlow import.

TensorFlow's servers listen on all interfaces and authenticate no peer; no option changes that. In a network namespace
of its own, no other machine and no other user except root can reach the job. In return, the job can't reach any other
machine.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import pathlib
import socket
import struct
import sys

from tfdist.launchers.requests import LaunchError

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1
_REMEDY = "leave out --private_network, or run as root. Received: --private_network"


def enter() -> None:
    """Moves this process, and all processes that it starts from now on, into a new network namespace.

    Without root's rights it also creates a user namespace, in which the user keeps its id.

    Raises:
      LaunchError: the system has no network namespaces, or doesn't let this user create one.
    """
    if not sys.platform.startswith("linux"):
        raise LaunchError(f"network namespaces are Linux's, and this is {sys.platform}; {_REMEDY}")
    user, group = os.geteuid(), os.getegid()
    code = _unshare(_CLONE_NEWNET)
    is_plain_user = code == errno.EPERM
    if is_plain_user:
        code = _unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
    if code:
        raise LaunchError(f"this system lets {_name(user)} make no network namespace ({os.strerror(code)}); {_REMEDY}")
    try:
        if is_plain_user:
            _keep_user(user, group)
        _raise_loopback()
    except OSError as error:
        raise LaunchError(
            f"this system lets {_name(user)} set up no network for the job ({error}); {_REMEDY}"
        ) from None


def _name(user: int) -> str:
    return f"the user {user}" if user else "root"


def _unshare(flags: int) -> int:
    """Calls unshare(2); returns 0 or the error's number."""
    return 0 if ctypes.CDLL(None, use_errno=True).unshare(flags) == 0 else ctypes.get_errno()


def _keep_user(user: int, group: int) -> None:
    """Maps the user and group to themselves, so that files keep their owners and tasks get no rights of root."""
    own = pathlib.Path("/proc/self")
    (own / "setgroups").write_text("deny")
    (own / "uid_map").write_text(f"{user} {user} 1")
    (own / "gid_map").write_text(f"{group} {group} 1")


def _raise_loopback() -> None:
    request = struct.Struct("16sh14x")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        _, flags = request.unpack(fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request.pack(b"lo", 0)))
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, request.pack(b"lo", flags | _IFF_UP))

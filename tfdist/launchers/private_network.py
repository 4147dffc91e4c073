# SPDX-License-Identifier: Apache-2.0
"""Gives a job on one machine a network of its own, with nothing but a loopback interface. No TensorFlow import.

TensorFlow's servers listen on all interfaces and ask no peer for a password; no option changes that. In a network
namespace of their own nobody else can reach them: no other machine, and no other user of this one but root. The price
is that the job reaches nobody either.
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
    """Moves this process into a new network namespace, and with it all processes that it starts from now on.

    Without root's rights it takes a user namespace, too, in which the user stays who it is.

    Raises:
      LaunchError: the system has no such namespaces, or does not let this user make one.
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
    """Maps the user and group to themselves: files belong to the same ones, and tasks have no rights of root."""
    own = pathlib.Path("/proc/self")
    (own / "setgroups").write_text("deny")
    (own / "uid_map").write_text(f"{user} {user} 1")
    (own / "gid_map").write_text(f"{group} {group} 1")


def _raise_loopback() -> None:
    request = struct.Struct("16sh14x")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        _, flags = request.unpack(fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request.pack(b"lo", 0)))
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, request.pack(b"lo", flags | _IFF_UP))

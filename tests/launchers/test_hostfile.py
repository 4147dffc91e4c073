# SPDX-License-Identifier: Apache-2.0
"""Hosts from files and flags; every malformed line is reported with its number."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.launchers.kubernetes import launcher as kubernetes
from tfdist.launchers.requests import LaunchError
from tfdist.launchers.ssh import launcher as ssh
from tfdist.launchers.ssh.launcher import Host


def test_a_file(tmp_path):
    path = tmp_path / "hosts"
    path.write_text(
        "# the cluster\nnode1 slots=2\n\n  me@node2   # spare\nn4:2 # as in --hosts\nn3 address=10.0.0.3 slots=4\r\n"
    )
    assert ssh.read_hostfile(str(path)) == [
        Host("node1", 2, "node1"),
        Host("me@node2", 1, "node2"),
        Host("n4", 2, "n4"),
        Host("n3", 4, "10.0.0.3"),
    ]


def test_a_flag():
    assert ssh.hosts_from_flag("a, me@b:2") == [Host("a"), Host("me@b", 2)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "hostfile lists no host"),
        ("# none", "hostfile lists no host"),
        ("a\nb slots", "hostfile, line 2: the option of the host is invalid"),
        ("a slots=0", "hostfile, line 1: slots is no number from 1 to 1024"),
        ("a slots=two", "hostfile, line 1: slots is no number"),
        ("a slots=9999", "hostfile, line 1: slots is no number"),
        ("a slots=1 slots=2", "hostfile, line 1: the option of the host is invalid"),
        ("a cores=2", 'hostfile, line 1: the option of the host is invalid; write "host", "user@host slots=2"'),
        ("a\n-oProxyCommand=x", "hostfile, line 2: the name of the host is invalid"),
        ("a\n\nb$c", "hostfile, line 3: the name of the host is invalid"),
        ("a\nb\nA slots=2", "hostfile, line 3: the host was named before; add its slots there"),
        ("a address=::1", "hostfile, line 1: the address has a host that is neither a name"),
        ("1.2.3", "hostfile, line 1: the address has a host that is neither a name"),
    ],
)
def test_malformed_lines(text, words):
    with pytest.raises(LaunchError, match=f"^{re.escape(words)}"):
        ssh.parse_hosts(text)


@pytest.mark.parametrize("text", ["a,", ",a", "a b", "a#", "a:0", "a:", "a:x", "a,,a"])
def test_malformed_flags(text):
    with pytest.raises(LaunchError, match=r"^--hosts: .*; write --hosts=a,user@b:2. Received: ") as caught:
        ssh.hosts_from_flag(text)
    assert str(caught.value).endswith(repr(text))


@pytest.mark.parametrize("read", [ssh.read_hostfile, kubernetes.read_patches])
def test_a_file_that_can_not_be_read(read, tmp_path):
    no_text, absent = tmp_path / "no_text", tmp_path / "absent"
    no_text.write_bytes(b"\xff\xfe")
    for path, problem in ((no_text, "it is not text in UTF-8"), (absent, "No such file or directory")):
        with pytest.raises(LaunchError) as caught:
            read(str(path))
        problem = f"can't be read: {problem}; name a file that exists. Received: {str(path)!r}"
        assert re.fullmatch(rf"--(hostfile|patch) {re.escape(problem)}", str(caught.value))


@pytest.mark.parametrize("cases", [500, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_fuzz(cases):
    @settings(max_examples=cases, deadline=None, database=None)
    @given(st.text("ab1 =slot#\n:.-@address", max_size=40) | st.text(max_size=20))
    def check(text):
        for function in (ssh.parse_hosts, ssh.hosts_from_flag):
            try:
                hosts = function(text)
            except LaunchError as error:
                assert "\n" not in str(error)
            else:
                assert all(host.slots > 0 and host.login for host in hosts)

    check()

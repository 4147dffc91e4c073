# SPDX-License-Identifier: Apache-2.0
"""Hosts from files and flags; every malformed line is reported with its number."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.launchers.requests import LaunchError
from tfdist.launchers.ssh import launcher as ssh
from tfdist.launchers.ssh.launcher import Host


def test_a_file(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# the cluster\nnode1 slots=2\n\n  me@node2   # spare\nn3 address=10.0.0.3 slots=4\r\n")
    assert ssh.read_hostfile(str(path)) == [
        Host("node1", 2, "node1"),
        Host("me@node2", 1, "node2"),
        Host("n3", 4, "10.0.0.3"),
    ]


def test_a_flag():
    assert ssh.hosts_from_flag("a,me@b:2") == [Host("a"), Host("me@b", 2)]


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
        ("a\nb\nA slots=2", "hostfile, line 3: the host is on line 1 already"),
        ("a address=::1", "hostfile, line 1: the address has more than one colon"),
        ("1.2.3", "hostfile, line 1: the address has a host that looks like an IPv4 address"),
    ],
)
def test_malformed_lines(text, words):
    with pytest.raises(LaunchError) as caught:
        ssh.parse_hosts(text)
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize("text", ["a,", ",a", "a b", "a#", "a:0", "a:", "a:x", "a,a"])
def test_malformed_flags(text):
    with pytest.raises(LaunchError, match="--hosts"):
        ssh.hosts_from_flag(text)


def test_a_file_that_is_no_text(tmp_path):
    path = tmp_path / "hosts"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(LaunchError, match="--hostfile is not a text file"):
        ssh.read_hostfile(str(path))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(LaunchError, match=r"--hostfile can't be read: No such file or directory. Received: '.*hosts'"):
        ssh.read_hostfile(str(tmp_path / "hosts"))


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

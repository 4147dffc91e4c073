# SPDX-License-Identifier: Apache-2.0
"""Output of tasks becomes whole lines, whatever its progress bars and its reads look like."""

import io
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import Clock

from tfdist.launchers.supervise.output import Console, LineReader


def lines_of(*chunks):
    reader = LineReader(clock=Clock())
    fed = [line for chunk in chunks for line in reader.feed(chunk)]
    return fed + reader.close()


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ([b"one\ntwo\n"], ["one", "two"]),
        ([b"o", b"ne\nt", b"wo"], ["one", "two"]),
        ([b"\n\n"], ["", ""]),
        ([], []),
        ([b"windows\r\n", b"split\r", b"\nend"], ["windows", "split", "end"]),
        (["é…🙂\n".encode()[:4], "é…🙂\n".encode()[4:]], ["é…🙂"]),
        ([b"bad \xff byte\n"], ["bad � byte"]),
        ([b"cut \xe2\x80"], ["cut �"]),
        ([b" 10%\r 50%\r100%\n"], ["100%"]),
        ([b" 10%\r", b" 50%\r", b"100%\r"], ["100%"]),
        ([b"\x1b[1m3/10\x1b[0m \x1b[32mbar\x1b[0m\n"], ["3/10 bar"]),
        ([b"\x1b]0;title\x07\x1b[2Kplain\x1b[A\x07\n"], ["plain"]),
        ([b"a\tb\n"], ["a\tb"]),
    ],
)
def test_lines(chunks, lines):
    assert lines_of(*chunks) == lines


def keras_bar(states):
    """Output of keras.utils.Progbar: backspaces over the former state, a carriage return, the new state."""
    width, out = 0, b""
    for state in states:
        text = f"\x1b[1m{state}\x1b[0m \x1b[32m━━\x1b[0m"
        out += ("\b" * width + "\r" + text).encode()
        width = len(text)
    return out + b"\n"


def test_a_keras_progress_bar_is_one_line():
    assert lines_of(b"Epoch 1/2\n" + keras_bar(f"{i}/300" for i in range(301))) == ["Epoch 1/2", "300/300 ━━"]


def test_a_long_progress_bar_is_shown_now_and_then():
    clock = Clock()
    reader = LineReader(progress_every_secs=5, clock=clock)
    shown = []
    for second in range(13):
        clock.now = second
        shown += reader.feed(f"\r{second} s".encode())
    assert shown == ["5 s", "10 s"]
    assert reader.feed(b"\n") == ["12 s"]


def test_a_state_that_was_shown_is_not_repeated_as_the_last_line():
    clock = Clock()
    reader = LineReader(progress_every_secs=5, clock=clock)
    reader.feed(b"\r1")
    clock.now = 6
    assert reader.feed(b"\r2") == ["2"]
    assert reader.feed(b"\n3\n") == ["3"]


def test_an_endless_line_is_cut():
    lines = lines_of(*[b"x" * 10_000] * 20)
    assert sum(map(len, lines)) == 200_000
    assert max(map(len, lines)) <= 1 << 16


def test_an_endless_spinner_takes_no_memory():
    reader = LineReader(clock=Clock())
    for _ in range(20_000):
        assert reader.feed(b"\r|\r/\r-") == []
    assert len(reader._pending) <= 1 << 16
    assert reader.close() == ["-"]


@given(st.lists(st.binary(max_size=20), max_size=20))
def test_where_reads_are_cut_does_not_matter(chunks):
    assert lines_of(*chunks) == lines_of(b"".join(chunks))


@given(st.lists(st.text(st.characters(exclude_categories=["Cc", "Cs"])), max_size=10))
def test_plain_text_arrives_as_it_is(lines):
    assert lines_of("".join(f"{line}\n" for line in lines).encode()) == lines


# The console.


def test_lines_of_several_threads_never_mix(monkeypatch):
    reader, writer = os.pipe()
    received = bytearray()

    def drain():
        while data := os.read(reader, 1000):
            received.extend(data)

    draining = threading.Thread(target=drain)
    draining.start()
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        console = Console()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda letter: write_many(console, letter), "abcd"))
    draining.join()
    os.close(reader)
    lines = received.decode().splitlines()
    assert len(lines) == 400
    assert all(line == f"[{line[1]}] " + line[1] * 3000 for line in lines)


def write_many(console, letter):
    for _ in range(100):
        console.write(f"[{letter}] ", [letter * 3000])


def test_a_reader_that_went_away_is_reported_once(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    reports = []
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        console = Console(on_broken_pipe=lambda: reports.append("gone"))
        console.write("", ["one"])
        console.write("", ["two"])
    assert reports == ["gone"]


def test_a_replaced_stream_is_written_to(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    Console().write("[a] ", ["é"], error=True)
    assert stream.getvalue() == "[a] é\n"


def test_what_the_encoding_lacks_is_escaped(monkeypatch, tmp_path):
    path = tmp_path / "out"
    with path.open("w", encoding="ascii") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        Console().write("[a] ", ["━"])
    assert path.read_text() == "[a] \\u2501\n"


@pytest.mark.parametrize("stream", [None, io.TextIOWrapper(io.BytesIO())], ids=["none", "closed"])
def test_a_stream_that_is_not_there_is_no_error(monkeypatch, stream):
    if stream:
        stream.close()
    monkeypatch.setattr(sys, "stdout", stream)
    console = Console()
    console.write("[a] ", ["lost"])
    assert not console.broken

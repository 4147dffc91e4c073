# SPDX-License-Identifier: Apache-2.0
"""Lines to the user go through `logging`: to standard error by default, else where the program sends them."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest
from absl import logging as absl_logging

from tfdist import _log


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("tfdist")
    handlers, root, level, filters = logger.handlers[:], logging.root.handlers[:], logger.level, logger.filters[:]
    logger.handlers[:], logging.root.handlers[:] = [], []
    yield logger
    logger.handlers[:], logging.root.handlers[:], logger.filters[:] = handlers, root, filters
    logger.setLevel(level)


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.name}: {record.getMessage()}")


@pytest.mark.parametrize(
    ("line", "written"), [("one", "tfdist: one\n"), ("tfdist worker:0: 5 %", "tfdist worker:0: 5 %\n")]
)
def test_a_line_is_on_standard_error_by_default(logger, capsys, line: str, written: str):
    _log.say(line)
    assert capsys.readouterr().err == written


def test_a_handler_of_absl_is_none_of_the_program(logger, capsys):
    logging.root.addHandler(absl_logging.get_absl_handler())
    _log.say("one")
    assert capsys.readouterr().err == "tfdist: one\n"


def test_nor_is_the_one_that_absl_makes_for_its_first_line(logger, capfd):
    absl_logging.error("a line of TensorFlow's")
    assert logging.root.handlers
    capfd.readouterr()
    _log.say("one")
    assert capfd.readouterr().err == "tfdist: one\n"


@pytest.mark.parametrize("chosen", ["stream", "format", "file"])
def test_a_program_that_says_where_or_how_gets_the_lines_so(logger, capfd, tmp_path, chosen: str):
    stream = io.StringIO()
    logging.basicConfig(
        **{
            "stream": {"stream": stream},
            "format": {"format": "at %(name)s: %(message)s"},
            "file": {"filename": tmp_path / "log"},
        }[chosen]
    )
    _log.say("one")
    err = capfd.readouterr().err
    if chosen == "format":
        assert err == "at tfdist: one\n"
    else:
        assert err == ""
        assert "one" in (stream.getvalue() if chosen == "stream" else (tmp_path / "log").read_text())
    logging.root.handlers[0].close()


@pytest.mark.parametrize("name", ["tfdist", ""])
def test_a_program_with_a_handler_gets_the_lines_there_alone(logger, capsys, name: str):
    kept = Kept()
    logging.getLogger(name or None).addHandler(kept)
    _log.say("100 % of it")
    assert kept.lines == ["WARNING tfdist: 100 % of it"]
    assert capsys.readouterr().err == ""


def test_the_level_and_filters_hold_by_default_too(logger, capsys):
    logger.addFilter(lambda record: "no" not in record.getMessage())
    _log.say("no")
    _log.say("yes")
    logger.setLevel(logging.ERROR)
    _log.say("yes, later")
    assert capsys.readouterr().err == "tfdist: yes\n"

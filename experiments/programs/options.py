# SPDX-License-Identifier: Apache-2.0
"""Reads programs.txt: the programs to run, and how much of each."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping

KINDS = ("one", "stock", "mirrored", "multi", "ps", "backup")


@dataclasses.dataclass(frozen=True)
class Options:
    """The words behind a program's path.

    Attributes:
      examples: how many examples data sets of images and reviews have; "few" is 512. Some programs index by the numbers
        of the true data set.
      in_scope: runs all of the program under the strategy's scope.
      in_own_directories: runs each worker in a directory of its own, for a program that makes files of fixed names in
        each; in most the workers read the files that the first has written.
      main: the module that the notebook writes and starts, in place of the notebook itself; or "".
      kinds: the strategies under which the program makes sense.
      values: numbers to put in place of those that the program gives to variables and arguments of these names, or in
        place of these numbers.
    """

    examples: int = 11000
    in_scope: bool = False
    in_own_directories: bool = False
    main: str = ""
    kinds: tuple[str, ...] = KINDS
    values: Mapping[str, int] = dataclasses.field(default_factory=dict)


def read(path: pathlib.Path) -> dict[str, Options]:
    """Returns the options of each program, by its path."""
    lines = [line.split() for line in path.read_text().splitlines()]
    return {line[0]: _options(line[1:]) for line in lines if line and not line[0].startswith("#")}


def _options(words: list[str]) -> Options:
    named = dict(word.split("=", 1) for word in words if "=" in word)
    main, kinds = named.pop("main", ""), named.pop("kinds", ",".join(KINDS))
    examples = int(named.pop("examples", 512 if "few" in words else 11000))
    return Options(
        examples=examples,
        in_scope="scope" in words,
        in_own_directories="own" in words,
        main=main,
        kinds=tuple(kinds.split(",")),
        values={name: int(value) for name, value in named.items()},
    )

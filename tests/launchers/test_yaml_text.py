# SPDX-License-Identifier: Apache-2.0
"""YAML as people write it, in which all text stays text."""

import hypothesis
import pytest
import yaml

from tfdist.launchers.kubernetes import launcher as kubernetes


def test_a_document():
    value = {"a": {"b c": [1, {"d": "x y", "e": []}, ["f"]], "g": {}}, "h": True, "on": "off"}
    assert kubernetes.yaml_documents([value]) == (
        'a:\n  b c:\n  - 1\n  - d: x y\n    e: []\n  - - f\n  g: {}\nh: true\n"on": "off"\n'
    )


WORDS = ("", "true", "No", "null", "~", "1", "1e3", "0x1", "1.5", "1:30", ".inf", "...")


@pytest.mark.parametrize("text", [*WORDS, "a: b", "a #b", "- a", " a", "a ", "*a"])
def test_text_that_looks_like_something_else_is_quoted(text):
    assert kubernetes.yaml_documents([{"a": text}]) == f'a: "{text}"\n'


def test_text_with_anything_in_it_is_one_line():
    text = '"\\\n\t\r\0\x7f\x85\u2028é😀'
    written = kubernetes.yaml_documents([{"a": text}])
    assert written.splitlines() == [written.removesuffix("\n")]


def test_two_documents():
    assert kubernetes.yaml_documents([{"a": 1}, {"b": 2}]) == "a: 1\n---\nb: 2\n"


def test_what_is_not_plain_data_is_refused():
    with pytest.raises(yaml.representer.RepresenterError, match="cannot represent an object"):
        kubernetes.yaml_documents([{"a": object()}])


@hypothesis.given(hypothesis.strategies.text())
def test_any_text_is_read_as_the_same_text(text):
    assert yaml.safe_load(kubernetes.yaml_documents([{"a": text}])) == {"a": text}

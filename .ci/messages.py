# SPDX-License-Identifier: Apache-2.0
"""Collects the error messages of tfdist out of its source, for the page "Messages" of the site. Standard library only.

`python .ci/messages.py` prints the page. `.ci/site_pages.py` puts it into the site.
"""

from __future__ import annotations

import ast
import dataclasses
import pathlib
import re
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "tfdist"
# Shorter texts are no sentences: keys, names of files, and what is put into a longer message.
_LEAST_WORDS = 4


@dataclasses.dataclass(frozen=True, order=True)
class Message:
    """One `raise` with a text of its own; values that are put in are shown as `…`."""

    kind: str
    text: str
    module: str

    @property
    def anchor(self) -> str:
        """The anchor of the message: its first fixed words."""
        words = re.findall(r"[a-z0-9]+", self.text.replace("…", " ").lower())
        return "-".join(words[:9])


def messages(package: pathlib.Path = PACKAGE) -> list[Message]:
    """Returns the messages of all errors that the package raises, sorted by kind and text."""
    found = set()
    for path in sorted(package.rglob("*.py")):
        module = ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
        found.update(_in_module(ast.parse(path.read_text(encoding="utf-8")), module))
    return sorted(found)


def _in_module(tree: ast.Module, module: str) -> Iterator[Message]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
            continue
        kind = ast.unparse(node.exc.func).rpartition(".")[2]
        kind = "ClusterError" if kind == "_wrong" else kind.lstrip("_")
        if not re.fullmatch(r"[A-Z]\w*(Error|Exit)", kind):  # A class that is chosen when it is raised.
            kind = "Error"
        for text in map(_text, node.exc.args):
            if text is not None and len(text.split()) >= _LEAST_WORDS:
                yield Message(kind, text, module)
                break


def _text(node: ast.AST) -> str | None:
    """Returns a literal or an f-string as one line; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return " ".join(node.value.split())
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
        return " ".join("".join(map(str, parts)).split())
    return None


def page() -> str:
    """Returns the page, in Markdown."""
    lines = [
        "# Messages",
        "",
        f"All {len(messages())} errors that tfdist raises with a text of its own. `…` stands for a value.",
        "",
    ]
    lines += ["[Troubleshooting](troubleshooting.md) explains those that need more than their own text.", ""]
    last = None
    for message in messages():
        if message.kind != last:
            lines += [f"## {message.kind}", ""]
            last = message.kind
        text = message.text.replace("`", "'").replace("|", "\\|")
        lines += [f'<a id="{message.anchor}"></a>`{text}`', f": in `{message.module}`", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    print(page())

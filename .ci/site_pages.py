# SPDX-License-Identifier: Apache-2.0
"""Gathers the pages of the site into .site/, and adds those that are generated, before mkdocs reads them.

The pages lie where a reader of the repository looks for them: README.md at the top, a page beside each experiment.
mkdocs wants them in one folder, so they are copied. Links to other files of the repository become names.
"""

from __future__ import annotations

import ast
import importlib
import pathlib
import re
import shutil
import sys

from absl import flags

ROOT = pathlib.Path(__file__).resolve().parents[1]
SITE = ROOT / ".site"
PATTERNS = (
    "*.md",
    "docs/**/*.md",
    "docs/images/*",
    "benchmarks/README.md",
    "experiments/*/README.md",
    "examples/**/*.md",
    "examples/notebooks/*.ipynb",
)
FILES = ("examples/*.py", "examples/notebooks/*.ipynb", "experiments/**/*.png", "experiments/**/*.svg")

# Public names by page; test_docs.py checks that none of `tfdist.__all__` is missing.
API = {
    "strategies": ("MirroredStrategy", "MultiWorkerMirroredStrategy", "ParameterServerStrategy", "strategy_from_flags"),
    "policies": (
        "BackupWorkers",
        "SoftSync",
        "StalenessScaling",
        "DropStale",
        "BoundedStaleness",
        "Warmup",
        "ParameterAveraging",
        "Compression",
        "LazyRows",
    ),
    "policy_records": tuple(f"policies.{name}" for name in ("Arrival", "Contribution", "Outcome", "Update", "Change")),
    "transforms": ("transforms.*",),
    "compression": ("compression.*",),
    "callbacks": ("callbacks.*", "schedules.*"),
    "cluster": ("is_chief", "task", "worker_index", "num_workers", "Cluster", "Task", "ClusterError"),
    "models": ("ShardedTables", "placement", "split", "keep_freed_memory"),
    "testing": ("testing.*",),
    "update_log": ("update_log.*",),
}
# Users call the constructors of these classes only; their methods are for the engines.
HIDDEN = ("policies",)
TITLES = {
    "models": "Large models",
    "policy_records": "Records for policies of your own",
    "update_log": "Update log",
    "callbacks": "Callbacks and schedules",
    "cluster": "Clusters",
}


# Wide enough for the lines of code of the pages; flags in tables stay on one line.
_CSS = """\
.md-grid { max-width: 78rem; }
.md-typeset pre > code { font-size: .78em; }
.md-typeset td code.flag { white-space: nowrap; }
/* Copied, a diff would have its + and -, and the output of a command would be run. */
.md-typeset .language-diff .md-code__nav, .md-typeset .language-text .md-code__nav { display: none; }
/* Phones: more of a row, and fewer names broken over lines. */
@media screen and (max-width: 44em) {
  .md-typeset table:not([class]) th, .md-typeset table:not([class]) td { min-width: 0; padding: .5em; }
  .md-typeset td code { padding: 0; }
}
"""


def gather() -> None:
    """Copies and generates all pages."""
    shutil.rmtree(SITE, ignore_errors=True)
    for pattern in (*PATTERNS, *FILES):
        for path in ROOT.glob(pattern):
            target = SITE / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    (SITE / "README.md").rename(SITE / "index.md")
    (SITE / "docs" / "README.md").rename(SITE / "docs" / "all.md")
    sys.path.insert(0, str(ROOT))
    generated = {"flags": flags_page()}
    generated |= {f"api/{name}": api_page(name) for name in API}
    for name, text in generated.items():
        path = SITE / "docs" / f"{name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (SITE / "site.css").write_text(_CSS, encoding="utf-8")
    for page in SITE.rglob("*.md"):
        page.write_text(_with_links_of_the_site(page), encoding="utf-8")


def api_page(name: str) -> str:
    """Returns a page of mkdocstrings' directives."""
    home = importlib.import_module("tfdist").MODULE_OF
    lines = [f"# {TITLES.get(name, name.capitalize())}", ""]
    for entry in API[name]:
        module, _, star = entry.partition(".")
        if star:
            listed = _listed(module) if star == "*" else [star]
            lines += [
                f"::: tfdist.{module}",
                "    options:",
                "      show_root_heading: false",
                f"      members: {list(listed)}",
                "",
            ]
        else:
            lines += [
                f"::: {home[entry]}.{entry}",
                *(["    options:", "      members: false"] if name in HIDDEN else []),
                "",
            ]
    return "\n".join(lines)


def _listed(module: str) -> list[str]:
    """Returns `__all__` of a module, which is not imported: TensorFlow would write lines about this machine."""
    folder = ROOT / "tfdist" / module
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
        if isinstance(node, ast.ImportFrom) and any(each.name == "__all__" for each in node.names):
            return _listed((node.module or "").removeprefix("tfdist.").replace(".", "/"))
    sys.exit(f"tfdist: {path.relative_to(ROOT)} has no __all__")


def flags_page() -> str:
    """Returns the flags of all commands, and those that `tfdist.flags` gives a script."""
    cli = importlib.import_module("tfdist.cli")
    lines = ["# Flags", "", "Of all commands, as `tfdist COMMAND --help` shows them, and of scripts.", ""]
    for name, module in cli.LAUNCHERS.items():
        lines += [f"## tfdist launch {name}", "", f"[{PAGE_OF[name][0]}]({PAGE_OF[name][1]}) explains it.", ""]
        lines += _flags_of(module)
    for name, module in cli.COMMANDS.items():
        lines += [f"## tfdist {name}", "", f"[{PAGE_OF[name][0]}]({PAGE_OF[name][1]}) explains it.", ""]
        lines += _flags_of(module)
    lines += [
        "## Of a script",
        "",
        "That calls `tfdist.flags.define_flags()`: [Launching](launching.md#flags-of-the-script).",
        "",
    ]
    return "\n".join([*lines, *_flags_of("tfdist.flags")])


PAGE_OF = {
    "local": ("Launching", "launching.md"),
    "ssh": ("Launching by ssh", "launching/ssh.md"),
    "slurm": ("Launching on Slurm", "launching/slurm.md"),
    "kubernetes": ("Launching on Kubernetes", "launching/kubernetes.md"),
    "tpu": ("Launching on TPUs", "launching/tpu.md"),
    "ray": ("Launching on Ray", "launching/ray.md"),
    "doctor": ("tfdist doctor", "launching/doctor.md"),
    "profile": ("Should I distribute?", "scaling.md#tfdist-profile"),
    "advise": ("Should I distribute?", "scaling.md#tfdist-advise"),
    "simulate": ("Should I distribute?", "scaling.md#tfdist-simulate"),
    "watch": ("Watching a run", "watching.md#in-a-terminal"),
}


# In pages, where `--help` says it to readers of the repository.
_FLAGS = re.compile("<!-- flags of tfdist (?:launch )?(.*) -->")


def _flags_of_command(found: re.Match[str]) -> str:
    cli = importlib.import_module("tfdist.cli")
    return "\n".join(_flags_of({**cli.LAUNCHERS, **cli.COMMANDS}[found[1]]))


def _flags_of(module: str) -> list[str]:
    """Returns a table of the flags that `define_flags` of the module defines."""
    values = flags.FlagValues()
    importlib.import_module(module).define_flags(values)
    command_line = importlib.import_module("tfdist.launchers.command_line")
    lines = ["| flag | default | |", "|---|---|---|"]
    for name in sorted({values[name].name for name in values}):  # Without short names.
        flag = values[name]
        help_text = command_line.help_text(flag).replace("|", "\\|").replace("<", "&lt;")
        short = f", `-{flag.short_name}`" if flag.short_name else ""
        lines.append(f"| `--{name}`{short} | {_default(flag)} | {help_text} |")
    return [*lines, ""]


def _default(flag: flags.Flag) -> str:
    if flag.default == sys.executable:
        return "this Python"
    is_off = flag.default is None or flag.default is False or flag.default in ("", [])
    return "" if is_off else f"`{flag.default_as_str.strip(chr(39))}`"


_LINK = re.compile(r"(?<!!)\[([^\]\[]*)\]\(([^)\s]+)\)")


def _with_links_of_the_site(page: pathlib.Path) -> str:
    """Renames links to moved pages; a link to a file that the site does not have becomes its text. Marks flags."""

    def replaced(match: re.Match[str]) -> str:
        text, link = match.groups()
        name, hash_sign, anchor = link.partition("#")
        if "://" in link or not name:
            return match.group()
        moved = {SITE / "README.md": "index.md", SITE / "docs" / "README.md": "all.md"}
        target = (page.parent / name).resolve()
        if target in moved:
            name = name.removesuffix("README.md") + moved[target]
        elif not target.exists():
            return text
        return f"[{text}]({name}{hash_sign}{anchor})"

    text = _LINK.sub(replaced, _FLAGS.sub(_flags_of_command, page.read_text(encoding="utf-8")))
    return re.sub(r"^(\| `--[^`]+`)", r"\1{ .flag }", text, flags=re.MULTILINE)


if __name__ == "__main__":
    gather()

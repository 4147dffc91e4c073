# SPDX-License-Identifier: Apache-2.0
"""The documentation holds: what it shows runs, what it links to is there, and the names in it exist."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pathlib
import re
import runpy
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import programs
import psutil
import pytest
from absl import flags

import tfdist
from tfdist import cli

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("experiments/*/README.md")])
PAGES += [ROOT / "benchmarks" / "README.md", ROOT / "examples" / "README.md"]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))

# Language, title and code.
_BLOCK = re.compile(r"^```(\w*)(?: title=\"([\w.]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_NAME = re.compile(r"\btfdist((?:\.[A-Za-z_]\w*)+)")
_MAKE = re.compile(r"^(?:```\n)?make ([a-z-]+)|`make ([a-z-]+)", re.MULTILINE)
_COMMANDS = r"pip|python|tfdist|tensorboard|ray|gcloud|export|sudo|unshare|[A-Z_]+=.*"
_FLAG = re.compile(r"^\| `--(\w+)", re.MULTILINE)
_PATH = re.compile(r"`([\w.-]+/[\w./-]*)`")
_ARCHITECTURE = ROOT / "docs" / "architecture.md"

# Tests that show each row of a table that says "works", by the row's first cell: functions, loops of guides, and names
# of cases in tests/conformance/cases.py, which run under all strategies that don't leave them out.
_FIT = ("sum loss", "decay, ema", "test_evaluate_and_predict_see_every_example_once")
_DATA = (
    "dicts",
    "ragged",
    "test_each_example_is_trained_on_once_per_epoch",
    "test_every_batch_of_a_generator_is_used_once",
)
_PARTS_OF_EPOCHS = "class weights, validation_split, steps_per_epoch"
_VALIDATION = (_PARTS_OF_EPOCHS, "sample_weight", "steps_per_execution", "test_validation_data_are_read_exactly")
_UNEVEN = ("one number, one over", "fewer examples than replicas", "test_replicas_without_examples_leave_no_trace")
_SINGLE = ("test_steps_on_single_batches",)
_CALLBACKS = ("test_callbacks_stop_schedule_save_and_restore",)
_OWN_STEPS = ("step decorated", "step that assigns", "test_own_train_step_keeps_its_logs")
_LOOPS = ("for_outside_of_a_graph", "next_until_the_end", "test_a_loop_over_distributed_data")
_OPTIMIZERS = ("global_clipnorm", "decay, ema", "loss scale")
_ACCUMULATION = ("accumulation, clipnorm, ema", "test_one_worker_trains_as_one_device_does")
_EMBEDDING = ("embedding, clipnorm", "embedding, places")
_PARTS = ("test_two_workers_of_two_devices_are_as_one_device", "test_each_part_computes_on_its_device")
_BACKUP = (
    "test_a_straggler_is_not_waited_for_and_leaves_no_trace",
    "test_a_straggler_holds_up_nobody_and_leaves_no_trace",
)
_ASYNCHRONOUS = ("test_every_example_is_used_once_in_each_pass", "test_no_gradient_is_older_than_the_bound")
_WARMUP = ("test_the_phase_is_training_on_one_device", "test_who_waits_does_no_step_and_then_all_are_equal")
_AVERAGING = ("test_it_is_as_if_models_were_averaged_by_hand", "test_what_anybody_looks_at_is_the_average")
_TABLES = (
    "test_a_wide_layer_trains_as_on_one_device",
    "test_tables_in_shards_train_save_and_restore_as_on_one_device",
)
_OVERLAPPING = ("test_calls_within_callbacks_work",)
_PLAIN_LOOPS = ("test_updates_outside_of_run_are_refused", "updated", "plainly_looped")
_SHOWN_BY: dict[str, dict[str, tuple[str, ...]]] = {
    "docs/cluster.md": {"`evaluator`": ("test_an_evaluator_works_alone_whether_it_is_listed_or_not",)},
    "docs/parameter_averaging.md": {
        "steps_per_execution, steps_per_epoch, run_eagerly, validation_data, endless data, data of unknown length": (
            *("steps_per_execution", "run_eagerly", _PARTS_OF_EPOCHS, "unknown length"),
        ),
        '`reduction="sum"`': ("sum loss, eagerly",),
        "`distribute_datasets_from_function`": ("test_each_replica_may_have_data_of_its_own",),
    },
    "docs/parameter_server.md": {
        "fit from arrays, tf.data, generators, PyDataset, dicts, several inputs and outputs": (
            *("test_each_example_is_trained_on_once_per_epoch", "dicts"),
        ),
        "evaluate, predict": (
            "test_evaluate_sees_each_example_once",
            "test_predict_gives_each_example_its_own_in_order",
        ),
        "train_on_batch, test_on_batch, predict_on_batch": _SINGLE,
        "steps_per_execution": ("test_metrics_of_several_steps_are_those_of_one_device",),
        "ModelCheckpoint, BackupAndRestore, TensorBoard, CSVLogger": _CALLBACKS,
        ".keras files, weights, `model.export`, `tf.train.Checkpoint`": ("models_saved_and_exported", "checkpoints"),
        "own `train_step`, custom loops with `strategy.run`": ("test_a_model_with_steps_of_its_own", *_LOOPS),
        "gradient_accumulation_steps": ("test_an_update_is_made_of_the_gradients_of_one_worker",),
        "run_eagerly": ("test_run_eagerly_is_one_device_and_steps_see_values",),
        "Embedding, recurrent layers, Dropout": (*_EMBEDDING, "recurrent, built from one example"),
        "`devices_per_replica`": ("test_each_part_computes_on_its_device",),
        "`distribute_datasets_from_function`": ("test_the_user_may_give_each_worker_its_own_data",),
        "operations of other packages (tensorflow-text)": (
            "test_servers_load_operations_before_and_after_their_start",
        ),
        "`ClusterCoordinator.schedule` and `join`": ("test_a_loop_with_the_coordinator",),
    },
    "docs/strategies.md": {
        "`quantize`, `enable_lora`": ("test_lora_and_quantization_outside_of_the_scope_are_in_it",),
        "weights equal those of one device": (*_FIT, *_OPTIMIZERS),
        "fit, evaluate, predict, `*_on_batch`": (*_FIT, *_SINGLE),
        "arrays, tf.data, generators, dicts, several inputs and outputs, uneven last batches": (*_DATA, *_UNEVEN),
        "validation data and split, class and sample weights, steps_per_epoch, steps_per_execution": _VALIDATION,
        "metrics of an epoch count that epoch's batches exactly": (
            "test_metrics_of_several_steps_are_those_of_one_device",
        ),
        "logs given to batch-level callbacks": _FIT,
        "EarlyStopping, LearningRateScheduler, ModelCheckpoint, BackupAndRestore, TensorBoard, `.keras` files": (
            *_CALLBACKS,
        ),
        "own `train_step`, custom loops with `strategy.run`": (*_OWN_STEPS, *_LOOPS),
        "clipping, weight decay, EMA, mixed precision": (*_OPTIMIZERS, "test_mixed_precision"),
        "gradient_accumulation_steps": _ACCUMULATION,
        "`variable_partitioner`, tables larger than a machine's memory": (
            *_TABLES,
            "test_no_task_holds_a_shard_of_256_mb_twice",
        ),
        "`BackupWorkers`": _BACKUP,
        "`SoftSync`, `StalenessScaling`, `DropStale`, `BoundedStaleness`": _ASYNCHRONOUS,
        "`Warmup`": _WARMUP,
        "`LazyRows`": ("test_lazy_rows_update_the_rows_of_the_step",),
        "`ParameterAveraging`": _AVERAGING,
        "[replicas that span devices](large_models.md#replicas-that-span-devices)": _PARTS,
        "`tfdist.callbacks.Resume`": ("interrupted and resumed", "test_it_goes_on_as_if_nothing_had_happened"),
        "data of unknown length": ("unknown length", "test_the_unannounced_end_of_the_data_is_no_step"),
        "uneven last batches, fewer examples than replicas": _UNEVEN,
        "models without `call()`; layers, optimizers and seed generators first used in a step or a custom loop": (
            *("step without call", "optimizer of its own", "seed generator", "batches_given_by_name"),
        ),
        '`reduction="sum"` or `"none"` in a loss': ("sum loss", "sum loss, eagerly"),
        "batch-level logs": (*_FIT, "test_own_train_step_keeps_its_logs"),
        "train_on_batch, test_on_batch, predict_on_batch": (*_SINGLE, "single batches"),
        "own `train_step`, `compute_loss`": (*_OWN_STEPS, "own compute_loss"),
        "loops without `strategy.run`: model, gradient tape, `optimizer.apply`": _PLAIN_LOOPS,
        "`model.compile` outside of the scope; optimizers, metrics and losses that were made there": (
            "compiled outside of the scope",
        ),
        "optimizers that hand variables to other optimizers": ("compiled outside of the scope",),
        "`evaluate`, `predict` and their like": ("test_training_outside_of_the_scope_is_refused",),
        "anything, in an evaluator, in a cluster of one worker, or in the scope of the default strategy": (
            "test_fit_of_a_model_outside_of_the_scope_warns_once",
        ),
        "seed generators, random layers and optimizers that were made outside of the scope, in loops": (
            *("seed_generators_made_outside_of_the_scope", "optimizers_made_outside_of_the_scope"),
        ),
        "clipping, gradient_accumulation_steps, EMA, weight decay": (*_OPTIMIZERS, *_ACCUMULATION),
        "mixed precision, LossScaleOptimizer": (
            *("loss scale", "test_float16_skips_updates_that_are_not_finite_on_any_replica"),
        ),
        "run_eagerly": ("run_eagerly",),
        "auto-shard policies": (
            *("test_every_example_of_a_shuffle_is_used_once", "test_own_data_sets_of_different_lengths_are_all_used"),
            *(
                "test_equal_data_sets_that_are_not_sharded_are_divided",
                "test_files_are_read_once_and_predicted_in_order",
            ),
        ),
        "another thread: `predict` of the same model": ("test_calls_with_counts_of_the_same_model_are_refused",),
        "another thread: any call of another model": ("test_two_models_train_in_two_threads",),
        "a callback: `evaluate`, `predict`": _OVERLAPPING,
        "a callback: `fit`, of the same model or another": _OVERLAPPING,
    },
}


def _text(page: pathlib.Path) -> str:
    return page.read_text(encoding="utf-8")


def _blocks(page: pathlib.Path, language: str) -> list[str]:
    return [code for name, _, code in _BLOCK.findall(_text(page)) if name == language]


def _prose(page: pathlib.Path) -> str:
    return _BLOCK.sub("", _text(page))


def _found(pattern: re.Pattern[str], text: Callable[[pathlib.Path], str] = _text) -> list[tuple[pathlib.Path, Any]]:
    """All that matches on the pages, each with its page."""
    return [(page, found) for page in PAGES for found in pattern.findall(text(page))]


def _anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def _id(page: pathlib.Path) -> str:
    return str(page.relative_to(ROOT))


def _run(arguments: list[str], directory: pathlib.Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs Python in `directory`, and fails if a process that it has started outlives it."""
    environment = {**os.environ, "TFDIST_TEST_DOCS": str(directory)}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env=environment,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=240,
    )
    started = [each for each in psutil.process_iter() if programs.carries(each, "TFDIST_TEST_DOCS", str(directory))]
    _, alive = psutil.wait_procs(started, timeout=10)
    for process in alive:
        process.kill()
    assert not alive
    return done


def _assert_trained(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert "Epoch 5/5" in done.stdout


@pytest.fixture
def quick_start() -> str:
    return _blocks(ROOT / "README.md", "python")[0]


def test_pages_are_short() -> None:
    assert len(_text(ROOT / "README.md").split()) < 900
    assert len(_text(_ARCHITECTURE).split()) < 1_200
    # Those are written by programs of experiments/.
    written = {ROOT / "docs" / name for name in ("keras_tests.md", "programs.md")}
    assert sum(len(_text(page).split()) for page in {*(ROOT / "docs").rglob("*.md")} - written) < 35_000


def test_changelog_is_headed_by_the_version() -> None:
    head = re.search(r"^## (.+)$", _text(ROOT / "CHANGELOG.md"), re.MULTILINE)
    assert head is not None and head.group(1) in (tfdist.__version__, "Unreleased")


def test_page_on_a_registry_has_no_link_that_leads_nowhere() -> None:
    with mock.patch("setuptools.setup") as setup:
        runpy.run_path(str(ROOT / "setup.py"))
    text = setup.call_args.kwargs["long_description"]
    assert "`docs/tutorials/two_workers.md`" in text
    assert re.findall(r"\]\((?!https?:).*?\)", text) == []


def test_diff_of_the_readme_makes_the_quick_start(quick_start: str) -> None:
    """Three lines are added, and what they put into the scope is shown as indented already (`diff -b`)."""
    (diff,) = _blocks(ROOT / "README.md", "diff")
    lines = diff.splitlines()
    assert "".join(f"{line[1:]}\n" for line in lines) == quick_start
    assert len([line for line in lines if line.startswith("+")]) == 3
    before = "\n".join(line[1:].removeprefix("    ") for line in lines if not line.startswith("+"))
    compile(before, "before", "exec")
    assert "tfdist" not in before


@pytest.mark.slow
def test_script_before_the_diff_of_the_readme_trains(tmp_path: pathlib.Path) -> None:
    (diff,) = _blocks(ROOT / "README.md", "diff")
    kept = [line[1:].removeprefix("    ") for line in diff.splitlines() if not line.startswith("+")]
    (tmp_path / "train.py").write_text("\n".join(kept))
    _assert_trained(_run(["train.py"], tmp_path))


def test_chart_of_the_readme_shows_the_results() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import charts
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    picture = _text(charts.STRAGGLER)
    assert len(charts.labels()) == 6
    for label in charts.labels():
        assert f">{label}</text>" in picture, "python benchmarks/charts.py"


@pytest.mark.slow
@pytest.mark.processes
def test_launch_line_of_the_readme_runs_the_quick_start(quick_start: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "train.py").write_text(quick_start)
    lines = [line for block in _blocks(ROOT / "README.md", "shell") for line in block.splitlines()]
    (line,) = [line.partition("#")[0] for line in lines if line.startswith("tfdist launch local")]
    done = _run(["-m", "tfdist", *line.split()[1:]], tmp_path)
    _assert_trained(done)
    # Of two workers, one shows its progress.
    assert done.stdout.count("[worker:0] Epoch 5/5") == 1


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("page", TUTORIALS, ids=_id)
def test_tutorial_runs_block_by_block(page: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Files are written, diffs applied and commands run in the order of the page."""
    names = []
    for language, title, code in _BLOCK.findall(_text(page)):
        names.append(language)
        if language == "python":
            (tmp_path / title).write_text(code)
        elif language == "diff":
            _apply(code, tmp_path / title)
        elif language == "shell":
            for command in code.splitlines():
                words = command.split()
                head = words[1:] if words[0] == "python" else ["-m", "tfdist", *words[1:]]
                done = _run(head, tmp_path)
                assert done.returncode == 0, done.stdout + done.stderr
        else:
            assert language == "text"
    assert {"python", "shell"} <= set(names)


@pytest.mark.parametrize("page", TUTORIALS, ids=_id)
def test_diffs_of_a_tutorial_fit_its_files(page: pathlib.Path, tmp_path: pathlib.Path) -> None:
    for language, title, code in _BLOCK.findall(_text(page)):
        if language == "python":
            (tmp_path / title).write_text(code)
        elif language == "diff":
            _apply(code, tmp_path / title)
            compile((tmp_path / title).read_text(), title, "exec")


def _apply(diff: str, path: pathlib.Path) -> None:
    """Applies one hunk."""
    lines = diff.splitlines()
    old = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("+"))
    new = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("-"))
    text = path.read_text()
    assert text.count(old) == 1, old
    path.write_text(text.replace(old, new))


def _ci_module(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_site_has_every_public_name_and_every_page() -> None:
    site = _ci_module("site_pages")
    shown = {name for names in site.API.values() for name in names if "." not in name}
    assert shown == set(tfdist.__all__) - {"__version__"}
    # Modules that import their `__all__` list it, too.
    assert "'read_logs'" in site.api_page("update_log")
    whole = {name.partition(".")[0] for names in site.API.values() for name in names if name.endswith(".*")}
    assert whole == {"callbacks", "compression", "schedules", "testing", "transforms", "update_log"}
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = set(re.findall(r": (\S+\.md)$", nav, re.MULTILINE))
    generated = {"index.md", "docs/all.md", "docs/flags.md", *(f"docs/api/{name}.md" for name in site.API)}
    assert listed - generated == {_id(page) for page in PAGES} - {"README.md", "docs/README.md"}
    assert generated <= listed


def test_troubleshooting_explains_existing_messages() -> None:
    sources = " ".join(path.read_text(encoding="utf-8") for path in (ROOT / "tfdist").rglob("*.py"))
    # Adjacent literals are one message.
    sources = re.sub(r'"\s*f?"', "", sources)
    for heading in _HEADING.findall(_text(ROOT / "docs" / "troubleshooting.md")):
        for quoted in re.findall(r"^`(.+?)`", heading):
            assert quoted in sources, f"docs/troubleshooting.md explains a message that is gone: {quoted}"


def test_the_quick_start_is_ten_lines(quick_start: str) -> None:
    assert len([line for line in quick_start.splitlines() if line.strip()]) <= 10


def test_python_in_the_pages_can_be_compiled() -> None:
    for page in PAGES:
        for code in _blocks(page, "python"):
            compile(code, _id(page), "exec")


def test_the_cluster_example_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    (code,) = _blocks(ROOT / "docs" / "cluster.md", "python")
    exec(compile(code, "docs/cluster.md", "exec"), {})
    assert "worker:1 False worker:0 2 10.0.0.3:2222" in capsys.readouterr().out


def test_the_tf_config_example_is_one() -> None:
    (text,) = _blocks(ROOT / "docs" / "cluster.md", "json")
    tfdist.Cluster.from_tf_config(text).check_parameter_server()


def test_what_is_linked_to_is_there() -> None:
    for page, link in _found(_LINK, _prose):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{_id(page)} links to {link}"
        if anchor:
            assert anchor in map(_anchor, _HEADING.findall(_text(target))), f"{_id(page)} links to {link}"


def test_names_in_the_pages_exist() -> None:
    for page, dotted in _found(_NAME):
        parts = dotted.strip(".").split(".")
        path = ROOT.joinpath("tfdist", *parts)
        is_module = path.is_dir() or path.with_suffix(".py").exists()
        is_in_module = (ROOT / "tfdist" / parts[0]).is_dir() or (ROOT / "tfdist" / f"{parts[0]}.py").exists()
        assert is_module or parts[0] in tfdist.__all__ or (is_in_module and _exists(dotted)), (
            f"{_id(page)}: tfdist{dotted}"
        )


def test_paths_in_pages_for_developers_exist() -> None:
    for path in _PATH.findall(_text(_ARCHITECTURE) + _text(ROOT / "CONTRIBUTING.md")):
        # "engines/base.Engine" is a class in tfdist/engines/base.py.
        names = [f"{each}{ending}" for each in (path, path.rpartition(".")[0]) for ending in ("", ".py") if each]
        assert any((folder / name).exists() for folder in (ROOT, ROOT / "tfdist") for name in names), path


def test_the_architecture_names_every_part_of_the_package() -> None:
    layers = _blocks(_ARCHITECTURE, "")[0]
    package = ROOT / "tfdist"
    found = [*package.glob("*.py"), *(init.parent for init in package.glob("*/__init__.py"))]
    parts = {path.stem for path in found} - {"__init__"}
    assert {part for part in parts if not re.search(rf"\b{part}\b", layers)} == set()


def _exists(dotted: str) -> bool:
    """Returns True if tfdist<dotted> can be reached from the package."""
    found: object = tfdist
    for name in dotted.strip(".").split("."):
        found = getattr(found, name, None)
    return found is not None


def test_targets_of_make_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for page, found in _found(_MAKE):
        assert "".join(found) in targets, f"{_id(page)}: make {''.join(found)}"


def _flags_by_command() -> dict[str, set[str]]:
    modules = {f"launch {name}": module for name, module in cli.LAUNCHERS.items()} | cli.COMMANDS
    found = {}
    for command, module in modules.items():
        values = flags.FlagValues()
        importlib.import_module(module).define_flags(values)
        found[command] = {values[name].name for name in values}
    return found


def test_generated_page_has_every_flag_of_every_command() -> None:
    page = _ci_module("site_pages").flags_page()
    assert str(ROOT) not in page
    sections = [section.partition("\n") for section in page.split("\n## tfdist ")[1:]]
    own = {name for name in _FLAG.findall(page) if name.startswith("tfdist_")}
    assert own
    assert {command: set(_FLAG.findall(text)) - own for command, _, text in sections} == _flags_by_command()


def test_flags_in_tables_exist() -> None:
    values = flags.FlagValues()
    tfdist.flags.define_flags(values)
    known = set().union({*values, "flagfile", "help"}, *_flags_by_command().values())
    for page in (*ROOT.glob("docs/*.md"), *ROOT.glob("docs/launching/*.md")):
        assert set(_FLAG.findall(_text(page))) <= known, _id(page)


def test_page_of_each_command_has_all_its_flags(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = _ci_module("site_pages")
    monkeypatch.setattr(pages, "SITE", tmp_path / "site")
    pages.gather()
    for command, names in _flags_by_command().items():
        page = pages.PAGE_OF[command.removeprefix("launch ")][1].partition("#")[0]
        assert names - {*_FLAG.findall(_text(pages.SITE / "docs" / page))} == set(), command


_REGISTRY = "pip install ['\"]?tfdist"


def test_shell_blocks_are_commands_to_copy() -> None:
    """No output, whose block is `text`, no synopsis, and no name that only a registry without tfdist could know."""
    for page, (language, _, code) in _found(_BLOCK):
        for line in re.sub(r"\\\n", "", code).splitlines() if language == "shell" else ():
            words = line.split()
            assert not words or re.fullmatch(_COMMANDS, words[0]), f"{_id(page)}: {line}"
            assert not re.search(rf"\[(FLAGS|ARGUMENTS)\]|{_REGISTRY}", line), f"{_id(page)}: {line}"
    assert [str(path) for path in (ROOT / "tfdist").rglob("*.py") if re.search(_REGISTRY, path.read_text())] == []


def test_every_page_is_reached_from_the_readme() -> None:
    start = ROOT / "README.md"
    reached, new = set(), {start}
    while new:
        reached |= new
        links = {
            (page.parent / link.partition("#")[0]).resolve() for page in new for link in _LINK.findall(_text(page))
        }
        new = (links & set(PAGES)) - reached
    assert set(PAGES) == reached


def _claims(page: pathlib.Path) -> set[str]:
    """First cells of the rows in which another cell begins with "works"."""
    rows = [line.strip().strip("|").split("|") for line in _text(page).splitlines() if line.startswith("|")]
    return {row[0].strip() for row in rows if any(re.match(r"works?\b", cell.strip()) for cell in row[1:])}


def test_each_row_that_says_works_is_shown_by_a_test() -> None:
    # The table of programs.md is the result of an experiment.
    pages = {_id(page): _claims(page) for page in PAGES if page.name != "programs.md"}
    assert {page: rows for page, rows in pages.items() if rows} == {page: {*rows} for page, rows in _SHOWN_BY.items()}
    sources = [_text(path) for path in (ROOT / "tests").rglob("*.py")]
    found = {name for source in sources for name in re.findall(r"^ *def (\w+)\(", source, re.MULTILINE)}
    found |= set(re.findall(r'"([^"\n]+)"', _text(ROOT / "tests" / "conformance" / "cases.py")))
    named = {name for rows in _SHOWN_BY.values() for names in rows.values() for name in names}
    assert named - found == set()


def test_no_page_names_a_place_on_one_machine() -> None:
    for page in PAGES:
        assert not re.search(r"/(?:home|root|Users|work)/", _text(page)), _id(page)


def test_troubleshooting_has_a_row_for_each_warning_of_python() -> None:
    sources = [path.read_text() for path in (ROOT / "tfdist").rglob("*.py")]
    found = sum(text.count("warnings.warn(") + text.count("._interrupted_warning()") for text in sources)
    table = _text(ROOT / "docs" / "troubleshooting.md").split("|---|---|---|\n")[1].split("\n\n")[0]
    assert len(table.splitlines()) == found

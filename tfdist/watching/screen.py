# SPDX-License-Identifier: Apache-2.0
"""Draws a snapshot for a terminal of any size, with the library rich."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tfdist.telemetry.update_log import EventKind
from tfdist.watching.snapshot import Snapshot, WorkerRow

_STALL_SECS = 30.0
# Cost that is shown in bold: half of a worker's time.
_COSTLY = 0.5
_LEAST_BAR, _MOST_BAR = 8, 40
# Widths of the columns of the table besides name and bar, with the gaps.
_FIXED = 36
_WIDE = 110
# Shorter screens have no line of words.
_LEAST_LINES = 10
_EVENTS = {
    EventKind.LOST: ("lost", "red"),
    EventKind.RETURNED: ("returned", "green"),
    EventKind.POLICY_CHANGED: ("policy", "cyan"),
    EventKind.PHASE_CHANGED: ("phase", "cyan"),
    EventKind.RESUMED: ("resumed", "green"),
    EventKind.RESTARTED: ("restarted", "yellow"),
}
_STATES = {
    "input": "blue",
    "computing": "",
    "waiting": "dim",
    "all-reduce": "magenta",
    "held": "yellow",
    "lost": "bold red",
    "ended": "dim",
    "absent": "dim",
}
# Characters and styles of the bar: told apart without colours, too.
_BAR = (
    ("▓", "i", "blue"),
    ("█", "#", "green"),
    ("░", ".", "bright_black"),
    ("▚", "n", "magenta"),
    ("▒", "=", "yellow"),
)
_BAR_NAMES = ("input", "compute", "wait", "all-reduce", "held")


@dataclasses.dataclass(frozen=True)
class View:
    """Properties of the terminal, and of what is shown beside the job.

    Attributes:
      width: columns of the terminal.
      height: its lines; None for all rows, however many.
      now: Unix time.
      run: name of the run.
      other_runs: number of other runs in the log directory.
      is_unicode: True if the terminal shows block characters.
      bytes_sent: bytes that each worker sends per second, where they are known.
      problems: lines about files that can't be read.
    """

    width: int
    height: int | None
    now: float
    run: str
    other_runs: int = 0
    is_unicode: bool = True
    bytes_sent: Mapping[str, float] = dataclasses.field(default_factory=dict)
    problems: Sequence[str] = ()


def draw(snapshot: Snapshot, view: View) -> RenderableType:
    """Returns the whole screen, which has `view.height` lines at most."""
    head = _head(snapshot, view)
    problems = [_line("yellow", f"skipped {each}") for each in view.problems[:2]]
    if view.height is None:
        events, shown = _event_lines(snapshot, view, 10), len(snapshot.workers)
    else:
        # Two lines are the table's heading and the legend.
        left = view.height - len(head) - len(problems) - 2
        events = _event_lines(snapshot, view, min(8, max(1, left // 5)))
        shown = max(1, left - len(events))
        if shown < len(snapshot.workers):
            shown = max(1, shown - 1)
    table = _table(snapshot, snapshot.workers[:shown], view)
    hidden = _hidden(snapshot.workers[shown:])
    return Group(*head, table, *hidden, _legend(snapshot, view), *events, *problems)


def waiting(directory: str, view: View) -> RenderableType:
    """Returns the screen of a directory without a log."""
    text = f"waiting for an update log below {plain(directory)}"
    hint = "tfdist.callbacks.Telemetry(log_dir) writes one, a few seconds after the first update"
    return Group(_line("bold", text), _line("dim", hint), *(_line("yellow", f"skipped {e}") for e in view.problems[:2]))


def plain(text: str) -> str:
    """Returns a text from a file without control characters, which a terminal would obey."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def _line(style: str, text: str) -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _head(snapshot: Snapshot, view: View) -> list[Text]:
    title = _line("", "")
    title.append(plain(view.run), "bold")
    title.append(f"  {plain(snapshot.strategy)}")
    if snapshot.is_simulated:
        title.append("  simulated", "magenta")
    if view.other_runs:
        title.append(f"  (+{view.other_runs} other run{'s' * (view.other_runs > 1)}: --run)", "dim")
    # The longest is last, where the line may be cut.
    if snapshot.policies:
        title.append(f"  {plain(', '.join(snapshot.policies))}")
    words = _line("bold yellow" if any(row.is_slow for row in snapshot.workers) else "", plain(snapshot.in_words))
    # Printed once, it may have several lines.
    words.no_wrap = view.height is not None
    has_words = snapshot.in_words and (view.height is None or view.height >= _LEAST_LINES)
    return [title, *([words] if has_words else []), _progress(snapshot, view), _rates(snapshot)]


def _progress(snapshot: Snapshot, view: View) -> Text:
    if not snapshot.updates:
        return _line("yellow", "no update yet")
    phase = "warmup  " if snapshot.is_warmup else ""
    line = _line("", f"{phase}step {snapshot.step:,}  updates {snapshot.updates:,}")
    if not snapshot.is_simulated:
        silent = max(0.0, view.now - snapshot.last)
        if snapshot.ended:
            style = "bold green" if snapshot.ended == "finished" else "bold red"
            line.append(f"  {plain(snapshot.ended)} {_duration(silent)} ago", style)
        else:
            line.append(f"  last {_duration(silent)} ago", "bold yellow" if silent > _STALL_SECS else "")
    ran = "ran" if snapshot.ended else "runs"
    line.append(f"  {ran} for {_duration(snapshot.last - snapshot.begin)}", "dim")
    return line


def _rates(snapshot: Snapshot) -> Text:
    line = _line("", "")
    line.append(f"{_number(snapshot.updates_per_sec)} updates/s", "bold")
    if not math.isnan(snapshot.examples_per_sec):
        line.append(f"  {_number(snapshot.examples_per_sec)} examples/s", "bold")
    if not math.isnan(snapshot.wait):
        line.append(f"  waiting for gradients {snapshot.wait:.0%}")
    line.append(f"  (last {_duration(snapshot.window_secs)})", "dim")
    return line


def _table(snapshot: Snapshot, rows: Sequence[WorkerRow], view: View) -> Table:
    is_wide, has_bytes = view.width >= _WIDE, bool(view.bytes_sent)
    # Columns in which no worker has anything are left out.
    has_input = not all(math.isnan(row.input_secs) for row in snapshot.workers)
    has_drops, has_lost = any(row.dropped for row in snapshot.workers), any(row.lost for row in snapshot.workers)
    is_stale, has_lost = _is_stale(snapshot), has_lost and is_wide
    name_width = min(max([6, *(len(row.name) for row in rows)]), 24 if is_wide else 11)
    taken = 9 * has_bytes + 7 * has_lost + 6 * has_input + 6 * has_drops + 8 * is_stale
    bar_width = min(_MOST_BAR, view.width - _FIXED - name_width - taken)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold", show_edge=False)
    table.add_column("worker", width=name_width, no_wrap=True, overflow="ellipsis")
    table.add_column("state", width=10, no_wrap=True)
    heads = [("input", 5)] if has_input else []
    heads += [("p50", 5), ("p95", 5), ("accept", 6), *([("drop", 5)] if has_drops else [])]
    heads += [*([("lost", 6)] if has_lost else []), *([("stale", 7)] if is_stale else [])]
    for title, width in (*heads, ("cost", 4), *([("sent/s", 8)] if has_bytes else [])):
        table.add_column(title, width=width, justify="right", no_wrap=True)
    has_bar = bar_width >= _LEAST_BAR
    if has_bar:
        table.add_column("time", no_wrap=True)
    for row in rows:
        cells = [
            Text(plain(row.name), "bold yellow" if row.is_slow else ""),
            _state(row),
            *([_secs(row.input_secs)] if has_input else []),
            *map(_secs, (row.p50_secs, row.p95_secs)),
            _count(row.accepted),
            *([_count(row.dropped)] if has_drops else []),
            *([_count(row.lost)] if has_lost else []),
            *([_staleness(row)] if is_stale else []),
            Text(_cost(row.cost), "bold yellow" if row.cost >= _COSTLY else ""),
            *([_bytes(view.bytes_sent.get(row.name))] if has_bytes else []),
            *([_bar(row, bar_width, view.is_unicode)] if has_bar else []),
        ]
        table.add_row(*cells, style="bold" if row.is_slow else "")
    return table


def _is_stale(snapshot: Snapshot) -> bool:
    return any(row.staleness_max for row in snapshot.workers)


def _state(row: WorkerRow) -> Text:
    if not row.late_secs:
        return Text(row.state, _STATES[row.state])
    limits = ((100, "s", 1), (6000, "min", 60), (360_000, "h", 3600), (math.inf, "d", 86_400))
    unit, size = next((unit, size) for limit, unit, size in limits if row.late_secs < limit)
    return Text(f"late {row.late_secs / size:.0f} {unit}", "bold yellow")


def _staleness(row: WorkerRow) -> str:
    return "-" if math.isnan(row.staleness_mean) else f"{row.staleness_mean:.1f}/{row.staleness_max}"


def _bar(row: WorkerRow, width: int, is_unicode: bool) -> Text:
    text, used, total = Text(), 0, 0.0
    shares = row.input, row.compute, row.wait, row.reduce, row.held
    for share, (block, letter, style) in zip(shares, _BAR, strict=True):
        total = min(1.0, total + share)
        length = max(0, round(total * width) - used)
        text.append((block if is_unicode else letter) * length, style)
        used += length
    return text


def _legend(snapshot: Snapshot, view: View) -> Text:
    line = _line("dim", "")
    for (block, letter, style), name in zip(_BAR, _BAR_NAMES, strict=True):
        if not any(getattr(row, "reduce" if name == "all-reduce" else name) > 0 for row in snapshot.workers):
            continue
        line.append(block if view.is_unicode else letter, style)
        line.append(f" {name} ")
    line.append(f" {'stale: mean/max  ' if _is_stale(snapshot) else ''}cost: 1.0 = one worker's time")
    return line


def _hidden(rows: Sequence[WorkerRow]) -> list[Text]:
    if not rows:
        return []
    lost = sum(row.state == "lost" for row in rows)
    text = f"{len(rows)} more worker{'s' * (len(rows) > 1)}, each with a cost of {_cost(rows[0].cost)} or less"
    return [_line("dim", text + (f"; {lost} of them lost" if lost else ""))]


def _event_lines(snapshot: Snapshot, view: View, most: int) -> list[Text]:
    lines = []
    for moment, worker, kind, words in snapshot.events[:most]:
        name, style = _EVENTS[kind]
        line = _line("", "")
        line.append(f"{moment - snapshot.begin:8.1f} s " if snapshot.is_simulated else _clock(moment), "dim")
        line.append(f"{name:9} ", style)
        line.append(plain(words if worker in words else f"{worker} {words}".rstrip()))
        lines.append(line)
    return lines


def _clock(moment: float) -> str:
    return time.strftime("%H:%M:%S ", time.localtime(moment))


def _secs(secs: float) -> str:
    if math.isnan(secs):
        return "-"
    if secs < 0.00995:
        return f"{secs * 1000:.1f}ms"
    if secs < 0.9995:
        return f"{secs * 1000:.0f}ms"
    return f"{secs:.1f}s" if secs < 99.95 else f"{min(secs, 9999):.0f}s"


def _cost(cost: float) -> str:
    return f"{cost:.2f}" if cost < 9.995 else f"{cost:.0f}"


def _count(number: int) -> str:
    for limit, unit, size in ((100_000, "", 1), (100_000_000, "k", 1_000), (10**11, "M", 10**6)):
        if number < limit:
            return f"{number // size}{unit}"
    return f"{number // 10**9}G"


def _bytes(number: float | None) -> str:
    if number is None:
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _duration(secs: float) -> str:
    whole = round(secs)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s" if minutes < 10 else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} days"

"""Prints the runs of a plan (several runs submitted together) before it is submitted, and what each
of several merged TOML files sets."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from engine.core.format import words
from mcp_server.api.replies import compact
from mcp_server.screen.values import grid

_LEVELS = ("low", "likely", "high")  # an estimate has a value for each


def print_steps(out: Console, steps: Sequence[Mapping[str, Any]], *, settings: bool) -> None:
    """Print the runs of a plan as a table, with their times and their cost.

    Args:
        out: where it is printed.
        steps: the runs, as in the replies of `dry_run` and `estimate_cost`.
        settings: whether to print the settings of each run below the table.
    """
    columns = ["step", "run", "time", "money"]
    rows = [_row(step) for step in steps]
    is_money_known = any(row[-1] for row in rows)  # False if no price of a GPU-hour is set
    if not is_money_known:
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    out.print(grid(columns, rows))
    if settings:
        for step in steps:
            if step.get("settings"):
                out.print(Text(_settings_line(step), style="dim"))


def _settings_line(step: Mapping[str, Any]) -> str:
    """Return the settings of a plan's run as a line: "step 1 seed=2: lr = 0.001, steps = 40"."""
    assignments = [f"{name} = {compact(value)}" for name, value in step["settings"].items()]
    return f"step {step['step']} {step.get('label', '')}: {', '.join(assignments)}"


def _row(step: Mapping[str, Any]) -> list[str]:
    """Return the table cells of one run of a plan: its number, what it is, its time and its cost.

    The time is "?" and the cost is "" if the estimate does not know them.
    """
    name_parts = [step["algorithm"], step.get("env_id", ""), step.get("label", "")]
    hours, money = step.get("hours"), step.get("money")
    time_text, money_text = "?", ""
    if hours:
        time_text = _range([words(hours[level]) for level in _LEVELS])
    if money:
        money_text = _range([f"{money[level]:.2f}" for level in _LEVELS])
    name = " ".join(part for part in name_parts if part)
    return [str(step["step"]), name, time_text, money_text]


def _range(texts: Sequence[str]) -> str:
    """Join the texts (low, likely, high) of an estimate: "3 min (2 min to 5 min)"."""
    low, likely, high = texts
    return f"{likely} ({low} to {high})"


def print_files(out: Console, files: Sequence[Mapping[str, Any]]) -> None:
    """Print for each of several merged TOML files what it sets and what it changes.

    `files` are in the order of merging: a later file changes what earlier ones have set.
    """
    for entry in files:
        sets = [f"{name} = {compact(value)}" for name, value in entry["sets"].items()]
        changes = [
            f"{name} {compact(old)} -> {'taken away' if new is None else compact(new)}"
            for name, (old, new) in entry["changes"].items()
        ]
        out.print(Text(f"{entry['file']}: {', '.join([*changes, *sets]) or 'changes nothing'}"))

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
    rows = [_step_cells(step) for step in steps]
    is_money_known = any(money for *_, money in rows)  # False if no price of a GPU-hour is set
    if not is_money_known:  # leave out the last column
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


def _step_cells(step: Mapping[str, Any]) -> list[str]:
    """Return the table cells of one run of a plan: its number, its name, its time and its cost. The
    name is made of the algorithm, the environment and the label, such as "seed=2".

    The time is "?" and the cost is "" if the estimate does not know them.
    """
    name_parts = [step["algorithm"], step.get("env_id", ""), step.get("label", "")]
    hours, money = step.get("hours"), step.get("money")
    time_text, money_text = "?", ""
    if hours:
        time_text = _range_text([words(hours[level]) for level in _LEVELS])
    if money:
        money_text = _range_text([f"{money[level]:.2f}" for level in _LEVELS])
    name = " ".join(part for part in name_parts if part)
    return [str(step["step"]), name, time_text, money_text]


def _range_text(texts: Sequence[str]) -> str:
    """Join the three texts (low, likely, high) of an estimate: "3 min (2 min to 5 min)"."""
    low, likely, high = texts
    return f"{likely} ({low} to {high})"


def print_files(out: Console, files: Sequence[Mapping[str, Any]]) -> None:
    """Print for each of several merged TOML files what it sets and what it changes.

    `files` are in the order of merging: a later file changes what earlier ones have set. Each has
    the name of the `file`, what it `sets` (name -> value), and what it `changes` (name -> old and
    new value).
    """
    for entry in files:
        assignments = [f"{name} = {compact(value)}" for name, value in entry["sets"].items()]
        changes = []
        for name, (old, new) in entry["changes"].items():
            new_text = "taken away" if new is None else compact(new)
            changes.append(f"{name} {compact(old)} -> {new_text}")
        what_it_does = ", ".join([*changes, *assignments]) or "changes nothing"
        out.print(Text(f"{entry['file']}: {what_it_does}"))

"""Prints the runs of a plan before it is submitted, and what merged TOML files say."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from engine.core.format import words
from mcp_server.api.replies import compact
from mcp_server.screen.values import grid


def print_steps(out: Console, steps: Sequence[Mapping[str, Any]], *, settings: bool) -> None:
    """Print the runs of a plan as a table; with `settings` also what each is trained with."""
    columns = ["step", "run", "time", "money"]
    rows = [_row(step) for step in steps]
    if not any(row[-1] for row in rows):  # without a price the money is not known
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    out.print(grid(columns, rows))
    for step in steps if settings else ():
        if step.get("settings"):
            given = ", ".join(f"{name} = {compact(v)}" for name, v in step["settings"].items())
            out.print(Text(f"step {step['step']} {step.get('label', '')}: {given}", style="dim"))


def _row(step: Mapping[str, Any]) -> list[str]:
    """A run of a plan as a row of the table."""
    parts = [step["algorithm"], step.get("env_id", ""), step.get("label", "")]
    hours, money = step.get("hours"), step.get("money")
    return [
        str(step["step"]),
        " ".join(part for part in parts if part),
        _range([words(hours[level]) for level in ("low", "likely", "high")]) if hours else "?",
        _range([f"{money[level]:.2f}" for level in ("low", "likely", "high")]) if money else "",
    ]


def _range(texts: Sequence[str]) -> str:
    """A figure from low to high: "3 min (2 min to 5 min)"."""
    low, likely, high = texts
    return f"{likely} ({low} to {high})"


def print_files(out: Console, files: Sequence[Mapping[str, Any]]) -> None:
    """Print what each of several merged TOML files says that those before it did not."""
    for entry in files:
        sets = [f"{name} = {compact(value)}" for name, value in entry["sets"].items()]
        changes = [
            f"{name} {compact(before)} -> {'taken away' if now is None else compact(now)}"
            for name, (before, now) in entry["changes"].items()
        ]
        out.print(Text(f"{entry['file']}: {', '.join([*changes, *sets]) or 'changes nothing'}"))

"""The demo's stage: steps that appear as they happen, curves that grow, lines where nobody looks.

On a terminal one live panel; elsewhere (a log, a pipe) a line per step and one every few seconds.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from mcp_server.screen.render import duration, sparkline

QUIET_EVERY_S = 10.0
MARKS = {"done": ("✓", "green"), "failed": ("✗", "red")}


@dataclass
class Step:
    """One call of the loop as it is shown."""

    name: str
    text: str = ""
    state: str = "working"
    curve: list[float] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    ended: float | None = None

    @property
    def seconds(self) -> float:
        return (self.ended or time.monotonic()) - self.began


class Stage:
    """Shows steps while they happen.

    Args:
        title: the first line.
        console: where to show; live only when it is a terminal.
    """

    def __init__(self, title: str, console: Console) -> None:
        self.console = console
        self._title = title
        self._steps: list[Step] = []
        self._spinner = Spinner("dots", style="cyan")
        self._live: Live | None = None
        self._told = 0.0

    def __enter__(self) -> "Stage":
        if self.console.is_terminal:
            # Few frames: the cores are training.
            self._live = Live(
                get_renderable=self._panel, console=self.console, refresh_per_second=4
            )
            self._live.start()
        else:
            self.console.print(self._title, soft_wrap=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None and self._steps and self._steps[-1].state == "working":
            self.end(self._steps[-1], "stopped", failed=True)
        if self._live is not None:
            self._live.stop()

    def begin(self, name: str, text: str = "") -> Step:
        """A step that is going on from now."""
        step = Step(name, text)
        self._steps.append(step)
        return step

    def tell(self, step: Step, text: str, curve: Sequence[float] = ()) -> None:
        """What a step is doing now."""
        step.text = text
        if curve:
            step.curve = list(curve)
        if self._live is None and time.monotonic() - self._told > QUIET_EVERY_S:
            self._told = time.monotonic()
            line = f"  ... {step.name:<14} {sparkline(step.curve, 24)} {text}"
            self.console.print(line, soft_wrap=True)

    def end(self, step: Step, text: str, failed: bool = False) -> None:
        """The step is over."""
        step.text, step.ended = text, time.monotonic()
        step.state = "failed" if failed else "done"
        if self._live is None:
            self.console.print(self._row(step, False), soft_wrap=True)
            self._told = time.monotonic()

    def _panel(self) -> RenderableType:
        table = Table.grid(padding=(0, 1), expand=True)
        table.add_column(width=1)
        table.add_column(width=14, no_wrap=True)
        table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        for step in self._steps:
            working = step.state == "working"
            mark, style = MARKS.get(step.state, ("", ""))
            table.add_row(
                self._spinner if working else Text(mark, style=style),
                Text(step.name, style="bold" if working else ""),
                self._row(step, True),
            )
        return Group(Text(self._title, style="bold"), table)

    def _row(self, step: Step, live: bool) -> Text:
        line = Text()
        if not live:
            mark, style = MARKS.get(step.state, ("·", ""))
            line.append(f"{mark} ", style=style).append(f"{step.name:<14} ")
        if step.seconds >= 1:
            line.append(f"{duration(step.seconds):>5} ", style="dim")
        if step.curve:
            line.append(sparkline(step.curve, 32) + " ", style="cyan")
        return line.append(step.text)


def progress_text(reply: Mapping[str, Any], value: str) -> str:
    """One line about a run that is going on."""
    parts = [str(reply.get("run_id", "")), str(reply.get("state", ""))]
    if reply.get("total_steps"):
        parts = [str(reply.get("run_id", "")), f"{reply.get('step') or 0}/{reply['total_steps']}"]
    if value:
        parts.append(value)
    if reply.get("eta_s"):
        parts.append(f"about {duration(float(reply['eta_s']))} left")
    return "  ".join(part for part in parts if part)


def stage_console(quiet: bool) -> Console:
    """The console of the demo: stdout, or stderr where stdout carries JSON."""
    stream = sys.stderr if quiet else sys.stdout
    return Console(file=stream, highlight=False, width=None if stream.isatty() else 160)

"""Shows the steps of the demo while they happen.

A terminal shows one live panel with growing curves. Elsewhere (a log, a pipe) a line is printed at
the end of each step, and every few seconds during a step.
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

LINE_EVERY_S = 10.0  # between two lines about the same step, where there is no terminal
PLAIN_WIDTH = 160  # columns where there is no terminal
FRAMES_PER_SECOND = 4  # few, because the cores are training
MARKS = {"done": ("✓", "green"), "failed": ("✗", "red")}


@dataclass
class Step:
    """One call of the loop, as it is shown.

    Attributes:
        name: name of the step, usually that of the tool.
        text: what the step is doing, or how it ended.
        state: working, done or failed.
        curve: values to draw; empty for no curve.
        began: when the step began, in seconds of a monotonic clock.
        ended: when it ended; None while it is working.
    """

    name: str
    text: str = ""
    state: str = "working"
    curve: list[float] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    ended: float | None = None

    @property
    def seconds(self) -> float:
        """How long the step took, or has taken so far, in seconds."""
        return (self.ended or time.monotonic()) - self.began


class Stage:
    """Shows steps while they happen; used as a context manager.

    Args:
        title: the first line.
        console: where to show the steps: in a live panel if it is a terminal, otherwise as lines.
    """

    def __init__(self, title: str, console: Console) -> None:
        """Start without steps; nothing is shown before the `with` block begins."""
        self.console = console
        self._title = title
        self._steps: list[Step] = []
        self._spinner = Spinner("dots", style="cyan")
        self._live: Live | None = None
        self._last_line_at = 0.0

    def __enter__(self) -> "Stage":
        """Start the live panel; without a terminal, print the title."""
        if self.console.is_terminal:
            self._live = Live(
                get_renderable=self._panel,
                console=self.console,
                refresh_per_second=FRAMES_PER_SECOND,
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
        """Stop the live panel. If an error ended the block, first show the step that was working as
        failed."""
        if kind is not None and self._steps and self._steps[-1].state == "working":
            self.end(self._steps[-1], "stopped", failed=True)
        if self._live is not None:
            self._live.stop()

    def begin(self, name: str, text: str = "") -> Step:
        """Add a step that starts now, and return it. `text` is shown behind the step's name until
        `show_progress` or `end` replaces it."""
        step = Step(name, text)
        self._steps.append(step)
        return step

    def show_progress(self, step: Step, text: str, curve: Sequence[float] = ()) -> None:
        """Show `text` and `curve` for a step that is working.

        An empty `curve` keeps the curve shown so far. Without a live panel a line is printed, but
        at most one in `LINE_EVERY_S` seconds.
        """
        step.text = text
        if curve:
            step.curve = list(curve)
        if self._live is None and time.monotonic() - self._last_line_at > LINE_EVERY_S:
            self._last_line_at = time.monotonic()
            line = f"  ... {step.name:<14} {sparkline(step.curve, width=24)} {text}"
            self.console.print(line, soft_wrap=True)

    def end(self, step: Step, text: str, failed: bool = False) -> None:
        """Show that a step is done, or failed if `failed`; `text` says how the step ended."""
        step.text = text
        step.ended = time.monotonic()
        step.state = "failed" if failed else "done"
        if self._live is None:
            self.console.print(self._row(step, in_panel=False), soft_wrap=True)
            self._last_line_at = time.monotonic()

    def _panel(self) -> RenderableType:
        """Render the live panel: the title, and below it a table of all steps with mark, name and
        text."""
        table = Table.grid(padding=(0, 1), expand=True)
        table.add_column(width=1)
        table.add_column(width=14, no_wrap=True)
        table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        for step in self._steps:
            is_working = step.state == "working"
            name = Text(step.name, style="bold" if is_working else "")
            table.add_row(self._mark(step), name, self._row(step, in_panel=True))
        return Group(Text(self._title, style="bold"), table)

    def _mark(self, step: Step) -> RenderableType:
        """Return the mark before a step in the panel: a spinner while the step is working, then a
        tick or a cross."""
        if step.state == "working":
            return self._spinner
        mark, style = MARKS[step.state]
        return Text(mark, style=style)

    def _row(self, step: Step, in_panel: bool) -> Text:
        """Return a step as one line: its duration, its curve and its text.

        With `in_panel`, the mark and the name of the step are left out, because the panel has
        columns for them. Otherwise the line begins with them.
        """
        line = Text()
        if not in_panel:
            mark, style = MARKS.get(step.state, ("·", ""))  # a dot: the step has not ended
            line.append(f"{mark} ", style=style).append(f"{step.name:<14} ")
        if step.seconds >= 1:  # a shorter duration says nothing
            line.append(f"{duration(step.seconds):>5} ", style="dim")
        if step.curve:
            line.append(sparkline(step.curve, width=32) + " ", style="cyan")
        return line.append(step.text)


def progress_text(reply: Mapping[str, Any], latest_values: str = "") -> str:
    """Return one line about a run that is under way: "r-1  3/60  loss 0.412  about 40s left".

    `reply` is the status of the run; if it has no number of steps, its state is shown instead.
    `latest_values`, such as "loss 0.412", is inserted unchanged.
    """
    progress = str(reply.get("state", ""))
    if reply.get("total_steps"):
        progress = f"{reply.get('step') or 0}/{reply['total_steps']}"
    parts = [str(reply.get("run_id", "")), progress, latest_values]
    if reply.get("eta_s"):
        parts.append(f"about {duration(float(reply['eta_s']))} left")
    return "  ".join(part for part in parts if part)


def stage_console(quiet: bool) -> Console:
    """Make the console of the demo: on stderr if `quiet`, because stdout then carries JSON;
    otherwise on stdout."""
    stream = sys.stderr if quiet else sys.stdout
    return Console(file=stream, highlight=False, width=None if stream.isatty() else PLAIN_WIDTH)

"""The parts of a report: sections, and the blocks in them.

`outcome.py`, `progress.py` and `origins.py` build these from the dossier (everything known about a
run) without knowing how they will look; `report.html.j2` and `markdown.py` render each kind of
block. The texts in blocks are plain: each rendering escapes them in its own way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from engine.evidence.report.dossier import Station
from engine.evidence.verdict.flips import FlipExample
from engine.evidence.verdict.regression import Battery


@dataclass(frozen=True)
class Code:
    """Text that a reader copies: a command or a hash."""

    text: str


@dataclass(frozen=True)
class Tag:
    """A verdict in one word, coloured on the page."""

    word: str


Line = Sequence[str | Code | Tag]


@dataclass(frozen=True, kw_only=True)
class Block:
    """A part of a section.

    `shown_in` names the renderings that show the block: the HTML page has room and can draw;
    Markdown is read by agents and is limited in length.
    """

    shown_in: Literal["both", "page", "markdown"] = "both"

    @property
    def kind(self) -> str:
        """The name of the macro in `report.html.j2` that renders this block."""
        return type(self).__name__.lower()


@dataclass(frozen=True)
class Paragraph(Block):
    """A paragraph of text; `style` is its CSS class on the page."""

    line: Line
    style: str = ""


@dataclass(frozen=True)
class Note:
    """One remark. `mood` is "fail", "plain" or "" (a warning); `label` is set in bold before the
    text."""

    text: str
    mood: str = ""
    label: str = ""


@dataclass(frozen=True)
class Notes(Block):
    """A list of remarks."""

    notes: Sequence[Note]


@dataclass(frozen=True)
class Cell:
    """A table cell.

    Attributes:
        note: small print under the text.
        drawing: an SVG; None for no drawing.
        share: 0 to 1, drawn as a bar; None for no bar.
        mood: the colour of the bar.
    """

    text: str = ""
    note: str = ""
    drawing: Markup | None = None
    share: float | None = None
    mood: str = ""


@dataclass(frozen=True)
class Table(Block):
    """A table.

    Attributes:
        styles: CSS classes of each column on the page, such as num, name, or rest (shown on wide
            pages only).
        style: CSS class of the table; "knobs" is a list in two columns of three cells a row,
            "figures" a list of large numbers, each with name and remark.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str | Tag | Cell]]
    styles: Sequence[str] = ()
    style: str = ""


@dataclass(frozen=True)
class Facts(Block):
    """A list of names with values. `code` says that the values are hashes."""

    rows: Sequence[tuple[str, str]]
    code: bool = False


@dataclass(frozen=True)
class Figure(Block):
    """A drawing.

    Attributes:
        narrow: the drawing for a phone; None if `wide` serves both.
        text: what Markdown says instead; "" for nothing.
        caption: how to read the drawing.
        legend: (CSS class of a colour, what it means).
    """

    wide: Markup
    narrow: Markup | None = None
    text: str = ""
    caption: str = ""
    legend: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Panel(Block):
    """Blocks in a common frame. With `grid` these are small panels in rows, without a frame."""

    blocks: Sequence[Block]
    title: str = ""
    grid: bool = False


@dataclass(frozen=True)
class Shares(Block):
    """How `total` tasks divide into parts.

    A part is (what happened to its tasks, the number of its tasks, CSS class of their colour).
    """

    total: int
    parts: Sequence[tuple[str, int, str]]


@dataclass(frozen=True)
class Skills(Block):
    """The results before and after training, by battery (set of questions) and skill."""

    batteries: Sequence[Battery]


@dataclass(frozen=True)
class Answers(Block):
    """Both answers to a task whose result changed.

    `direction` is "gained" or "lost"; `names` are the models that answered before and after.
    """

    direction: str
    example: FlipExample
    names: tuple[str, str]


@dataclass(frozen=True)
class Steps(Block):
    """A list of steps. `style` is "way" (arrows between them), "flat" (the order means nothing) or
    "chain"."""

    steps: Sequence[Station]
    style: Literal["way", "flat", "chain"]


@dataclass(frozen=True)
class Section:
    """A part of a report with a heading.

    Attributes:
        title: heading on the page; with "" the section continues the previous one.
        short: heading in Markdown; "" likewise.
        lead: a sentence below the heading, on the page only.
        folded: whether the section is closed on the page until it is clicked.
    """

    title: str
    short: str
    blocks: Sequence[Block]
    lead: Line = ()
    folded: bool = False

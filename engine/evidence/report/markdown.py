"""A run as Markdown: the report, short enough for an agent to read, and the model card."""

import json
import re
from collections.abc import Callable, Iterable, Sequence

from engine.evidence.report import blocks, origins, outcome, progress
from engine.evidence.report.blocks import Block, Section
from engine.evidence.report.dossier import Dossier, Station
from engine.evidence.report.other_words import other_words, prompts
from engine.evidence.report.values import value_text
from engine.home.sanitize import clip, one_line

MOST_CHARS = 9_800  # of a report or card, so that it stays under 10,000
_CELL_CHARS = 160
_ANSWER_CHARS = 260
_NOTE_CHARS = 300
_NOTICE_CHARS = 160  # kept free for the sentence that names what was left out
_WORTH_CUTTING = 400  # with at least this many free characters, part of a section is still shown
# Characters to escape. An underscore between letters is no markup in CommonMark, so names keep it.
_MARKUP = re.compile(r"[\\`*\[\]<>|]|(?<![^\W_])_|_(?![^\W_])")

BuildSection = Callable[[Dossier], Section | None]
# The most important first: if the text becomes too long, the last sections are left out.
_REPORT: Sequence[BuildSection] = (
    *(outcome.verdict, prompts, other_words, outcome.skills, outcome.tasks, outcome.answers),
    *(
        outcome.models,
        progress.curves,
        origins.settings,
        origins.audit,
        origins.contamination,
        origins.cost,
    ),
    *(origins.lineage, origins.provenance, origins.hashes),
)
_CARD: Sequence[BuildSection] = (
    *(outcome.verdict, outcome.skills, outcome.models, origins.training, origins.contamination),
    *(origins.how_to_use, origins.lineage, origins.provenance, origins.hashes, origins.limits),
    origins.settings,
)


def markdown_of(dossier: Dossier) -> str:
    """The report as Markdown under 10,000 characters.

    If it would be longer, the last sections are left out and named at the end.
    """
    word, _ = outcome.headline(dossier)
    title = _escaped(f"{dossier.row.run_id}: {word}")
    labels = "; ".join(f"{name} {value}".strip() for name, value in dossier.labels)
    head = f"# {title}\n\n{_escaped(labels)}."
    if dossier.note:
        head += f"\n\nNote: {_escaped(one_line(dossier.note, _NOTE_CHARS))}"
    return _joined_under_limit([head, *_section_texts(dossier, _REPORT)])


def card_of(dossier: Dossier) -> str:
    """The model card as Markdown, with the front matter that model hubs read.

    If it would exceed 10,000 characters, the last sections are left out and named at the end.
    """
    # JSON is valid YAML, the language of the front matter.
    tags = json.dumps(["lora", "honesmith", dossier.row.algorithm])
    base = json.dumps(dossier.base)
    front_matter = f"---\nbase_model: {base}\nlibrary_name: peft\ntags: {tags}\n---"
    head = f"# {_escaped(dossier.row.run_id)}\n\n{_escaped(origins.card_head(dossier))}"
    return _joined_under_limit([front_matter, head, *_section_texts(dossier, _CARD)])


def _section_texts(dossier: Dossier, builders: Iterable[BuildSection]) -> list[str]:
    """The sections as Markdown, one text for each section that has a heading.

    A section without a heading is appended to the previous text. A builder returns None if it has
    nothing to show.
    """
    texts: list[str] = []
    for build_section in builders:
        section = build_section(dossier)
        if section is None:
            continue
        body = _blocks_text(section.blocks)
        if section.short:
            texts.append(f"## {section.short}\n\n{body}")
        elif body:  # no heading: never the first section, so there is a text before it
            texts[-1] += f"\n\n{body}"
    return texts


def _blocks_text(section_blocks: Iterable[Block]) -> str:
    """Blocks as Markdown, with a blank line between them; empty ones are left out."""
    texts = [_block_text(block) for block in section_blocks]
    return "\n\n".join(text for text in texts if text)


def _block_text(block: Block) -> str:
    """A block as Markdown; "" for a block that only the HTML page shows."""
    if block.shown_in == "page":
        return ""
    match block:
        case blocks.Paragraph(line=line):
            return _line_text(line)
        case blocks.Notes(notes=notes):
            return _bullet_list(map(_note_text, notes))
        case blocks.Table(heads=heads, rows=rows):
            return _table(heads, rows)
        case blocks.Facts(rows=rows, code=code):
            return _bullet_list(_fact_text(name, value, is_hash=code) for name, value in rows)
        case blocks.Shares():
            return _shares_text(block)
        case blocks.Skills(batteries=batteries):
            return _skills_table(batteries)
        case blocks.Answers():
            return _answers_text(block)
        case blocks.Steps(steps=steps):
            return _numbered_list(map(_step_text, steps))
        case blocks.Figure(text=text):
            return text
        case blocks.Panel(blocks=inner):
            return _blocks_text(inner)
    return ""


def _bullet_list(items: Iterable[str]) -> str:
    """A Markdown list, one "- item" per line."""
    return "\n".join(f"- {item}" for item in items)


def _numbered_list(items: Iterable[str]) -> str:
    """A Markdown list, one "1. item" per line."""
    return "\n".join(f"{number}. {item}" for number, item in enumerate(items, start=1))


def _shares_text(block: blocks.Shares) -> str:
    """A sentence on shares of the tasks, such as "Of 40 tasks: 5 gained, 33 unchanged, 2 lost."."""
    parts = [f"{count} {what}" for what, count, _ in block.parts]
    return f"Of {block.total} tasks: {', '.join(parts)}."


def _note_text(note: blocks.Note) -> str:
    """A note as Markdown, after its label if it has one, such as "timeout: the run was ended"."""
    text = f"{note.label}: {note.text}" if note.label else note.text
    return _escaped(text)


def _fact_text(name: str, value: str, *, is_hash: bool) -> str:
    """A line "name: value" as Markdown; a hash is set in backticks."""
    value_text = f"`{value}`" if is_hash else _escaped(value)
    return f"{_escaped(name)}: {value_text}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str | blocks.Tag | blocks.Cell]]) -> str:
    """A table as Markdown: `heads` are the headings of its columns, `rows` have a cell for each.

    Columns that have neither a heading nor any text are left out: they hold drawings of the HTML
    page.
    """
    cells = [[_cell_text(cell) for cell in row] for row in rows]
    columns: list[int] = []  # the indices of those that are shown
    for index, head in enumerate(heads):
        has_text = any(row[index] for row in cells)
        if head or has_text:
            columns.append(index)

    def line_of(row: Sequence[str]) -> str:
        """A row of the table as "| a | b |"."""
        shown_cells = [row[index] for index in columns]
        return f"| {' | '.join(shown_cells)} |"

    rule = f"|{'---|' * len(columns)}"  # the line that Markdown wants below the headings
    return "\n".join([line_of(heads), rule, *(line_of(row) for row in cells)])


def _cell_text(cell: str | blocks.Tag | blocks.Cell) -> str:
    """A cell as escaped text: its own text, or else its small print."""
    if isinstance(cell, blocks.Tag):
        return _escaped(cell.word)
    text = cell if isinstance(cell, str) else cell.text or cell.note
    return _escaped(clip(text, _CELL_CHARS))


def _skills_table(batteries: Sequence[blocks.Battery]) -> str:
    """A Markdown table with one row per battery (set of questions), and below it one row for each
    of its skills in which something right was lost."""
    heads = ("asked", "before", "after", "tasks", "right before", "lost", "")
    rows = []
    for battery in batteries:
        right_before = battery.lost_of_right.right if battery.lost_of_right else ""
        numbers = (battery.before, battery.after, battery.n, right_before, battery.lost)
        rows.append((battery.battery, *map(value_text, numbers), battery.verdict))
        for skill in battery.skills:
            lost = skill.lost_of_right  # tasks that were right before training and are wrong now
            if lost is not None and lost.lost:
                name = f"{battery.battery}: {skill.skill}"
                numbers = (skill.before, skill.after, "", lost.right, lost.lost)
                rows.append((name, *map(value_text, numbers), lost.text))
    return _table(heads, rows)


def _answers_text(block: blocks.Answers) -> str:
    """The prompt of a task and both answers to it, in a Markdown code fence.

    The fence is longer than any fence in the texts: a model wrote them and could end a shorter one.
    """
    texts = (block.example.prompt, block.example.before, block.example.after)
    prompt, before, after = (clip(text, _ANSWER_CHARS) for text in texts)
    text = f"prompt: {prompt}\nbefore: {before}\nafter:  {after}"
    fence = "```"
    while fence in text:
        fence += "`"
    return f"**{block.direction}: {_escaped(block.example.task)}**\n\n{fence}\n{text}\n{fence}"


def _step_text(step: Station) -> str:
    """A step of a model's history, or a link of its provenance, as one line.

    Such as "r-1 (grpo on sums@3f2a): better", or "data: 1 file, `91bc03d2f7aa`".
    """
    text = _escaped(step.name)
    if step.code:  # only a link has a hash
        return f"{text}: {_escaped(step.detail)}, `{step.code}`"
    if step.detail:
        text += f" ({_escaped(step.detail)})"
    if step.verdict:
        text += f": {step.verdict}"
    return text


def _line_text(line: blocks.Line) -> str:
    """A line of text, code and tags as Markdown, such as "passed: No such answer is paid."

    Code is set in backticks, and a tag is followed by a colon.
    """
    text = ""
    for part in line:
        if isinstance(part, blocks.Code):
            text += f"`{part.text}`"
        elif isinstance(part, blocks.Tag):
            text += _with_markup_escaped(f"{part.word}:")
        else:
            text += _with_markup_escaped(part)
    return " ".join(text.split())  # line breaks become blanks


def _escaped(text: str) -> str:
    """Untrusted text for one line of Markdown: its markup has no effect, line breaks become blanks,
    and it is safe in a table cell."""
    return " ".join(_with_markup_escaped(text).split())  # any run of white space as one blank


def _with_markup_escaped(text: str) -> str:
    """The text with a backslash before each Markdown character; line breaks stay."""
    return _MARKUP.sub(r"\\\g<0>", text)


def _joined_under_limit(texts: Sequence[str]) -> str:
    """The texts joined by blank lines, at most `MOST_CHARS` characters.

    The first text that does not fit, and all after it, are named in a closing sentence. The
    beginning of that first text is still shown if it is the first of all, or if there is room for
    more than `_WORTH_CUTTING` characters.
    """
    joined = ""
    for index, text in enumerate(texts):
        room = MOST_CHARS - len(joined) - _NOTICE_CHARS  # in characters
        if len(text) > room:
            if index == 0 or room > _WORTH_CUTTING:
                joined += _first_lines(text, room)
            return f"{joined}\n\n{_left_out_sentence(texts[index:])}\n"
        if joined:
            joined += "\n\n"
        joined += text
    return joined + "\n"


def _left_out_sentence(texts: Sequence[str]) -> str:
    """The sentence that names the texts that are not shown, by the first line of each, its
    heading; cut to 100 characters."""
    headings = [text.partition("\n")[0].lstrip("# ") for text in texts]
    names = ", ".join(headings)[:100]
    return f"Left out for length: {names}."


def _first_lines(text: str, room: int) -> str:
    """A blank line and the first lines of a text, as many as fit into `room` characters.

    They end before a code fence, which might not be closed within the room.
    """
    lines = ["", ""]  # these become a blank line when joined, which does not count for the room
    for line in text.split("\n"):
        room -= len(line) + 1
        if room < 0 or line.startswith("```"):
            break
        lines.append(line)
    return "\n".join(lines)

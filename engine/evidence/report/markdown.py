"""The sections of a run as Markdown: a report an agent can afford to read, and the model card."""

import json
import re
from collections.abc import Callable, Iterable, Sequence

from engine.evidence.report import blocks, origins, outcome, progress
from engine.evidence.report.blocks import Block, Section
from engine.evidence.report.dossier import Dossier, Station
from engine.evidence.report.values import value_text
from engine.home.sanitize import clip, one_line

MOST_CHARS = 9_800  # of a text, so that it stays under 10,000
_CELL_CHARS = 160
_ANSWER_CHARS = 260
_NOTICE_CHARS = 160  # kept free for the sentence that names what was left out
_WORTH_CUTTING = 400  # free characters from which on the beginning of a section is still shown
# Characters to escape. An underscore between letters is no markup in CommonMark, so names keep it.
_MARKUP = re.compile(r"[\\`*\[\]<>|]|(?<![^\W_])_|_(?![^\W_])")

BuildSection = Callable[[Dossier], Section | None]
# The most important first: where the text grows too long, the last sections are left out.
_REPORT: Sequence[BuildSection] = (
    *(outcome.verdict, outcome.skills, outcome.tasks, outcome.answers, outcome.models),
    *(progress.curves, origins.settings, origins.audit, origins.contamination, origins.cost),
    *(origins.lineage, origins.provenance, origins.hashes),
)
_CARD: Sequence[BuildSection] = (
    *(outcome.verdict, outcome.skills, outcome.models, origins.training, origins.contamination),
    *(origins.use, origins.lineage, origins.provenance, origins.hashes, origins.limits),
    origins.settings,
)


def markdown_of(dossier: Dossier) -> str:
    """The report as Markdown under 10,000 characters.

    Where it would be longer, the last sections are left out and named at the end.
    """
    word, _ = outcome.headline(dossier)
    chips = "; ".join(f"{name} {value}".strip() for name, value in dossier.chips)
    head = f"# {_escaped(f'{dossier.row.run_id}: {word}')}\n\n{_escaped(chips)}."
    if dossier.note:
        head += f"\n\nNote: {_escaped(one_line(dossier.note, 300))}"
    return _joined_under_limit([head, *_section_texts(dossier, _REPORT)])


def card_of(dossier: Dossier) -> str:
    """The model card under 10,000 characters, with the front matter that model hubs read."""
    tags = json.dumps(["lora", "honesmith", dossier.row.algorithm])
    base = json.dumps(dossier.base)
    front = f"---\nbase_model: {base}\nlibrary_name: peft\ntags: {tags}\n---"
    head = f"# {_escaped(dossier.row.run_id)}\n\n{_escaped(origins.card_head(dossier))}"
    return _joined_under_limit([front, head, *_section_texts(dossier, _CARD)])


def _section_texts(dossier: Dossier, builders: Iterable[BuildSection]) -> list[str]:
    """The sections as Markdown, one text for each section that has a heading.

    A section without a heading is appended to the text before it. A builder that returns None has
    nothing to show.
    """
    texts: list[str] = []
    for build_section in builders:
        section = build_section(dossier)
        body = _blocks_text(section.blocks) if section else ""
        if section and section.short:
            texts.append(f"## {section.short}\n\n{body}")
        elif body:
            texts[-1] += f"\n\n{body}"
    return texts


def _blocks_text(shown_blocks: Iterable[Block]) -> str:
    return "\n\n".join(text for block in shown_blocks if (text := _block_text(block)))


def _block_text(block: Block) -> str:
    """A block as Markdown; "" for what only the page shows.

    The one kind of block without a text of its own is a panel: it gives the texts of its blocks.
    """
    if block.only == "page":
        return ""
    match block:
        case blocks.Paragraph(line=line):
            return _line_text(line)
        case blocks.Notes(notes=notes):
            lines = (f"{note.label}: {note.text}" if note.label else note.text for note in notes)
            return "\n".join(f"- {_escaped(text)}" for text in lines)
        case blocks.Table(heads=heads, rows=rows):
            return _table(heads, rows)
        case blocks.Facts(rows=rows, code=code):
            lines = ((name, f"`{value}`" if code else _escaped(value)) for name, value in rows)
            return "\n".join(f"- {_escaped(name)}: {value}" for name, value in lines)
        case blocks.Shares(total=total, parts=parts):
            return f"Of {total} tasks: {', '.join(f'{count} {what}' for what, count, _ in parts)}."
        case blocks.Skills(batteries=batteries):
            return _skills_table(batteries)
        case blocks.Answers():
            return _answers(block)
        case blocks.Steps(steps=steps):
            return "\n".join(f"{i}. {_step_text(step)}" for i, step in enumerate(steps, 1))
        case blocks.Figure(text=text):
            return text
        case blocks.Panel(blocks=inner):
            return _blocks_text(inner)
    return ""


def _table(heads: Sequence[str], rows: Sequence[Sequence[str | blocks.Tag | blocks.Cell]]) -> str:
    """A table as Markdown.

    Columns that have neither a heading nor any text are left out: they hold drawings.
    """
    cells = [[_cell_text(cell) for cell in row] for row in rows]
    columns = [i for i, head in enumerate(heads) if head or any(row[i] for row in cells)]
    lines = [f"| {' | '.join(row[i] for i in columns)} |" for row in ([*heads], *cells)]
    return "\n".join([lines[0], f"|{'---|' * len(columns)}", *lines[1:]])


def _cell_text(cell: str | blocks.Tag | blocks.Cell) -> str:
    """A cell as escaped text: its own text, else its small print."""
    if isinstance(cell, blocks.Tag):
        return _escaped(cell.word)
    text = cell if isinstance(cell, str) else cell.text or cell.note
    return _escaped(clip(text, _CELL_CHARS))


def _skills_table(batteries: Sequence[blocks.Battery]) -> str:
    """A table as Markdown, with one row per battery of questions."""
    rows = []
    for battery in batteries:
        numbers = (battery.before, battery.after, battery.n, battery.lost)
        rows.append((battery.battery, *(value_text(number) for number in numbers), battery.verdict))
    return _table(("asked", "before", "after", "tasks", "lost", ""), rows)


def _answers(block: blocks.Answers) -> str:
    """The prompt of a task and both answers to it, in a code fence.

    The fence is longer than any in the texts, because a model wrote them and could end the fence.
    """
    texts = (block.example.prompt, block.example.before, block.example.after)
    prompt, before, after = (clip(text, _ANSWER_CHARS) for text in texts)
    text = f"prompt: {prompt}\nbefore: {before}\nafter:  {after}"
    fence = "```"
    while fence in text:
        fence += "`"
    return f"**{block.way}: {_escaped(block.example.task)}**\n\n{fence}\n{text}\n{fence}"


def _step_text(step: Station) -> str:
    """A step of a history, or a link of the provenance, as one line.

    Such as "r-1 (grpo on sums@3f2a): better", or "data: 1 file, `91bc03d2f7aa`".
    """
    if step.code:  # only a link has a hash
        return f"{_escaped(step.name)}: {_escaped(step.detail)}, `{step.code}`"
    detail = f" ({_escaped(step.detail)})" if step.detail else ""
    return _escaped(step.name) + detail + (f": {step.verdict}" if step.verdict else "")


def _line_text(line: blocks.Line) -> str:
    """Text, code and tags as one line of Markdown, such as "passed: The audit found nothing."

    Code stands in backticks, and a tag is followed by a colon.
    """
    text = ""
    for part in line:
        if isinstance(part, blocks.Code):
            text += f"`{part.text}`"
        else:
            text += _escaped_part(f"{part.word}:" if isinstance(part, blocks.Tag) else part)
    return " ".join(text.split())


def _escaped(text: str) -> str:
    """Untrusted text for one line of Markdown.

    Its markup has no effect, line breaks become blanks, and it is safe in a table cell.
    """
    return " ".join(_escaped_part(text).split())


def _escaped_part(text: str) -> str:
    return _MARKUP.sub(r"\\\g<0>", text)


def _joined_under_limit(texts: Sequence[str]) -> str:
    """The texts joined, under the limit of length.

    The first text that does not fit is the last one shown: its beginning is, if there is enough
    room, and always that of `texts[0]`. It and all later texts are named in a closing sentence.
    """
    joined = ""
    for index, text in enumerate(texts):
        room = MOST_CHARS - len(joined) - _NOTICE_CHARS
        if len(text) > room:
            if index == 0 or room > _WORTH_CUTTING:
                joined += _whole_lines(text, room)
            # Each text begins with its heading.
            names = [left_out.partition("\n")[0].lstrip("# ") for left_out in texts[index:]]
            return joined + f"\n\nLeft out for length: {', '.join(names)[:100]}.\n"
        joined += ("\n\n" if joined else "") + text
    return joined + "\n"


def _whole_lines(text: str, room: int) -> str:
    """The first lines of a text, as many as `room` characters hold.

    It stops before a code fence, which might not be closed within the room.
    """
    lines = ["", ""]  # a blank line before the text
    for line in text.split("\n"):
        room -= len(line) + 1
        if room < 0 or line.startswith("```"):
            break
        lines.append(line)
    return "\n".join(lines)

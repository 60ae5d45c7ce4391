"""The sections of a run as Markdown: a report an agent can afford to read, and the model card."""

import json
import re
from collections.abc import Callable, Iterable, Sequence

from engine.evidence.report import blocks, origins, outcome, progress
from engine.evidence.report.blocks import Block, Section
from engine.evidence.report.dossier import Dossier, Station
from engine.evidence.report.values import value_text
from engine.home.sanitize import clip, one_line

MOST_CHARS = 9_800
_CELL_CHARS = 160
_ANSWER_CHARS = 260
# An underscore between letters is no markup in CommonMark, and names are full of them.
_MARKUP = re.compile(r"[\\`*\[\]<>|]|(?<![^\W_])_|_(?![^\W_])")

Make = Callable[[Dossier], Section | None]
# What matters first: the end is left out where the text grows too long.
_REPORT: Sequence[Make] = (
    *(outcome.verdict, outcome.skills, outcome.tasks, outcome.answers, outcome.models),
    *(progress.curves, origins.settings, origins.audit, origins.contamination, origins.cost),
    *(origins.lineage, origins.provenance, origins.hashes),
)
_CARD: Sequence[Make] = (
    *(outcome.verdict, outcome.skills, outcome.models, origins.training, origins.contamination),
    *(origins.use, origins.lineage, origins.provenance, origins.hashes, origins.limits),
    origins.settings,
)


def markdown_of(dossier: Dossier) -> str:
    """The report under 10,000 characters; the last sections go first when it is too long."""
    word, _ = outcome.headline(dossier)
    chips = "; ".join(f"{name} {value}".strip() for name, value in dossier.chips)
    head = f"# {_escaped(f'{dossier.row.run_id}: {word}')}\n\n{_escaped(chips)}."
    if dossier.note:
        head += f"\n\nNote: {_escaped(one_line(dossier.note, 300))}"
    return _joined([head, *_texts(dossier, _REPORT)])


def card_of(dossier: Dossier) -> str:
    """The model card under 10,000 characters, with the front matter that hubs read."""
    tags = json.dumps(["lora", "honesmith", dossier.row.algorithm])
    base = json.dumps(dossier.base)
    front = f"---\nbase_model: {base}\nlibrary_name: peft\ntags: {tags}\n---"
    head = f"# {_escaped(dossier.row.run_id)}\n\n{_escaped(origins.card_head(dossier))}"
    return _joined([front, head, *_texts(dossier, _CARD)])


def _texts(dossier: Dossier, chosen: Iterable[Make]) -> list[str]:
    """One text for each section with a heading; one without continues the text before it."""
    texts: list[str] = []
    for make in chosen:
        section = make(dossier)
        body = _text(section.blocks) if section else ""
        if section and section.short:
            texts.append(f"## {section.short}\n\n{body}")
        elif body:
            texts[-1] += f"\n\n{body}"
    return texts


def _text(shown: Iterable[Block]) -> str:
    return "\n\n".join(text for block in shown if (text := _block(block)))


def _block(block: Block) -> str:
    """A block as text, "" for what only the page shows."""
    if block.only == "page":
        return ""
    match block:
        case blocks.Paragraph(line=line):
            return _line(line)
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
            return _skills(batteries)
        case blocks.Answers():
            return _answers(block)
        case blocks.Steps(steps=steps):
            return "\n".join(f"{i}. {_step(step)}" for i, step in enumerate(steps, 1))
        case blocks.Figure(text=text):
            return text
        case blocks.Panel(blocks=inner):
            return _text(inner)
    return ""


def _table(heads: Sequence[str], rows: Sequence[Sequence[str | blocks.Tag | blocks.Cell]]) -> str:
    """A table without the columns that are drawn."""
    cells = [[_cell(cell) for cell in row] for row in rows]
    columns = [i for i, head in enumerate(heads) if head or any(row[i] for row in cells)]
    lines = [f"| {' | '.join(row[i] for i in columns)} |" for row in ([*heads], *cells)]
    return "\n".join([lines[0], f"|{'---|' * len(columns)}", *lines[1:]])


def _cell(cell: str | blocks.Tag | blocks.Cell) -> str:
    if isinstance(cell, blocks.Tag):
        return _escaped(cell.word)
    text = cell if isinstance(cell, str) else cell.text or cell.note
    return _escaped(clip(text, _CELL_CHARS))


def _skills(batteries: Sequence[blocks.Battery]) -> str:
    rows = []
    for battery in batteries:
        numbers = (battery.before, battery.after, battery.n, battery.lost)
        rows.append((battery.battery, *(value_text(number) for number in numbers), battery.verdict))
    return _table(("asked", "before", "after", "tasks", "lost", ""), rows)


def _answers(block: blocks.Answers) -> str:
    """Both answers in a fence longer than any they contain: a model wrote them."""
    texts = (block.example.prompt, block.example.before, block.example.after)
    prompt, before, after = (clip(text, _ANSWER_CHARS) for text in texts)
    text = f"prompt: {prompt}\nbefore: {before}\nafter:  {after}"
    fence = "```"
    while fence in text:
        fence += "`"
    return f"**{block.way}: {_escaped(block.example.task)}**\n\n{fence}\n{text}\n{fence}"


def _step(step: Station) -> str:
    if step.code:
        return f"{_escaped(step.name)}: {_escaped(step.detail)}, `{step.code}`"
    detail = f" ({_escaped(step.detail)})" if step.detail else ""
    return _escaped(step.name) + detail + (f": {step.verdict}" if step.verdict else "")


def _line(line: blocks.Line) -> str:
    text = ""
    for part in line:
        if isinstance(part, blocks.Code):
            text += f"`{part.text}`"
        else:
            text += _escaped_part(f"{part.word}:" if isinstance(part, blocks.Tag) else part)
    return " ".join(text.split())


def _escaped(text: str) -> str:
    """Untrusted text inside a line of Markdown: no markup, no table cell broken."""
    return " ".join(_escaped_part(text).split())


def _escaped_part(text: str) -> str:
    return _MARKUP.sub(r"\\\g<0>", text)


def _joined(texts: Sequence[str]) -> str:
    """The texts under the limit: the first whole one that no longer fits ends it."""
    joined = ""
    for index, text in enumerate(texts):
        room = MOST_CHARS - len(joined) - 160
        if len(text) > room:
            if index == 0 or room > 400:
                joined += _whole_lines(text, room)
            names = [left_out.partition("\n")[0].lstrip("# ") for left_out in texts[index:]]
            return joined + f"\n\nLeft out for length: {', '.join(names)[:100]}.\n"
        joined += ("\n\n" if joined else "") + text
    return joined + "\n"


def _whole_lines(text: str, room: int) -> str:
    """As many lines as `room` characters hold, none of a fence that would stay open."""
    lines = ["", ""]
    for line in text.split("\n"):
        room -= len(line) + 1
        if room < 0 or line.startswith("```"):
            break
        lines.append(line)
    return "\n".join(lines)

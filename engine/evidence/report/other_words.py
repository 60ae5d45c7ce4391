"""The report's sections on words: how models do if their tasks are asked in other words (reworded),
and the prompts that a search tried."""

from collections.abc import Sequence

from engine.core.format import significant
from engine.evidence.report import blocks
from engine.evidence.report.blocks import Block, Section, Tag
from engine.evidence.report.dossier import Dossier
from engine.evidence.robustness.robustness import KindResult, Robustness
from engine.evidence.stats.results import show, show_change
from engine.home.sanitize import clip
from engine.records.lines.prompt_line import PromptLine

_HEADS = (
    "model",
    "asked as it is",
    "in other words",
    "change",
    "95 % interval",
    "",
    "tasks",
    "how",
)
_PROMPT_CHARS = 600  # of a prompt in the table
_STYLES = ("name", "num", "num", "num", "num", "", "num rest", "rest")


def other_words(dossier: Dossier) -> Section | None:
    """The section on reworded tasks. Returns None if no task was reworded.

    It has a table with a row for each model and kind of rewording, then an example for each kind in
    which a model is fragile (significantly worse).
    """
    results = dossier.verdict.robustness
    if not results:
        return None
    lead = (
        "The same tasks as they are and in other words, compared task by task. A model that is "
        "fragile learnt the words of its training rows too; vary_wording trains with others."
    )
    rows = []
    examples: list[Block] = []
    for result in results:
        rows += _rows(dossier, result)
        fragile_kinds = [kind for kind in result.fragile if kind.examples]
        examples += [blocks.Paragraph([_flip_in_words(kind)]) for kind in fragile_kinds]
    table = blocks.Table(_HEADS, rows, _STYLES, style="models")
    return Section(
        title="In other words", short="Other words", blocks=[table, *examples], lead=[lead]
    )


def prompts(dossier: Dossier) -> Section | None:
    """The section of the report on the prompts that a search tried; None for other runs."""
    lines = PromptLine.read_all(dossier.run.prompts)
    if not lines:
        return None
    rows = []
    for line in lines:
        texts = [f"{name}: {text}" for name, text in line.texts.items()]
        rewards = (line.before, line.after, line.chosen_by)
        numbers = ["" if value is None else significant(value) for value in rewards]
        round_text = "its own" if line.round == 0 else str(line.round)
        name = f"chosen: {line.env_id}" if line.env_id else round_text
        rows.append((name, *numbers, clip(dossier.redact.text("; ".join(texts)), _PROMPT_CHARS)))
    heads = ("round", "earned before", "earned with it", "on the tasks that choose", "prompt")
    table = blocks.Table(heads, rows, ("name", "num", "num", "num", "rest"), style="models")
    lead = (
        "Mean reward on the train tasks of a round, by the prompt that was taken up and by the one "
        "that the endpoint wrote of its answers; those that earned more answered the tasks that "
        "choose. All texts in full: prompts.jsonl."
    )
    return Section(title="Prompts", short="Prompts", blocks=[table], lead=[lead])


def _rows(dossier: Dossier, probed: Robustness) -> Sequence[Sequence[str | Tag]]:
    """The table rows of one model, one for each kind of rewording."""
    name = dossier.redact.text(probed.model)
    return [(name, *_cells(kind)) for kind in probed.kinds]


def _cells(kind: KindResult) -> tuple[str | Tag, ...]:
    """The table cells of one kind of rewording, after the cell with the model's name.

    They are: level before, level after, change, its interval, the verdict, the number of tasks, and
    the kind with what was left out. The numbers are "" if nothing was compared.
    """
    outcome, measure = kind.outcome, kind.measure
    if outcome is None or measure is None:
        return ("", "", "", "", Tag(kind.word), "0", f"{kind.label}: {kind.why}")
    low, high = show_change(outcome.low, measure), show_change(outcome.high, measure)
    left_out = f" ({kind.left_out} left out: {kind.why})" if kind.left_out else ""
    return (
        show(outcome.before, measure),
        show(outcome.after, measure),
        show_change(outcome.diff, measure),
        f"{low} to {high}",
        Tag(kind.word),
        str(outcome.n),
        f"{kind.label}{left_out}",
    )


def _flip_in_words(kind: KindResult) -> str:
    """A sentence with the first task that a model did worse in other words, and both answers to
    it."""
    flip = kind.examples[0]
    return (
        f"{kind.label}, task {flip.task}: asked {flip.asked!r}, it answered {flip.after!r}; as it "
        f"is, {flip.before!r}."
    )

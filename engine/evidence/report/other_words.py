"""The report's sections on words: how models do if their tasks are asked in other words (reworded),
and the prompts that a search tried."""

from collections.abc import Sequence

from engine.core.format import significant
from engine.evidence.report import blocks
from engine.evidence.report.blocks import Block, Section, Tag
from engine.evidence.report.dossier import Dossier
from engine.evidence.robustness.robustness import KindResult, Robustness
from engine.evidence.stats.results import show, show_change
from engine.home.sanitize import Redactor, clip
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
    rows = [_prompt_row(line, dossier.redact) for line in lines]
    heads = ("round", "earned before", "earned with it", "on the tasks that choose", "prompt")
    table = blocks.Table(heads, rows, ("name", "num", "num", "num", "rest"), style="models")
    lead = (
        "Mean reward on the train tasks of a round, by the prompt that was taken up and by the one "
        "that the endpoint wrote of its answers; those that earned more answered the tasks that "
        "choose. All texts in full: prompts.jsonl."
    )
    return Section(title="Prompts", short="Prompts", blocks=[table], lead=[lead])


def _prompt_row(line: PromptLine, redact: Redactor) -> tuple[str, ...]:
    """The table row of one prompt: its round, its mean rewards before, with it and on the tasks
    that choose, and its texts without secrets, shortened."""
    if line.env_id:  # the prompt that the search chose, and the version that has it
        name = f"chosen: {line.env_id}"
    else:
        name = "its own" if line.round == 0 else str(line.round)
    rewards = (line.before, line.after, line.chosen_by)
    numbers = ["" if reward is None else significant(reward) for reward in rewards]
    texts = "; ".join(f"{part}: {text}" for part, text in line.texts.items())
    return (name, *numbers, clip(redact.text(texts), _PROMPT_CHARS))


def _rows(dossier: Dossier, model_result: Robustness) -> Sequence[Sequence[str | Tag]]:
    """The table rows of one model, one for each kind of rewording; `model_result` holds its results
    on the reworded tasks."""
    name = dossier.redact.text(model_result.model)
    return [(name, *_cells(kind)) for kind in model_result.kinds]


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

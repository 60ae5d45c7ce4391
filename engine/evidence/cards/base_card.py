"""The card of a base model as Markdown: its size and architecture, what it can do and how it must
be asked, and what was measured of it in this home."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from engine.core.files import read_object
from engine.home.rows import RunRow
from engine.home.run_dir import Home
from engine.home.sanitize import clip, redactor_for
from engine.home.store import Store
from engine.models import catalog
from engine.models.catalog import ModelRef
from engine.records.lines.evaluation_row import EvaluationRow
from engine.records.skill_card import SkillCard, find_skill_card

_LOOK_BACK = 200  # newest runs that are searched for the model
_MOST_EXAMS = 8  # evaluations that are shown
_EXAMPLE_CHARS = 90  # of a request or a reply
_EXAMPLES_OF_SKILL = 2  # if they come from a run of this home (a card of the model may have more)


def base_models(home: Home) -> list[str]:
    """The references of the base models that `get_status` lists. Only these have cards, so that a
    client cannot make the server read any path on the disk."""
    return [usable.ref for usable in catalog.usable_models(home) if usable.kind != "run"]


def base_card(home: Home, ref: str) -> str:
    """The card of a base model as Markdown; `ref` is one of `base_models`.

    Raises the errors of `catalog.resolve_model`.
    """
    model = catalog.resolve_model(home, ref)
    skills = find_skill_card(model.base_path)
    measured = _skills_of_card(skills) if skills else _skills_from_runs(home, ref)
    sections = [_head(model), _skills_section(measured), _exams_section(home, ref)]
    return "\n\n".join(section for section in sections if section) + "\n"


def _head(model: ModelRef) -> str:
    """The first lines of the card: name, architecture, sizes, and whether the model can think."""
    facts = model.facts
    thinking = "thinks where that is switched on" if facts.thinking else "has no thinking mode"
    return (
        f"# {model.ref}\n\n{facts.architecture}, {facts.params:,} parameters, "
        f"{facts.max_positions:,} tokens of context, a vocabulary of {facts.vocab:,}; {thinking}. "
        f"{model.kind.capitalize()}."
    )


@dataclass
class _Skill:
    """One skill of a base model.

    Attributes:
        right, asked: the number of right answers, and the number of questions.
        level: how well the model has the skill, in a word; "" if that was not recorded.
        examples: (request, reply, note) of some questions; the note is "" if there is none.
    """

    name: str
    right: int
    asked: int
    level: str = ""
    examples: list[tuple[str, str, str]] = field(default_factory=list)


def _skills_of_card(card: SkillCard) -> list[_Skill]:
    """The skills as the model's stored skill card holds them, measured when the model was made.

    The examples of a skill are (prompt, answer, note) each.
    """
    skills = []
    for name, right_share in card.scores.items():
        examples = [
            (example.prompt, example.answer, example.note)
            for example in card.examples.get(name, [])
        ]
        skills.append(
            _Skill(
                name,
                right=round(right_share * card.per_skill),
                asked=card.per_skill,  # questions of each skill
                level=card.levels.get(name, ""),  # how well it is known, in a word
                examples=examples,
            )
        )
    return skills


def _skills_from_runs(home: Home, ref: str) -> list[_Skill]:
    """The skills that a training run from this model asked about before training began; the newest
    such run counts. Returns [] if no run has asked."""
    for row in _runs_with(home, ref, "train"):
        path = home.run(row.run_id).kept("before")
        if path.is_file():
            return _skills_in(home, EvaluationRow.read_all(path))
    return []


def _skills_in(home: Home, rows: Sequence[EvaluationRow]) -> list[_Skill]:
    """The skills that the rows ask about, each with its count of right answers and its first
    `_EXAMPLES_OF_SKILL` requests."""
    redact = redactor_for(home, None)
    skills: dict[str, _Skill] = {}  # by name
    for row in rows:
        name = row.family or row.battery or "questions"
        skill = skills.setdefault(name, _Skill(name, right=0, asked=0))
        skill.asked += 1
        skill.right += row.success is True
        has_room = len(skill.examples) < _EXAMPLES_OF_SKILL
        if has_room and isinstance(row.prompt, list) and row.prompt:
            last_message = row.prompt[-1]  # the request itself
            request = redact.text(str(last_message.get("content", "")))
            answer = redact.text(row.completion or "")
            skill.examples.append((request, answer, ""))  # without a note
    return list(skills.values())


def _skills_section(skills: Sequence[_Skill]) -> str:
    """The section "What it can do": for each skill how many answers were right, and its example
    requests."""
    if not skills:
        return (
            "## What it can do\n\nNothing was asked yet in this home: every training from it asks "
            "48 short questions first, and `evaluate` asks the tasks of an environment."
        )
    lines = ["## What it can do", "", "Right greedy replies, and requests -> replies."]
    for skill in skills:
        level = f", {skill.level}" if skill.level else ""
        lines.append(f"- **{skill.name}**: {skill.right} of {skill.asked}{level}")
        lines += [f"  - {_example_text(*example)}" for example in skill.examples]
    return "\n".join(lines)


def _example_text(request: str, reply: str, note: str) -> str:
    """A request with its reply on one line of Markdown, such as "`Copy ab.` -> `ab` (note)"."""

    def as_code(text: str) -> str:
        """The text on one line between backticks, cut after `_EXAMPLE_CHARS` characters."""
        one_line = text.replace("\n", "\\n").replace("`", "'")
        return f"`{clip(one_line, _EXAMPLE_CHARS)}`"

    remark = f" ({note})" if note else ""
    return f"{as_code(request)} -> {as_code(reply)}{remark}"


def _exams_section(home: Home, ref: str) -> str:
    """The section "Measured in this home": one line for each environment, from the newest
    evaluation of the model on it; at most `_MOST_EXAMS` lines. Returns "" if there is no
    evaluation."""
    line_of_env: dict[str, str] = {}
    for row in _runs_with(home, ref, "evaluate"):  # the newest first
        result = read_object(home.run(row.run_id).result)
        for model_result in result.get("models") or ():  # of each model that was asked
            is_first_of_env = row.env_id not in line_of_env
            if model_result.get("ref") == ref and is_first_of_env:
                line_of_env[row.env_id] = _level_line(row, model_result)
    if not line_of_env:
        return ""
    lines = list(line_of_env.values())[:_MOST_EXAMS]
    return "\n".join(["## Measured in this home", "", *lines])


def _level_line(row: RunRow, level: dict[str, object]) -> str:
    """One line for one evaluation, such as "- sums@1: success 0.42, reward 0.5 on 100 tasks (e-7)".

    `level` is the model's entry in the evaluation's result.
    """
    scores = [
        f"{name} {level[name]:.4g}" for name in ("success", "reward") if level.get(name) is not None
    ]
    return f"- {row.env_id}: {', '.join(scores)} on {level.get('tasks')} tasks ({row.run_id})"


def _runs_with(home: Home, ref: str, kind: str) -> Iterator[RunRow]:
    """The newest finished runs of a kind that evaluated the model `ref` or trained it."""
    with Store(home) as store:
        rows = store.list_runs(_LOOK_BACK, kind=kind, states=("done",))
    for row in rows:
        config = home.run(row.run_id).find_config()
        if config is not None and ref in (row.model, *config.model_refs):
            yield row

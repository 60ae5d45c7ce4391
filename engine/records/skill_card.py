"""`card.json` beside the weights of a model: what the model can do, skill by skill, as measured
when it was made."""

from pathlib import Path

from pydantic import Field

from engine.records.record import Record

CARD = "card.json"


class SkillExample(Record):
    """An example of a skill.

    Attributes:
        prompt: a request in the form in which the model was taught it.
        answer: a right first reply.
        note: what else the request needs.
    """

    prompt: str
    answer: str
    note: str = ""


class SkillCard(Record):
    """What a model can do.

    Attributes:
        per_skill: on how many new prompts each skill was measured.
        levels: skill -> mastered, half known or absent.
        scores: skill -> share of right first replies, sampled greedily.
        examples: skill -> one example for every wording that was taught.
    """

    per_skill: int
    levels: dict[str, str]
    scores: dict[str, float]
    examples: dict[str, list[SkillExample]] = Field(default_factory=dict)


def find_skill_card(model: Path) -> SkillCard | None:
    """Read the card in the folder of a model; None if there is none, as for most models.

    Raises DamagedRecord if the file does not hold such a card.
    """
    path = model / CARD
    return SkillCard.read(path) if path.is_file() else None

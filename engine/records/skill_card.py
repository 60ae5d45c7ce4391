"""`card.json` beside the weights of a model that was measured when it was made: what it can do,
skill by skill."""

from pathlib import Path

from pydantic import Field

from engine.records.record import Record

CARD = "card.json"


class SkillExample(Record):
    """A request as the model was taught it, and a right first reply; `note` says what else the
    request needs."""

    prompt: str
    answer: str
    note: str = ""


class SkillCard(Record):
    """What a model can do.

    Attributes:
        per_skill: on how many fresh prompts each skill was measured.
        levels: of each skill: mastered, half known or absent.
        scores: of each skill: share of right greedy first replies.
        examples: of each skill: one for every wording that was taught.
    """

    per_skill: int
    levels: dict[str, str]
    scores: dict[str, float]
    examples: dict[str, list[SkillExample]] = Field(default_factory=dict)


def find_skill_card(model: Path) -> SkillCard | None:
    """The card in the folder of a model; None where there is none, as with most models.

    Raises DamagedRecord.
    """
    path = model / CARD
    return SkillCard.read(path) if path.is_file() else None

"""What a detector returns: one cause with its numbers, and the one change (lever) to try next."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from engine.core.hints import Change, Hint
from engine.records.lines.curves import number, short

# Root causes first: a finding may be the cause of those further down.
ORDER = (
    "infra",
    "reward_errors",
    "scorer_moves",
    "leak",
    "worse_start",
    "contradictory_rows",
    "duplicates",
    "pairs_alike",
    "other_exam",
    "constant_answer",
    "rows_disagree",
    "plateau",
    "unstable",
    "no_update",
    "judge_pleasing",
    "reward_hacking",
    "overfitting",
    "below_start",
    "reward_falls",
    "length_grew",
    "truncation",
    "overthinking",
    "repetition",
    "unparsed",
    "uniform_groups",
    "too_hard",
    "too_easy",
    "solved",
    "entropy_collapse",
    "too_short",
    "memorised_rows",
    "forgetting",
    "slow_reward",
    "underpowered",
)

Severity = Literal["high", "medium", "low"]
# Findings that forbid using the run's measurements or its model as they are.
_HIGH = frozenset(
    {
        "infra",
        "reward_errors",
        "scorer_moves",
        "unstable",
        "judge_pleasing",
        "reward_hacking",
        "below_start",
        "reward_falls",
        "leak",
        "too_short",  # hardly any task is solved
        "forgetting",
    }
)
# Findings that only cost time or certainty; the model itself is sound.
_LOW = frozenset({"slow_reward", "underpowered", "solved"})
_ARGUMENTS = frozenset({"rows"})  # tool arguments that a lever can change; all others are settings


@dataclass(frozen=True)
class Lever:
    """The one change to try next; built by `setting_lever` or `edit_lever`.

    Attributes:
        hint: the reason, or the edit in words; and, if it is known, what to change in the call that
            submitted the run.
        setting: the setting that `hint` changes, "" for an edit. It may also be an argument of the
            tool that submitted the run (`rows` of an evaluation).
        now: the value of that setting in this run.
    """

    hint: Hint
    setting: str = ""
    now: object = None

    @property
    def edit(self) -> str:
        """What to do, in words, for an edit; the reason, or "", for a setting."""
        return self.hint.text

    @property
    def to(self) -> object:
        """The new value of the setting; None for an edit, or if no value can be given."""
        if self.hint.change is None:
            return None
        # Tool arguments and settings have different names.
        new_values = {**self.hint.change.settings, **self.hint.change.arguments}
        return new_values.get(self.setting)

    def to_json(self) -> dict[str, object]:
        """The change to try, as a JSON object.

        The keys are setting, now, to and (if there is a reason) why; for an edit only edit.
        """
        if not self.setting:
            return {"edit": self.edit}
        # For a setting, `edit` holds the reason.
        change = {"setting": self.setting, "now": self.now, "to": self.to}
        return {**change, "why": self.edit} if self.edit else change

    def words(self) -> str:
        """The change as part of a sentence: "temperature = 1.0 (a reason)" for a setting, its text
        for an edit."""
        if not self.setting:
            return self.edit
        change = f"{self.setting} = {self.to}"  # `edit` holds the reason
        return f"{change} ({self.edit})" if self.edit else change


def setting_lever(name: str, now: object, to: object, why: str = "") -> Lever:
    """A lever (the one change to try next) that changes the setting `name` from `now` to `to`.

    `to` is None if the new value is not known; `why` is the reason, or "".
    """
    new_values = {} if to is None else {name: to}
    # A few settings (`_ARGUMENTS`) are given as arguments of the call that submits a run.
    change = Change(arguments=new_values) if name in _ARGUMENTS else Change(settings=new_values)
    return Lever(Hint(why, change=change), setting=name, now=now)


def lower_rate_lever(learning_rate: object, *, divisor: int, why: str = "") -> Lever:
    """The advice (a lever) to divide the learning rate by `divisor`, with two digits.

    `why` is the reason, or "". The advice names no new value if `learning_rate` is not a number.
    """
    new_rate = None
    if isinstance(learning_rate, int | float):
        new_rate = float(f"{learning_rate / divisor:.2g}")
    return setting_lever("learning_rate", now=learning_rate, to=new_rate, why=why)


def edit_lever(text: str, change: Change | None = None) -> Lever:
    """A lever (the one change to try next) that is not a setting: `text` says what to edit by hand.

    `change` holds the arguments or settings to change when the run is submitted again; None if they
    stay as they were.
    """
    return Lever(Hint(text, change=change))


@dataclass(frozen=True)
class Finding:
    """One cause of trouble in a run.

    Attributes:
        id: one of `ORDER`.
        what: what was observed, one sentence with its numbers.
        evidence: the numbers by name; None if one is not known.
        lever: the one change to try next.
        playbook: slug of the section of the guide that says more.
        examples: which rollouts show the finding, as the argument `pick` of `read_rollouts`; "" if
            none do.
        where: the condition that filters them, as the argument `where` of `read_rollouts`.
        is_cause: whether it is known to be a cause and not an effect; such findings come first.
        severity: how far it devalues the run's result; "" takes the usual one of the id.
        cost: the share of held-out score, or of earlier skills, that was lost by it; for a cause of
            not learning, the share of held-out tasks left unsolved; 0 if nothing was lost or
            measured.
    """

    id: str
    what: str
    evidence: Mapping[str, object]
    lever: Lever
    playbook: str = "failures"
    examples: str = ""
    where: str = ""
    is_cause: bool = False
    severity: Severity | Literal[""] = ""
    cost: float = 0.0

    def __post_init__(self) -> None:
        """Fill in the usual severity of the id if none was given."""
        if self.id in _HIGH:
            usual = "high"
        elif self.id in _LOW:
            usual = "low"
        else:
            usual = "medium"
        # A frozen dataclass refuses a plain assignment.
        object.__setattr__(self, "severity", self.severity or usual)

    @property
    def numbers(self) -> dict[str, object]:
        """The evidence with rounded floats; None and NaN are left out."""
        numbers: dict[str, object] = {}
        for name, value in self.evidence.items():
            rounded_value = _in_few_digits(value) if isinstance(value, float) else value
            if rounded_value is not None:  # NaN becomes None
                numbers[name] = rounded_value
        return numbers

    @property
    def rank(self) -> tuple[bool, float, int]:
        """The sort key: known causes and machine failures first, then the highest cost, then the
        place of the id in `ORDER`."""
        comes_first = self.is_cause or self.id == "infra"
        # Costs that are equal in whole percent count as equal. False sorts before True.
        return (not comes_first, -round(self.cost, 2), ORDER.index(self.id))


def _in_few_digits(value: float) -> float | None:
    """The value with few digits, as evidence shows it; None for NaN and infinity."""
    return short(value) if number(value) is not None else None


def ranked(findings: list[Finding]) -> list[Finding]:
    """The findings sorted: known causes first, then the costliest, then causes before their
    effects."""
    return sorted(findings, key=lambda finding: finding.rank)

"""What a detector says: one cause with its numbers, and the one lever to pull."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from engine.core.hints import Change, Hint
from engine.records.lines.curves import number, short

# Nearest to the root first: what stands above may be the reason for what stands below.
ORDER = (
    "infra",
    "reward_errors",
    "scorer_moves",
    "unstable",
    "no_update",
    "judge_pleasing",
    "reward_hacking",
    "overfitting",
    "below_start",
    "length_grew",
    "truncation",
    "overthinking",
    "repetition",
    "unparsed",
    "uniform_groups",
    "too_hard",
    "too_easy",
    "entropy_collapse",
    "too_short",
    "forgetting",
    "slow_reward",
    "underpowered",
)

Severity = Literal["high", "medium", "low"]
# What a run measured or learned is not to be used as it is.
_HIGH = frozenset(
    {
        "infra",
        "reward_errors",
        "scorer_moves",
        "unstable",
        "judge_pleasing",
        "reward_hacking",
        "below_start",
        "forgetting",
    }
)
# It costs time, or certainty; what was learned stands.
_LOW = frozenset({"slow_reward", "underpowered"})
_ARGUMENTS = frozenset({"rows"})  # of a tool; every other name that a lever changes is a setting


@dataclass(frozen=True)
class Lever:
    """The one change to try next; made by `setting_lever` or `edit_lever`.

    Attributes:
        hint: the reason or the edit in words; where it is known, what to change in the call that
            the run came from.
        setting: the setting that `hint` changes, "" for an edit. It may also be an argument of the
            tool the run came from (`rows` of an evaluation).
        now: the value of that setting in this run.
    """

    hint: Hint
    setting: str = ""
    now: object = None

    @property
    def edit(self) -> str:
        """What to edit in words; of a setting the reason, "" where there is none to give."""
        return self.hint.text

    @property
    def to(self) -> object:
        """The new value of the setting, None where nobody can say it."""
        change = self.hint.change or Change()
        return {**change.settings, **change.arguments}.get(self.setting)

    def to_json(self) -> dict[str, object]:
        if self.setting:
            change: dict[str, object] = {"setting": self.setting, "now": self.now, "to": self.to}
            return change | ({"why": self.edit} if self.edit else {})
        return {"edit": self.edit}

    def words(self) -> str:
        if not self.setting:
            return self.edit
        return f"{self.setting} = {self.to}" + (f" ({self.edit})" if self.edit else "")


def setting_lever(name: str, now: object, to: object, why: str = "") -> Lever:
    """Set `name` from `now` to `to`; None where the new value is not known."""
    given = {} if to is None else {name: to}
    change = Change(arguments=given) if name in _ARGUMENTS else Change(settings=given)
    return Lever(Hint(why, change=change), name, now)


def edit_lever(text: str, change: Change | None = None) -> Lever:
    """Edit something, as `text` says; `change` where it also changes the run's call."""
    return Lever(Hint(text, change=change))


@dataclass(frozen=True)
class Finding:
    """One cause.

    Attributes:
        id: one of `ORDER`.
        what: what was seen, one sentence with its numbers.
        evidence: the numbers.
        playbook: slug of the section that says more.
        pick, where: how `read_rollouts` shows examples; "" when rollouts show nothing.
        root: known to be the cause and not an effect; such findings come first.
        severity: how much it takes from what the run came to; by its id where it is not given.
    """

    id: str
    what: str
    evidence: Mapping[str, object]
    lever: Lever
    playbook: str = "failures"
    pick: str = ""
    where: str = ""
    root: bool = field(default=False)
    severity: Severity | Literal[""] = ""

    def __post_init__(self) -> None:
        usual: Severity = "high" if self.id in _HIGH else "low" if self.id in _LOW else "medium"
        object.__setattr__(self, "severity", self.severity or usual)

    @property
    def numbers(self) -> dict[str, object]:
        """The evidence in few digits, what is not known left out."""
        rounded = {
            name: _in_few_digits(value) if isinstance(value, float) else value
            for name, value in self.evidence.items()
        }
        return {name: value for name, value in rounded.items() if value is not None}

    @property
    def rank(self) -> tuple[bool, int]:
        return (not self.root and self.id != "infra", ORDER.index(self.id))


def _in_few_digits(value: float) -> float | None:
    return short(value) if number(value) is not None else None


def ranked(findings: list[Finding]) -> list[Finding]:
    """Causes before their effects."""
    return sorted(findings, key=lambda finding: finding.rank)

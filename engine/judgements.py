"""What the checks of a dry run come to: their form, and the judgement of data and of a probe."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from engine.core.errors import UserError
from engine.core.hints import Call, Hint, hint_of
from engine.core.reply import Reply
from engine.cost.estimate import none_fit
from engine.environments.env_facts import EnvFacts
from engine.evidence.stats.learnability import BROKEN
from engine.records.probe_result import ProbeResult
from engine.records.settings import SFTSettings, TrainSettings
from envs.audit.audit_summary import best_degenerate

FEW_HELDOUT = 100
Status = Literal["pass", "warn", "fail", "skip"]
Fact = TypeVar("Fact")


@dataclass(frozen=True)
class Outcome:
    """What a check came to.

    Attributes:
        detail: what was seen, with numbers.
        fix: what to do about it, "" where nothing is to be done.
        code: of the error that a submit would raise for it, "" for none.
    """

    status: Status
    detail: str
    fix: str | Hint = ""
    code: str = ""


@dataclass(frozen=True)
class Check:
    """A check as the report shows it; `fix` already names the whole call to make."""

    name: str
    status: Status
    detail: str
    fix: Hint
    code: str

    def to_json(self) -> dict[str, object]:
        """name, status, detail, fix, and where there are any the call and the error's code."""
        shown = {"name": self.name, "status": self.status, "detail": self.detail}
        return shown | self.fix.as_fields("fix") | ({"code": self.code} if self.code else {})


class Stairs:
    """Checks in order.

    Attributes:
        rehearsal: gives the dry run that this is, which a fix may change.
        checks: those made so far.
    """

    def __init__(self, rehearsal: Callable[[], Call]) -> None:
        self.rehearsal = rehearsal
        self.checks: list[Check] = []

    def step(self, name: str, needs: Sequence[str], check: Callable[[], Outcome]) -> None:
        """Run `check` unless one of `needs` has not passed; a UserError is a fail."""
        missing = [need for need in needs if self.status(need) not in ("pass", "warn")]
        if missing:
            outcome = Outcome("skip", f"needs {missing[0]}")
        else:
            try:
                outcome = check()
            except UserError as error:
                outcome = Outcome("fail", error.message, error.advice, error.code)
        fix = hint_of(outcome.fix).for_call(self.rehearsal())
        self.checks.append(Check(name, outcome.status, outcome.detail, fix, outcome.code))

    def status(self, name: str) -> str:
        """The status of a check that was made; "skip" for any other."""
        return next((check.status for check in self.checks if check.name == name), "skip")

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.status == "fail"]


def known(fact: Fact | None) -> Fact:
    """A fact that an earlier check must have learnt."""
    assert fact is not None
    return fact


def judge_data(statistics: Reply, rows: EnvFacts, settings: TrainSettings) -> Outcome:
    """Whether the training rows fit the settings.

    Args:
        statistics: of the rows, as engine.environments.env_facts counts them.
    """
    prompt, target = statistics["prompt"], statistics["target"]
    detail = (
        f"{statistics['rows']} train rows, "
        f"prompts of {prompt['p50']} tokens (95 %: {prompt['p95']}), "
        f"answers of {target['p50']} (95 %: {target['p95']})"
    )
    if rows.refused:
        return Outcome(
            "fail",
            f"the chat template refuses {rows.refused} rows; {rows.refusal}",
            "Correct these rows: roles and content must be what the template takes.",
            "DATASET_INVALID",
        )
    if unfit := none_fit(statistics, settings):
        return Outcome("fail", unfit, "Raise max_length.", "DATASET_INVALID")
    weak = []
    if statistics["dropped"]:
        weak.append(
            (f"{statistics['dropped']} rows do not fit and are left out", "Raise max_length.")
        )
    if statistics["truncated_share"] > 0.02:
        name, limit = (
            ("max_length", settings.max_length)
            if isinstance(settings, SFTSettings)
            else ("max_tokens", settings.max_tokens)
        )
        share = f"{statistics['truncated_share']:.0%} of the answers are cut at {name}"
        weak.append((f"{share} = {limit}", f"Raise {name}."))
    if isinstance(settings, SFTSettings) and statistics["without_answer"]:
        weak.append((f"{statistics['without_answer']} rows have no answer and are left out", ""))
    if statistics["duplicate_share"] > 0.2:
        weak.append(
            (f"{statistics['duplicate_share']:.0%} of the prompts repeat an earlier one", "")
        )
    if rows.heldout_rows < FEW_HELDOUT:
        weak.append(
            (
                f"{rows.heldout_rows} held-out rows can show only large gains",
                f"Give the environment at least {FEW_HELDOUT} held-out rows, better 400.",
            )
        )
    if not weak:
        return Outcome("pass", detail)
    text = "; ".join(weakness for weakness, _ in weak)
    return Outcome("warn", f"{detail}; {text}", " ".join(fix for _, fix in weak if fix))


def too_hard(result: ProbeResult) -> bool:
    """Whether GRPO would have next to nothing to select because hardly any answer is right."""
    hard, easy = result.too_hard, result.too_easy
    return result.effective < 0.2 and hard >= easy and hard > 0


def beside_degenerate(outcome: Outcome, result: ProbeResult, audit: Reply) -> Outcome:
    """`outcome`, but a warning where a degenerate answer (empty, repeated, ...) earns more than
    the model does on average: GRPO would learn to give it, for that is nearer than being right."""
    best, earned = best_degenerate(audit.get("probes") or []), result.reward_mean
    if best is None or earned is None or outcome.status == "fail":
        return outcome
    if best["mean"] <= max(0.0, earned):
        return outcome
    probe = best["probe"]
    text = (
        f"{probe} pays {best['mean']:.2f}, the model earns {earned:.2f} on average: {probe} is the "
        "best it can reach"
    )
    fix = f"Pay less for {probe} than for a first try, and push again, or train by SFT first."
    fix = f"{fix} {outcome.fix}".strip()
    return Outcome("warn", f"{text}; {outcome.detail}", fix, outcome.code)


def judge_probe(result: ProbeResult) -> Outcome:
    """A probe's numbers in words, with the one lever they point at."""
    effective, truncated = result.effective, result.truncated_share
    passes = ", ".join(f"pass@{k} {value:.2f}" for k, value in result.pass_at_k.items())
    detail = (
        f"{effective:.0%} of {result.tasks} groups have variance "
        f"({result.too_hard:.0%} too hard, {result.too_easy:.0%} too easy), {passes}, "
        f"{truncated:.0%} truncated"
    )
    if shares := result.gradient_share:
        carried = ", ".join(f"{group}: {share:.0%}" for group, share in shares.items())
        detail += f"; groups that would teach, by group_size: {carried}"
    if not result.error_share:
        return _judge_groups(result, detail)
    detail = f"{result.error_share:.0%} of the scores failed; {detail}"
    fix = "Mend score() and push again."
    if result.error_share > BROKEN:
        return Outcome("fail", detail, fix, "ENV_INVALID")
    return Outcome("warn", detail, f"{fix} {_judge_groups(result, detail).fix}".strip())


def _judge_groups(result: ProbeResult, detail: str) -> Outcome:
    """Whether groups that were scored would teach."""
    effective, truncated = result.effective, result.truncated_share
    if truncated > 0.1:
        after = " If the groups stay too hard: train by SFT first." if too_hard(result) else ""
        return Outcome("warn", detail, f"Raise max_tokens, or ask for shorter answers.{after}")
    if too_hard(result):
        return Outcome(
            "warn",
            detail,
            "GRPO has little to select: train by SFT first, take easier tasks, give partial "
            "credit or raise group_size.",
        )
    if effective < 0.2 and result.too_easy:
        return Outcome("warn", detail, "The tasks are solved already: take harder ones.")
    text = "; ".join(item.say for item in result.advice)
    return Outcome("pass", detail, f"{text[:1].upper()}{text[1:]}." if text else "")

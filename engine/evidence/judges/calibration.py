"""Asks a judge (a language model that scores) about gold answers, and stores how far it agrees.

The result is stored by judge and rubric. A verdict may rest on a judge whose kappa is at least
KAPPA, whose interval does not reach below KAPPA_LOW, and which does not clearly favour long answers
or answers of its own model. 0.6 begins what Landis and Koch (1977) call substantial agreement.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import TypeVar

from pydantic import Field

from engine.core.errors import UserError
from engine.core.format import counted
from engine.core.reply import Reply
from engine.endpoints.judges import judge_in
from engine.evidence.judges.agreement import (
    Figure,
    Judged,
    agreement,
    kappa,
    length_lean,
    own_lean,
    with_interval,
)
from engine.evidence.judges.gold import GoldAnswer, read_gold
from engine.home.run_dir import Home
from engine.records.record import Record
from envs.base import Task
from envs.judge import Judge, Rubric

KAPPA, KAPPA_LOW = 0.6, 0.4
FEWEST = 30  # answers; with fewer the interval says nothing
LEAN = 0.1  # a judge is refused if the whole interval of a lean (bias) lies beyond this
KEPT = 20  # earlier calibrations that are kept beside the newest
MOST_PAIRS = 200  # of answers that are asked in both orders: each costs two requests
T = TypeVar("T")
R = TypeVar("R")
AT_ONCE = 8  # requests to the judge


class PastCalibration(Record):
    """An earlier calibration of a judge.

    Attributes:
        time, gold, agreement, kappa, marks: as in `Calibration`.
        change: of the agreement from then to the newest calibration on the same gold labels, paired
            by answer; None if there is none.
    """

    time: float
    gold: str
    agreement: Figure
    kappa: Figure
    marks: str
    change: Figure | None = None


class Calibration(Record):
    """What came of holding a judge against gold labels, as it is stored.

    Attributes:
        judge, rubric: hashes of the judge and of its criteria (envs/judge.py, envs/rubric.py).
        model, url: the judge's model and where it is served.
        answers, unjudged: how many gold answers the judge scored, and how many it gave no verdict
            on.
        agreement, kappa: of the judge with the labels.
        length, own, position: how much more the judge gives longer answers, answers of its own
            model, and the first of two answers; None if the gold answers cannot show it.
        kappa_before: kappa of the calibration that this one replaced; None for the first.
        time: seconds since the epoch; 0 if it was not recorded.
        gold: a hash of the gold answers and their labels, whatever their order; "" if not recorded.
        marks: a character for each gold answer, in the order of the hash: "1" if judge and label
            agree, "0" if not, "-" if the judge gave no verdict.
        earlier: the calibrations before this one, oldest first.
    """

    judge: str
    rubric: str
    model: str
    url: str
    answers: int
    unjudged: int
    agreement: Figure
    kappa: Figure
    length: Figure | None = None
    own: Figure | None = None
    position: Figure | None = None
    kappa_before: float | None = None
    time: float = 0.0
    gold: str = ""
    marks: str = ""
    earlier: list[PastCalibration] = Field(default_factory=list)

    @property
    def faults(self) -> list[str]:
        """The reasons why no verdict may rest on the judge, one sentence part each. Empty if one
        may."""
        faults = []
        if self.answers < FEWEST:
            faults.append(f"only {self.answers} gold answers were judged, at least {FEWEST} needed")
        if self.kappa.value < KAPPA or self.kappa.low < KAPPA_LOW:
            kappa_text = with_interval_text(self.kappa)
            faults.append(
                f"kappa {kappa_text} is below {KAPPA:g} (its interval below {KAPPA_LOW:g})"
            )
        biases = {"longer answers": self.length, "what its own model wrote": self.own}
        for favoured, bias in biases.items():
            if bias is not None and bias.beyond(LEAN):
                verb = "favours" if bias.value > 0 else "disfavours"
                faults.append(f"it {verb} {favoured} by {with_interval_text(bias)}")
        return faults

    @property
    def sentences(self) -> list[str]:
        """One sentence for the agreement and one for each bias that was measured, with intervals;
        then one for answers without a verdict, one for the kappa of the previous calibration, and
        one for the change on the same gold answers, if any."""
        lines = [
            f"Agreement with {self.answers} gold labels: {with_interval_text(self.agreement)}, "
            f"kappa {with_interval_text(self.kappa)}."
        ]
        biases = {
            "Longer answers": self.length,
            "What its own model wrote": self.own,
            "What stands first of two": self.position,
        }
        for favoured, bias in biases.items():
            if bias is not None:
                word = "a bias" if bias.beyond(0.0) else "no clear bias"
                lines.append(f"{favoured}: {with_interval_text(bias, sign=True)} more, {word}.")
        if self.unjudged:
            lines.append(f"No verdict on {self.unjudged} gold answers.")
        if self.kappa_before is not None:
            lines.append(f"Kappa was {self.kappa_before:.2f} the time before.")
        on_same_gold = [past for past in self.earlier if past.gold == self.gold and past.change]
        if on_same_gold:
            lines.append(change_sentence(on_same_gold[-1]))
        return lines


def change_sentence(past: PastCalibration) -> str:
    """A sentence on how the agreement has changed since an earlier calibration on the same gold
    labels; it names a drop whose whole interval lies below 0. `past.change` must not be None."""
    assert past.change is not None
    change = with_interval_text(past.change, sign=True)
    if past.change.high < 0:
        word = "The judge drifted"
    elif past.change.low > 0:
        word = "The judge agrees more"
    else:
        word = "No clear drift of the judge"
    return (
        f"{word}: on the same gold labels its agreement has changed by {change} since "
        f"{date_text(past.time)}."
    )


def date_text(seconds: float) -> str:
    """The day (UTC) of a time in seconds since the epoch, such as "2026-11-28"."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d")


def with_interval_text(figure: Figure, *, sign: bool = False) -> str:
    """A figure with its interval as text, such as "0.71 (0.60 to 0.81)"; with `sign`, "+0.71 (+0.60
    to +0.81)"."""
    form = "+.2f" if sign else ".2f"
    return f"{figure.value:{form}} ({figure.low:{form}} to {figure.high:{form}})"


def calibrate(home: Home, judge: Judge, rubric: Rubric, gold: Sequence[GoldAnswer]) -> Calibration:
    """Ask the judge about every gold answer, and about pairs of answers to one prompt in both
    orders. Store the calibration and return it.

    Raises UserError BAD_ARGUMENT if every criterion of the rubric is decided by code (the judge has
    nothing to decide), or if the judge gave no verdict on any answer.
    """
    answers, preferences_for_first = _ask_about_all(judge, rubric, gold)
    judged = [answer for answer in answers if answer is not None]
    gold_hash, marks = _hash_and_marks(gold, answers)
    stored = find_calibration(home, judge, rubric)
    agreed, beyond_chance = with_interval(judged, agreement), with_interval(judged, kappa)
    assert agreed is not None and beyond_chance is not None  # both exist for any answers
    calibration = Calibration(
        judge=judge.judge_hash,
        rubric=rubric.judged_hash,
        model=judge.model,
        url=judge.place,
        answers=len(judged),
        unjudged=len(gold) - len(judged),
        agreement=agreed,
        kappa=beyond_chance,
        length=with_interval(judged, length_lean),
        own=with_interval(judged, own_lean),
        position=with_interval(preferences_for_first, fmean),
        kappa_before=stored.kappa.value if stored else None,
        time=time.time(),
        gold=gold_hash,
        marks=marks,
        earlier=_earlier_calibrations(stored, gold_hash, marks),
    )
    home.judges.mkdir(exist_ok=True)
    calibration.write(_calibration_path(home, judge, rubric))
    return calibration


def _hash_and_marks(
    gold: Sequence[GoldAnswer], answers: Sequence[Judged | None]
) -> tuple[str, str]:
    """(hash of the gold answers, their marks in the order of the hash). A mark is "1" if judge and
    label agree, "0" if not, "-" for no verdict. `answers` is what the judge made of each gold
    answer, None for no verdict."""
    texts_and_marks: list[tuple[str, str]] = []
    for gold_answer, judged in zip(gold, answers, strict=True):
        if judged is None:  # no verdict
            mark = "-"
        else:
            mark = str(int(judged.passed == judged.is_right))
        texts_and_marks.append((json.dumps(astuple(gold_answer)), mark))
    texts_and_marks.sort()
    texts = [text for text, _ in texts_and_marks]
    digest = hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]
    return digest, "".join(mark for _, mark in texts_and_marks)


def _earlier_calibrations(
    stored: Calibration | None, gold: str, marks: str
) -> list[PastCalibration]:
    """The calibrations before a new one, oldest first, at most KEPT.

    Those on the same gold labels get the change of the agreement up to the new one. `stored` is the
    calibration that is replaced; `gold` and `marks` are those of the new one.
    """
    if stored is None or not stored.gold:  # one of an earlier version says nothing of its answers
        return []
    shared_fields = PastCalibration.model_fields.keys() - {"change"}
    replaced = PastCalibration(**{name: getattr(stored, name) for name in shared_fields})
    newest_calibrations = [*stored.earlier, replaced][-KEPT:]
    earlier = []
    for past in newest_calibrations:
        if past.gold == gold:
            past = past.model_copy(update={"change": _change_of_agreement(past.marks, marks)})
        earlier.append(past)
    return earlier


def _change_of_agreement(before: str, after: str) -> Figure | None:
    """The change of the agreement between two calibrations, paired by answer; None if no answer got
    a verdict in both.

    `before` and `after` are their marks, one character for each answer: "1" if judge and label
    agree, "0" if not, "-" for no verdict.
    """
    changes = []
    for old, new in zip(before, after, strict=True):
        has_both_verdicts = "-" not in (old, new)
        if has_both_verdicts:
            changes.append(int(new) - int(old))
    return with_interval(changes, fmean)


def _ask_about_all(
    judge: Judge, rubric: Rubric, gold: Sequence[GoldAnswer]
) -> tuple[list[Judged | None], list[float]]:
    """Ask the judge about every gold answer, and about pairs of answers in both orders.

    Returns what the judge made of each answer (None: no verdict), and for each pair how much more
    it gave the answer that stood first, without pairs that got no verdict. Raises UserError
    BAD_ARGUMENT if the judge has nothing to decide, or gave no verdict on any answer.
    """
    if not rubric.for_judge:
        message = "every criterion of the rubric is decided by code: there is no judge to calibrate"
        raise UserError("BAD_ARGUMENT", message, hint="Add a criterion without check.")
    asker = _Asker(judge, Rubric(*rubric.for_judge, pass_at=rubric.pass_at))
    answers = _map_in_threads(asker.judge_answer, gold)
    if not any(answers):
        raise UserError(
            "BAD_ARGUMENT",
            f"the judge gave no verdict on any of {len(gold)} gold answers: {asker.first_error}",
            hint="Check url, model and key of [judge], and that it replies with JSON.",
        )
    preferences = _map_in_threads(asker.preference_for_first, _pairs(gold))
    return answers, [preference for preference in preferences if preference is not None]


def calibrate_files(home: Home, rubric: Path, gold: Path) -> Reply:
    """Calibrate the judge of a rubric file with the gold answers of another file. Returns the reply
    of the command.

    Raises UserError BAD_ARGUMENT if a file cannot be read, if the judge has nothing to decide, or
    if it gave no verdict on any answer; MODEL_NOT_FOUND or ENV_SECRETS if it is named and
    config.toml lacks it or its key is not set.
    """
    answers = read_gold(gold)
    try:
        parsed, judge = Rubric.from_file(rubric), judge_in(home, rubric)
    except ValueError as problem:
        hint = "docs/judges.md shows a rubric.toml."
        raise UserError("BAD_ARGUMENT", str(problem), hint=hint, field="rubric") from problem
    calibration = calibrate(home, judge, parsed, answers)
    faults = calibration.faults
    if faults:
        trust_text = f"may not decide verdicts: {'; '.join(faults)}"
    else:
        trust_text = "may decide verdicts"
    count_text = counted(calibration.answers, "gold answer")
    sentences = " ".join(calibration.sentences)
    return {
        "summary": f"{calibration.model}, held against {count_text}, {trust_text}. {sentences}",
        "trusted": not faults,
        **calibration.model_dump(mode="json", exclude={"marks", "earlier"}),
        "next": [],
    }


def find_calibration(home: Home, judge: Judge, rubric: Rubric) -> Calibration | None:
    """The stored calibration of this judge with this rubric. Returns None if there is none. Raises
    DamagedRecord if its file cannot be parsed."""
    try:
        return Calibration.read(_calibration_path(home, judge, rubric))
    except FileNotFoundError:
        return None


def _calibration_path(home: Home, judge: Judge, rubric: Rubric) -> Path:
    """The file of the calibration of this judge with this rubric."""
    return home.judges / f"{judge.judge_hash}-{rubric.judged_hash}.json"


@dataclass
class _Asker:
    """Asks a judge about gold answers.

    Attributes:
        first_error: why the judge gave no verdict the first time that it gave none; "" until then.
    """

    judge: Judge
    rubric: Rubric
    first_error: str = ""

    def judge_answer(self, gold: GoldAnswer) -> Judged | None:
        """Ask the judge about a gold answer. Returns None if it gave no verdict."""
        score = self.rubric.score(_task_of(gold), gold.answer, self.judge)
        if score.error:
            self.first_error = self.first_error or score.error
            return None
        # The mean of the criteria instead of the reward, which is 0 if a required one fails.
        # `score.parts` maps a criterion to (weight, value).
        weighted_values = [weight * value for weight, value in score.parts.values()]
        weights = [weight for weight, _ in score.parts.values()]
        # Without required criteria an answer passes from 0.5 on, as a label is right from 0.5.
        passed = bool(score.success) if self._has_required else score.reward >= 0.5
        return Judged(
            label=gold.label,
            value=sum(weighted_values) / sum(weights),
            passed=passed,
            length=len(gold.answer),
            own=gold.author == self.judge.model if gold.author else None,
        )

    @property
    def _has_required(self) -> bool:
        """Whether an answer must meet some criteria of the rubric to be right."""
        return any(criterion.required for criterion in self.rubric.criteria)

    def preference_for_first(self, pair: tuple[GoldAnswer, GoldAnswer]) -> float | None:
        """How much more the judge gives an answer because it stands first: the mean preference for
        the first place over both orders of the pair. 0 without a bias; None if the judge gave no
        verdict."""
        first, second = pair
        criteria, task = self.rubric.for_judge, _task_of(first)
        try:
            forward = self.judge.prefers_first(criteria, task, first.answer, second.answer)
            backward = self.judge.prefers_first(criteria, task, second.answer, first.answer)
        except Exception as error:  # noqa: BLE001 - a judge without verdict is a result here
            self.first_error = self.first_error or str(error)
            return None
        return (forward + backward) / 2


def _task_of(gold: GoldAnswer) -> Task:
    """A task with the prompt and the reference answer of a gold answer, as the judge is shown
    it."""
    return Task("gold", gold.prompt, gold.reference or None)


def _pairs(gold: Sequence[GoldAnswer]) -> list[tuple[GoldAnswer, GoldAnswer]]:
    """Pairs of different answers to the same prompt; the first MOST_PAIRS of them."""
    by_prompt: dict[str, list[GoldAnswer]] = {}
    for answer in gold:
        by_prompt.setdefault(answer.prompt, []).append(answer)
    pairs = []
    for answers in by_prompt.values():
        for first, second in combinations(answers, 2):
            if first.answer != second.answer:
                pairs.append((first, second))
    return pairs[:MOST_PAIRS]


def _map_in_threads(ask: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Call `ask` on each item, up to AT_ONCE at a time in threads. Returns the results in the order
    of the items."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(ask, items))

"""Scores answers once more with an env process that has scored nothing else.

An environment that counts its calls, remembers answers or patches its own scoring may give one
answer two rewards: one late in the life of its process, another in a new process. Answers with two
rewards are scored several times by a third process. If that gives the second reward every time, the
difference is confirmed (the reward depends on the process's past); if not, the scorer is random.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from envs.audit.audit_report import Rescoring
from envs.config.problem import EnvProblem
from envs.json_types import ScoreReply

SHOWN = 5  # examples in the result
THIRD_S = 5.0  # seconds after which the third process gets no further answers
TIMES = 3  # how often the third process must repeat the second's reward: once may be chance
TASK_CHARS = 80  # how much of a task's id a sentence shows
ERROR_CHARS = 200


@dataclass(frozen=True)
class Scored:
    """An answer with the reward it got, and how to score it again.

    Attributes:
        identity: the part of an example that says which answer it is (`task`, `completion`, ...).
        reward: the reward it got first.
        score: scores the answer with the process passed to it, like `EnvProcess.score`. If it
            returns a text instead of a score, that is the reason why the answer cannot be scored.
    """

    identity: Mapping[str, Any]
    reward: float
    score: Callable[[Any], ScoreReply | str]


def score_again(
    answers: Sequence[Scored],
    start_process: Callable[[], Any],
    time_is_up: Callable[[], bool],
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Rescoring:
    """Score answers again with a fresh process and count those that get another reward.

    An answer whose reward differs from its first, however little, is scored once more by the same
    process. If that reward differs from the first too, a third process scores the answer.

    Args:
        answers: answers with the rewards they got first.
        start_process: starts a process that has scored nothing yet; called a second time if rewards
            differ. It may raise EnvProblem, which becomes the `why` of the result.
        time_is_up: returns True once no further answers should be scored.
        clock: returns the time in seconds; the third process may use THIRD_S (5) seconds, even
            after `time_is_up`.
    """
    progress = _Progress()
    stop_reason = ""
    try:
        process = start_process() if answers else None
        for answer in answers:
            # `score` returns False if the time was up before the answer was judged.
            if time_is_up() or not progress.score(answer, process, time_is_up):
                stop_reason = "the time was up"
                break
        _ask_third_process(progress.changed, start_process, clock)
    except EnvProblem as problem:
        stop_reason = str(problem)[:ERROR_CHARS]
    return _rescoring(len(answers), progress, stop_reason)


def _rescoring(answer_count: int, progress: "_Progress", stop_reason: str) -> Rescoring:
    """Return the result of scoring answers again.

    Args:
        answer_count: how many answers were to be scored.
        progress: what the scoring has shown.
        stop_reason: why not all of them were scored; "" if they were.
    """
    changed = progress.changed
    failed = sum(item.failed for item in changed)
    # Confirmed answers come first, because False sorts before True.
    confirmed_first = sorted(changed, key=lambda item: not item.confirmed)
    return {
        "asked": answer_count,
        "scored": progress.scored,
        "differing": len(changed) - failed,
        "failed": failed,
        "confirmed": sum(item.confirmed for item in changed),
        "wavering": sum(item.wavering for item in changed),
        "skipped": progress.skipped,
        "examples": [item.example() for item in confirmed_first[:SHOWN]],
        "why": stop_reason,
    }


def differing_count(rescoring: Mapping[str, Any]) -> int:
    """Return how many answers got another reward or failed when they were scored again.

    `rescoring` is a `Rescoring` as it was stored; {} gives 0.
    """
    return int(rescoring.get("differing") or 0) + int(rescoring.get("failed") or 0)


def sentence(rescoring: Mapping[str, Any]) -> str:
    """Return a sentence about a rescoring in which something differs, with its first example.

    For example "3 of 24 answers got another reward in a new env process (task a-1: 1, and there 0):
    what it pays depends on what its process has done before". The environment's error messages are
    not in the sentence; `examples` has them.

    Args:
        rescoring: a `Rescoring` with at least one example, as it was stored.
    """
    example = rescoring["examples"][0]
    if example.get("error"):
        in_new_process = "scoring failed there"
    else:
        in_new_process = f"and there {example['second']:g}"
    if rescoring["wavering"]:
        conclusion = "a third one did not agree with that either, so there is chance in it"
    elif rescoring.get("confirmed"):
        conclusion = "what it pays depends on what its process has done before"
    else:
        conclusion = "a third one has not confirmed that"
    count = f"{differing_count(rescoring)} of {rescoring['scored']}"
    return (
        f"{count} answers got another reward in a new env process "
        f"(task {_short(example['task'])}: {example['first']:g}, {in_new_process}): {conclusion}"
    )


def _short(task_id: Any) -> str:
    """Return a task's id on one line, cut to TASK_CHARS (80) characters with an ellipsis at the
    end."""
    one_line = " ".join(str(task_id).split())
    return one_line if len(one_line) <= TASK_CHARS else one_line[: TASK_CHARS - 1] + "…"


@dataclass
class _Changed:
    """An answer that a fresh process rewarded differently than the audit did.

    Attributes:
        answer: the answer with its first reward.
        second: the score of the fresh process.
        confirmed: whether a third process gave the reward of `second` every time.
        wavering: whether a third process gave yet another reward. Both are False if no third
            process was asked.
    """

    answer: Scored
    second: Mapping[str, Any]
    confirmed: bool = False
    wavering: bool = False

    @property
    def failed(self) -> bool:
        """Whether scoring failed in the fresh process."""
        return bool(self.second["error"])

    def example(self) -> dict[str, object]:
        """Return what a report shows of the answer.

        The keys are those of `answer.identity`, then `first` (the reward it got in the audit),
        `second` (its reward in a fresh process) and, if scoring failed there, `error`.
        """
        example = {
            **self.answer.identity,
            "first": self.answer.reward,
            "second": self.second["reward"],
        }
        if self.failed:
            example["error"] = str(self.second["error"])[:ERROR_CHARS]
        return example


@dataclass
class _Progress:
    """What scoring again has shown so far.

    Attributes:
        scored: how many answers were scored again.
        skipped: reason -> how many answers could not be scored again.
        changed: the answers that got another reward.
        cold_start_forgiven: whether the one tolerated difference has occurred: a reward that
            differed at first and then came back.
    """

    scored: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    changed: list[_Changed] = field(default_factory=list)
    cold_start_forgiven: bool = False

    def score(self, answer: Scored, process: Any, time_is_up: Callable[[], bool]) -> bool:
        """Score an answer again with `process`.

        Returns True if the answer was dealt with (scored, or skipped because it cannot be scored).
        Returns False if its reward differs and no time is left to score it once more; it then does
        not count.
        """
        second = answer.score(process)
        if isinstance(second, str):  # the reason why it cannot be scored
            self.skipped[second] = self.skipped.get(second, 0) + 1
            return True
        if second["reward"] != answer.reward:
            if time_is_up():
                return False
            self._judge_difference(answer, second, process)
        self.scored += 1
        return True

    def _judge_difference(self, answer: Scored, second: ScoreReply, process: Any) -> None:
        """Decide whether an answer counts as changed whose new score, `second`, differs from its
        first reward.

        The answer is scored once more by the same process. If that differs from the first reward
        too, the answer is added to `changed`. If the first reward comes back, a `second` that was a
        failure is forgiven; of those with another reward only the first is forgiven, and later ones
        are added.
        """
        differing_score = _differing_again(answer, second, process)
        if differing_score is not None:
            self.changed.append(_Changed(answer, differing_score))
            return
        if second["error"]:  # the failure has not come again
            return
        # One such answer is forgiven, because the first call of a new process may be slow, and
        # score() may have a time limit of its own.
        if self.cold_start_forgiven:
            self.changed.append(_Changed(answer, second))
        self.cold_start_forgiven = True


def _differing_again(answer: Scored, second: ScoreReply, process: Any) -> ScoreReply | None:
    """Score an answer once more with the process that gave it the score `second`.

    Returns `second` if this scoring fails, None if the answer gets its first reward again, else the
    new score.
    """
    repeated = answer.score(process)
    # A text is the reason why the answer cannot be scored.
    if isinstance(repeated, str) or repeated["error"]:
        return second
    return None if repeated["reward"] == answer.reward else repeated


def _ask_third_process(
    changed: Sequence[_Changed], start_process: Callable[[], Any], clock: Callable[[], float]
) -> None:
    """Score changed answers with a third process and mark each as confirmed or wavering.

    - confirmed: the third process gave the second reward TIMES (3) times
    - wavering: it gave another reward before that
    - neither: scoring failed or the time was up before that, or the second score had failed
    """
    # Answers whose second score failed are left out: another failure would confirm nothing.
    with_two_rewards = [item for item in changed if not item.failed]
    if not with_two_rewards:
        return
    process = start_process()
    began = clock()
    for item in with_two_rewards:
        agreements = 0
        while agreements < TIMES and clock() - began <= THIRD_S:
            third = item.answer.score(process)
            if isinstance(third, str) or third["error"]:  # a str says why it cannot be scored
                break
            if third["reward"] != item.second["reward"]:
                item.wavering = True
                break
            agreements += 1
        item.confirmed = agreements == TIMES

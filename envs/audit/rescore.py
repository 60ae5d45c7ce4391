"""Answers scored once more by an env process that has scored nothing else.

An environment that counts its calls, remembers answers or has patched what it scores with may give
one answer two rewards: one late in the life of its process, another when it is asked first. Answers
with two rewards are scored by a third process, several times: where it gives the second reward
again and again the difference is confirmed (the reward depends on the process's past); where it
does not, the scorer is random.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envs.audit.audit_report import Rescoring
from envs.config.problem import EnvProblem
from envs.json_types import ScoreReply

SHOWN = 5
THIRD_S = 5.0  # of the third process, once it runs; one call more may be under way
TIMES = 3  # a third process must repeat the second's reward so often: once may be chance
TASK_CHARS = 80  # of a task's id in a sentence


@dataclass(frozen=True)
class Scored:
    """An answer with the reward it got.

    Attributes:
        about: what an example tells of it (`task`, `completion`, ...).
        reward: the first one.
        score: scores it by the process given, as `EnvProcess.score` does; a text is the reason why
            that cannot be done.
    """

    about: Mapping[str, Any]
    reward: float
    score: Callable[[Any], ScoreReply | str]


def score_again(
    answers: Sequence[Scored],
    fresh: Callable[[], Any],
    late: Callable[[], bool],
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Rescoring:
    """Scores the answers again by a fresh process; rewards are compared exactly.

    Args:
        fresh: gives a started process that has scored nothing; it is called again where rewards
            differ. EnvProblem where there is none to be had.
        late: whether to leave the rest. The third process has `THIRD_S` seconds of its own.
    """
    scored = 0
    skipped: dict[str, int] = {}
    changed: list[_Changed] = []
    why, cold = "", False
    try:
        process = fresh() if answers else None
        for answer in answers:
            if late():
                why = "the time was up"
                break
            second = answer.score(process)
            if isinstance(second, str):
                skipped[second] = skipped.get(second, 0) + 1
                continue
            if second["reward"] != answer.reward:
                if late():  # nothing is held against a scorer that it was asked but once
                    why = "the time was up"
                    break
                settled = _settled(answer, second, process)
                # The first call of a process may be slow beyond a limit inside of score(); a
                # second reward that comes and goes is something else.
                forgiven = settled is None and (bool(second["error"]) or not cold)
                cold = cold or (settled is None and not second["error"])
                if not forgiven:
                    changed.append(_Changed(answer, settled or second))
            scored += 1
        _ask_a_third(changed, fresh, clock)
    except EnvProblem as problem:
        why = str(problem)[:200]
    failed = sum(each.failed for each in changed)
    shown = sorted(changed, key=lambda each: not each.confirmed)[:SHOWN]
    return {
        "asked": len(answers),
        "scored": scored,
        "differing": len(changed) - failed,
        "failed": failed,
        "confirmed": sum(each.confirmed for each in changed),
        "wavering": sum(each.wavering for each in changed),
        "skipped": skipped,
        "examples": [each.example() for each in shown],
        "why": why,
    }


def differing(rescoring: Mapping[str, Any]) -> int:
    """Answers with another reward, those included that could not be scored again."""
    return int(rescoring.get("differing") or 0) + int(rescoring.get("failed") or 0)


def sentence(rescoring: Mapping[str, Any]) -> str:
    """The result of `score_again` in words, where something differs, with an example.

    It repeats no text that the environment wrote: its errors are in `examples` alone.

    Args:
        rescoring: a `Rescoring`, as it was stored.
    """
    one = rescoring["examples"][0]
    there = "scoring failed there" if one.get("error") else f"and there {one['second']:g}"
    why = "a third one has not confirmed that"
    if rescoring["wavering"]:
        why = "a third one did not agree with that either, so there is chance in it"
    elif rescoring.get("confirmed"):
        why = "what it pays depends on what its process has done before"
    return (
        f"{differing(rescoring)} of {rescoring['scored']} answers got another reward in a new env "
        f"process (task {_short(one['task'])}: {one['first']:g}, {there}): {why}"
    )


def _short(task_id: Any) -> str:
    flat = " ".join(str(task_id).split())
    return flat if len(flat) <= TASK_CHARS else flat[: TASK_CHARS - 1] + "…"


@dataclass
class _Changed:
    """An answer that a fresh process rewarded otherwise, and whether a third process agreed."""

    answer: Scored
    second: Mapping[str, Any]
    confirmed: bool = False
    wavering: bool = False

    @property
    def failed(self) -> bool:
        return bool(self.second["error"])

    def example(self) -> dict[str, object]:
        """The answer with both rewards, and the error where scoring failed."""
        rewards = {"first": self.answer.reward, "second": self.second["reward"]}
        error = {"error": str(self.second["error"])[:200]} if self.failed else {}
        return {**self.answer.about, **rewards, **error}


def _settled(answer: Scored, second: ScoreReply, process: Any) -> ScoreReply | None:
    """The score of the same process when it is asked once more; None for the first reward."""
    warm = answer.score(process)
    if isinstance(warm, str) or warm["error"]:
        return second
    return None if warm["reward"] == answer.reward else warm


def _ask_a_third(
    changed: Sequence[_Changed], fresh: Callable[[], Any], clock: Callable[[], float]
) -> None:
    """Marks those that a third process rewards as the second did (confirmed), or otherwise.

    Those that failed are left out: failing once more would confirm nothing.
    """
    scored = [each for each in changed if not each.failed]
    if not scored:
        return
    process = fresh()
    began = clock()
    for each in scored:
        held = 0
        while held < TIMES and clock() - began <= THIRD_S:
            third = each.answer.score(process)
            if isinstance(third, str) or third["error"]:
                break
            if third["reward"] != each.second["reward"]:
                each.wavering = True
                break
            held += 1
        each.confirmed = held == TIMES

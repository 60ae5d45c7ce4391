"""Answers scored once more by an env process that has scored nothing else.

An environment that counts its calls, keeps what it has seen or has patched what it scores with may
pay one answer in two ways: asked late in the life of its process, and asked first. Answers on which
the two differ go to one more process, several times over: a reward that both fresh ones hold to is
a confirmed difference, one that they do not is chance and no state.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envs.config.problem import EnvProblem
from envs.json_types import ScoreReply

SHOWN = 5
THIRD_S = 5.0  # of the third process, once it runs; one call more may be under way
TIMES = 3  # a third process must hold to the reward of the second: one toss of a coin often does
TASK_CHARS = 80  # of a task's id in a sentence


@dataclass(frozen=True)
class Scored:
    """An answer with the reward it got.

    Attributes:
        about: what an example says of it (`task`, `completion`, ...).
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
) -> dict[str, Any]:
    """Holds the answers against a fresh process, rewards compared exactly.

    Args:
        fresh: gives a started process that has scored nothing; it is called again where rewards
            differ. EnvProblem where there is none to be had.
        late: whether to leave the rest. The third process has `THIRD_S` seconds of its own.

    Returns `asked`, `scored`, `differing`, `failed` (differing because scoring failed now; not
    among `differing`), `confirmed` and `wavering` (of those that differ: a third process holds to
    the second's reward, or does not; neither where it was not asked), `skipped` (reason ->
    answers), `examples` (confirmed ones first), `why` ("" unless the rest was left).
    """
    found: dict[str, Any] = {"asked": len(answers), "scored": 0}
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
            found["scored"] += 1
        _ask_a_third(changed, fresh, clock)
    except EnvProblem as problem:
        why = str(problem)[:200]
    failed = sum(each.failed for each in changed)
    shown = sorted(changed, key=lambda each: not each.confirmed)[:SHOWN]
    return found | {
        "differing": len(changed) - failed,
        "failed": failed,
        "confirmed": sum(each.confirmed for each in changed),
        "wavering": sum(each.wavering for each in changed),
        "skipped": skipped,
        "examples": [each.example() for each in shown],
        "why": why,
    }


def differing(found: Mapping[str, Any]) -> int:
    """Answers with another reward, those included that could not be scored again."""
    return int(found.get("differing") or 0) + int(found.get("failed") or 0)


def sentence(found: Mapping[str, Any]) -> str:
    """What `score_again` found where something differs, with an example.

    It says no word of the environment's own: its errors stand in `examples`.
    """
    one = found["examples"][0]
    there = "scoring failed there" if one.get("error") else f"and there {one['second']:g}"
    why = "a third one has not confirmed that"
    if found["wavering"]:
        why = "a third one did not agree with that either, so there is chance in it"
    elif found.get("confirmed"):
        why = "what it pays depends on what its process has done before"
    return (
        f"{differing(found)} of {found['scored']} answers got another reward in a new env process "
        f"(task {_short(one['task'])}: {one['first']:g}, {there}): {why}"
    )


def _short(task_id: Any) -> str:
    flat = " ".join(str(task_id).split())
    return flat if len(flat) <= TASK_CHARS else flat[: TASK_CHARS - 1] + "…"


@dataclass
class _Changed:
    """An answer that a fresh process paid otherwise, and what a third one said of that."""

    answer: Scored
    second: Mapping[str, Any]
    confirmed: bool = False
    wavering: bool = False

    @property
    def failed(self) -> bool:
        return bool(self.second["error"])

    def example(self) -> dict[str, Any]:
        said = {**self.answer.about, "first": self.answer.reward, "second": self.second["reward"]}
        return said | ({"error": str(self.second["error"])[:200]} if self.failed else {})


def _settled(answer: Scored, second: ScoreReply, process: Any) -> ScoreReply | None:
    """What the same process says when it is asked once more; None for the reward of old."""
    warm = answer.score(process)
    if isinstance(warm, str) or warm["error"]:
        return second
    return None if warm["reward"] == answer.reward else warm


def _ask_a_third(
    changed: Sequence[_Changed], fresh: Callable[[], Any], clock: Callable[[], float]
) -> None:
    """Marks which of them a third process pays as the second did, or otherwise.

    What failed is left out: that scoring fails once more would confirm nothing.
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

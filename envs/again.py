"""Answers scored once more by an env process that has scored nothing else.

An environment that counts its calls, keeps what it has seen or has patched what it scores with may
pay one answer in two ways: asked late in the life of its process, and asked first. Answers on which
the two differ go to one more process; where two fresh ones disagree, it is chance and no state.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envs.problem import EnvProblem

SHOWN = 5


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
    score: Callable[[Any], dict[str, Any] | str]


def score_again(
    answers: Sequence[Scored], fresh: Callable[[], Any], late: Callable[[], bool]
) -> dict[str, Any]:
    """Holds the answers against a fresh process, rewards compared exactly.

    Args:
        fresh: gives a started process that has scored nothing; it is called again where rewards
            differ. EnvProblem where there is none to be had.
        late: whether to leave the rest.

    Returns `asked`, `scored`, `differing`, `failed` (differing because scoring failed now; not
    among `differing`), `wavering` (of those that differ: two fresh processes disagree), `skipped`
    (reason -> answers), `examples`, `why` ("" unless the rest was left).
    """
    found: dict[str, Any] = {"asked": len(answers), "scored": 0}
    skipped: dict[str, int] = {}
    changed: list[tuple[Scored, dict[str, Any]]] = []
    wavering, why = 0, ""
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
            found["scored"] += 1
            if second["reward"] != answer.reward:
                changed.append((answer, second))
        wavering = _disagreeing(changed, fresh, late)
    except EnvProblem as problem:
        why = str(problem)[:200]
    failed = sum(bool(second["error"]) for _, second in changed)
    return found | {
        "differing": len(changed) - failed,
        "failed": failed,
        "wavering": wavering,
        "skipped": skipped,
        "examples": [_example(answer, second) for answer, second in changed[:SHOWN]],
        "why": why,
    }


def differing(found: Mapping[str, Any]) -> int:
    """Answers with another reward, those included that could not be scored again."""
    return int(found.get("differing") or 0) + int(found.get("failed") or 0)


def sentence(found: Mapping[str, Any]) -> str:
    """What `score_again` found where something differs, with an example."""
    one = found["examples"][0]
    failed = f" ({one['error']})" if one.get("error") else ""
    why = "what it pays depends on what its process has done before"
    if found["wavering"]:
        why = "a third one did not agree with that either, so there is chance in it"
    return (
        f"{differing(found)} of {found['scored']} answers got another reward in a new env process "
        f"(task {one['task']}: {one['first']:g}, and there {one['second']:g}{failed}): {why}"
    )


def _disagreeing(
    changed: Sequence[tuple[Scored, Mapping[str, Any]]],
    fresh: Callable[[], Any],
    late: Callable[[], bool],
) -> int:
    """How many of them a third process pays otherwise than the second did."""
    if not changed or late():
        return 0
    process, count = fresh(), 0
    for answer, second in changed:
        if late():
            break
        third = answer.score(process)
        count += not isinstance(third, str) and third["reward"] != second["reward"]
    return count


def _example(answer: Scored, second: Mapping[str, Any]) -> dict[str, Any]:
    said = {**answer.about, "first": answer.reward, "second": second["reward"]}
    return said | ({"error": str(second["error"])[:200]} if second["error"] else {})

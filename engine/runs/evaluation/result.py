"""What an evaluation came to: a summary of each model, and the verdict on how they differ."""

from collections.abc import Iterable, Sequence

from engine.core.files import JsonObject
from engine.core.format import decimal
from engine.evidence.stats.basics.summary import ScoredAnswer, summarise
from engine.evidence.stats.results import Level, show
from engine.evidence.verdict.verdict import run_verdict
from engine.home.run_dir import RunDir


def model_result(
    ref: str, tasks: int, answers: Iterable[ScoredAnswer], left_out: int
) -> JsonObject:
    """The summary of one model for result.json.

    Args:
        ref: the model.
        tasks: how many tasks it answered.
        answers: all of them, scored.
        left_out: how many tasks it was not asked.
    """
    summary = summarise(answers)
    return {
        "ref": ref,
        "tasks": tasks,
        "attempts": summary.n,
        "success": summary.success,
        "reward": summary.reward,
        "errors": summary.errors,
        "truncated_share": summary.truncated,
        "metrics": summary.metrics,
        "left_out": left_out,
    }


def evaluation_result(run: RunDir, results: Sequence[JsonObject]) -> JsonObject:
    """Make the result record of an evaluation from those of its models.

    The verdict says whether the models differ, `evidence` has the numbers that show it, and
    `summary` is a line for people, such as "base: success 0.310 over 200 tasks; ...", and what
    became of them in other words.
    """
    verdict = run_verdict(run)
    level_of = {side.model: side.level for side in verdict.models if side.level is not None}
    levels = "; ".join(
        f"{result['ref']}: {result_in_words(result)}"
        f"{interval_in_words(level_of.get(result['ref']), result['tasks'])}"
        for result in results
    )
    summary = ". ".join([levels, *(probed.sentence for probed in verdict.robustness)])
    evidence = verdict.to_json()
    return {
        "models": list(results),
        "verdict": evidence["verdict"],
        "evidence": evidence,
        "summary": summary,
    }


def interval_in_words(level: Level | None, played: int) -> str:
    """The interval of a model's level, such as " (95 % interval 30.9 % to 52.1 %)"; "" without.

    Where it is of fewer tasks than the `played` ones (others chose a checkpoint, or failed), the
    level on those stands with it.
    """
    if level is None or level.value is None:
        return ""
    low, high = show(level.low, level.measure), show(level.high, level.measure)
    interval = f"95 % interval {low} to {high}"
    if level.tasks == played:
        return f" ({interval})"
    value = show(level.rounded_value, level.measure)
    return f"; {value} on the {level.tasks} of them that count ({interval})"


def result_in_words(result: JsonObject) -> str:
    """One model's result in words: the success rate where the environment reports success, else the
    mean reward.

    For example "success 0.310 over 200 tasks", with "3 of 200 scores failed (they count as not
    solved), " before it where scores failed.
    """
    if result["success"] is not None:
        measured = f"success {decimal(result['success'])} over {result['tasks']} tasks"
        counted_as = "not solved"
    else:
        measured = f"reward {decimal(result['reward'])} over {result['tasks']} tasks"
        counted_as = "reward 0"
    if not result["errors"]:
        return measured
    failures = f"{result['errors']} of {result['attempts']} scores failed"
    return f"{failures} (they count as {counted_as}), {measured}"

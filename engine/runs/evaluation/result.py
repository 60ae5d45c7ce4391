"""The result of an evaluation: a summary of each model, and the verdict on how they differ."""

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
    """Summarise the scored answers of one model as an entry of `models` in result.json.

    Args:
        ref: the model.
        tasks: how many tasks the model answered.
        answers: all of its answers with their scores.
        left_out: how many tasks the model was not asked, because a cap ended the run.
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
    """Make the content of an evaluation's result.json from the results of its models.

    `verdict` says whether the models differ, `evidence` has the numbers behind the verdict, and
    `summary` is a line for people, such as "base: success 0.310 over 200 tasks; ...", followed by a
    sentence on how each model did on the same tasks in other words, if these were asked too.
    """
    verdict = run_verdict(run)
    level_by_model = {side.model: side.level for side in verdict.models if side.level is not None}
    result_texts = []
    for result in results:
        interval = interval_in_words(level_by_model.get(result["ref"]), result["tasks"])
        result_texts.append(f"{result['ref']}: {result_in_words(result)}{interval}")
    # How each model did on the same tasks in other words.
    robustness_sentences = [robustness.sentence for robustness in verdict.robustness]
    summary = ". ".join(["; ".join(result_texts), *robustness_sentences])
    evidence = verdict.to_json()
    return {
        "models": list(results),
        "verdict": evidence["verdict"],
        "evidence": evidence,
        "summary": summary,
    }


def interval_in_words(level: Level | None, played: int) -> str:
    """Write the 95 % interval of a model's level (its mean score) as the end of a sentence.

    For example " (95 % interval 30.9 % to 52.1 %)"; "" if there is no level. The level may rest on
    fewer than the `played` tasks, because some chose a checkpoint or their scoring failed. Then the
    text also names the level and the number of its tasks.
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
    """Write a model's result in words: its success rate, or its mean reward if the environment does
    not report success.

    For example "success 0.310 over 200 tasks". If scores failed, "3 of 200 scores failed (they
    count as not solved), " comes first.
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

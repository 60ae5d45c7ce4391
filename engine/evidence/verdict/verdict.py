"""Did the run get better? One word per run, computed from the files it left.

Before is step 0: the starting point, evaluated on the same tasks in the same way. After is the
best checkpoint, chosen on the `select` half of the held-out tasks; the verdict is computed on the
`report` half only, so the choice cannot flatter it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.core.files import read_object
from engine.core.hints import Call
from engine.evidence.stats.inference import (
    ALPHA,
    MARGIN,
    PairedVerdict,
    holm,
    paired_verdict,
    tasks_needed,
)
from engine.evidence.stats.results import (
    HIGHER_IS_BETTER,
    Level,
    Measure,
    Row,
    answer_of,
    by_prompt,
    level,
    load_rows,
    measure_of,
    only_half,
    rounded,
    rounded_ends,
    select_best,
    show,
    show_change,
    side,
    text_of,
    value_of,
)
from engine.evidence.verdict.fresh_scores import warnings as rescored_warnings
from engine.evidence.verdict.holdout_reuse import caution, exam_use, looks_at_pair, price
from engine.evidence.verdict.lineage import better_start
from engine.evidence.verdict.regression import kept_skills, losses
from engine.home.run_dir import RunDir
from engine.home.sanitize import Redactor, clip, redactor_for
from engine.records.run_config import AskingConfig, RunConfig, TrainConfig

_EXAMPLES = 2  # per direction, in a result
_EXAMPLE_CHARS = 240
_OTHER_HALF = ", half of its eval_rows: the other half chose the checkpoint"
_DECIDED = ("better", "worse", "no_difference")
_WORDS = {
    "better": "better",
    "worse": "worse",
    "no_difference": "no difference",
    "inconclusive": "inconclusive",
    "unknown": "unknown",
}


@dataclass(frozen=True)
class Comparison:
    """Two sets of rows on the same tasks, compared.

    `errors_decide` where the verdict was taken back because it hangs on the answers whose scoring
    failed; `ids` is how many task ids the outcome's tasks had, where rows share their prompts.
    """

    measure: Measure | None
    outcome: PairedVerdict
    before: Level | None
    after: Level | None
    errors_decide: bool = False
    ids: int = 0

    @property
    def lead(self) -> float:
        """How far the second is ahead of the first, 0 where nothing could be compared."""
        gap = self.outcome.diff or 0.0
        return -gap if self.measure == "loss" else gap

    @property
    def reason(self) -> str:
        """Why the verdict is not better or worse, "" when it is."""
        found, measure = self.outcome, self.measure
        if found.reason or measure is None:
            return found.reason
        unit = " points" if measure == "success" else ""
        if found.verdict == "inconclusive":
            gap = show_change(found.detectable, measure).removeprefix("+")
            return f"{found.n} tasks would show a change of {gap}{unit} or more"
        if found.verdict == "no_difference":
            margin = show_change(found.margin, measure).removeprefix("+")
            return f"the whole interval lies within {margin}{unit} of 0"
        return ""

    def as_dict(self) -> dict[str, Any]:
        """The numbers of a comparison under the names that results use."""
        found = self.outcome
        return {
            "verdict": found.verdict,
            "metric": self.measure,
            "difference": rounded(found.diff),
            "interval": rounded_ends(found.low, found.high),
            "n": found.n,
            "p": None if found.p is None else float(f"{found.p:.3g}"),
            "smallest_detectable_gap": rounded(found.detectable),
            "method": found.method,
            "gained": len(found.gained),
            "lost": len(found.lost),
            "unpaired": found.unpaired,
            "errors": list(found.errors),
            "reason": self.reason,
        }


def compare_rows(before: Sequence[Row], after: Sequence[Row]) -> Comparison:
    """Compare two evaluations task by task, on what both were scored by.

    Tasks of one prompt are one task (`results.by_prompt`).
    """
    ids = len({str(row.get("task")) for rows in (before, after) for row in rows})
    before, after = by_prompt(before, after)
    prompts = len({str(row.get("task")) for rows in (before, after) for row in rows})
    measure = measure_of(before, after)
    if measure is None:
        missing = "the first" if not before else "the second" if not after else "either"
        outcome = PairedVerdict("unknown", f"nothing was scored in {missing} evaluation")
        return Comparison(None, outcome, None, None)
    old, new = level(before, measure), level(after, measure)
    margin = None
    if measure == "success":
        margin = MARGIN
    elif measure == "loss":
        margin = 0.01 * abs(old.value or 0.0)  # of a loss, one percent is no difference
    ways = [
        paired_verdict(
            side(before, measure, failed),
            side(after, measure, failed),
            higher_is_better=HIGHER_IS_BETTER[measure],
            margin=margin,
        )
        for failed in failures(measure, before, after)
    ]
    found = Comparison(measure, ways[0], old, new, ids=ids if prompts < ids else 0)
    return heed_errors(found, ways[-1])


def failures(measure: Measure, *row_sets: Sequence[Row]) -> list[float | None]:
    """What a failed scoring counts as, each way a comparison is judged: left out (None), and where
    one failed as not solved, for its absence must not make a side look better than it is."""
    failed = any(value_of(row, measure) is None for rows in row_sets for row in rows)
    return [None, 0.0] if failed and measure != "loss" else [None]


def heed_errors(found: Comparison, counted: PairedVerdict) -> Comparison:
    """Takes a verdict back that does not stand with failed scorings counted as not solved."""
    old = found.outcome
    if found.measure is None or old.verdict not in _DECIDED or counted.verdict == old.verdict:
        return found
    levels = f"{show(counted.before, found.measure)} to {show(counted.after, found.measure)}"
    failed = sum(old.errors)
    who = f"the {failed} answers" if failed > 1 else "the one answer"
    reason = (
        f"{who} whose scoring failed decide: left out, the verdict is {_WORDS[old.verdict]}; "
        f"counted as not solved, {_WORDS[counted.verdict]} ({levels})"
    )
    outcome = replace(old, verdict="inconclusive", reason=reason)
    return replace(found, outcome=outcome, errors_decide=True)


def run_verdict(run_dir: RunDir) -> dict[str, Any]:
    """The verdict on a run, from its files alone.

    A training run is compared with its own starting point; an evaluation of several models
    compares each with the first. Holds verdict, summary, reason, metric, before, after,
    difference, interval, n, p, smallest_detectable_gap, flips with examples, warnings, next.
    Never raises on a run that is not finished: the verdict is then unknown, with the reason.
    """
    config = run_dir.find_config()  # what is left of a run is judged without it
    redact = redactor_for(run_dir.home, config.env_dir if config else None)
    if isinstance(config, AskingConfig):
        return _evaluation_verdict(run_dir, config, redact)
    return _training_verdict(run_dir, config, redact)


def after_step(run_dir: RunDir) -> int | None:
    """The evaluated step that stands for the run's result, None before there is one.

    The checkpoint the run named its best, where its report half was played; else the best by the
    select half among the steps whose report half was.
    """
    steps = [step for step in run_dir.eval_steps() if step > 0]
    played = [step for step in steps if only_half(load_rows(run_dir.evals(step)), "report")]
    candidates = played or steps
    if not candidates:
        return None
    named = run_dir.resolve_checkpoint("best")
    if named is not None and (step := int(named.name.rpartition("_")[2])) in candidates:
        return step
    best = select_best(run_dir, candidates)
    return candidates[-1] if best is None else best


def contamination_of(run_dir: RunDir) -> dict[str, Any]:
    """Which held-out tasks the training rows of a run's models hold; {} when it was not asked."""
    return read_object(run_dir.contamination)


def taught_tasks(run_dir: RunDir) -> frozenset[str]:
    """Held-out tasks that stand in training rows: nobody can be judged by them."""
    return frozenset(map(str, contamination_of(run_dir).get("leaked") or ()))


def shared_rows(run_dir: RunDir) -> list[str]:
    """The warning about held-out tasks in training rows, nothing where there are none."""
    found = contamination_of(run_dir)
    if found.get("verdict", "clean") == "clean":
        return []
    left_out = len(taught_tasks(run_dir))
    after = f"; {left_out} are left out of the verdict" if left_out else ""
    return [f"Contamination: {found.get('headline', 'training rows hold held-out tasks')}{after}."]


def untaught(rows: Sequence[Row], taught: frozenset[str]) -> list[Row]:
    """The rows whose task was not taught."""
    return [row for row in rows if str(row.get("task")) not in taught]


@dataclass(frozen=True)
class Sides:
    """The rows a verdict rests on: who stands before, who after, and which half they are."""

    before: Sequence[Row]
    after: Sequence[Row]
    before_name: str
    after_name: str
    half: str = "all"
    step: int | None = None
    taught: int = 0


def training_sides(run_dir: RunDir) -> Sides:
    """Step 0 and the checkpoint that stands for the result, on the half that chose nothing."""
    step = after_step(run_dir)
    taught = taught_tasks(run_dir)
    before = untaught(load_rows(run_dir.evals(0)), taught)
    after = untaught(load_rows(run_dir.evals(step)), taught) if step is not None else []
    half = "all"
    if any(row.get("half") for row in before):
        before, after, half = only_half(before, "report"), only_half(after, "report"), "report"
    name = "no step yet" if step is None else f"step {step}"
    return Sides(before, after, "step 0", name, half, step, len(taught))


def evaluation_sides(run_dir: RunDir, config: RunConfig | None) -> Sides | None:
    """The first model and the one furthest from it, None with fewer than two."""
    models = evaluated_models(run_dir, config)
    if len(models) < 2:
        return None
    first, *others = models
    main = max(others, key=lambda ref: compare_rows(models[first], models[ref]).lead)
    return Sides(models[first], models[main], first, main)


def _training_verdict(
    run_dir: RunDir, config: TrainConfig | None, redact: Redactor
) -> dict[str, Any]:
    sides = training_sides(run_dir)
    looks = len([step for step in run_dir.eval_steps() if step > 0])
    warnings = rescored_warnings(run_dir)
    if sides.half == "all" and looks > 1:
        warnings.append(
            "The held-out tasks were not split into halves, so the checkpoint was chosen on "
            "the tasks it is reported on: the gain is flattered."
        )
    found = compare_rows(sides.before, sides.after)
    missing = _missing(sides)
    if missing:
        outcome = PairedVerdict("unknown", missing)
        found = Comparison(None, outcome, found.before, found.after)
    result = found.as_dict() | {
        "half": sides.half,
        "before": _level_at(found.before, 0),
        "after": _level_at(found.after, sides.step),
        "checkpoints_compared": looks,
        "flips": _flips(found, sides.before, sides.after, redact),
    }
    warnings += _cautions(found, config, sides.half)
    env_id = config.env_id if config else ""
    use, kept = exam_use(run_dir.home, env_id, run_dir.id), kept_skills(run_dir)
    forgot = losses(kept)
    often = caution(use, found.outcome.verdict, found.outcome.p)
    result["warnings"] = shared_rows(run_dir) + forgot + warnings + ([often] if often else [])
    result |= _expectation(config.expect if config else "", found.outcome.verdict)
    said = [sentence(found, "held-out ")]
    word = found.outcome.verdict
    if start := better_start(run_dir, config, sides.step, word):
        said.append(start["said"])
        result["go_on_with"] = start["model"]
    result["summary"] = " ".join([*said, *forgot])
    result |= {"exam_use": use} | ({"kept_skills": kept} if kept else {})
    result["next"] = _next_calls(run_dir.id, found)
    return result


def _missing(sides: Sides) -> str:
    """Which evaluation a verdict would need and is not there, "" when nothing is missing."""
    if not sides.before and sides.taught:
        return "every reported held-out task stands in the training rows"
    if not sides.before:
        return "there is no evaluation before training (step 0)"
    if sides.step is None:
        return "there is no evaluation after step 0"
    if not sides.after:
        return f"the report half was not played with {sides.after_name}; it is, when the run ends"
    return ""


def _evaluation_verdict(run_dir: RunDir, config: AskingConfig, redact: Redactor) -> dict[str, Any]:
    models = evaluated_models(run_dir, config)
    measure = measure_of(*models.values())
    table = [
        {"model": ref, **(level(rows, measure).as_dict() if measure else {})}
        for ref, rows in models.items()
    ]
    if len(models) < 2 or measure is None:
        reason = "one model alone has nothing to be better than" if models else "nothing was scored"
        if not models and taught_tasks(run_dir):
            reason = "every task that was scored stands in the training rows"
        outcome = PairedVerdict("unknown", reason)
        lone = Comparison(measure, outcome, None, None)
        return lone.as_dict() | {
            "models": table,
            "summary": _table_sentence(table, measure),
            "warnings": shared_rows(run_dir) + rescored_warnings(run_dir),
            "next": [Call("read_rollouts", {"run_id": run_dir.id}).to_json()],
        }
    first, *others = models
    found = [compare_rows(models[first], models[ref]) for ref in others]
    env_id = config.env_id
    looks = [looks_at_pair(run_dir.home, env_id, (first, ref), (run_dir.id,)) for ref in others]
    correct_for_many(found, looks)
    main = max(range(len(others)), key=lambda i: found[i].lead)
    return found[main].as_dict() | {
        "before": {"model": first, **_level_dict(found[main].before)},
        "after": {"model": others[main], **_level_dict(found[main].after)},
        "models": table,
        "comparisons": [
            {"model": ref, "against": first, **item.as_dict()}
            for ref, item in zip(others, found, strict=True)
        ][:8],
        "flips": _flips(found[main], models[first], models[others[main]], redact),
        "summary": f"{others[main]} against {first}: {sentence(found[main])}",
        "warnings": shared_rows(run_dir)
        + rescored_warnings(run_dir)
        + looked_often(looks[main])
        + _cautions(found[main], config),
        "next": [
            *(failed_calls(run_dir.id) if found[main].errors_decide else []),
            Call("compare_runs", {"ids": [run_dir.id]}).to_json(),
            Call("read_rollouts", {"run_id": run_dir.id, "pick": "changed"}).to_json(),
        ],
    }


def evaluated_models(run_dir: RunDir, config: RunConfig | None) -> dict[str, list[Row]]:
    """Rows by model reference, in the order the models were asked for; taught tasks left out."""
    models: dict[str, list[Row]] = {}
    taught = taught_tasks(run_dir)
    refs = config.model_refs if isinstance(config, AskingConfig) else []
    for index, ref in enumerate(refs):
        rows = untaught(load_rows(run_dir.model_evals(index)), taught)
        if rows:
            models[ref if ref not in models else f"{ref} (#{index + 1})"] = rows
    return models


def correct_for_many(found: list[Comparison], looks: Sequence[int] = ()) -> list[float | None]:
    """Holm's correction over several comparisons, and the price of evaluations before this one
    (`looks` by comparison, see looks_at_pair); takes back verdicts that do not survive.

    Changes `found` in place and returns the adjusted p values, None where there was no test.
    """
    tested = [i for i, item in enumerate(found) if item.outcome.p is not None]
    adjusted = holm([found[i].outcome.p or 0.0 for i in tested])
    result: list[float | None] = [None] * len(found)
    for index, p in zip(tested, adjusted, strict=True):
        looked = looks[index] if looks else 1
        p = min(1.0, p * price(looked))
        result[index] = p
        item = found[index]
        if item.outcome.verdict in ("better", "worse") and p >= ALPHA:
            many = [f"{len(tested)} comparisons"] if len(tested) > 1 else []
            many += [f"{looked} evaluations of these models"] if looked > 1 else []
            reason = (
                f"not significant after correction for {' and '.join(many)} (p = {p:.2g}), "
                "which the interval does not hold"
            )
            outcome = replace(item.outcome, verdict="inconclusive", reason=reason)
            found[index] = replace(item, outcome=outcome)
    return result


def looked_often(looks: int) -> list[str]:
    """The warning where two models were evaluated until they differed, or may have been."""
    if looks < 2:
        return []
    return [
        f"These models were evaluated {looks} times on this environment version: each is a chance "
        f"to differ by luck, so better and worse are said only where p times {price(looks)} is "
        f"below {ALPHA}."
    ]


def sentence(found: Comparison, kind: str = "") -> str:
    """The comparison in one sentence a person can repeat."""
    outcome, measure = found.outcome, found.measure
    if outcome.diff is None or measure is None:
        return f"The verdict is unknown: {outcome.reason}."
    before, after = show(outcome.before, measure), show(outcome.after, measure)
    moved = f"{kind}{measure} went from {before} to {after} on {outcome.n} tasks"
    span = f"{show_change(outcome.low, measure)} to {show_change(outcome.high, measure)}"
    span += " points" if measure == "success" else ""
    text = f"{_WORDS[outcome.verdict].capitalize()}: {moved} (95 % interval of the change {span})"
    return f"{text}; {found.reason}." if found.reason else f"{text}."


def flip_examples(
    found: Comparison,
    before: Iterable[Row],
    after: Iterable[Row],
    redact: Redactor,
    *,
    each: int = _EXAMPLES,
    chars: int = _EXAMPLE_CHARS,
) -> dict[str, list[dict[str, Any]]]:
    """The tasks that changed most, with what was said before and after."""
    olds, news = _first_by_task(before), _first_by_task(after)

    def example(task: str) -> dict[str, Any]:
        old, new = olds.get(task, {}), news.get(task, {})
        return {
            "task": redact.text(task)[:120],
            "prompt": clip(redact.text(text_of(new.get("prompt") or old.get("prompt"))), chars),
            "before": clip(redact.text(answer_of(old)), chars),
            "after": clip(redact.text(answer_of(new)), chars),
            "reward_before": rounded(old.get("reward")),
            "reward_after": rounded(new.get("reward")),
        }

    return {
        "gained": [example(task) for task in found.outcome.gained[:each]],
        "lost": [example(task) for task in found.outcome.lost[:each]],
    }


def _flips(
    found: Comparison, before: Sequence[Row], after: Sequence[Row], redact: Redactor
) -> dict[str, Any]:
    outcome = found.outcome
    return {
        "gained": len(outcome.gained),
        "lost": len(outcome.lost),
        "unchanged": outcome.n - len(outcome.gained) - len(outcome.lost),
        "examples": flip_examples(found, before, after, redact),
    }


def _first_by_task(rows: Iterable[Row]) -> dict[str, Row]:
    first: dict[str, Row] = {}
    for row in rows:
        if not row.get("error"):
            first.setdefault(str(row.get("task")), row)
    return first


def _cautions(found: Comparison, config: RunConfig | None, half: str = "all") -> list[str]:
    outcome, notes = found.outcome, []
    if outcome.unpaired:
        notes.append(f"{outcome.unpaired} tasks were scored on one side only and are left out.")
    if sum(outcome.errors) and outcome.verdict != "unknown":
        notes.append(
            f"Scoring failed on {outcome.errors[0]} attempts before and {outcome.errors[1]} after; "
            "they are left out of the comparison."
        )
    notes += how_it_was_counted(found)
    unsure = outcome.verdict == "inconclusive" and not found.errors_decide
    if unsure and found.measure == "success" and outcome.n:
        share = (len(outcome.gained) + len(outcome.lost) + 1) / (outcome.n + 1)
        needed = tasks_needed(MARGIN, share)
        if needed > outcome.n:
            notes.append(
                f"About {needed} reported tasks would show a change of 5 points; this run has "
                f"{outcome.n}{_OTHER_HALF if half == 'report' else ''}."
            )
    if isinstance(config, TrainConfig) and config.settings.accept_reward_risk:
        notes.append(
            "The reward audit of this environment failed and accept_reward_risk was set: a higher "
            "reward may not mean better answers."
        )
    return notes


def how_it_was_counted(found: Comparison) -> list[str]:
    """What to know of a comparison whose scorings failed or whose tasks share their prompts."""
    notes = []
    if found.errors_decide:
        notes.append(
            "The answers whose scoring failed decide this verdict: read them, mend the scorer, "
            "push it and score the answers again (evaluate with regrade)."
        )
    if found.ids:
        notes.append(
            f"{found.ids} tasks have {found.outcome.n} different prompts: tasks of one prompt are "
            "one question and count as one."
        )
    return notes


def failed_calls(run_id: str) -> list[dict[str, Any]]:
    """The next moves where failed scorings decide."""
    look = Call("read_rollouts", {"run_id": run_id, "pick": "error"}).to_json()
    return [look, Call("diagnose", {"run_id": run_id}).to_json()]


def _expectation(expected: str, verdict: str) -> dict[str, Any]:
    if expected not in ("better", "no_difference"):
        return {}
    known = verdict not in ("unknown", "inconclusive")
    return {"expected": expected, "as_expected": verdict == expected if known else None}


def _next_calls(run_id: str, found: Comparison) -> list[dict[str, Any]]:
    verdict = found.outcome.verdict
    if found.errors_decide:
        return failed_calls(run_id)
    changed = Call("read_rollouts", {"run_id": run_id, "pick": "changed"}).to_json()
    if verdict == "better":
        return [changed, Call("deploy", {"run_id": f"{run_id}@best"}).to_json()]
    if verdict == "unknown":
        return [Call("read_logs", {"run_id": run_id, "view": "events"}).to_json()]
    return [changed, Call("diagnose", {"run_id": run_id}).to_json()]


def _level_at(found: Level | None, step: int | None) -> dict[str, Any]:
    return {"step": step, **_level_dict(found)}


def _level_dict(found: Level | None) -> dict[str, Any]:
    return {} if found is None else found.as_dict()


def _table_sentence(table: Sequence[Mapping[str, Any]], measure: Measure | None) -> str:
    if measure is None or not table:
        return "Nothing was scored yet."
    row = table[0]
    low, high = row["interval"]
    return (
        f"{row['model']}: {measure} {show(row['value'], measure)} on {row['tasks']} tasks "
        f"(95 % interval {show(low, measure)} to {show(high, measure)})."
    )

"""Two to eight models on the same tasks: which is better, by how much, and because of what."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine.core.errors import UserError
from engine.core.hints import Call
from engine.core.reply import BODY_CHARS
from engine.evidence.compare.candidates import MAX_ARMS, Arm, find_arms
from engine.evidence.compare.seeds import compare_arms, grouped, seed_of
from engine.evidence.compare.settings_diff import attribution, differing_settings
from engine.evidence.stats.power import attempts_wanted, more_rows, split_rows, tasks_wanted
from engine.evidence.stats.results import by_prompt, level, measure_of, side
from engine.evidence.verdict.holdout_reuse import looks_at_pair
from engine.evidence.verdict.verdict import (
    Comparison,
    correct_for_many,
    failed_calls,
    flip_examples,
    how_it_was_counted,
    looked_often,
    sentence,
    shared_rows,
    taught_tasks,
    untaught,
)
from engine.home.run_dir import Home
from engine.home.sanitize import json_chars, redactor_for
from engine.home.store import Store
from engine.records.run_config import EvaluateConfig, RegradeConfig

_MOST_SETTINGS = 24


def compare_runs(home: Home, ids: Sequence[str], env_id: str = "") -> dict[str, Any]:
    """Compare each arm with the first, task by task, on one environment version.

    `ids` are training runs (their own held-out evaluation, the half no checkpoint was chosen on),
    evaluation runs (all their models) or model references already evaluated. Runs that differ in
    the seed alone count as one arm (engine/evidence/compare/seeds.py). `verdict` is that of the arm
    furthest from the first; with more than one comparison Holm's correction applies.

    Raises UserError BAD_ARGUMENT, RUN_NOT_FOUND, NO_EVALUATION or NOT_COMPARABLE (environments
    or sampling settings differ).
    """
    wanted = _checked(ids)
    arms, warnings = find_arms(home, wanted, env_id)
    arms, shared = _without_taught(home, arms)
    warnings += shared
    arms = grouped(home, arms)
    first, others = arms[0], arms[1:]
    measure = measure_of(*(arm.rows for arm in arms))
    found = [compare_arms(home, first, arm) for arm in others]
    looks = [_looks(home, first, arm) for arm in others]
    adjusted = correct_for_many(found, looks)
    causes = [attribution(home, first, arm) for arm in others]
    main = max(range(len(others)), key=lambda i: found[i].lead)
    source = home.run(first.source).find_config()
    redact = redactor_for(home, source.env_dir if source else None)
    more, wanted = _more_evidence(home, first, others[main], found[main])
    result: dict[str, Any] = {
        "summary": _summary(first, others[main], found[main], causes[main], len(others)),
        "verdict": found[main].outcome.verdict,
        "metric": measure,
        "env_id": first.env_id,
        "reference": first.label,
        "arms": [_arm(home, arm, measure) for arm in arms],
        "comparisons": [
            {"model": arm.label, "against": first.label, **item.as_dict()}
            | ({"p_adjusted": _short(p)} if len(others) > 1 or max(looks) > 1 else {})
            | {"attribution": cause}
            for arm, item, p, cause in zip(others, found, adjusted, causes, strict=True)
        ],
        "settings": _trimmed(differing_settings(home, arms)),
        "sampling": dict(first.sampling),
        "flips": {
            "model": others[main].label,
            **flip_examples(found[main], first.rows, others[main].rows, redact),
        },
        "warnings": warnings + more + looked_often(max(looks)) + _cautions(home, arms, found),
        "next": [*wanted, _read_changed(others[main])],
    }
    return _fitted(result)


def _looks(home: Home, first: Arm, other: Arm) -> int:
    """How often the two were evaluated to tell them apart; seeds taken together count their own."""
    if first.members or other.members:
        return 1
    labels = (first.label, other.label)
    return looks_at_pair(home, first.env_id, labels, (first.source, other.source))


def _checked(ids: Sequence[str]) -> list[str]:
    wanted = list(dict.fromkeys(str(ref).strip() for ref in ids if str(ref).strip()))
    if not 1 <= len(wanted) <= MAX_ARMS:
        raise UserError(
            "BAD_ARGUMENT",
            f"{len(wanted)} different ids were given",
            hint=f"Give 2 to {MAX_ARMS} ids; one evaluation of several models counts as one.",
            field="ids",
        )
    return wanted


def _without_taught(home: Home, arms: Sequence[Arm]) -> tuple[list[Arm], list[str]]:
    """The arms without the tasks that any of their models was taught, and what to say of it."""
    sources = [home.run(source) for source in dict.fromkeys(arm.source for arm in arms)]
    notes = list(dict.fromkeys(note for run in sources for note in shared_rows(run)))
    taught = frozenset().union(*(taught_tasks(run) for run in sources))
    return [replace(arm, rows=untaught(arm.rows, taught)) for arm in arms], notes


def _arm(home: Home, arm: Arm, measure: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"id": arm.label, "evaluated_in": arm.source}
    if arm.members:
        body["seeds"] = {member.label: seed_of(home, member) for member in arm.members}
    elif arm.step is not None:
        body["step"] = arm.step
    if measure is not None:
        body |= level(arm.rows, measure).as_dict()
    runs = {member.run_id for member in arm.members or (arm,)} - {""}
    if runs:
        with Store(home) as store:
            spent = sum(store.get_run(run_id).spent_hours for run_id in runs)
        body["device_hours"] = round(spent, 4)
    return body


def _summary(
    first: Arm, other: Arm, found: Comparison, cause: dict[str, Any], comparisons: int
) -> str:
    text = f"{other.label} against {first.label}: {sentence(found)}"
    if comparisons > 1:
        text += f" It is the best of {comparisons} compared with {first.label}."
    if cause["refused"] and found.outcome.verdict in ("better", "worse"):
        text += f" Not attributed: {cause['reason']}."
    elif cause["to"] and found.outcome.verdict in ("better", "worse"):
        text += f" One lever changed: {cause['to']}."
    return text


def _cautions(home: Home, arms: Sequence[Arm], found: Sequence[Comparison]) -> list[str]:
    notes = []
    unpaired = max(item.outcome.unpaired for item in found)
    if unpaired:
        notes.append(f"Up to {unpaired} tasks were scored on one side only and are left out.")
    notes += dict.fromkeys(note for item in found for note in how_it_was_counted(item))
    for arm in arms:
        looked = sum(row.get("half") == "select" for row in arm.rows)
        config = home.run(arm.run_id).find_config() if arm.run_id else None
        own_choice = config is not None and config.env_id == arm.env_id
        if looked and own_choice and len(home.run(arm.run_id).eval_steps()) > 2:
            notes.append(
                f"{looked} of the {len(arm.rows)} answers of {arm.label} are to tasks its "
                "checkpoint was chosen on, which flatters it a little; the run's own verdict "
                "leaves them out."
            )
    return notes[:4]


def _read_changed(other: Arm) -> dict[str, Any]:
    changed = {"run_id": other.source, "pick": "changed"}
    return Call("read_rollouts", changed).to_json()


def _more_evidence(
    home: Home, first: Arm, other: Arm, found: Comparison
) -> tuple[list[str], list[dict[str, Any]]]:
    """What would settle an inconclusive comparison, in words and as calls: rows of the split that
    were not asked yet, then attempts where they help, else rows that do not exist yet. Of seeds
    taken together it is seeds: what lies between those no task takes away."""
    if found.outcome.verdict != "inconclusive" or found.measure is None:
        return [], []
    if found.errors_decide:
        worst = max((first, other), key=lambda arm: sum(bool(row.get("error")) for row in arm.rows))
        return [], failed_calls(worst.source)
    if first.members or other.members:
        return ["One more seed on each side would tell more than tasks or attempts."], []
    needed = tasks_wanted(found.outcome)
    config = home.run(first.source).find_config()
    split = config.split if isinstance(config, EvaluateConfig | RegradeConfig) else "heldout"
    rows = split_rows(home, first.env_id, split)
    asked = {str(row.get("task")) for arm in (first, other) for row in arm.rows}
    asked |= taught_tasks(home.run(first.source)) | taught_tasks(home.run(other.source))
    models = [member.label for arm in (first, other) for member in arm.members or (arm,)]
    call: dict[str, Any] = {"env_id": first.env_id, "models": models}
    call |= {"split": split} if split != "heldout" else {}
    if rows is None or len(asked) < rows:
        call["rows"] = min(max(400, needed or 2 * found.outcome.n), rows or 10**6)
        return [], [Call("evaluate", call).to_json()]
    sides = [side(rows, found.measure) for rows in by_prompt(first.rows, other.rows)]
    attempts = attempts_wanted(sides[0], sides[1], found.outcome.margin)
    used = f"All {rows} rows of the {split} split are used"
    if attempts is not None:
        said = f"{used}; {attempts} attempts at each would show a change worth having."
        return [said], [Call("evaluate", call | {"rows": rows, "attempts": attempts}).to_json()]
    edit = more_rows(needed, rows, "held-out" if split == "heldout" else split)
    return [f"{used}: {edit}."], [Call("push_env", {"path": "..."}).to_json()]


def _trimmed(table: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    names = list(table)[:_MOST_SETTINGS]
    return {name: table[name] for name in names}


def _fitted(result: dict[str, Any]) -> dict[str, Any]:
    """Leave out the least needed parts until an agent can afford the result."""
    for cut in ("before_after", "settings", "sampling"):
        if json_chars(result) <= BODY_CHARS:
            return result
        if cut == "before_after":
            flips = result["flips"]
            for way in ("gained", "lost"):
                flips[way] = [{"task": example["task"]} for example in flips[way]]
            for item in result["comparisons"]:
                item.pop("method", None)
        elif cut == "settings":
            result["settings"] = dict.fromkeys(result["settings"], "differs")
        else:
            result.pop("sampling")
    return result


def _short(p: float | None) -> float | None:
    return None if p is None else float(f"{p:.3g}")

"""curate: what a model did well becomes training rows.

Sources are evaluations, probes and training rollouts. Attempts are grouped and chosen
(engine/curation/selection.py), errors, cut answers, repetitions and everything that touches a
held-out task are dropped and counted, and what is left is pushed as an SFT dataset that names, row
by row, where it came from. The held-out tasks of the sources come along as its held-out split.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.core.errors import UserError
from engine.core.hints import Call, Hint
from engine.core.reply import BODY_CHARS
from engine.curation.curated import free_name, save_dataset
from engine.curation.selection import Attempt, Key, Rule, check_selection, groups_of, ranked
from engine.curation.sources import Source, load_sources
from engine.environments import registry
from engine.evidence.stats.overlap import HeldOut
from engine.evidence.stats.results import text_of
from engine.home.run_dir import Home
from engine.home.sanitize import Redactor, clip, json_chars, redactor_for

FEW_ROWS = 20
_EXAMPLES = 3
_EXAMPLE_CHARS = 500
# Why an attempt is not kept.
REASONS = {
    "heldout": "its task is held out",
    "unknown_task": "its task is no training task of its environment version",
    "error": "it could not be scored",
    "where": "its task does not match where",
    "not_correct": "select keeps correct answers only",
    "truncated": "the answer was cut off at max_tokens",
    "empty": "the model said nothing",
    "contaminated": "it holds a held-out task",
    "duplicate": "the same conversation is kept already",
    "not_selected": "its task has enough answers",
}


@dataclass
class _Choice:
    """What is kept, and how many attempts were not, by reason."""

    kept: list[Attempt] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)
    first: dict[str, Attempt] = field(default_factory=dict)  # an example for each reason
    overlaps: dict[str, int] = field(default_factory=dict)  # contaminated ones by kind
    unindexed: int = 0  # held-out tasks that no answer was compared with by word sequences

    def drop(self, reason: str, attempts: Sequence[Attempt]) -> None:
        if attempts:
            self.dropped[reason] = self.dropped.get(reason, 0) + len(attempts)
            self.first.setdefault(reason, attempts[0])


def curate(
    home: Home,
    source_ids: Sequence[str],
    name: str,
    where: str = "",
    select: str = "correct",
    max_per_task: int = 1,
    pool_models: bool = False,
    preview: bool = True,
) -> dict[str, Any]:
    """Choose training rows from runs; with `preview=False` push them as the dataset `name`.

    Args:
        source_ids: evaluations, probes or GRPO runs; `run@step20` takes one step's rollouts.
        where: a rule over each task's attempts (engine/curation/selection.py: Rule).
        select: correct, best, best_n, shortest or all.
        max_per_task: answers kept per task and model (correct, best_n, shortest).
        pool_models: treat the attempts of all models at a task as one group.

    Raises UserError BAD_ARGUMENT, RUN_NOT_FOUND, NO_EVALUATION, ENV_NOT_FOUND, and of a push.
    """
    check_selection(select, max_per_task)
    name = free_name(home, name)
    sources = load_sources(home, source_ids)
    attempts = [attempt for source in sources for attempt in source.attempts]
    rule = Rule(where, {metric for attempt in attempts for metric in attempt.metrics})
    records = {source.record.hash: source.record for source in sources}
    rows = {key: registry.read_tasks(record) for key, record in sorted(records.items())}
    groups = groups_of(attempts, pool_models)
    choice = _choose(groups, rows, rule, select, max_per_task)
    redact = _redactor(home, sources)
    tasks = {(attempt.env_hash, attempt.task) for attempt in choice.kept}
    result: dict[str, Any] = {
        "summary": "",
        "kept": len(choice.kept),
        "tasks": len(tasks),
        "attempts": len(attempts),
        "groups": len(groups),
        "dropped": {key: choice.dropped[key] for key in REASONS if key in choice.dropped},
        "sources": [source.about() for source in sources],
        "heldout_rows": sum(row["split"] == "heldout" for found in rows.values() for row in found),
        "env_id": "",
        "examples": [_example(redact, attempt) for attempt in choice.kept[:_EXAMPLES]],
        "dropped_examples": {
            reason: _example(redact, choice.first[reason]) | {"why": REASONS[reason]}
            for reason in REASONS
            if reason in choice.first
        },
    }
    if choice.overlaps:
        result["contaminated"] = choice.overlaps
    asked = {
        "source_ids": list(source_ids), "name": name, "where": where, "select": select,
        "max_per_task": max_per_task, "pool_models": pool_models,
    }  # fmt: skip
    warnings = _warnings(choice, select, sources)
    if not preview:
        if not choice.kept:
            raise UserError(
                "BAD_ARGUMENT",
                f"nothing is left to save: {_said(result['dropped']) or 'no attempts'}",
                hint=_way_out(choice, sources),
                field="where" if choice.dropped.get("where") else "source_ids",
            )
        pushed = save_dataset(home, name, choice.kept, rows, records, sources, asked)
        result["env_id"] = pushed["env_id"]
        warnings += [note for note in pushed["warnings"] if note not in warnings]
    result["summary"] = _sentence(result, name)
    result["next"] = _next(result, asked, sources)
    result["warnings"] = warnings
    return _fitted(result)


def _choose(
    groups: Mapping[Key, list[Attempt]],
    rows: Mapping[str, list[dict[str, Any]]],
    rule: Rule,
    select: str,
    max_per_task: int,
) -> _Choice:
    choice = _Choice()
    sides = {(env, row["id"]): row["split"] for env, found in rows.items() for row in found}
    exam = HeldOut(row for found in rows.values() for row in found if row["split"] == "heldout")
    choice.unindexed = exam.unindexed
    seen: set[str] = set()
    for (env_hash, task, _), group in groups.items():
        side = sides.get((env_hash, task))
        if side != "train":
            choice.drop("heldout" if side == "heldout" else "unknown_task", group)
            continue
        matched = rule.matches(group)
        choice.drop("error", [a for a in group if a.error is not None])
        scored = [a for a in group if a.error is None]
        if not matched:
            choice.drop("where", scored)
            continue
        fit, unfit = ranked(scored, select)
        choice.drop("not_correct", unfit)
        taken = 0
        for attempt in fit:
            enough = taken >= max_per_task and select != "all"
            reason = "not_selected" if enough else _flaw(attempt, exam, seen, choice)
            if reason:
                choice.drop(reason, [attempt])
                continue
            taken += 1
            seen.add(_conversation(attempt))
            choice.kept.append(attempt)
    return choice


def _flaw(attempt: Attempt, exam: HeldOut, seen: set[str], choice: _Choice) -> str:
    """Why an attempt that `select` would take cannot be learnt from, "" when it can."""
    if attempt.stop_reason == "length":
        return "truncated"
    said = [message for message in attempt.messages if message.get("role") == "assistant"]
    last = attempt.messages[-1]
    if not said or not text_of([said[-1]]).strip() or last.get("role") != "assistant":
        return "empty"
    if _conversation(attempt) in seen:
        return "duplicate"
    row = {"id": attempt.task, "prompt": attempt.prompt}
    found = exam.matches(row | {"gold": [*attempt.prompt, *attempt.messages]})
    if found:
        kind = min(found, key=lambda match: match.rank).kind
        choice.overlaps[kind] = choice.overlaps.get(kind, 0) + 1
        return "contaminated"
    return ""


def _conversation(attempt: Attempt) -> str:
    """The same text for conversations that only white space around messages tells apart."""
    plain = [
        {**message, "content": str(message.get("content") or "").strip()}
        for message in (*attempt.prompt, *attempt.messages)
    ]
    return json.dumps(plain, sort_keys=True, ensure_ascii=False)


def _redactor(home: Home, sources: Sequence[Source]) -> Redactor:
    """Hides the secrets of every environment among the sources."""
    if len({source.record.env_id for source in sources}) == 1:
        return redactor_for(home, sources[0].config.env_dir)
    return _Redactors([redactor_for(home, source.config.env_dir) for source in sources])


class _Redactors(Redactor):
    """Several redactors, one after the other."""

    def __init__(self, each: Sequence[Redactor]) -> None:
        super().__init__()
        self._each = each

    def __call__(self, text: str) -> str:
        for redact in self._each:
            text = redact(text)
        return text


def _example(redact: Redactor, attempt: Attempt) -> dict[str, Any]:
    return {
        "task": clip(redact.text(attempt.task), 80),
        "run": attempt.source,
        "model": redact.text(attempt.model),
        "reward": attempt.reward,
        "tokens": attempt.tokens,
        "prompt": clip(redact.text(text_of(list(attempt.prompt))), _EXAMPLE_CHARS),
        "answer": clip(redact.text(text_of(list(attempt.messages))), _EXAMPLE_CHARS),
    }


def _warnings(choice: _Choice, select: str, sources: Sequence[Source]) -> list[str]:
    notes = []
    wrong = sum(not attempt.correct for attempt in choice.kept)
    if wrong and select not in ("correct", "shortest"):
        notes.append(
            f"{wrong} of the {len(choice.kept)} rows are not correct answers; "
            'where="solved" with select="correct" keeps right ones only.'
        )
    if 0 < len(choice.kept) < FEW_ROWS:
        notes.append(f"{len(choice.kept)} rows are few to learn from; more attempts give more.")
    if choice.dropped.get("heldout"):
        notes.append(
            f"{choice.dropped['heldout']} attempts are at held-out tasks, which never become "
            "training rows."
        )
    if choice.unindexed:
        notes.append(
            f"{choice.unindexed} held-out tasks are past the size of the index: answers were "
            "compared with them as a whole, not by shared word sequences."
        )
    if len({source.record.hash for source in sources}) > 1:
        names = sorted({source.record.env_id for source in sources})
        notes.append(f"Tasks of {', '.join(names)} are kept apart, also where their ids agree.")
    return notes


def _way_out(choice: _Choice, sources: Sequence[Source]) -> Hint:
    """What to do when nothing is left."""
    total = sum(choice.dropped.values())
    if choice.dropped.get("heldout") == total:
        first = sources[0]
        plays = {
            "env_id": first.record.env_id,
            "models": list(first.models),
            "split": "train",
            "attempts": 8,
        }
        return Hint("Play training tasks, then curate that evaluation:", Call("evaluate", plays))
    if choice.dropped.get("where"):
        return Hint("Loosen where; a preview shows an example of every reason.")
    return Hint("A preview shows an example of every reason; more attempts give more to choose.")


def _sentence(result: Mapping[str, Any], name: str) -> str:
    kept = f"{result['kept']} of {result['attempts']} attempts are kept, at {result['tasks']} tasks"
    dropped = _said(result["dropped"])
    text = f"{kept}; dropped: {dropped}." if dropped else f"{kept}."
    if result["env_id"]:
        return f"Saved {result['env_id']}, an SFT dataset with {result['kept']} rows: {text}"
    return f"Preview of {name}, nothing is saved: {text}"


def _said(dropped: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in dropped.items())


def _next(
    result: Mapping[str, Any], asked: Mapping[str, Any], sources: Sequence[Source]
) -> list[dict[str, Any]]:
    if result["env_id"]:
        models = {model for source in sources for model in source.models}
        plan: dict[str, Any] = {"env_id": result["env_id"], "algorithm": "sft"}
        if len(models) == 1 and (only := next(iter(models))) and len(only) < 200:
            plan["model"] = only
        return [Call("submit_train", plan).to_json()]
    if not result["kept"]:
        return []
    default = {"where": "", "select": "correct", "max_per_task": 1, "pool_models": False}
    given = {key: value for key, value in asked.items() if default.get(key) != value}
    return [Call("curate", given | {"preview": False}).to_json()]


def _fitted(result: dict[str, Any]) -> dict[str, Any]:
    """Leave out examples until an agent can afford the result."""
    for cut in ("dropped_examples", "examples", "sources"):
        if json_chars(result) <= BODY_CHARS:
            return result
        if cut == "dropped_examples":
            for example in result[cut].values():
                example["prompt"], example["answer"] = (
                    clip(example[key], 120) for key in ("prompt", "answer")
                )
        elif cut == "examples":
            result[cut] = result[cut][:1]
            result["dropped_examples"] = {}
        else:
            result[cut] = result[cut][:5]
    return result

"""curate: what a model did well becomes training rows.

Sources are evaluations, probes and training rollouts. Attempts are grouped and chosen
(engine/curation/selection.py), errors, cut answers, repetitions and everything that touches a
held-out task are dropped and counted, and what is left is pushed as an SFT dataset that names, row
by row, where it came from. The held-out tasks of the sources come along as its held-out split.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from engine.core.errors import UserError
from engine.core.hints import Call, Hint
from engine.core.reply import BODY_CHARS, ReplyBase, as_json
from engine.curation.curated import Choices, free_name, save_dataset
from engine.curation.selection import Attempt, Key, Rule, check_selection, groups_of, ranked
from engine.curation.sources import Source, SourceSummary, load_sources
from engine.environments import registry
from engine.evidence.stats.overlap import HeldOut
from engine.evidence.stats.results import text_of
from engine.home.run_dir import Home
from engine.home.sanitize import Redactor, clip, json_chars, redactor_for
from engine.records.lines.line_record import skipped_lines
from envs.json_types import TaskRow

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
class _Outcome:
    """What becomes of the attempts.

    Attributes:
        kept: those that become training rows.
        dropped: how many do not, by reason; `first` is an example of each reason.
        overlaps: contaminated ones by kind of match.
        unindexed: held-out tasks that no answer was compared with by word sequences.
    """

    kept: list[Attempt] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)
    first: dict[str, Attempt] = field(default_factory=dict)
    overlaps: dict[str, int] = field(default_factory=dict)
    unindexed: int = 0

    def drop(self, reason: str, attempts: Sequence[Attempt]) -> None:
        if attempts:
            self.dropped[reason] = self.dropped.get(reason, 0) + len(attempts)
            self.first.setdefault(reason, attempts[0])


@dataclass(frozen=True)
class Example:
    """An attempt as a reply shows it; of a dropped one with the reason in words."""

    task: str
    run: str
    model: str
    reward: float
    tokens: int
    prompt: str
    answer: str
    why: str | None = None

    def shortened(self, chars: int) -> "Example":
        return replace(self, prompt=clip(self.prompt, chars), answer=clip(self.answer, chars))


@dataclass(frozen=True)
class CurationReply(ReplyBase):
    """What was chosen, and where it was saved.

    Attributes:
        kept, tasks: attempts that become rows, and the tasks they are at.
        attempts, groups: all that were looked at.
        dropped: attempts that were not kept, by reason.
        heldout_rows: held-out tasks that come along.
        env_id: the version that was pushed, "" for a preview.
        contaminated: attempts that hold a held-out task, by kind of match; None without any.
    """

    summary: str
    kept: int
    tasks: int
    attempts: int
    groups: int
    dropped: dict[str, int]
    sources: list[SourceSummary]
    heldout_rows: int
    env_id: str
    examples: list[Example]
    dropped_examples: dict[str, Example]
    contaminated: dict[str, int] | None = None
    next: list[Call] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def curate(home: Home, name: str, choices: Choices, preview: bool = True) -> CurationReply:
    """Choose training rows from runs; with `preview=False` push them as the dataset `name`.

    Raises UserError BAD_ARGUMENT, RUN_NOT_FOUND, NO_EVALUATION, ENV_NOT_FOUND, and of a push.
    """
    check_selection(choices.select, choices.max_per_task)
    name = free_name(home, name)
    sources = load_sources(home, choices.source_ids)
    attempts = [attempt for source in sources for attempt in source.attempts]
    rule = Rule(choices.where, {metric for attempt in attempts for metric in attempt.metrics})
    records = {source.record.hash: source.record for source in sources}
    tasks = {key: registry.read_tasks(record) for key, record in sorted(records.items())}
    groups = groups_of(attempts, choices.pool_models)
    outcome = _choose(groups, tasks, rule, choices)
    redact = _redactor(home, sources)
    reply = CurationReply(
        summary="",
        kept=len(outcome.kept),
        tasks=len({(attempt.env_hash, attempt.task) for attempt in outcome.kept}),
        attempts=len(attempts),
        groups=len(groups),
        dropped={
            reason: outcome.dropped[reason] for reason in REASONS if reason in outcome.dropped
        },
        sources=[source.summary() for source in sources],
        heldout_rows=sum(row["split"] == "heldout" for rows in tasks.values() for row in rows),
        env_id="",
        examples=[_example(redact, attempt) for attempt in outcome.kept[:_EXAMPLES]],
        dropped_examples={
            reason: replace(_example(redact, outcome.first[reason]), why=why)
            for reason, why in REASONS.items()
            if reason in outcome.first
        },
        contaminated=outcome.overlaps or None,
    )
    warnings = _warnings(outcome, choices.select, sources)
    if not preview:
        if not outcome.kept:
            raise UserError(
                "BAD_ARGUMENT",
                f"nothing is left to save: {_counts(reply.dropped) or 'no attempts'}",
                hint=_way_out(outcome, sources),
                field="where" if outcome.dropped.get("where") else "source_ids",
            )
        pushed = save_dataset(home, name, outcome.kept, tasks, sources, choices)
        reply = replace(reply, env_id=pushed.env_id)
        warnings += [note for note in pushed.warnings if note not in warnings]
    return _fitted(
        replace(
            reply,
            summary=_sentence(reply, name),
            next=_next_calls(reply, name, choices, sources),
            warnings=warnings,
        )
    )


def _choose(
    groups: Mapping[Key, list[Attempt]],
    tasks: Mapping[str, list[TaskRow]],
    rule: Rule,
    choices: Choices,
) -> _Outcome:
    """Which attempts are kept; every other one is dropped for the first reason that holds.

    Args:
        tasks: the stored rows of each environment version, by its hash.
    """
    outcome = _Outcome()
    sides = {(env, row["id"]): row["split"] for env, rows in tasks.items() for row in rows}
    heldout = HeldOut(row for rows in tasks.values() for row in rows if row["split"] == "heldout")
    outcome.unindexed = heldout.unindexed
    kept_conversations: set[str] = set()
    for (env_hash, task, _), group in groups.items():
        side = sides.get((env_hash, task))
        if side != "train":
            outcome.drop("heldout" if side == "heldout" else "unknown_task", group)
            continue
        matched = rule.matches(group)
        outcome.drop("error", [a for a in group if a.error is not None])
        scored = [a for a in group if a.error is None]
        if not matched:
            outcome.drop("where", scored)
            continue
        fit, unfit = ranked(scored, choices.select)
        outcome.drop("not_correct", unfit)
        taken = 0
        for attempt in fit:
            if taken >= choices.max_per_task and choices.select != "all":
                reason = "not_selected"
            else:
                reason = _flaw(attempt, heldout, kept_conversations, outcome.overlaps)
            if reason:
                outcome.drop(reason, [attempt])
                continue
            taken += 1
            kept_conversations.add(_conversation(attempt))
            outcome.kept.append(attempt)
    return outcome


def _flaw(
    attempt: Attempt, heldout: HeldOut, kept_conversations: set[str], overlaps: dict[str, int]
) -> str:
    """Why an attempt that `select` would take cannot be learnt from, "" when it can.

    An attempt that holds a held-out task is counted in `overlaps` by its kind of match.
    """
    if attempt.stop_reason == "length":
        return "truncated"
    last = attempt.messages[-1]
    if last.get("role") != "assistant" or not text_of([last]).strip():
        return "empty"
    if _conversation(attempt) in kept_conversations:
        return "duplicate"
    row = {"id": attempt.task, "prompt": attempt.prompt}
    matches = heldout.matches(row | {"gold": [*attempt.prompt, *attempt.messages]})
    if matches:
        kind = min(matches, key=lambda match: match.rank).kind
        overlaps[kind] = overlaps.get(kind, 0) + 1
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


def _example(redact: Redactor, attempt: Attempt) -> Example:
    """The attempt with its texts cut and its secrets hidden."""
    return Example(
        task=clip(redact.text(attempt.task), 80),
        run=attempt.source,
        model=redact.text(attempt.model),
        reward=attempt.reward,
        tokens=attempt.tokens,
        prompt=clip(redact.text(text_of(list(attempt.prompt))), _EXAMPLE_CHARS),
        answer=clip(redact.text(text_of(list(attempt.messages))), _EXAMPLE_CHARS),
    )


def _warnings(outcome: _Outcome, select: str, sources: Sequence[Source]) -> list[str]:
    """What whoever trains on the rows should know of them."""
    notes = skipped_lines(sum(source.skipped for source in sources))
    wrong = sum(not attempt.correct for attempt in outcome.kept)
    if wrong and select not in ("correct", "shortest"):
        notes.append(
            f"{wrong} of the {len(outcome.kept)} rows are not correct answers; "
            'where="solved" with select="correct" keeps right ones only.'
        )
    if 0 < len(outcome.kept) < FEW_ROWS:
        notes.append(f"{len(outcome.kept)} rows are few to learn from; more attempts give more.")
    if outcome.dropped.get("heldout"):
        notes.append(
            f"{outcome.dropped['heldout']} attempts are at held-out tasks, which never become "
            "training rows."
        )
    if outcome.unindexed:
        notes.append(
            f"{outcome.unindexed} held-out tasks are past the size of the index: answers were "
            "compared with them as a whole, not by shared word sequences."
        )
    if len({source.record.hash for source in sources}) > 1:
        names = sorted({source.record.env_id for source in sources})
        notes.append(f"Tasks of {', '.join(names)} are kept apart, also where their ids agree.")
    return notes


def _way_out(outcome: _Outcome, sources: Sequence[Source]) -> Hint:
    """What to do when nothing is left."""
    total = sum(outcome.dropped.values())
    if outcome.dropped.get("heldout") == total:
        first = sources[0]
        plays = {
            "env_id": first.record.env_id,
            "models": list(first.models),
            "split": "train",
            "attempts": 8,
        }
        return Hint("Play training tasks, then curate that evaluation:", Call("evaluate", plays))
    if outcome.dropped.get("where"):
        return Hint("Loosen where; a preview shows an example of every reason.")
    return Hint("A preview shows an example of every reason; more attempts give more to choose.")


def _sentence(reply: CurationReply, name: str) -> str:
    kept = f"{reply.kept} of {reply.attempts} attempts are kept, at {reply.tasks} tasks"
    dropped = _counts(reply.dropped)
    text = f"{kept}; dropped: {dropped}." if dropped else f"{kept}."
    if reply.env_id:
        return f"Saved {reply.env_id}, an SFT dataset with {reply.kept} rows: {text}"
    return f"Preview of {name}, nothing is saved: {text}"


def _counts(dropped: Mapping[str, int]) -> str:
    """`2 heldout, 1 error`."""
    return ", ".join(f"{count} {reason}" for reason, count in dropped.items())


def _next_calls(
    reply: CurationReply, name: str, choices: Choices, sources: Sequence[Source]
) -> list[Call]:
    """Train on what was saved, or save what the preview shows."""
    if reply.env_id:
        models = {model for source in sources for model in source.models}
        plan = {"env_id": reply.env_id, "algorithm": "sft"}
        if len(models) == 1 and (only := next(iter(models))) and len(only) < 200:
            plan["model"] = only
        return [Call("submit_train", plan)]
    if not reply.kept:
        return []
    defaults = as_json(Choices(source_ids=[]))
    given = {key: value for key, value in as_json(choices).items() if value != defaults[key]}
    source_ids = given.pop("source_ids")
    return [Call("curate", {"source_ids": source_ids, "name": name, **given, "preview": False})]


def _fitted(reply: CurationReply) -> CurationReply:
    """The reply with shorter and fewer examples, then fewer sources, until it is affordable."""
    if _fits(reply):
        return reply
    shorter = {reason: each.shortened(120) for reason, each in reply.dropped_examples.items()}
    reply = replace(reply, dropped_examples=shorter)
    if _fits(reply):
        return reply
    reply = replace(reply, examples=reply.examples[:1], dropped_examples={})
    return reply if _fits(reply) else replace(reply, sources=reply.sources[:5])


def _fits(reply: CurationReply) -> bool:
    return json_chars(reply.to_json()) <= BODY_CHARS

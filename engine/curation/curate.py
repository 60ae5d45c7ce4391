"""curate: choose good answers of models as training rows.

Sources are evaluations, probes and training rollouts. Attempts are grouped and chosen
(engine/curation/selection.py). Errors, answers that were cut off, repetitions and everything that
holds a held-out task are dropped and counted. The rest is pushed as a dataset for SFT, or of pairs
for DPO; each row names its origin. The held-out tasks of the sources become its held-out split.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from engine.core.errors import UserError
from engine.core.hints import Call, Hint
from engine.core.reply import BODY_CHARS, ReplyBase, as_json
from engine.curation.curated import Choices, Chosen, checked_name, save_dataset
from engine.curation.selection import (
    PAIRS,
    Attempt,
    Key,
    Rule,
    check_selection,
    groups_of,
    pairs_in,
    ranked,
)
from engine.curation.sources import (
    Source,
    SourceSummary,
    load_sources,
    redactor_of_sources,
    warnings_of_providers,
)
from engine.environments import registry
from engine.environments.push import PushReply
from engine.evidence.overlap.overlap import HeldOut
from engine.evidence.stats.results import text_of
from engine.home.run_dir import Home
from engine.home.sanitize import Redactor, clip, json_chars
from engine.home.user_config import PREFIX
from engine.records.lines.answer import OUT_OF_TOKENS
from engine.records.lines.line_record import skipped_lines
from envs.json_types import TaskRow

FEW_ROWS = 20  # fewer rows get a warning
_EXAMPLES = 3  # kept attempts that a reply shows
_EXAMPLE_CHARS = 500  # the most characters of each text of an example
_SHORT_EXAMPLE_CHARS = 120  # the same if the reply would otherwise be too long
_LONGEST_MODEL = 200  # a model reference of so many characters is left out of suggested calls
# Reasons why an attempt is not kept: key in replies -> explanation.
REASONS = {
    "heldout": "its task is held out",
    "unknown_task": "its task is no training task of its environment version",
    "error": "it could not be scored",
    "where": "its task does not match where",
    "not_correct": "select keeps correct answers only",
    "truncated": "the answer was cut off at max_tokens or max_length",
    "empty": "the model said nothing",
    "contaminated": "it holds a held-out task",
    "duplicate": "the same conversation is kept already",
    "not_selected": "its task has enough answers",
    "unpaired": "its task has no answer that is better or worse to pair it with",
}


@dataclass
class _Outcome:
    """Which attempts are kept and which are dropped.

    Attributes:
        kept: attempts that become training rows; with select="pairs" the better ones of the pairs.
        worse: for pairs the worse attempt of each kept one, in the same order; else empty.
        dropped: reason (key of REASONS) -> number of attempts dropped for it.
        first_dropped: reason -> the first attempt that was dropped for it.
        overlaps: kind of match, e.g. "exact" -> number of attempts that hold a held-out task.
        kept_conversations: the conversations of kept attempts as `_conversation_text` writes them.
        unindexed: number of held-out tasks that were compared with answers only as a whole, because
            the index of word sequences was full.
    """

    kept: list[Attempt] = field(default_factory=list)
    worse: list[Attempt] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)
    first_dropped: dict[str, Attempt] = field(default_factory=dict)
    overlaps: dict[str, int] = field(default_factory=dict)
    kept_conversations: set[str] = field(default_factory=set)
    unindexed: int = 0

    def drop(self, reason: str, attempts: Sequence[Attempt]) -> None:
        """Count the attempts as dropped for `reason`, a key of REASONS, and keep the first as an
        example of it."""
        if attempts:
            self.dropped[reason] = self.dropped.get(reason, 0) + len(attempts)
            self.first_dropped.setdefault(reason, attempts[0])


@dataclass(frozen=True)
class Example:
    """An attempt as a reply shows it. `why` says why it was dropped; None if it is kept."""

    task: str
    run: str
    model: str
    reward: float
    tokens: int
    prompt: str
    answer: str
    why: str | None = None

    def shortened(self, chars: int) -> "Example":
        """Return the example with prompt and answer cut to `chars` characters each."""
        return replace(self, prompt=clip(self.prompt, chars), answer=clip(self.answer, chars))


@dataclass(frozen=True)
class CurationReply(ReplyBase):
    """The reply of curate: what was chosen, and where it was saved.

    Attributes:
        kept: number of attempts or pairs that become rows.
        tasks: number of different tasks of the kept attempts.
        attempts, groups: number of attempts, and of groups of them, that were considered.
        dropped: reason (key of REASONS) -> number of attempts dropped for it.
        heldout_rows: number of held-out tasks that the dataset gets.
        env_id: the version that was pushed; "" for a preview.
        contaminated: kind of match -> number of attempts that hold a held-out task; None without
            any.
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


@dataclass(frozen=True)
class _Selection:
    """The attempts of the sources, and which of them were chosen.

    Attributes:
        tasks: hash of an environment version -> its task rows.
        groups: all attempts of the sources, in the groups that `groups_of` makes.
        outcome: which of them are kept and dropped.
    """

    sources: Sequence[Source]
    tasks: Mapping[str, list[TaskRow]]
    groups: Mapping[Key, list[Attempt]]
    outcome: _Outcome


def curate(home: Home, name: str, choices: Choices, preview: bool = True) -> CurationReply:
    """Choose training rows from runs; with `preview=False` also push them as the dataset `name`.

    Raises UserError BAD_ARGUMENT if an argument cannot be used or nothing is left to push; the
    errors of `load_sources` if a source cannot be read; and every error of `push_env`.
    """
    check_selection(choices.select, choices.max_per_task)
    name = checked_name(home, name)
    selection = _select(home, choices)
    sources = selection.sources
    reply = _reply_of(selection, redactor_of_sources(home, sources))
    warnings = _warnings(selection.outcome, choices.select, sources)
    if not preview:
        push_reply = _push_dataset(home, name, selection, choices)
        reply = replace(reply, env_id=push_reply.env_id)
        # The push may give the same warning again.
        warnings += [warning for warning in push_reply.warnings if warning not in warnings]
    complete_reply = replace(
        reply,
        summary=_summary(reply, name, is_pairs=choices.select == PAIRS),
        next=_next_calls(reply, name, choices, sources),
        warnings=warnings,
    )
    return _shortened_to_fit(complete_reply)


def _select(home: Home, choices: Choices) -> _Selection:
    """Read the attempts of the sources and choose among them. Raises UserError if a source cannot
    be read or the rule `choices.where` cannot be used."""
    sources = load_sources(home, choices.source_ids)
    attempts = [attempt for source in sources for attempt in source.attempts]
    # The rule may name every metric that any attempt has.
    rule = Rule(choices.where, {metric for attempt in attempts for metric in attempt.metrics})
    tasks = _tasks_by_version(sources)
    groups = groups_of(attempts, choices.pool_models)
    outcome = _keep_or_drop(groups, tasks, rule, choices)
    return _Selection(sources, tasks, groups, outcome)


def _push_dataset(home: Home, name: str, selection: _Selection, choices: Choices) -> PushReply:
    """Push the attempts that `selection` has chosen as the dataset `name`. Raises UserError
    BAD_ARGUMENT if none was chosen, and every error of `push_env`."""
    if not selection.outcome.kept:
        raise _nothing_to_save(selection.outcome, selection.sources)
    chosen = Chosen(selection.outcome.kept, selection.outcome.worse)
    return save_dataset(home, name, chosen, selection.tasks, selection.sources, choices)


def _reply_of(selection: _Selection, redact: Redactor) -> CurationReply:
    """Make the reply about a selection; `redact` hides secrets. Its summary, env_id, next calls and
    warnings are empty."""
    outcome, sources = selection.outcome, selection.sources
    return CurationReply(
        summary="",
        kept=len(outcome.kept),
        tasks=len({(attempt.env_hash, attempt.task) for attempt in outcome.kept}),
        attempts=sum(len(source.attempts) for source in sources),
        groups=len(selection.groups),
        dropped=_dropped_by_reason(outcome),
        sources=[source.summary() for source in sources],
        heldout_rows=len(_heldout_tasks(selection.tasks)),  # each task becomes a row
        env_id="",
        examples=[_example(redact, attempt) for attempt in outcome.kept[:_EXAMPLES]],
        dropped_examples=_dropped_examples(outcome, redact),
        contaminated=outcome.overlaps or None,
    )


def _dropped_by_reason(outcome: _Outcome) -> dict[str, int]:
    """Return reason -> number of attempts that `outcome` counts as dropped, in the order of
    REASONS; reasons with no attempt are left out."""
    return {reason: outcome.dropped[reason] for reason in REASONS if reason in outcome.dropped}


def _heldout_tasks(tasks: Mapping[str, list[TaskRow]]) -> list[TaskRow]:
    """Return the held-out and the dev tasks, which are never trained on. `tasks` maps the hash of
    each environment version to its task rows."""
    return [row for rows in tasks.values() for row in rows if row["split"] != "train"]


def _dropped_examples(outcome: _Outcome, redact: Redactor) -> dict[str, Example]:
    """Return reason -> the first attempt that was dropped for it, in the order of REASONS. `redact`
    hides secrets."""
    return {
        reason: replace(_example(redact, outcome.first_dropped[reason]), why=why)
        for reason, why in REASONS.items()
        if reason in outcome.first_dropped
    }


def _tasks_by_version(sources: Sequence[Source]) -> dict[str, list[TaskRow]]:
    """Return hash -> task rows for each environment version of the sources, sorted by hash."""
    records = {source.record.hash: source.record for source in sources}
    return {env_hash: _tasks_to_curate(record) for env_hash, record in sorted(records.items())}


def _tasks_to_curate(record: registry.EnvRecord) -> list[TaskRow]:
    """Return the task rows of a version. Of data too large to copy only the held-out rows are
    returned, because models were asked no others."""
    return list(registry.read_tasks(record, "heldout" if record.version.data else None))


def _keep_or_drop(
    groups: Mapping[Key, list[Attempt]],
    tasks: Mapping[str, list[TaskRow]],
    rule: Rule,
    choices: Choices,
) -> _Outcome:
    """Decide for every attempt whether it is kept as a training row or dropped, and why. Attempts
    at tasks that are no training tasks are dropped.

    Args:
        groups: the attempts of each group, as `groups_of` returns them.
        tasks: hash of an environment version -> its task rows.
        rule: `choices.where`, parsed.
        choices: how attempts are chosen.
    """
    heldout = HeldOut(_heldout_tasks(tasks))  # an index that finds held-out tasks in answers
    outcome = _Outcome(unindexed=heldout.unindexed)
    split_of_task = {
        (env_hash, row["id"]): row["split"] for env_hash, rows in tasks.items() for row in rows
    }
    for (env_hash, task, _model), group in groups.items():
        split = split_of_task.get((env_hash, task))
        if split == "train":
            _keep_or_drop_group(group, rule, choices, heldout, outcome)
        else:  # `split` is None if the version has no task of this id
            outcome.drop("unknown_task" if split is None else "heldout", group)
    return outcome


def _keep_or_drop_group(
    group: Sequence[Attempt],
    rule: Rule,
    choices: Choices,
    heldout: HeldOut,
    outcome: _Outcome,
) -> None:
    """Keep or drop each attempt of one group (attempts at one training task), and add the result to
    `outcome`. `rule` keeps or drops the group as a whole; `heldout` finds held-out tasks in answers
    of the group."""
    # The rule may count attempts with an error (n_error), so it is applied before they are dropped.
    rule_holds = rule.matches(group)
    outcome.drop("error", [attempt for attempt in group if attempt.error is not None])
    without_error = [attempt for attempt in group if attempt.error is None]
    if not rule_holds:
        outcome.drop("where", without_error)
    elif choices.select == PAIRS:
        _keep_pairs(without_error, choices, heldout, outcome)
    else:
        _keep_best(without_error, choices, heldout, outcome)


def _keep_pairs(
    attempts: Sequence[Attempt], choices: Choices, heldout: HeldOut, outcome: _Outcome
) -> None:
    """Keep pairs (a better and a worse attempt) of the attempts at one task, at most
    `choices.max_per_task`.

    Pairs are made of the attempts that can become training rows. The pairs are added to `outcome`,
    and all other attempts are counted there as dropped, each with its reason.
    """
    usable_attempts = _usable_attempts(attempts, heldout, outcome)
    pairs = pairs_in(usable_attempts)
    for better, worse in pairs[: choices.max_per_task]:
        outcome.kept.append(better)
        outcome.worse.append(worse)
    surplus_pairs = pairs[choices.max_per_task :]
    outcome.drop("not_selected", [attempt for pair in surplus_pairs for attempt in pair])
    paired_ids = {id(attempt) for pair in pairs for attempt in pair}  # attempts are not hashable
    outcome.drop(
        "unpaired", [attempt for attempt in usable_attempts if id(attempt) not in paired_ids]
    )


def _usable_attempts(
    attempts: Sequence[Attempt], heldout: HeldOut, outcome: _Outcome
) -> list[Attempt]:
    """Return the attempts that can become training rows; `outcome` counts the others as dropped.
    `heldout` finds held-out tasks in answers."""
    usable_attempts: list[Attempt] = []
    for attempt in attempts:
        reason = _drop_reason(attempt, heldout, outcome)
        if reason:
            outcome.drop(reason, [attempt])
        else:
            usable_attempts.append(attempt)
            outcome.kept_conversations.add(_conversation_text(attempt))
    return usable_attempts


def _keep_best(
    attempts: Sequence[Attempt], choices: Choices, heldout: HeldOut, outcome: _Outcome
) -> None:
    """Keep those attempts at one task that `choices.select` prefers, and add them to `outcome`. At
    most `choices.max_per_task` are kept, unless `select` is "all". The others are counted in
    `outcome` as dropped, each with its reason."""
    candidates, ruled_out = ranked(attempts, choices.select)
    outcome.drop("not_correct", ruled_out)
    kept_count = 0
    for attempt in candidates:  # the preferred ones first
        if choices.select != "all" and kept_count >= choices.max_per_task:
            reason = "not_selected"
        else:
            reason = _drop_reason(attempt, heldout, outcome)
        if reason:
            outcome.drop(reason, [attempt])
            continue
        kept_count += 1
        outcome.kept_conversations.add(_conversation_text(attempt))
        outcome.kept.append(attempt)


def _drop_reason(attempt: Attempt, heldout: HeldOut, outcome: _Outcome) -> str:
    """Return the reason why an attempt cannot become a training row, as a key of REASONS; "" if it
    can. If it holds a held-out task, which `heldout` finds, the kind of match is counted in
    `outcome.overlaps`."""
    if attempt.stop_reason in OUT_OF_TOKENS:
        return "truncated"
    last_message = attempt.messages[-1]
    if last_message.get("role") != "assistant" or not text_of([last_message]).strip():
        return "empty"
    if _conversation_text(attempt) in outcome.kept_conversations:
        return "duplicate"
    kind = _overlap_with_heldout(attempt, heldout)
    if kind:
        outcome.overlaps[kind] = outcome.overlaps.get(kind, 0) + 1
        return "contaminated"
    return ""


def _overlap_with_heldout(attempt: Attempt, heldout: HeldOut) -> str:
    """Return how an attempt's conversation holds a held-out task, which `heldout` finds: the kind
    of the strongest match, such as "exact". Returns "" if it holds none."""
    # Build the training row that the attempt would become; "gold" is prompt and answer together.
    conversation = [*attempt.prompt, *attempt.messages]
    training_row = {"id": attempt.task, "prompt": attempt.prompt, "gold": conversation}
    matches = heldout.matches(training_row)
    if not matches:
        return ""
    strongest = min(matches, key=lambda match: match.rank)  # the lowest rank is the strongest
    return strongest.kind


def _conversation_text(attempt: Attempt) -> str:
    """Return the whole conversation of an attempt as one text, by which duplicates are found. White
    space around messages is removed, so that it makes no difference.
    """
    plain_messages = [
        {**message, "content": str(message.get("content") or "").strip()}
        for message in (*attempt.prompt, *attempt.messages)
    ]
    return json.dumps(plain_messages, sort_keys=True, ensure_ascii=False)


def _example(redact: Redactor, attempt: Attempt) -> Example:
    """Return the attempt as a reply shows it, with texts cut and secrets hidden by `redact`."""
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
    """Return warnings about the chosen rows for the person who trains on them: too few rows, wrong
    answers, attempts at held-out tasks, and answers whose use may not be allowed."""
    warnings = skipped_lines(sum(source.skipped for source in sources))
    warnings += _warnings_of_incorrect_rows(outcome.kept, select)
    if 0 < len(outcome.kept) < FEW_ROWS:
        warnings.append(f"{len(outcome.kept)} rows are few to learn from; more attempts give more.")
    if outcome.dropped.get("heldout"):
        warnings.append(
            f"{outcome.dropped['heldout']} attempts are at held-out tasks, which never become "
            "training rows."
        )
    if outcome.unindexed:
        warnings.append(
            f"{outcome.unindexed} held-out tasks are past the size of the index: answers were "
            "compared with them as a whole, not by shared word sequences."
        )
    warnings += warnings_of_providers(sources)
    return warnings + _warnings_of_several_versions(sources)


def _warnings_of_incorrect_rows(kept_attempts: Sequence[Attempt], select: str) -> list[str]:
    """Return a list with one warning that counts the kept attempts which are not correct. Returns
    [] if there are none, or if this `select` could not leave them out."""
    incorrect_count = sum(not attempt.correct for attempt in kept_attempts)
    # correct and shortest keep only right answers. Both answers of a pair may be wrong on purpose.
    if not incorrect_count or select in ("correct", "shortest", PAIRS):
        return []
    return [
        f"{incorrect_count} of the {len(kept_attempts)} rows are not correct answers; "
        'where="solved" with select="correct" keeps right ones only.'
    ]


def _warnings_of_several_versions(sources: Sequence[Source]) -> list[str]:
    """Return a list with one warning if the sources come from several environment versions; else
    []."""
    if len({source.record.hash for source in sources}) <= 1:
        return []
    # An env_id ends with the hash of its version, so there are several of them too.
    names = sorted({source.record.env_id for source in sources})
    return [f"Tasks of {', '.join(names)} are kept apart, also where their ids agree."]


def _nothing_to_save(outcome: _Outcome, sources: Sequence[Source]) -> UserError:
    """Make the error for a call that should save a dataset but keeps no attempt; `outcome` counts
    why."""
    dropped_counts = _dropped_by_reason(outcome)
    return UserError(
        "BAD_ARGUMENT",
        f"nothing is left to save: {_counts_text(dropped_counts) or 'no attempts'}",
        hint=_advice_without_rows(outcome, sources),
        field="where" if outcome.dropped.get("where") else "source_ids",
    )


def _advice_without_rows(outcome: _Outcome, sources: Sequence[Source]) -> Hint:
    """Return the hint for a call that keeps no attempt: evaluate training tasks, loosen `where`, or
    look at a preview."""
    dropped_count = sum(outcome.dropped.values())
    if outcome.dropped.get("heldout") == dropped_count:  # every attempt was at a held-out task
        first_source = sources[0]
        evaluation = {
            "env_id": first_source.record.env_id,
            "models": list(first_source.models),
            "split": "train",
            "attempts": 8,
        }
        return Hint(
            "Play training tasks, then curate that evaluation:", Call("evaluate", evaluation)
        )
    if outcome.dropped.get("where"):
        return Hint("Loosen where; a preview shows an example of every reason.")
    return Hint("A preview shows an example of every reason; more attempts give more to choose.")


def _summary(reply: CurationReply, name: str, *, is_pairs: bool) -> str:
    """Return the summary: how many attempts or pairs are kept and dropped, and whether they were
    saved.

    Example: "Preview of best, nothing is saved: 12 of 64 attempts are kept, at 9 tasks; dropped:
    2 heldout, 1 error."
    """
    counts = f"{reply.kept} of {reply.attempts} attempts are kept, at {reply.tasks} tasks"
    if is_pairs:
        counts = f"{reply.kept} pairs of {reply.attempts} attempts, at {reply.tasks} tasks"
    dropped_text = _counts_text(reply.dropped)
    text = f"{counts}; dropped: {dropped_text}." if dropped_text else f"{counts}."
    if reply.env_id:
        kind = "a dataset of pairs for DPO" if is_pairs else "an SFT dataset"
        return f"Saved {reply.env_id}, {kind} with {reply.kept} rows: {text}"
    return f"Preview of {name}, nothing is saved: {text}"


def _counts_text(counts: Mapping[str, int]) -> str:
    """Return counts by reason as a text, such as "2 heldout, 1 error"; "" if there are none."""
    return ", ".join(f"{count} {reason}" for reason, count in counts.items())


def _next_calls(
    reply: CurationReply, name: str, choices: Choices, sources: Sequence[Source]
) -> list[Call]:
    """Return the calls to suggest next:

    - if the dataset was saved: train on it.
    - for a preview that keeps rows: the same call with `preview=False`.
    - for a preview that keeps no row: none.
    """
    if reply.env_id:
        return [_training_call(reply.env_id, choices, sources)]
    if not reply.kept:
        return []
    # Choices that have their default are left out. `source_ids` is always given, and comes first.
    defaults = as_json(Choices(source_ids=[]))
    given_choices = {
        key: value
        for key, value in as_json(choices).items()
        if key != "source_ids" and value != defaults[key]
    }
    arguments = {
        "source_ids": list(choices.source_ids),
        "name": name,
        **given_choices,
        "preview": False,
    }
    return [Call("curate", arguments)]


def _training_call(env_id: str, choices: Choices, sources: Sequence[Source]) -> Call:
    """Return the call that trains on the saved dataset. It starts from the model that gave the
    answers, if one model gave all of them and can be trained."""
    algorithm = "dpo" if choices.select == PAIRS else "sft"
    training = {"env_id": env_id, "algorithm": algorithm}
    models = {model for source in sources for model in source.models}
    if len(models) == 1:
        [model] = models
        # The model is left out if it is not known (""), if its reference is very long, or if it is
        # behind a URL and so cannot be trained.
        if model and len(model) < _LONGEST_MODEL and not model.startswith(PREFIX):
            training["model"] = model
    return Call("submit_train", training)


def _shortened_to_fit(reply: CurationReply) -> CurationReply:
    """Return the reply, shortened if it is too long to be sent.

    Each step is taken only if the reply is still too long:
    1. shorten the examples of dropped attempts;
    2. keep one example of a kept attempt and none of dropped ones;
    3. keep the first five sources.
    """
    if _is_short_enough(reply):
        return reply
    short_examples = {
        reason: example.shortened(_SHORT_EXAMPLE_CHARS)
        for reason, example in reply.dropped_examples.items()
    }
    reply = replace(reply, dropped_examples=short_examples)
    if _is_short_enough(reply):
        return reply
    reply = replace(reply, examples=reply.examples[:1], dropped_examples={})
    if _is_short_enough(reply):
        return reply
    return replace(reply, sources=reply.sources[:5])


def _is_short_enough(reply: CurationReply) -> bool:
    """Tell whether the reply is short enough to be sent."""
    return json_chars(reply.to_json()) <= BODY_CHARS

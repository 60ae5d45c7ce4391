"""Reads rollouts of training and answers of an evaluation, with their scores.

All returned texts come from an environment or a model; they are cleaned and secrets are hidden.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine.core.hints import Call
from engine.core.reply import ReplyBase
from engine.home.halves import ABOUT_HALF
from engine.home.run_dir import Home
from engine.home.sanitize import redactor_for
from engine.home.store import Store
from engine.reading.changed_answers import ChangedPage, changed_page
from engine.reading.rollout_groups import GroupsPage, groups_page
from engine.reading.rollout_pages import Reading, RolloutQuery, fit, start_of
from engine.reading.rollout_rows import Row, Source, matching, ordered, rewards_of, source_of
from engine.reading.transcripts import RolloutItem, decoder_of, rollout_item, squeezed_rollout


@dataclass(frozen=True)
class About:
    """Explanations of fields of the items."""

    half: str = ABOUT_HALF


@dataclass(frozen=True)
class RolloutsPage(ReplyBase):
    """Rollouts or held-out answers in the order of the pick.

    Attributes:
        step: training step, or in an evaluation the index of the model among `models`.
        source: a description of the rows, as "rollouts of step 3".
        models: the models of an evaluation; None for a training run.
        matching: number of matching rows, on all pages.
        about: the meaning of `half` in the items; None if no item has it.
    """

    summary: str
    run_id: str
    step: int
    source: str
    models: list[str] | None
    matching: int
    about: About | None
    rollouts: list[RolloutItem]
    warnings: list[str] = field(default_factory=list)
    next: list[Call] = field(default_factory=list)
    next_cursor: str = ""


def read_rollouts(home: Home, query: RolloutQuery) -> RolloutsPage | GroupsPage | ChangedPage:
    """A page of the rollouts or answers that `query.pick` chooses.

    worst, best, median: ordered by reward. random: in a seeded order. truncated, error: only those.
    group: whole groups with their advantages, the widest spread of rewards first. changed: the same
    held-out task before and after training (in an evaluation: by the first model and by this one),
    the largest change first.

    Raises UserError RUN_NOT_FOUND, BAD_ARGUMENT, BAD_CURSOR or NO_EVALUATION.
    """
    query.check()
    with Store(home) as store:
        row = store.get_run(query.run_id)
    run = home.run(row.run_id)
    config = run.find_config()  # None if damaged; the rows are readable all the same
    start = start_of(query)
    decode = decoder_of(config) if query.tokens else None
    redact = redactor_for(home, config.env_dir if config else None)
    reading = Reading(query, start, run, row, config, redact, decode)
    if query.pick == "changed":
        return changed_page(reading)
    source = source_of(reading)
    matching_rows = matching(source.rows, query.where)
    if query.pick == "group":
        return groups_page(reading, source, matching_rows)
    return _rollouts_page(reading, source, matching_rows)


def _rollouts_page(reading: Reading, source: Source, matching_rows: Sequence[Row]) -> RolloutsPage:
    """The page with those of `matching_rows` that the pick selects, in its order."""
    query, row = reading.query, reading.row
    picked = ordered(matching_rows, query.pick, seed=f"{row.run_id} {source.step}")
    texts = reading.texts(query.max_chars)
    items = [rollout_item(reading.redact, answer, texts) for answer in reading.shown_part(picked)]
    page = RolloutsPage(
        summary="",
        run_id=row.run_id,
        step=source.step,
        source=source.what,
        models=None if row.kind == "train" else reading.models,
        matching=len(picked),
        about=About() if any(item.half for item in items) else None,
        rollouts=[],
    )
    fitted = fit(
        reading,
        items,
        len(picked),
        source.mark,
        lambda shown: replace(page, rollouts=shown),
        squeezed_rollout,
    )
    return replace(
        page,
        summary=_summary(reading, source, len(fitted.items), len(picked), matching_rows),
        rollouts=fitted.items,
        warnings=fitted.warnings + source.warnings,
        next_cursor=fitted.next_cursor,
    )


def _summary(
    reading: Reading,
    source: Source,
    shown_count: int,
    picked_count: int,
    matching_rows: Sequence[Row],
) -> str:
    """One sentence: which rows these are, how many of how many, and their mean reward.

    Args:
        shown_count: number of rows on this page.
        picked_count: number of rows that the pick selects.
        matching_rows: the rows that match the filter; the mean is taken over them, as in metrics.
    """
    pick = reading.query.pick
    what = f"{pick} {source.what}"
    if pick in ("error", "truncated"):  # these select rows instead of ordering them
        what = f"{source.what} " + ("with an error" if pick == "error" else "cut short")
    sentence = f"{shown_count} of {picked_count} {what} in {reading.row.run_id}"
    rewards, failed = rewards_of(matching_rows), sum(bool(row.error) for row in matching_rows)
    if rewards:
        count = len(rewards) if source.trained else len(rewards) + failed
        sentence += f"; mean reward {math.fsum(rewards) / count:.3g} over {count}"
    if failed:
        treatment = "left out" if source.trained else "reward 0"
        sentence += f"; {failed} could not be scored" + (f" ({treatment})" if rewards else "")
    return sentence + "."

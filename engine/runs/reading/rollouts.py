"""Reads rollouts of training and answers of an evaluation, with their scores.

All returned texts come from an environment or a model; they are cleaned and secrets are hidden.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine.core.hints import Call
from engine.core.reply import ReplyBase
from engine.home.halves import ABOUT_HALF
from engine.home.owner_marks import refuse_if_of_sealed
from engine.home.run_dir import Home
from engine.home.sanitize import redactor_for
from engine.home.store import Store
from engine.runs.reading.changed_answers import ChangedPage, changed_page
from engine.runs.reading.rollout_groups import GroupsPage, groups_page
from engine.runs.reading.rollout_pages import Reading, RolloutQuery, fit, start_of
from engine.runs.reading.rollout_rows import (
    Row,
    Source,
    matching,
    rewards_of,
    select_picked,
    source_of,
)
from engine.runs.reading.transcripts import RolloutItem, decoder_of, rollout_item, shorten_rollout


@dataclass(frozen=True)
class About:
    """Explanations of fields of the items."""

    half: str = ABOUT_HALF


@dataclass(frozen=True)
class RolloutsPage(ReplyBase):
    """Rollouts or held-out answers, in the order that the query's `pick` asks for.

    Attributes:
        step: training step, or in an evaluation the index of the (last) model among `models`.
        source: a description of the rows, such as "rollouts of step 3".
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
    """Read one page of the rollouts or answers that `query.pick` chooses. "group" shows whole
    groups (the answers to one task); "changed" shows tasks whose score differs between two
    evaluations; every other pick shows single rollouts in the order of `select_picked`. If the run
    goes on, `next` of the page suggests waiting.

    Raises UserError:
        RUN_NOT_FOUND if there is no such run; BAD_ARGUMENT if an argument has a value that is not
            allowed; BAD_CURSOR if the cursor is not of this pick; NO_EVALUATION if there are no
            rows yet; ENV_SEALED if the owner has sealed the run's tasks.
    """
    query.check()
    reading = _reading_of(home, query)
    return replace(_page_of(reading), next=reading.row.wait_calls)


def _page_of(reading: Reading) -> RolloutsPage | GroupsPage | ChangedPage:
    """Make the page that the pick of the query asks for. Raises the UserErrors of `read_rollouts`
    about rows and arguments: NO_EVALUATION and BAD_ARGUMENT."""
    query = reading.query
    if query.pick == "changed":
        return changed_page(reading)
    source = source_of(reading)
    matching_rows = matching(source.rows, query.where)
    if query.pick == "group":
        return groups_page(reading, source, matching_rows)
    return _rollouts_page(reading, source, matching_rows)


def _reading_of(home: Home, query: RolloutQuery) -> Reading:
    """Open the run of the query, and collect what is needed to show its rows.

    Raises UserError RUN_NOT_FOUND if there is no such run, ENV_SEALED if the owner has sealed its
    tasks, BAD_CURSOR if the cursor is not of the query's pick.
    """
    with Store(home) as store:
        row = store.get_run(query.run_id)
    run = home.run(row.run_id)
    # None if the config is gone or damaged; the rows are readable all the same.
    config = run.find_config()
    refuse_if_of_sealed(config, "its answers cannot be read")
    return Reading(
        query=query,
        start=start_of(query),
        run=run,
        row=row,
        config=config,
        redact=redactor_for(home, config.env_dir if config else None),
        decode=decoder_of(config) if query.tokens else None,
    )


def _rollouts_page(reading: Reading, source: Source, matching_rows: Sequence[Row]) -> RolloutsPage:
    """Make a page of single rollouts or answers. `matching_rows` are the rows of `source` that
    match the query's filter. The page shows those that the query's `pick` selects (such as "worst"
    or "random"), in the order of that pick."""
    # Every page uses the same seed, so that all pages show parts of one random order.
    seed = f"{reading.row.run_id} {source.step}"
    picked_rows = select_picked(matching_rows, reading.query.pick, seed=seed)
    items = _shown_items(reading, picked_rows)
    page_without_items = _page_without_rollouts(reading, source, picked_count=len(picked_rows))
    # A held-out answer of a run names the part of the tasks that it belongs to (its `half`), such
    # as "report"; `about` says what these names mean.
    if any(item.half for item in items):
        page_without_items = replace(page_without_items, about=About())
    # As many of the items as one reply can hold.
    fitted_rollouts = fit(
        reading,
        items,
        total=len(picked_rows),
        step_mark=source.mark,
        page_of=lambda shown_items: replace(page_without_items, rollouts=shown_items),
        shorten=shorten_rollout,
    )
    shown_count = len(fitted_rollouts.items)
    return replace(
        page_without_items,
        summary=_summary(reading, source, shown_count, len(picked_rows), matching_rows),
        rollouts=fitted_rollouts.items,
        warnings=fitted_rollouts.warnings + source.warnings,
        next_cursor=fitted_rollouts.next_cursor,
    )


def _shown_items(reading: Reading, picked_rows: Sequence[Row]) -> list[RolloutItem]:
    """Make the items of the picked rows that belong on this page, each with at most `max_chars`
    characters."""
    texts = reading.texts(reading.query.max_chars)
    return [rollout_item(reading.redact, row, texts) for row in reading.shown_part(picked_rows)]


def _page_without_rollouts(reading: Reading, source: Source, picked_count: int) -> RolloutsPage:
    """Make a page about the rows of `source` that still lacks its summary, `about`, rollouts,
    warnings and cursor. `picked_count` is the number of rows that the pick selects, on all
    pages."""
    row = reading.row
    return RolloutsPage(
        summary="",
        run_id=row.run_id,
        step=source.step,
        source=source.description,
        models=None if row.kind == "train" else reading.models,
        matching=picked_count,
        about=None,
        rollouts=[],
    )


def _summary(
    reading: Reading,
    source: Source,
    shown_count: int,
    picked_count: int,
    matching_rows: Sequence[Row],
) -> str:
    """Write the summary, such as "3 of 64 worst rollouts of step 8 in r-1; mean reward 0.41 over
    64."

    Args:
        shown_count: number of rows on this page.
        picked_count: number of rows that the pick selects, on all pages.
        matching_rows: the rows that match the filter, over which the mean is taken.
    """
    rows_text = _name_of_picked_rows(reading.query.pick, source.description)
    sentence = f"{shown_count} of {picked_count} {rows_text} in {reading.row.run_id}"
    return f"{sentence}{_reward_text(matching_rows, trained=source.trained)}."


def _reward_text(rows: Sequence[Row], *, trained: bool) -> str:
    """Write the mean reward of the rows and the number of failed scorings, as the end of a
    sentence. In training (`trained`), rows that could not be scored are left out of the mean; in an
    evaluation each counts as reward 0."""
    text = ""
    rewards = rewards_of(rows)
    failed_count = sum(bool(row.error) for row in rows)
    if rewards:
        mean_count = len(rewards) if trained else len(rewards) + failed_count
        text += f"; mean reward {math.fsum(rewards) / mean_count:.3g} over {mean_count}"
    if failed_count:
        text += f"; {failed_count} could not be scored"
    if failed_count and rewards:
        text += " (left out)" if trained else " (reward 0)"
    return text


def _name_of_picked_rows(pick: str, description: str) -> str:
    """Describe the rows that a pick shows. `description` names all rows, such as "rollouts of step
    8"."""
    if pick == "error":
        return f"{description} with an error"
    if pick == "truncated":
        return f"{description} cut short"
    return f"{pick} {description}"  # the other picks, such as "worst", are adjectives

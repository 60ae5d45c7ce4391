"""Whole groups of rollouts, the answers to one task side by side: `pick="group"`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine.core.hints import Call
from engine.core.reply import ReplyBase, as_json
from engine.home.sanitize import clip, json_chars
from engine.reading.rollout_pages import Reading, fit
from engine.reading.rollout_rows import Row, Source, reward_std, rewards_of
from engine.reading.transcripts import (
    RolloutItem,
    Turn,
    chars_of,
    rollout_item,
    turns_of,
    with_shorter_texts,
    within,
)
from engine.records.lines.curves import short
from engine.records.lines.trajectory_record import TrajectoryRecord


@dataclass(frozen=True)
class GroupItem:
    """One group as a page shows it.

    Attributes:
        step, group: its place in training; None in an evaluation.
        reward_mean, reward_std: over the members that were scored; the mean None where none was.
        solved: members counted as a success.
        errors: members that could not be scored, None where all could.
        members_left_out: members that the page has no room for, None where it shows all.
    """

    task: str
    step: int | None
    group: int | None
    reward_mean: float | None
    reward_std: float
    solved: int
    errors: int | None
    prompt: list[Turn]
    members: list[RolloutItem]
    members_left_out: int | None = None


@dataclass(frozen=True)
class GroupsPage(ReplyBase):
    """Groups with the widest spread of rewards first; `matching` counts those on all pages."""

    summary: str
    run_id: str
    step: int
    source: str
    matching: int
    groups: list[GroupItem]
    warnings: list[str] = field(default_factory=list)
    next: list[Call] = field(default_factory=list)
    next_cursor: str = ""


def groups_page(reading: Reading, source: Source, chosen: Sequence[Row]) -> GroupsPage:
    """The whole groups of which at least one member is among the `chosen` rows."""
    wanted = {_group_key(row) for row in chosen}
    members: dict[str, list[Row]] = {}
    for row in source.rows:
        if _group_key(row) in wanted:
            members.setdefault(_group_key(row), []).append(row)
    groups = sorted(members.values(), key=lambda rows: (-reward_std(rows), _group_key(rows[0])))
    page = GroupsPage("", reading.row.run_id, source.step, source.what, len(groups), [])
    fitted = fit(
        reading,
        [_group_item(reading, rows) for rows in reading.shown_part(groups)],
        len(groups),
        source.mark,
        lambda items: replace(page, groups=items),
        _squeezed,
    )
    flat = sum(reward_std(rows) == 0.0 for rows in groups)
    return replace(
        page,
        groups=fitted.items,
        warnings=fitted.warnings + source.warnings,
        next_cursor=fitted.next_cursor,
        summary=f"{len(fitted.items)} of {len(groups)} groups among the {source.what} in "
        f"{page.run_id}, the widest spread of rewards first; in {flat} all rewards are equal.",
    )


def _group_key(row: Row) -> str:
    """The same text for the members of one group: of a step, or all attempts at a task."""
    if isinstance(row, TrajectoryRecord):
        return f"{row.step:09d} {row.group:09d}"
    return f"task {row.task}"


def _group_item(reading: Reading, rows: Sequence[Row]) -> GroupItem:
    """One group as a page shows it; its members share the characters of one rollout."""
    max_chars, redact = reading.query.max_chars, reading.redact
    rewards = rewards_of(rows)
    texts = reading.texts(max(60, max_chars * 2 // (3 * len(rows))), prompt=False)
    first = rows[0]
    trained = first if isinstance(first, TrajectoryRecord) else None
    return GroupItem(
        task=clip(redact.text(first.task), 120),
        step=trained.step if trained else None,
        group=trained.group if trained else None,
        reward_mean=short(math.fsum(rewards) / len(rewards)) if rewards else None,
        reward_std=short(reward_std(rows)),
        solved=sum(row.success is True for row in rows),
        errors=sum(bool(row.error) for row in rows) or None,
        prompt=within(turns_of(redact, first.prompt), max(max_chars // 3, 40)),
        members=[
            # What all members share stands once, at the group.
            replace(rollout_item(redact, row, texts), step=None, task=None, group=None, half=None)
            for row in rows
        ],
    )


def _squeezed(item: GroupItem, chars: int) -> GroupItem:
    """`item` in about `chars`: with shorter texts, then without metrics, then fewer members."""
    item = with_shorter_texts(item, chars)
    for index in range(len(item.members)):
        if chars_of(item) > chars:
            members = list(item.members)
            members[index] = replace(members[index], metrics=None)
            item = replace(item, members=members)
    while (over := chars_of(item) - chars) > 0 and len(item.members) > 1:
        count = len(item.members)
        gone = over * count // json_chars(as_json(item.members))
        gone = max(1, min(count - 1, gone))
        left_out = (item.members_left_out or 0) + gone
        item = replace(item, members=item.members[: count - gone], members_left_out=left_out)
    return item

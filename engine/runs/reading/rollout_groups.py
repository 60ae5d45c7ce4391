"""Pages of whole groups of rollouts (the answers to one task): `pick="group"` of read_rollouts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine.core.hints import Call
from engine.core.reply import ReplyBase, as_json
from engine.home.sanitize import clip, json_chars
from engine.records.lines.curves import short
from engine.records.lines.trajectory_record import TrajectoryRecord
from engine.runs.reading.rollout_pages import Reading, fit
from engine.runs.reading.rollout_rows import Row, Source, reward_std, rewards_of
from engine.runs.reading.transcripts import (
    RolloutItem,
    Turn,
    chars_of,
    rollout_item,
    shorten_turns,
    turns_of,
    with_shorter_texts,
)

_TASK_CHARS = 120  # characters that are shown of a task's id
_LEAST_MEMBER_CHARS, _LEAST_PROMPT_CHARS = 60, 40  # kept at least, however little room there is


@dataclass(frozen=True)
class GroupItem:
    """One group as a page shows it.

    Attributes:
        step, group: training step and number of the group in it; None in an evaluation.
        reward_mean: over the members that were scored; None if none was.
        reward_std: over the same members; 0 for fewer than two.
        solved: number of members that count as a success.
        errors: number of members that could not be scored; None if there are none.
        members_left_out: number of members that the page has no room for; None if it shows all.
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
    """Groups, the widest spread of rewards first. `matching` counts those on all pages."""

    summary: str
    run_id: str
    step: int
    source: str
    matching: int
    groups: list[GroupItem]
    warnings: list[str] = field(default_factory=list)
    next: list[Call] = field(default_factory=list)
    next_cursor: str = ""


def groups_page(reading: Reading, source: Source, matching_rows: Sequence[Row]) -> GroupsPage:
    """Make a page with every group of `source` that has at least one member among `matching_rows`.
    A group is shown whole, with the members that do not match. Groups with the widest spread of
    rewards come first."""
    groups = _groups_by_spread(matching_rows, source.rows)
    empty_page = GroupsPage(
        summary="",  # written below, once it is known how many groups fit
        run_id=reading.row.run_id,
        step=source.step,
        source=source.description,
        matching=len(groups),
        groups=[],
    )
    fitted_groups = fit(
        reading,
        [_group_item(reading, rows) for rows in reading.shown_part(groups)],
        total=len(groups),
        step_mark=source.mark,  # so that the cursor goes on with the same step
        page_of=lambda items: replace(empty_page, groups=items),
        shorten=_shorten_group,
    )
    return replace(
        empty_page,
        groups=fitted_groups.items,
        warnings=fitted_groups.warnings + source.warnings,
        next_cursor=fitted_groups.next_cursor,
        summary=_summary(empty_page, groups, shown_count=len(fitted_groups.items)),
    )


def _summary(page: GroupsPage, groups: Sequence[Sequence[Row]], shown_count: int) -> str:
    """Say how many of the groups the page shows (`shown_count`), and in how many all rewards are
    equal."""
    uniform_count = sum(reward_std(rows) == 0.0 for rows in groups)
    return (
        f"{shown_count} of {len(groups)} groups among the {page.source} in {page.run_id}, the "
        f"widest spread of rewards first; in {uniform_count} all rewards are equal."
    )


def _groups_by_spread(matching_rows: Sequence[Row], rows: Sequence[Row]) -> list[list[Row]]:
    """Collect the groups of `rows` that have a member among `matching_rows`, each with all its
    members. The widest spread of rewards comes first; equal spreads are in the order of the groups'
    keys."""
    chosen_groups = {_group_key(row) for row in matching_rows}
    rows_by_group: dict[str, list[Row]] = {}
    for row in rows:
        if _group_key(row) in chosen_groups:
            rows_by_group.setdefault(_group_key(row), []).append(row)

    def widest_first(members: list[Row]) -> tuple[float, str]:
        """Sort key: the spread of rewards, descending, then the key of the group."""
        return -reward_std(members), _group_key(members[0])

    return sorted(rows_by_group.values(), key=widest_first)


def _group_key(row: Row) -> str:
    """Make a text that identifies a row's group, such as "000000003 000000012" or "task add-7 of
    base".

    In training it is the step and the number of the group, with zeros in front, so that sorting by
    the text gives the order of training. In an evaluation it is the task and the model.
    """
    if isinstance(row, TrajectoryRecord):
        return f"{row.step:09d} {row.group:09d}"
    return f"task {row.task} of {row.model}"


def _group_item(reading: Reading, rows: Sequence[Row]) -> GroupItem:
    """Make the item that a page shows for one group. The prompt and the answers of all members
    share the characters that the query allows for one rollout (`max_chars`)."""
    redact = reading.redact
    # One third of the characters is for the prompt, two thirds are for the answers.
    prompt_chars = max(reading.query.max_chars // 3, _LEAST_PROMPT_CHARS)
    first = rows[0]
    rollout = first if isinstance(first, TrajectoryRecord) else None  # None in an evaluation
    return GroupItem(
        task=clip(redact.text(first.task), _TASK_CHARS),
        step=rollout.step if rollout else None,
        group=rollout.group if rollout else None,
        reward_mean=_reward_mean(rows),
        reward_std=short(reward_std(rows)),
        solved=sum(row.success is True for row in rows),
        errors=sum(bool(row.error) for row in rows) or None,  # None instead of 0
        prompt=shorten_turns(turns_of(redact, first.prompt), prompt_chars),
        members=_member_items(reading, rows),
    )


def _reward_mean(rows: Sequence[Row]) -> float | None:
    """Compute the mean reward of the rows that were scored, rounded to few digits. Returns None if
    none was scored."""
    rewards = rewards_of(rows)
    return short(math.fsum(rewards) / len(rewards)) if rewards else None


def _member_items(reading: Reading, rows: Sequence[Row]) -> list[RolloutItem]:
    """Make the items of the members of one group, without the fields that are the same for all of
    them. Two thirds of the query's characters are divided among their answers."""
    chars = max(_LEAST_MEMBER_CHARS, reading.query.max_chars * 2 // (3 * len(rows)))
    texts = reading.texts(chars, with_prompt=False)
    items = [rollout_item(reading.redact, row, texts) for row in rows]
    return [replace(item, step=None, task=None, group=None, half=None) for item in items]


def _shorten_group(item: GroupItem, chars: int) -> GroupItem:
    """Shorten `item` to about `chars` characters of JSON.

    Three steps, each only if the item is still too long:
    1. cut texts;
    2. drop the metrics, member by member;
    3. drop members from the end, and count them in `members_left_out`; the first member stays.
    """
    item = _with_fewer_metrics(with_shorter_texts(item, chars), chars)
    while len(item.members) > 1 and chars_of(item) > chars:
        excess_chars = chars_of(item) - chars
        count = len(item.members)
        # The number of members that take up the excess characters, if all are equally long.
        members_in_excess = excess_chars * count // json_chars(as_json(item.members))
        drop_count = max(1, min(count - 1, members_in_excess))  # at least one, but not all
        item = replace(
            item,
            members=item.members[: count - drop_count],
            members_left_out=(item.members_left_out or 0) + drop_count,
        )
    return item


def _with_fewer_metrics(item: GroupItem, chars: int) -> GroupItem:
    """Drop the metrics of the members, one after the other from the first, until the item has at
    most `chars` characters of JSON or no metrics are left."""
    for index in range(len(item.members)):
        if chars_of(item) > chars:
            members = list(item.members)
            members[index] = replace(members[index], metrics=None)
            item = replace(item, members=members)
    return item

"""The task rows of a version, as push stores them: split, with their reference conversations."""

import json
import os
import time
from pathlib import Path

from engine.core import split
from engine.core.errors import UserError
from engine.environments import push_limits
from engine.environments.draft import Draft
from envs.host.process import EnvProcess, EpisodeFailed
from envs.json_types import ChatMessage, TaskRow

GIVE_UP_REPLAYS = 20  # failures after which the remaining reference answers are not replayed


def assign_split(rows: list[TaskRow], draft: Draft) -> split.Split:
    """Writes each row's `split`. Raises UserError ENV_INVALID for one that is unknown."""
    try:
        sides = split.split_rows(rows)
    except split.UnknownSplit as error:
        raise UserError(
            "ENV_INVALID",
            str(error),
            field="path",
            hint='Use "train" or "heldout" ("test", "eval", "validation"), or leave it out.',
        ) from error
    draft.warnings += sides.warnings
    for row, side in zip(rows, sides.sides, strict=True):
        row["split"] = side
    return sides


def add_gold(env: EnvProcess, rows: list[TaskRow], kind: str, draft: Draft) -> None:
    """Writes each row's `gold`: the whole conversation with the reference answer, or None."""
    failures: list[str] = []
    unplayed = 0
    last_start = draft.deadline - push_limits.AUDIT_SECONDS
    for row in rows:
        row["gold"] = None
        if row["answer"] is None:
            continue
        if kind != "multi":
            row["gold"] = [*row["prompt"], *row["answer"]]
        elif len(failures) >= GIVE_UP_REPLAYS or time.monotonic() > last_start:
            unplayed += 1
        else:
            try:
                row["gold"] = _replay(env, row)
            except EpisodeFailed as error:
                failures.append(f"{row['id']}: {error}")
    if failures:
        count = f"{len(failures)} reference answers cannot be replayed"
        draft.warnings.append(f"{count}, the first is {failures[0][:200]}")
        draft.problems += [failure[:300] for failure in failures[:5]]
    if unplayed:
        draft.warnings.append(f"{unplayed} reference answers were not replayed, for want of time")


def _replay(env: EnvProcess, row: TaskRow) -> list[ChatMessage]:
    """The conversation that the answer's assistant messages lead to. Raises EpisodeFailed."""
    conversation = list(row["prompt"])
    episode = env.start(row)
    try:
        for message in row["answer"]:
            if message["role"] != "assistant":
                continue
            conversation.append(message)
            reply = episode.step(message)
            if reply is None:
                break
            conversation += reply
    finally:
        episode.close()
    while conversation[-1]["role"] != "assistant":  # nobody answers the environment's last words
        conversation.pop()
    return conversation


def write(path: Path, rows: list[TaskRow]) -> None:
    """Writes tasks.jsonl, durably."""
    with open(path, "w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())

"""The task rows of a version as push stores them, with their split and reference conversation."""

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
_MOST_PROBLEMS = 5  # failures that the reply lists
_WARNING_CHARS, _PROBLEM_CHARS = 200, 300  # of a failure's text


def assign_split(rows: list[TaskRow], draft: Draft) -> split.Split:
    """Set each row's `split` to "train" or "heldout"; warnings go to the draft.

    Returns the split that was made. Raises UserError ENV_INVALID for a split of an unknown name.
    """
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
    """Set each row's `gold`: the whole conversation with the reference answer, or None.

    In a multi-turn environment (`kind` "multi") the conversation is made by replaying the answer.
    It is None for rows without an answer, and where the replay failed or there was no time for it;
    the draft gets a warning then.
    """
    failures: list[str] = []
    not_replayed = 0
    last_replay_start = draft.deadline - push_limits.AUDIT_SECONDS
    for row in rows:
        row["gold"] = None
        if row["answer"] is None:
            continue
        if kind != "multi":
            row["gold"] = [*row["prompt"], *row["answer"]]
        elif len(failures) >= GIVE_UP_REPLAYS or time.monotonic() > last_replay_start:
            not_replayed += 1
        else:
            try:
                row["gold"] = _replay(env, row)
            except EpisodeFailed as error:
                failures.append(f"{row['id']}: {error}")
    if failures:
        failed = f"{len(failures)} reference answers cannot be replayed"
        draft.warnings.append(f"{failed}, the first is {failures[0][:_WARNING_CHARS]}")
        draft.problems += [failure[:_PROBLEM_CHARS] for failure in failures[:_MOST_PROBLEMS]]
    if not_replayed:
        draft.warnings.append(
            f"{not_replayed} reference answers were not replayed, for want of time"
        )


def _replay(env: EnvProcess, row: TaskRow) -> list[ChatMessage]:
    """The conversation that arises when the answer's assistant messages are played, one by one.

    It ends with an assistant message. Raises EpisodeFailed.
    """
    conversation = list(row["prompt"])
    episode = env.start(row)
    try:
        for message in row["answer"]:
            if message["role"] != "assistant":
                continue
            conversation.append(message)
            reply = episode.step(message)
            if reply is None:  # the episode has ended
                break
            conversation += reply
    finally:
        episode.close()
    while conversation[-1]["role"] != "assistant":  # the environment's last reply gets no answer
        conversation.pop()
    return conversation


def write(path: Path, rows: list[TaskRow]) -> None:
    """Write the rows to the file tasks.jsonl at `path` and sync it to disk."""
    with open(path, "w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())

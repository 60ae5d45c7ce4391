"""Makes the task rows of a version: splits them, adds their reference conversations, and finds
training rows that give held-out tasks away."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from engine.core import split
from engine.core.errors import UserError
from engine.core.wording.prompt_texts import SYSTEM, as_texts, prompt_with, tools_with
from engine.environments import registry
from engine.environments.draft import Draft
from engine.evidence.overlap import overlap
from engine.evidence.overlap.leaks import asked_once, leaking_pairs
from envs.config import push_limits
from envs.config.problem import EnvProblem
from envs.config.settings import FILE, SCORERS, Prompt
from envs.dataset import data_files, read_rows
from envs.host.loader import ENTRY
from envs.host.process import EnvProcess, EpisodeFailed
from envs.json_types import ChatMessage, EnvDescription, TaskRow
from envs.scored_rows import fitting_scorer
from envs.tool_schemas import tools_of

GIVE_UP_REPLAYS = 20  # failures after which the remaining reference answers are not replayed
_MOST_PROBLEMS = 5  # failures that the reply lists
_MOST_LEAKS = 20  # pairs of a training row and a held-out task that the reply lists
_LEAST_SCAN_S = 0.1  # seconds for the search for such pairs, however little time is left
_WARNING_CHARS, _PROBLEM_CHARS = 200, 300  # characters kept of a failure's text


def apply_prompt_texts(
    rows: list[TaskRow], description: EnvDescription, prompt_table: Prompt | None
) -> EnvDescription:
    """Put the system message and the tool descriptions of the table [prompt] in environment.toml
    (`prompt_table`; None if there is none) into the rows, in place.

    Returns the environment's description with the same texts in its tools. Raises EnvProblem
    ENV_INVALID if the table describes a tool that no task has.
    """
    if prompt_table is None:
        return description
    texts = as_texts(prompt_table.system, prompt_table.tools)
    tools = description["tools"]
    names = set()  # of all tools, those of single rows included
    for row in rows:
        for tool in tools_of(row, tools):
            function = tool.get("function", tool)  # a tool is a function, or wraps one
            names.add(function.get("name"))
    unknown_tools = [name for name in prompt_table.tools if name not in names]
    if unknown_tools:
        known_tools = ", ".join(sorted(names)) or "none"
        raise EnvProblem(
            "ENV_INVALID",
            f"[prompt.tools] names {unknown_tools[0]!r}; there are: {known_tools}",
            file=FILE,
        )
    for row in rows:
        prompt = prompt_with(row["prompt"], texts)
        if row.get("gold"):
            row["gold"] = [*prompt, *row["gold"][len(row["prompt"]) :]]
        row["prompt"] = prompt
        own_tools = tools_of(row, tools)
        if own_tools is not tools:  # the row has tools of its own
            row["tools"] = tools_with(own_tools, texts)
    return {**description, "tools": tools_with(tools, texts)}


def comparable_version(rows: Sequence[TaskRow], draft: Draft) -> str:
    """Return the id of the version from which these rows differ only in the texts of [prompt], so
    that the two can be compared task by task.

    It is the version that `of` under [prompt] in environment.toml names. Returns "" if `of` is not
    set. Returns "" and adds a warning to the draft if that version is missing or has other tasks.
    """
    prompt = draft.settings.prompt
    if prompt is None or not prompt.of:
        return ""
    name, _, hash12 = prompt.of.partition("@")
    try:
        stored = registry.read_tasks(registry.read_version(draft.home, name, hash12))
    except UserError:
        stored = []
    if _without_system(stored) == _without_system(rows):
        return prompt.of
    draft.warnings.append(
        f"[prompt] is of {prompt.of}, which is not here or asks other tasks: the two versions "
        "cannot be compared task by task"
    )
    return ""


def _without_system(rows: Sequence[TaskRow]) -> list[object]:
    """Return [id, side, prompt without its system message] of each row, by which the rows of two
    versions are compared that may differ in the system message."""
    no_system_text = {SYSTEM: ""}
    return [[row["id"], row["split"], prompt_with(row["prompt"], no_system_text)] for row in rows]


def assign_split(rows: list[TaskRow], draft: Draft) -> split.Split:
    """Set each row's `split` to "train", "dev" or "heldout", and add warnings to the draft.

    Returns the sides of all rows and how they were decided. Raises UserError ENV_INVALID if a row
    names an unknown split.
    """
    try:
        decided_split = split.split_rows(rows, draft.settings.dev_share)
    except split.UnknownSplit as error:
        raise UserError(
            "ENV_INVALID",
            str(error),
            field="path",
            hint='Use "train", "dev" or "heldout" ("test", "eval", "validation"), or leave it out.',
        ) from error
    draft.warnings += decided_split.warnings
    for row, side in zip(rows, decided_split.sides, strict=True):
        row["split"] = side
    return decided_split


def drop_leaks(
    rows: list[TaskRow], named_splits: Sequence[str | None], full_split: split.Split, draft: Draft
) -> split.Split:
    """Remove rows from `rows`, in place: training rows that teach a held-out or dev task, and
    held-out or dev rows that repeat the question of another one. A warning counts both.

    Args:
        rows: the rows, with their `split`.
        named_splits: the split that each row named itself, in the same order; None for none.
        full_split: the sides of the rows.
        draft: the version being made; it gets the warning.

    Returns `full_split` for the rows that stay.
    """
    copied_indexes = _copied_questions(rows, named_splits)
    teaching_ids = {pair.train for pair in _leaks(rows, draft)}
    kept_rows: list[TaskRow] = []
    kept_sides: list[str] = []
    for index, (row, side) in enumerate(zip(rows, full_split.sides, strict=True)):
        teaches = side == "train" and row["id"] in teaching_ids
        if index not in copied_indexes and not teaches:
            kept_rows.append(row)
            kept_sides.append(side)
    if len(kept_rows) < len(rows):
        draft.warnings.append(
            f"drop_leaks: {len(teaching_ids)} training rows that teach a held-out or dev task and "
            f"{len(copied_indexes)} copies of a question of the exam are left out"
        )
    rows[:] = kept_rows
    return replace(full_split, sides=kept_sides)


def _copied_questions(rows: Sequence[TaskRow], named_splits: Sequence[str | None]) -> set[int]:
    """Return the indexes of the held-out and dev rows whose question another such row already asks.

    `named_splits` holds the split that each row named itself, None for none; `asked_once` uses it
    to choose which row of equal questions stays.
    """
    indexes = [index for index, row in enumerate(rows) if row["split"] != "train"]
    are_kept = asked_once(
        [{"split": named_splits[index]} for index in indexes],
        [split.prompt_key(rows[index]["prompt"]) for index in indexes],
    )
    return {index for index, is_kept in zip(indexes, are_kept, strict=True) if not is_kept}


def _leaks(rows: Sequence[TaskRow], draft: Draft) -> list[overlap.Match]:
    """Return pairs of a training row and a held-out or dev task that it teaches, e.g. because both
    ask the same question; one pair for each such row.

    The search ends when the time of the push is up, so it may miss some.
    """
    train = [row for row in rows if row["split"] == "train"]
    exam = [row for row in rows if row["split"] != "train"]
    seconds = min(overlap.BUDGET_S, max(_LEAST_SCAN_S, draft.seconds_left))
    return leaking_pairs(train, exam, seconds)


def leak_problems(rows: Sequence[TaskRow], draft: Draft) -> list[str]:
    """Return one text for each pair of a training row and the held-out or dev task that it teaches.

    Example: "train.jsonl:7 asks heldout.jsonl:3 (exact, prompt)". A row that stands in no data file
    is named by its id. At most `_MOST_LEAKS` pairs are listed; a last text says how many more there
    are.
    """
    pairs = _leaks(rows, draft)
    place_by_row_id = _place_by_row_id(draft.source)
    texts = []
    for pair in pairs[:_MOST_LEAKS]:
        row_place = place_by_row_id.get(pair.train, pair.train)
        task_place = place_by_row_id.get(pair.heldout, pair.heldout)
        text = f"{row_place} asks {task_place} ({pair.kind}, {pair.part})"
        texts.append(text[:_PROBLEM_CHARS])
    more = len(pairs) - len(texts)
    return [*texts, f"and {more} more such pairs"] if more else texts


def scorer_problem(rows: Sequence[TaskRow], kind: str, draft: Draft) -> list[str]:
    """Return a list with one problem if rows of data files are not scored although a built-in
    scorer fits them; the text names that scorer. Returns [] if the environment has code, or if no
    scorer fits."""
    if kind != "sft" or (draft.source / ENTRY).is_file():  # ENTRY: the code of the environment
        return []
    scorer = fitting_scorer([_single_answer(row) for row in rows])
    if not scorer:
        return []
    return [
        "no scorer: a verdict can read the loss alone, which does not say that answers are right; "
        f'scorer = "{scorer}" in environment.toml scores each row by its answer '
        f"(others: {', '.join(name for name in SCORERS if name != scorer)})"
    ]


def _single_answer(row: TaskRow) -> str:
    """Return the text of a row's answer; "" if the answer is not a single message of text."""
    messages = row["answer"] or []
    if len(messages) != 1 or messages[0].get("tool_calls"):
        return ""
    return str(messages[0].get("content") or "")


def _place_by_row_id(folder: Path) -> dict[str, str]:
    """Return row id -> data file and line, such as "train.jsonl:7", for the data files in `folder`.
    Returns {} if there are none, or if one cannot be read."""
    places: dict[str, str] = {}
    try:
        for file in data_files(folder):
            for line, row in read_rows(file).rows:
                row_id = str(row.get("id") or f"{file.stem}-{line}")  # as `to_task` names rows
                places[row_id] = f"{file.name}:{line}"
    except EnvProblem:
        return {}
    return places


def kind_of(kind: str, rows: list[TaskRow]) -> str:
    """Return the kind of a version, from the kind that its env process names and from its rows.

    The process names every dataset without a scorer "sft". If no row has an answer to imitate, the
    rows are preferences (a chosen and a rejected answer), and the result is "preference". Any other
    kind is returned unchanged. Raises UserError DATASET_INVALID if only some rows have no answer.
    """
    if kind != "sft":
        return kind
    unanswered = [row["id"] for row in rows if not row["answer"]]
    if not unanswered:
        return "sft"
    if len(unanswered) == len(rows):
        return "preference"
    raise UserError(
        "DATASET_INVALID",
        f"{len(unanswered)} of {len(rows)} rows are preferences (chosen and rejected), such as "
        f"{unanswered[0]!r}, and the others have one answer",
        field="path",
        hint="Push them as two datasets, each in a folder of its own.",
    )


def add_gold(env: EnvProcess, rows: list[TaskRow], kind: str, draft: Draft) -> None:
    """Set each row's `gold`: the prompt and the reference answer as one conversation.

    In a multi-turn environment (`kind` "multi") the answer is played against the environment to get
    its replies. `gold` is None if the row has no answer, if playing failed, or if no time was left
    for it. A warning in the draft counts the rows of the last two cases.
    """
    failures: list[str] = []
    not_replayed = 0
    # A replay that starts later than this would take the time of the audit.
    last_replay_start = draft.deadline - push_limits.AUDIT_SECONDS
    for row in rows:
        row["gold"] = None
        if row["answer"] is None:
            continue
        if kind != "multi":  # the environment gives no replies
            row["gold"] = [*row["prompt"], *row["answer"]]
        # After so many failures the others would most likely fail too.
        elif len(failures) >= GIVE_UP_REPLAYS or time.monotonic() > last_replay_start:
            not_replayed += 1
        else:
            try:
                row["gold"] = _replay(env, row)
            except EpisodeFailed as error:
                failures.append(f"{row['id']}: {error}")
    _warn_of_replays(draft, failures, not_replayed)


def _warn_of_replays(draft: Draft, failures: list[str], not_replayed: int) -> None:
    """Add warnings to the draft about replays that failed, and about those for which no time was
    left. The first failures are also added to the draft's problems."""
    if failures:
        first_failure = failures[0][:_WARNING_CHARS]
        draft.warnings.append(
            f"{len(failures)} reference answers cannot be replayed, the first is {first_failure}"
        )
        draft.problems += [failure[:_PROBLEM_CHARS] for failure in failures[:_MOST_PROBLEMS]]
    if not_replayed:
        draft.warnings.append(
            f"{not_replayed} reference answers were not replayed, for want of time"
        )


def _replay(env: EnvProcess, row: TaskRow) -> list[ChatMessage]:
    """Play the assistant messages of the row's answer, one by one, in a new episode.

    Returns the whole conversation: the prompt, the messages played and the environment's replies.
    It ends with an assistant message. Raises EpisodeFailed if the environment's code fails.
    """
    conversation = list(row["prompt"])
    episode = env.start(row)
    try:
        for message in row["answer"]:
            # Only assistant messages are played; all others come from the environment's replies.
            if message["role"] != "assistant":
                continue
            conversation.append(message)
            reply = episode.step(message)
            if reply is None:  # the episode has ended
                break
            conversation += reply
    finally:
        episode.close()
    while conversation[-1]["role"] != "assistant":  # a last reply that nothing answers is dropped
        conversation.pop()
    return conversation


def write(path: Path, rows: list[TaskRow]) -> None:
    """Write the rows to the file tasks.jsonl at `path` and sync it to disk."""
    with open(path, "w", encoding="utf-8") as file:
        for row in rows:
            # allow_nan=False raises an error for a NaN, which is not valid JSON.
            file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())

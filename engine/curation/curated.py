"""A curated dataset: chosen attempts and the held-out tasks of their environments, pushed."""

import itertools
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engine.core.errors import UserError
from engine.core.reply import ReplyBase, as_json
from engine.curation.selection import Attempt
from engine.curation.sources import Source
from engine.environments import push, registry
from engine.environments.registry import EnvRecord
from engine.home.run_dir import Home
from engine.home.store import Store
from envs.json_types import ChatMessage, TaskRow, ToolSchema

_HELD_OUT_EVERY = 5  # the pairs of every fifth task are held out
CARD = "curation.json"  # the file that says where the rows came from and how they were chosen
# The environment.py of every curated dataset.
_ENVIRONMENT = '''"""Rows chosen from what models did; curation.json says from where and how."""

from pathlib import Path

from envs.dataset import DatasetEnv, data_files


def load_environment() -> DatasetEnv:
    return DatasetEnv(*data_files(Path(__file__).parent))
'''


@dataclass(frozen=True)
class Choices:
    """How attempts are chosen.

    Attributes:
        source_ids: evaluations, probes or GRPO runs; `run@step20` takes one step's rollouts.
        where: a rule over each task's attempts (engine/curation/selection.py: Rule).
        select: correct, best, best_n, shortest, all or pairs.
        max_per_task: answers kept per task and model (correct, best_n, shortest), or pairs.
        pool_models: treat the attempts of all models at a task as one group.
    """

    source_ids: list[str]
    where: str = ""
    select: str = "correct"
    max_per_task: int = 1
    pool_models: bool = False


@dataclass(frozen=True)
class Chosen:
    """The attempts that become training rows.

    Attributes:
        worse: for pairs the worse attempt of each row, in the order of `attempts`; else empty.
    """

    attempts: Sequence[Attempt]
    worse: Sequence[Attempt] = ()


@dataclass(frozen=True)
class Origin:
    """Where a row of a curated dataset comes from.

    A held-out task has only `env_id` and `task`, because no attempt stands behind it.
    """

    env_id: str
    task: str
    run: str | None = None
    model: str | None = None
    step: int | None = None
    attempt: int | None = None
    reward: float | None = None


@dataclass(frozen=True)
class RowMetadata:
    """The metadata of a row."""

    origin: Origin


@dataclass(frozen=True)
class DatasetRow(ReplyBase):
    """One row of a dataset file, as envs/dataset.py reads it.

    A prompt or completion that is a string stands for a single message. `completion` is None for
    a task without a known answer, `rejected` the worse answer of a pair, `group` the task's group.
    """

    id: str
    split: str
    prompt: str | Sequence[ChatMessage]
    completion: str | Sequence[ChatMessage] | None
    metadata: RowMetadata
    tools: list[ToolSchema] | None
    rejected: Sequence[ChatMessage] | None = None
    group: str | None = None


def save_dataset(
    home: Home,
    name: str,
    chosen: Chosen,
    tasks: Mapping[str, list[TaskRow]],
    sources: Sequence[Source],
    choices: Choices,
) -> push.PushReply:
    """Write the chosen attempts and the held-out tasks as the dataset `name`, and push it.

    Args:
        tasks: the task rows of each environment version, by the version's hash.
        sources, choices: written to the dataset's curation.json.

    Returns the reply of the push. Raises UserError as `push_env` does.
    """
    records = {source.record.hash: source.record for source in sources}
    train, heldout = _dataset_rows(chosen, tasks, records)
    card = _card_text(choices, sources)
    with tempfile.TemporaryDirectory(prefix=".curate-", dir=home.cache) as temporary_folder:
        dataset_folder = Path(temporary_folder) / name
        _write_dataset(dataset_folder, card, train, heldout)
        return push.push_env(home, dataset_folder, name=name)


def _write_dataset(
    folder: Path, card: str, train: Sequence[DatasetRow], heldout: Sequence[DatasetRow]
) -> None:
    """Write the files of a dataset into `folder`, which does not exist yet.

    `card` is the content of its curation.json.
    """
    (folder / "datasets").mkdir(parents=True)
    (folder / "environment.py").write_text(_ENVIRONMENT, "utf-8")
    (folder / CARD).write_text(card, "utf-8")
    _write_rows(folder / "datasets" / "train.jsonl", train)
    if heldout:  # else the dataset has no file of that name
        _write_rows(folder / "datasets" / "heldout.jsonl", heldout)


def _card_text(choices: Choices, sources: Sequence[Source]) -> str:
    """The content of the dataset's curation.json."""
    card = {
        "made_by": "curate",
        **as_json(choices),
        "sources": [as_json(source.summary(with_files=True)) for source in sources],
    }
    return json.dumps(card, indent=1, sort_keys=True) + "\n"


def _dataset_rows(
    chosen: Chosen,
    tasks: Mapping[str, list[TaskRow]],
    records: Mapping[str, EnvRecord],
) -> tuple[list[DatasetRow], list[DatasetRow]]:
    """The training rows and the held-out rows of the dataset.

    Chosen attempts become training rows, and held-out tasks held-out rows. Of pairs for DPO those
    at every fifth task become held-out rows too, because held-out tasks have no pairs. `tasks` and
    `records` have the task rows and the record of each environment version, by its hash.
    """
    prefixes = _id_prefixes(records)
    heldout = _heldout_rows(tasks, records, prefixes)
    used_ids = {row.id for row in heldout}  # no training row may have the id of a held-out row
    rows = _attempt_rows(chosen, records, prefixes, used_ids)
    group_of_task = {(key, row["id"]): row.get("group") for key in tasks for row in tasks[key]}
    tasks_of_heldout_pairs = _tasks_of_heldout_pairs(chosen)
    train = []
    for attempt, plain_row in zip(chosen.attempts, rows, strict=True):
        group = group_of_task.get((attempt.env_hash, attempt.task))
        row = replace(plain_row, group=group)
        if (attempt.env_hash, attempt.task) in tasks_of_heldout_pairs:
            heldout.append(replace(row, split="heldout"))
        else:
            train.append(row)
    return train, heldout


def _attempt_rows(
    chosen: Chosen,
    records: Mapping[str, EnvRecord],
    prefixes: Mapping[str, str],
    used_ids: set[str],
) -> list[DatasetRow]:
    """A training row of each chosen attempt, with the worse answer of its pair if it has one.

    Each row gets an id such as "task#1" that is not in `used_ids`, and is then added there.
    `records` and `prefixes` have the record of each environment version and the beginning of its
    ids, by the version's hash.
    """
    rows = []
    # `worse` is empty without pairs; each attempt then has None.
    for attempt, worse in itertools.zip_longest(chosen.attempts, chosen.worse):
        row_id = _take_free_id(f"{prefixes[attempt.env_hash]}{attempt.task}", used_ids)
        row = _attempt_row(attempt, records[attempt.env_hash], row_id)
        rows.append(row if worse is None else replace(row, rejected=worse.messages))
    return rows


def _heldout_rows(
    tasks: Mapping[str, list[TaskRow]],
    records: Mapping[str, EnvRecord],
    prefixes: Mapping[str, str],
) -> list[DatasetRow]:
    """The dataset rows of the held-out tasks and of the dev tasks.

    All arguments are by the hash of the environment version: task rows, record, beginning of ids.
    """
    return [
        _heldout_row(row, records[env_hash], prefixes[env_hash])
        for env_hash, rows in tasks.items()
        for row in rows
        if row["split"] != "train"
    ]


def _id_prefixes(records: Mapping[str, EnvRecord]) -> dict[str, str]:
    """What the ids of the rows of each environment version begin with, by the version's hash.

    With several versions it is six digits of the hash, because their tasks may have equal ids.
    """
    if len(records) > 1:
        return {env_hash: f"{env_hash[:6]}/" for env_hash in records}
    return dict.fromkeys(records, "")


def _tasks_of_heldout_pairs(chosen: Chosen) -> set[tuple[str, str]]:
    """The tasks whose pairs are held out, as (hash of the version, task).

    It is every fifth task that has a pair; none if the attempts are no pairs. Without held-out
    pairs nothing could measure a run of DPO: held-out tasks have no worse answer.
    """
    if not chosen.worse:
        return set()
    answered_tasks = {(attempt.env_hash, attempt.task) for attempt in chosen.attempts}
    return set(sorted(answered_tasks)[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY])


def _write_rows(path: Path, rows: Sequence[DatasetRow]) -> None:
    """Write the rows into the file `path`, one JSON object per line."""
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row.to_json(), ensure_ascii=False) + "\n" for row in rows)


def _attempt_row(attempt: Attempt, record: EnvRecord, row_id: str) -> DatasetRow:
    """Make a training row of a chosen attempt: its whole conversation, and where it came from."""
    origin = Origin(
        env_id=attempt.env_id,
        task=attempt.task,
        run=attempt.source,
        model=attempt.model,
        step=attempt.step,
        attempt=attempt.member,
        reward=attempt.reward,
    )
    metadata = RowMetadata(origin)
    tools = record.tools or None  # None: an empty list would stand in every row
    return DatasetRow(
        id=row_id,
        split="train",
        prompt=attempt.prompt,
        completion=attempt.messages,
        metadata=metadata,
        tools=tools,
    )


def _heldout_row(row: TaskRow, record: EnvRecord, prefix: str) -> DatasetRow:
    """Convert a held-out task of an environment to a dataset row with the same prompt and answer.

    The id is `prefix` and the id of the task.
    """
    # A task row stores every prompt as messages; "text" names what the environment gave as strings.
    prompt_was_string = "prompt" in (row.get("text") or [])
    prompt = row["prompt"][0]["content"] if prompt_was_string else row["prompt"]
    metadata = RowMetadata(Origin(env_id=record.env_id, task=row["id"]))
    return DatasetRow(
        id=prefix + row["id"],
        split=row["split"],
        prompt=prompt,
        completion=_answer_of(row) or None,
        metadata=metadata,
        tools=record.tools or None,
        group=row.get("group"),
    )


def _answer_of(row: TaskRow) -> str | Sequence[ChatMessage] | None:
    """The answer of a task row as messages, or as a string if the environment gave it as one.

    Empty or None if the row has no answer.
    """
    answer = row.get("answer")  # of a task that is only scored
    if row.get("gold"):  # of a task with an answer to learn: the prompt, and the answer after it
        answer = row["gold"][len(row["prompt"]) :]
    # "text" lists the fields that the environment gave as strings instead of messages.
    answer_was_string = "answer" in (row.get("text") or [])
    # An answer of several messages cannot be written as a string.
    if answer and answer_was_string and len(answer) == 1:
        return answer[0]["content"]
    return answer


def _take_free_id(base: str, used_ids: set[str]) -> str:
    """The first of `base#1`, `base#2` and so on that is not in `used_ids`; adds it to them."""
    number = 1
    while f"{base}#{number}" in used_ids:
        number += 1
    free_id = f"{base}#{number}"
    used_ids.add(free_id)
    return free_id


def checked_name(home: Home, name: str) -> str:
    """Return `name` if a curated dataset may be pushed under it.

    The name must be new, or that of an earlier curated dataset, which gets a new version. Raises
    UserError BAD_ARGUMENT if it is not a valid name, or the name of another kind of environment.
    """
    if not push.NAME.fullmatch(name):
        raise UserError(
            "BAD_ARGUMENT",
            f"{name[:60]!r} is no name for a dataset",
            hint='Use up to 40 of a-z, 0-9, dot, - and _, such as "arith-best".',
            field="name",
        )
    with Store(home) as store:
        # The look-up also returns names that only begin with `name`.
        versions = [row for row in store.find_env(name) if row.name == name]
    if not versions:
        return name
    newest = versions[0]
    card = home.env(name, newest.hash) / registry.SOURCE / CARD
    if not card.is_file():  # only curated datasets have a card
        raise UserError(
            "BAD_ARGUMENT",
            f"{name} is an environment already ({newest.env_id})",
            # With the ending it still has at most 40 characters.
            hint=f'Choose a name of its own, such as "{name[:35]}-best".',
            field="name",
        )
    return name

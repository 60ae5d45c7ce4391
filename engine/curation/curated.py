"""Writes a curated dataset (chosen attempts, and the held-out tasks of their environments) and
pushes it."""

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
from engine.home.owner_marks import own_part
from engine.home.run_dir import Home
from engine.home.store import Store
from envs.json_types import ChatMessage, TaskRow, ToolSchema
from envs.tool_schemas import tools_of

_HELD_OUT_EVERY = 5  # the pairs of every fifth task are held out, to measure a run of DPO
_ALL = 1_000_000  # a limit that no home reaches
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
        source_ids: ids of evaluations, probes or GRPO runs; `run@step20` takes the rollouts of one
            step.
        where: a rule over each task's attempts (engine/curation/selection.py: Rule).
        select: correct, best, best_n, shortest, all or pairs.
        max_per_task: the most answers (correct, best_n, shortest) or pairs that are kept per task
            and model.
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
        attempts: one for each row; for pairs the better one.
        worse: for pairs the worse attempt of each row, in the order of `attempts`; else empty.
    """

    attempts: Sequence[Attempt]
    worse: Sequence[Attempt] = ()


@dataclass(frozen=True)
class Origin:
    """The origin of a row of a curated dataset.

    A row that is a held-out task has only `env_id` and `task`, because it comes from no attempt.
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
    """The metadata of a row in the file of a curated dataset."""

    origin: Origin


@dataclass(frozen=True)
class DatasetRow(ReplyBase):
    """One row of a dataset file, as envs/dataset.py reads it.

    A prompt or completion that is a string stands for a single message. `completion` is None if no
    answer is known. `rejected` is the worse answer of a pair; `group` is the group of the task.
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
        home: the home to push to.
        name: the name of the dataset.
        chosen: the attempts that become rows.
        tasks: hash of an environment version -> its task rows.
        sources, choices: where the attempts came from and how they were chosen; both are written
            to the dataset's curation.json.

    Returns the reply of the push. Raises every UserError of `push_env`.
    """
    records = {source.record.hash: source.record for source in sources}
    train, heldout = _dataset_rows(chosen, tasks, records)
    card = _card_text(choices, sources)
    # Outside the home: a key may not push what lies in it.
    with tempfile.TemporaryDirectory(prefix="honesmith-curate-") as temporary_folder:
        dataset_folder = Path(temporary_folder) / name
        _write_dataset(dataset_folder, card, train, heldout)
        return push.push_env(home, dataset_folder, name=name)


def _write_dataset(
    folder: Path, card: str, train: Sequence[DatasetRow], heldout: Sequence[DatasetRow]
) -> None:
    """Write the files of a dataset into `folder`, which does not exist yet: its program, its rows
    for training and its held-out rows. `card` is the content of its curation.json."""
    (folder / "datasets").mkdir(parents=True)
    (folder / "environment.py").write_text(_ENVIRONMENT, "utf-8")
    (folder / CARD).write_text(card, "utf-8")
    _write_rows(folder / "datasets" / "train.jsonl", train)
    if heldout:  # without held-out rows the file is not made
        _write_rows(folder / "datasets" / "heldout.jsonl", heldout)


def _card_text(choices: Choices, sources: Sequence[Source]) -> str:
    """Return the content of the dataset's curation.json: the choices and the sources."""
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
    """Return the training rows and the held-out rows of the dataset.

    Chosen attempts become training rows; held-out tasks become held-out rows. Pairs for DPO at
    every fifth task become held-out rows too, because held-out tasks have no pairs. `tasks` and
    `records` map the hash of an environment version to its task rows and to its record.
    """
    prefixes = _id_prefixes(records)
    heldout = _heldout_rows(tasks, records, prefixes)
    used_ids = {row.id for row in heldout}  # no training row may have the id of a held-out row
    rows = _with_own_tools(chosen, _attempt_rows(chosen, records, prefixes, used_ids), tasks)
    group_of_task = {
        (env_hash, row["id"]): row.get("group") for env_hash, rows in tasks.items() for row in rows
    }
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


def _with_own_tools(
    chosen: Chosen, rows: Sequence[DatasetRow], tasks: Mapping[str, list[TaskRow]]
) -> list[DatasetRow]:
    """Return the rows of the chosen attempts; if a task has tools of its own, its rows get these
    tools in place of the environment's. `tasks` maps hash -> task rows."""
    own_tools: dict[tuple[str, str], list[ToolSchema]] = {}
    for env_hash, task_rows in tasks.items():
        for task in task_rows:
            tools = tools_of(task, [])
            if tools:
                own_tools[env_hash, task["id"]] = tools
    return [
        replace(row, tools=own_tools.get((attempt.env_hash, attempt.task), row.tools))
        for attempt, row in zip(chosen.attempts, rows, strict=True)
    ]


def _attempt_rows(
    chosen: Chosen,
    records: Mapping[str, EnvRecord],
    prefixes: Mapping[str, str],
    used_ids: set[str],
) -> list[DatasetRow]:
    """Make a training row of each chosen attempt, with the worse answer of its pair if it has one.

    Each row gets an id such as "task#1" that is not in `used_ids`; the id is then added there.
    `records` and `prefixes` map the hash of an environment version to its record and to the prefix
    of its ids.
    """
    rows = []
    # Without pairs `chosen.worse` is empty, and zip_longest gives None for each attempt.
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
    """Make the dataset rows of the held-out and the dev tasks.

    The arguments map the hash of an environment version to its task rows, its record and the prefix
    of its ids.
    """
    return [
        _heldout_row(row, records[env_hash], prefixes[env_hash])
        for env_hash, rows in tasks.items()
        for row in rows
        if row["split"] != "train"
    ]


def _id_prefixes(records: Mapping[str, EnvRecord]) -> dict[str, str]:
    """Return hash of an environment version -> prefix of the ids of its rows, for each version in
    `records`.

    With several versions the prefix is six digits of the hash and a slash, because their tasks may
    have equal ids. With one version it is "".
    """
    if len(records) > 1:
        return {env_hash: f"{env_hash[:6]}/" for env_hash in records}
    return dict.fromkeys(records, "")


def _tasks_of_heldout_pairs(chosen: Chosen) -> set[tuple[str, str]]:
    """Return the tasks whose pairs are held out, as (hash of the version, task id).

    It is every fifth task with a pair; none if the `chosen` attempts are no pairs. Held-out pairs
    are needed to measure a run of DPO, because the held-out tasks have no worse answer.
    """
    if not chosen.worse:
        return set()
    answered_tasks = {(attempt.env_hash, attempt.task) for attempt in chosen.attempts}
    return set(sorted(answered_tasks)[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY])


def _write_rows(path: Path, rows: Sequence[DatasetRow]) -> None:
    """Write the rows into the file `path`, one JSON object per line."""
    lines = (json.dumps(row.to_json(), ensure_ascii=False) + "\n" for row in rows)
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(lines)


def _attempt_row(attempt: Attempt, record: EnvRecord, row_id: str) -> DatasetRow:
    """Make the training row of a chosen attempt, with its whole conversation and its origin.
    `record` is its environment version, `row_id` becomes the row's id."""
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
    tools = record.tools or None  # None is not written, an empty list would stand in every row
    return DatasetRow(
        id=row_id,
        split="train",
        prompt=attempt.prompt,
        completion=attempt.messages,
        metadata=metadata,
        tools=tools,
    )


def _heldout_row(row: TaskRow, record: EnvRecord, prefix: str) -> DatasetRow:
    """Convert a held-out task (`row`) of an environment (`record`) to a dataset row with the same
    prompt and answer. The id of the dataset row is `prefix` and the id of the task."""
    # A task row stores every prompt as messages. Its "text" lists the fields that the environment
    # gave as strings.
    prompt_was_string = "prompt" in (row.get("text") or [])
    prompt = row["prompt"][0]["content"] if prompt_was_string else row["prompt"]
    metadata = RowMetadata(Origin(env_id=record.env_id, task=row["id"]))
    return DatasetRow(
        id=prefix + row["id"],
        split=row["split"],
        prompt=prompt,
        completion=_answer_of(row) or None,
        metadata=metadata,
        tools=tools_of(row, record.tools) or None,
        group=row.get("group"),
    )


def _answer_of(row: TaskRow) -> str | Sequence[ChatMessage] | None:
    """Return the answer of a task row as messages, or as a string if the environment gave it as
    one. Returns an empty list or None if the row has no answer.
    """
    answer = row.get("answer")
    if row.get("gold"):  # the reference conversation: the prompt, then the answer to learn
        answer = row["gold"][len(row["prompt"]) :]
    # "text" lists the fields that the environment gave as strings instead of messages.
    answer_was_string = "answer" in (row.get("text") or [])
    # An answer of several messages cannot be written as a string.
    if answer and answer_was_string and len(answer) == 1:
        return answer[0]["content"]
    return answer


def _take_free_id(base: str, used_ids: set[str]) -> str:
    """Return the first of `base#1`, `base#2` and so on that is not in `used_ids`; add it there."""
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
    with Store(own_part(home)) as store:  # what others share under this name is theirs
        versions = [row for row in store.list_envs(limit=_ALL) if row.name == name]
    if not versions:
        return name
    newest = versions[0]
    card = home.env(name, newest.hash) / registry.SOURCE / CARD
    if not card.is_file():  # only curated datasets have a card
        raise UserError(
            "BAD_ARGUMENT",
            f"{name} is an environment already ({newest.env_id})",
            # 35 characters of the name and the ending make at most 40, which a name may have.
            hint=f'Choose a name of its own, such as "{name[:35]}-best".',
            field="name",
        )
    return name

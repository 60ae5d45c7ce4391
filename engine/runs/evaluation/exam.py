"""The tasks of evaluations: their order, and their two halves.

The held-out tasks are ordered by the hash of their id, so every run of an environment evaluates the
same ones. They are divided into two halves: `select` is played during training, to choose the best
checkpoint; `report` only at step 0 and with the chosen checkpoint, so that the reported numbers
come from tasks that chose nothing. Tasks of one family (the same prompt or group) are always in the
same half, as they would give each other away. Where the environment has dev tasks, those are the
half that chooses, and all held-out tasks are reported.
"""

import hashlib
from collections.abc import Callable, Sequence

from engine.core.split import family_keys
from engine.environments.registry import EnvRecord, read_tasks
from engine.evidence.stats.results import TEST, VALIDATION
from engine.records.run_config import EvaluateConfig
from envs.json_types import TaskRow


def ordered(tasks: Sequence[TaskRow], limit: int) -> list[TaskRow]:
    """The first `limit` tasks in the order of the SHA-256 of their ids, which is the same in every
    run and has nothing to do with what the tasks ask."""
    in_order = sorted(tasks, key=lambda task: hashlib.sha256(task["id"].encode()).digest())
    return in_order[:limit]


def exam_tasks(
    env: EnvRecord, limit: int, usable: Callable[[TaskRow], object] = bool
) -> list[TaskRow]:
    """The tasks of a training run's evaluations: dev tasks, where the environment has them, then
    held-out tasks, at most `limit` of each, `ordered`. Only those for which `usable` is true."""
    sides = [filter(usable, read_tasks(env, split)) for split in ("dev", "heldout")]
    return [task for tasks in sides for task in ordered(list(tasks), limit)]


def halves(tasks: Sequence[TaskRow]) -> dict[str, str]:
    """Divide tasks, already `ordered`, into two halves. Returns VALIDATION or TEST for each task
    id.

    Where some of them are dev tasks, those are VALIDATION and all others TEST. Else tasks with the
    same key (`_dividing_keys`) are in the same half. Each new key goes to the half that has fewer
    tasks so far, so the halves stay about equally large.
    """
    if any(is_dev(task) for task in tasks):
        return {task["id"]: VALIDATION if is_dev(task) else TEST for task in tasks}
    keys = _dividing_keys(tasks)
    half_of_key: dict[str, str] = {}
    sizes = {VALIDATION: 0, TEST: 0}
    for key in keys:
        if key not in half_of_key:
            half_of_key[key] = TEST if sizes[TEST] < sizes[VALIDATION] else VALIDATION
        sizes[half_of_key[key]] += 1
    return {task["id"]: half_of_key[key] for task, key in zip(tasks, keys, strict=True)}


def halves_of_split(env: EnvRecord, split: str, tasks: Sequence[TaskRow]) -> dict[str, str]:
    """The half of each of the `tasks` of one split that an evaluation asks, by task id; see
    `halves`. {} where they choose no checkpoint: training tasks, and held-out tasks beside dev."""
    if split == "train" or (split == "heldout" and env.rows.get("dev")):
        return {}
    return halves(tasks)


def is_dev(task: TaskRow) -> bool:
    """Whether the task is for choosing checkpoints alone."""
    return task.get("split") == "dev"


def _dividing_keys(tasks: Sequence[TaskRow]) -> list[str]:
    """For each task the key that decides its half: its family (prompt and group), or its id if it
    has no prompt. If all tasks are of one family, which would put them all into one half, their ids
    are used."""
    # "id ": no id may equal the key of a family.
    with_prompt = [task for task in tasks if task.get("prompt")]
    family_of_task = dict(
        zip([task["id"] for task in with_prompt], family_keys(with_prompt), strict=True)
    )
    keys = [family_of_task.get(task["id"], f"id {task['id']}") for task in tasks]
    if len(set(keys)) == 1:
        return [task["id"] for task in tasks]
    return keys


def chosen_tasks(
    config: EvaluateConfig, env: EnvRecord, pool: Sequence[TaskRow]
) -> tuple[list[TaskRow], dict[str, str]]:
    """Choose the tasks of an evaluation from `pool`, all tasks of its split.

    Returns (the tasks that the config asks for, the half of every task of its split by id).

    Asked are the tasks at its `task_indices`, or all of its split if it has no indices; of these at
    most `rows`. Those that choose no checkpoint come first, so that an evaluation is of them as far
    as they reach; within each half in the order of `ordered`.
    """
    all_in_order = ordered(pool, len(pool))
    # Of the whole split: which half a task is in must not depend on which others are asked.
    half_of_task = halves_of_split(env, config.split, all_in_order)
    if config.task_indices:
        requested_tasks = [pool[index] for index in config.task_indices]
        return ordered(requested_tasks, config.rows), half_of_task
    reported_first = sorted(  # which keeps the order within a half
        all_in_order, key=lambda task: half_of_task.get(task["id"]) == VALIDATION
    )
    return reported_first[: config.rows], half_of_task

"""The tasks of evaluations: their order, and their two halves.

The held-out tasks are sorted by the hash of their id, so every run of an environment evaluates the
same tasks. They are divided into two halves. The half `select` is played during training, to choose
the best checkpoint. The half `report` is played only at step 0 and with the chosen checkpoint, so
that the reported numbers come from tasks that chose nothing. Tasks of one family (the same prompt
or group) are always in the same half, because the answer to one reveals that to the other. If the
environment has dev tasks, these choose the checkpoint, and all held-out tasks are reported.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence

from engine.core.split import family_keys, prompt_key
from engine.environments.registry import EnvRecord, read_tasks
from engine.evidence.stats.exam_size import ExamSize
from engine.evidence.stats.results import TEST, VALIDATION
from engine.records.run_config import EvaluateConfig
from envs.json_types import TaskRow

# Share of the tasks from which on their most frequent answer is worth a word: tasks with few
# different answers, such as labels.
_FREQUENT = 0.2


def ordered(tasks: Sequence[TaskRow], limit: int) -> list[TaskRow]:
    """Sort the tasks by the SHA-256 of their ids, and return the first `limit`.

    This order is the same in every run, and does not depend on what the tasks ask.
    """
    in_order = sorted(tasks, key=lambda task: hashlib.sha256(task["id"].encode()).digest())
    return in_order[:limit]


def exam_tasks(
    env: EnvRecord, limit: int, usable: Callable[[TaskRow], object] = bool
) -> list[TaskRow]:
    """Return the tasks of a training run's exam (its evaluations along the way).

    First come the dev tasks, if the environment has any, then the held-out tasks: at most `limit`
    of each, in the order of `ordered`. Tasks for which `usable` returns a false value are left out;
    the default `bool` keeps all, because no task is empty.
    """
    chosen: list[TaskRow] = []
    for split in ("dev", "heldout"):
        usable_tasks = [task for task in read_tasks(env, split) if usable(task)]
        chosen += ordered(usable_tasks, limit)
    return chosen


def halves(tasks: Sequence[TaskRow]) -> dict[str, str]:
    """Divide tasks into the half that chooses the checkpoint and the half that is reported.

    Returns task id -> VALIDATION (chooses) or TEST (is reported). `tasks` must be in the order of
    `ordered`.

    If there are dev tasks, they are VALIDATION and all others TEST. Otherwise tasks with the same
    key (`_dividing_keys`) get the same half. Each new key goes to the half that has fewer tasks so
    far, so the halves stay about equally large.
    """
    if any(is_dev(task) for task in tasks):
        half_of_task = dict.fromkeys([task["id"] for task in tasks], TEST)
        half_of_task |= {task["id"]: VALIDATION for task in tasks if is_dev(task)}
        return half_of_task
    keys = _dividing_keys(tasks)
    half_of_key: dict[str, str] = {}
    sizes = {VALIDATION: 0, TEST: 0}
    for key in keys:
        if key not in half_of_key:
            half_of_key[key] = TEST if sizes[TEST] < sizes[VALIDATION] else VALIDATION
        sizes[half_of_key[key]] += 1
    return {task["id"]: half_of_key[key] for task, key in zip(tasks, keys, strict=True)}


def halves_of_split(env: EnvRecord, split: str, tasks: Sequence[TaskRow]) -> dict[str, str]:
    """Return task id -> half (see `halves`) for the `tasks` of the split that an evaluation asks.

    Returns {} if tasks of this split choose no checkpoint: training tasks, and the held-out tasks
    of an environment that has dev tasks.
    """
    if split == "train" or (split == "heldout" and env.rows.get("dev")):
        return {}
    return halves(tasks)


def is_dev(task: TaskRow) -> bool:
    """Return whether the task is a dev task, which serves only to choose checkpoints."""
    return task.get("split") == "dev"


def _dividing_keys(tasks: Sequence[TaskRow]) -> list[str]:
    """Return for each task the key that decides its half.

    The key is the task's family (the same for tasks with the same prompt or group), or the task's
    id if it has no prompt. If all tasks are of one family, their ids are used instead.
    """
    with_prompt = [task for task in tasks if task.get("prompt")]
    ids_with_prompt = [task["id"] for task in with_prompt]
    family_of_task = dict(zip(ids_with_prompt, family_keys(with_prompt), strict=True))
    # The prefix "id " keeps an id from being equal to the key of a family.
    keys = [family_of_task.get(task["id"], f"id {task['id']}") for task in tasks]
    if len(set(keys)) == 1:  # one family would put all tasks into the same half
        return [task["id"] for task in tasks]
    return keys


def reported_tasks(env: EnvRecord, limit: int) -> list[TaskRow]:
    """Return what the verdict of a training run rests on: the tasks of its exam (at most `limit`)
    that choose no checkpoint."""
    tasks = exam_tasks(env, limit)
    half_of_task = halves(tasks)
    return [task for task in tasks if half_of_task[task["id"]] == TEST]


def frequent_answer(tasks: Sequence[TaskRow]) -> tuple[str, float] | None:
    """Return the most frequent reference answer to these tasks, and the share of them on which it
    is right: what a model reaches that always gives it.

    Returns None if that share is below `_FREQUENT`, or if the tasks have no reference answers of
    one message.
    """
    counts: Counter[str] = Counter()
    for task in tasks:
        reference_turns = task.get("answer") or []
        if len(reference_turns) == 1:
            counts[str(reference_turns[0].get("content") or "").strip()] += 1
    del counts[""]  # an answer that is a tool call, or none; a Counter may lack the key
    if not counts:
        return None
    text, count = counts.most_common(1)[0]
    share = count / counts.total()
    return (text, share) if share >= _FREQUENT else None


def size_of(env: EnvRecord, tasks: Sequence[TaskRow]) -> ExamSize:
    """Return how many questions these tasks are, and how many groups they form (tasks that the
    environment says belong together).

    Tasks with the same prompt are one question, unless the environment writes further messages.
    """
    group_of_question: dict[str, str] = {}  # "" for a task without a group
    for task in tasks:
        question = prompt_key(task["prompt"]) if env.kind == "single" else task["id"]
        group_of_question[question] = str(task.get("group") or "")
    return ExamSize.of(group_of_question)


def chosen_tasks(
    config: EvaluateConfig, env: EnvRecord, pool: Sequence[TaskRow]
) -> tuple[list[TaskRow], dict[str, str]]:
    """Choose the tasks of an evaluation from `pool`, which holds all tasks of its split, as
    `tasks_asked` does. Returns (the tasks to ask, the half of every task of the split by id)."""
    return tasks_asked(env, config.split, pool, config.rows, config.task_indices)


def tasks_asked(
    env: EnvRecord, split: str, pool: Sequence[TaskRow], rows: int, indices: Sequence[int]
) -> tuple[list[TaskRow], dict[str, str]]:
    """Choose the tasks that an evaluation asks from `pool`, which holds all tasks of `split`.

    Returns (the tasks to ask, the half of every task of the split by task id).

    The tasks at the positions `indices` are asked, or if there are none all of the split; at most
    `rows` in either case. Of the whole split, tasks that choose no checkpoint come first, so that a
    small `rows` takes those.
    """
    all_in_order = ordered(pool, len(pool))
    # The whole split is divided: a task's half must not depend on which other tasks are asked.
    half_of_task = halves_of_split(env, split, all_in_order)
    if indices:
        return ordered([pool[index] for index in indices], rows), half_of_task
    reported_first = sorted(  # stable: within each half the order stays that of `ordered`
        all_in_order, key=lambda task: half_of_task.get(task["id"]) == VALIDATION
    )
    return reported_first[:rows], half_of_task

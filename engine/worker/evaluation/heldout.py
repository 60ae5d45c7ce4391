"""Evaluation on held-out tasks: their order, their two halves, and the rows that are written.

The held-out tasks are ordered by the hash of their id, so every run of an environment evaluates the
same ones. They are divided into two halves: `select` is played during training, to choose the best
checkpoint; `report` only at step 0 and with the chosen checkpoint, so that the reported numbers
come from tasks that chose nothing. Tasks of one family (the same prompt or group) are always in the
same half, as they would give each other away. Where the environment has dev tasks, those are the
half that chooses, and all held-out tasks are reported.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from engine.core.files import Appender
from engine.core.metrics import curve_name
from engine.core.split import family_keys
from engine.environments.registry import EnvRecord, read_tasks
from engine.records.lines.evaluation_row import EvaluationRow
from engine.worker.core.trajectory import Group, Trajectory
from engine.worker.network.sampler import Sampler, SamplingParams
from engine.worker.rollouts.collect import RolloutContext, collect
from engine.worker.rollouts.rollout_file import answer_fields
from envs.json_types import TaskRow

VALIDATION, TEST = "select", "report"  # as rows of evaluations name the halves


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


@dataclass(frozen=True)
class Summary:
    """Means over answers; one whose scoring failed counts as not solved, with reward 0.

    Attributes:
        n: how many answers.
        success: share that succeeded; None where no score says whether it did.
        errors: how many could not be scored.
        truncated: share that was cut by a limit.
        metrics: means of the environment's own metrics over the answers that were scored.
    """

    n: int
    success: float | None
    reward: float
    errors: int
    truncated: float
    metrics: dict[str, float]

    def curves(self, split: str = "heldout") -> dict[str, float]:
        """Return the means as columns of metrics.jsonl, each named after the `split` of the tasks.

        They are `heldout_reward`, `heldout_success` if it is known, then `heldout_<name>` for each
        metric of the environment. If the environment has a metric with one of our names, ours is
        used.
        """
        trajectory_means = {f"{split}_reward": self.reward}
        if self.success is not None:
            trajectory_means[f"{split}_success"] = self.success
        environment_means: dict[str, float] = {}
        for name, value in self.metrics.items():
            environment_means[f"{split}_{curve_name(name)}"] = value
        # The first `trajectory_means` puts our columns first, the second overwrites equal names.
        return trajectory_means | environment_means | trajectory_means

    @property
    def score(self) -> float:
        """The number that checkpoints are chosen by: success where it is known, else reward."""
        return self.reward if self.success is None else self.success


def evaluate(
    tasks: Sequence[TaskRow],
    context: RolloutContext,
    sampler: Sampler,
    params: SamplingParams,
    attempts: int = 1,
) -> list[Group]:
    """Play and score each task `attempts` times. Returns one group per task, in the order of
    `tasks`."""
    groups, _times = collect(tasks, attempts, context, sampler, params)
    return groups


def summarise(trajectories: Iterable[Trajectory]) -> Summary:
    """Return the means over trajectories.

    One that could not be scored counts as not solved, with reward 0, but not in `metrics`.
    `success` is None if no score tells whether its task was solved.
    """
    answers = list(trajectories)
    scored = [trajectory for trajectory in answers if trajectory.error is None]
    count = max(1, len(answers))  # the means of nothing are 0
    success = None
    if any(trajectory.success is not None for trajectory in scored):
        success = sum(bool(trajectory.success) for trajectory in answers) / count
    return Summary(
        n=len(answers),
        success=success,
        reward=sum(trajectory.reward for trajectory in answers) / count,
        errors=len(answers) - len(scored),
        truncated=sum(trajectory.cut for trajectory in answers) / count,
        metrics=_metric_means(scored),
    )


def _metric_means(scored: Sequence[Trajectory]) -> dict[str, float]:
    """The mean of each metric of the environment over the scored trajectories that have it, by
    name: what only some tasks have is absent on the others, not 0."""
    names = sorted({name for t in scored for name in t.metrics})
    return {name: fmean(t.metrics[name] for t in scored if name in t.metrics) for name in names}


def write_rows(
    file: Appender, groups: Sequence[Group], half_of_task: dict[str, str], *, model: str
) -> None:
    """Append the row of each trajectory to an evaluation file; arguments as for `rows_of`."""
    for row in rows_of(groups, half_of_task, model=model):
        file.append(row.to_line())


def rows_of(
    groups: Sequence[Group], half_of_task: dict[str, str], *, model: str, with_tools: bool = False
) -> Iterator[EvaluationRow]:
    """Yield the row of each trajectory for an evaluation file, group by group; `attempt` counts the
    members of a group from 0.

    Args:
        half_of_task: VALIDATION or TEST for each task id. A task that is missing counts as TEST: it
            chooses no checkpoint. {} for tasks that are not divided.
        model: the name of the model in the rows.
        with_tools: the rows also say what the model could call.
    """
    for group in groups:
        for attempt, trajectory in enumerate(group.members):
            half = half_of_task.get(trajectory.task_id, TEST)
            fields = answer_fields(trajectory)
            if with_tools and trajectory.tools:
                fields["tools"] = trajectory.tools
            yield EvaluationRow(model=model, half=half, attempt=attempt, **fields)

"""Evaluation on held-out tasks: which tasks, which half, and the rows an evaluation leaves.

The held-out tasks are ordered by the hash of their id, so every run of an environment meets the
same ones. They alternate between two halves: `select` is looked at while training, to choose the
best checkpoint; `report` only at step 0 and for the checkpoint chosen, so that what is reported
was chosen on other tasks. Tasks of one prompt stand in one half: they are no other tasks.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from engine.core.files import Appender
from engine.core.metrics import HELDOUT, curve_name
from engine.core.split import prompt_key
from engine.records.lines.evaluation_row import EvaluationRow
from engine.worker.core.trajectory import Group, Trajectory
from engine.worker.network.sampler import Sampler, SamplingParams
from engine.worker.rollouts.collect import RolloutContext, collect
from envs.json_types import TaskRow

VALIDATION, TEST = "select", "report"  # as rows of evaluations name the halves


def ordered(tasks: Sequence[TaskRow], limit: int) -> list[TaskRow]:
    """At most `limit` tasks, in the order of the SHA-256 of their ids."""
    key = {task["id"]: hashlib.sha256(task["id"].encode()).digest() for task in tasks}
    return sorted(tasks, key=lambda task: key[task["id"]])[:limit]


def halves(tasks: Sequence[TaskRow]) -> dict[str, str]:
    """Task id to half, over tasks already `ordered`.

    A prompt not met before goes to the half with fewer tasks, so tasks whose prompts all differ
    alternate. Where all have one prompt there is nothing to keep apart, and they alternate too.
    """
    prompts = [prompt_key(t["prompt"]) if t.get("prompt") else f"id {t['id']}" for t in tasks]
    if len(set(prompts)) == 1:
        prompts = [task["id"] for task in tasks]
    of: dict[str, str] = {}
    sizes = {VALIDATION: 0, TEST: 0}
    for prompt in prompts:
        half = of.setdefault(prompt, TEST if sizes[TEST] < sizes[VALIDATION] else VALIDATION)
        sizes[half] += 1
    return {task["id"]: of[prompt] for task, prompt in zip(tasks, prompts, strict=True)}


@dataclass(frozen=True)
class Summary:
    """Means over the tasks evaluated; errors count as not solved, reward 0."""

    n: int
    success: float | None
    reward: float
    errors: int
    truncated: float
    metrics: dict[str, float]

    def curves(self) -> dict[str, float]:
        """As columns of metrics.jsonl; what was measured stands over whatever a scorer named."""
        measured = {"heldout_reward": self.reward}
        if self.success is not None:
            measured["heldout_success"] = self.success
        named = {f"{HELDOUT}{curve_name(name)}": value for name, value in self.metrics.items()}
        return measured | named | measured

    @property
    def score(self) -> float:
        """What checkpoints are chosen by."""
        return self.reward if self.success is None else self.success


def evaluate(
    tasks: Sequence[TaskRow],
    context: RolloutContext,
    sampler: Sampler,
    params: SamplingParams,
    attempts: int = 1,
) -> list[Group]:
    """Play the tasks `attempts` times each; greedy when the temperature is 0."""
    groups, _ = collect(tasks, attempts, context, sampler, params)
    return groups


def summarise(trajectories: Iterable[Trajectory]) -> Summary:
    """Means over trajectories; `success` is None when no score said whether it succeeded."""
    rows = list(trajectories)
    scored = [t for t in rows if t.error is None]
    judged = any(t.success is not None for t in scored)
    names = sorted({name for t in scored for name in t.metrics})
    count = max(1, len(rows))
    return Summary(
        n=len(rows),
        success=sum(bool(t.success) for t in rows) / count if judged else None,
        reward=sum(t.reward for t in rows) / count,
        errors=len(rows) - len(scored),
        truncated=sum(t.cut for t in rows) / count,
        metrics={
            name: sum(t.metrics.get(name, 0.0) for t in scored) / max(1, len(scored))
            for name in names
        },
    )


def write_rows(file: Appender, groups: Sequence[Group], half: dict[str, str], model: str) -> None:
    """One line per trajectory in an evaluation file."""
    for row in rows_of(groups, half, model):
        file.append(row.to_line())


def rows_of(groups: Sequence[Group], half: dict[str, str], model: str) -> Iterator[EvaluationRow]:
    """What an evaluation keeps of each trajectory."""
    for group in groups:
        for attempt, t in enumerate(group.members):
            yield EvaluationRow(
                model=model, half=half.get(t.task_id, TEST), attempt=attempt, **t.answer()
            )

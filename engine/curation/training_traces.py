"""Writes rollouts of a run as training traces for other trainers (OpenEnv's `TrainingTrace`).

The file holds JSON lines, one trace for each rollout whose token ids were kept. A trace has one
turn for each answer of the model, in every conversation of the rollout.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from engine.core.errors import UserError
from engine.core.files import JsonObject, write_text
from engine.core.reply import ReplyBase
from engine.home.owner_marks import refuse_if_of_sealed
from engine.home.run_dir import Home
from engine.records.lines.trajectory_record import (
    SampledIds,
    TrajectoryRecord,
    read_trajectories,
)

SCHEMA = 1  # version of OpenEnv's format


@dataclass(frozen=True)
class WrittenTraces(ReplyBase):
    """Training traces that were written to the file `path`, one on each line.

    Attributes:
        traces: number of rollouts.
        turns: number of the model's answers in them.
    """

    run_id: str
    path: str
    traces: int
    turns: int
    summary: str


def write_traces(home: Home, run_id: str, path: Path) -> WrittenTraces:
    """Write those rollouts of a run whose token ids were kept to the file `path`, which is
    replaced.

    Raises UserError ENV_SEALED if the run's environment is sealed (reserved for a final exam),
    NO_EVALUATION if no token ids were kept, and BAD_ARGUMENT if the file cannot be written.
    """
    run = home.run(run_id)
    refuse_if_of_sealed(run.find_config(), "its answers cannot be read")
    traces: list[JsonObject] = []
    for step in run.rollout_steps():
        for record in read_trajectories(run.rollouts(step)):
            trace = trace_of(record, run_id)
            if trace["turns"]:  # else its tokens were not kept
                traces.append(trace)
    if not traces:
        raise UserError(
            "NO_EVALUATION",
            f"{run_id} kept no tokens of rollouts",
            hint="GRPO keeps those of the first groups of each step; train with it.",
            field="run_id",
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, "".join(json.dumps(trace) + "\n" for trace in traces))
    except OSError as error:
        raise UserError(
            "BAD_ARGUMENT", f"{path} cannot be written: {error.strerror}", field="path"
        ) from error
    turns = sum(len(trace["turns"]) for trace in traces)
    return WrittenTraces(
        run_id,
        path=str(path),
        traces=len(traces),
        turns=turns,
        summary=f"{len(traces)} rollouts of {run_id} with {turns} answers are in {path}.",
    )


def trace_of(record: TrajectoryRecord, run_id: str) -> JsonObject:
    """Convert a rollout to a training trace in OpenEnv's form, with one turn for each answer of the
    model. If the rollout's tokens were not kept, `turns` is empty."""
    name = f"{run_id}-{record.step}-{record.group}-{record.member}"
    metadata = {
        "task": record.task,
        "reward": record.reward,
        "advantage": record.advantage,
        "policy_step": record.policy_step,
    }
    turns = [
        {"node_id": f"{name}-{place}-{number}", **turn, "metadata": metadata}
        for place, conversation in enumerate(record.conversations)
        for number, turn in enumerate(_turns(conversation))
    ]
    return {"schema_version": SCHEMA, "turns": turns}


def _turns(conversation: SampledIds) -> Iterator[JsonObject]:
    """Yield one turn for each answer of the model in a conversation.

    An answer is a sequence of tokens whose loss mask is 1. The prompt of a turn is everything
    before the answer, including what the environment wrote since the previous answer.
    """
    start = 0  # position in `conversation.ids` of the present sequence of equal mask values
    for is_sampled, mask_values in groupby(conversation.loss_mask):
        length = len(list(mask_values))
        if is_sampled:
            prompt_ids = conversation.prompt_ids + conversation.ids[:start]
            yield {
                "prompt_token_ids": prompt_ids,
                "completion_token_ids": conversation.ids[start : start + length],
                "per_token_logps": conversation.logprobs[start : start + length],
                "loss_mask": [0] * len(prompt_ids) + [1] * length,
            }
        start += length

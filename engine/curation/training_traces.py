"""Rollouts of a run as training traces for other trainers: OpenEnv's `TrainingTrace`, schema 1.

A file of JSON lines, one trace for each rollout whose token ids were kept; a trace has a turn for
each answer of the model, of every conversation of the rollout.
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

SCHEMA = 1


@dataclass(frozen=True)
class WrittenTraces(ReplyBase):
    """Training traces that were written to `path`, one a line."""

    run_id: str
    path: str
    traces: int
    turns: int
    summary: str


def write_traces(home: Home, run_id: str, path: Path) -> WrittenTraces:
    """Write the rollouts of a run whose token ids were kept; an existing file is replaced.

    Raises UserError: ENV_SEALED; NO_EVALUATION, none were kept; BAD_ARGUMENT if the file cannot be
    written.
    """
    run = home.run(run_id)
    refuse_if_of_sealed(run.find_config(), "its answers cannot be read")
    traces = [
        trace
        for step in run.rollout_steps()
        for record in read_trajectories(run.rollouts(step))
        if (trace := trace_of(record, run_id))["turns"]
    ]
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
    """A rollout as a training trace, without turns where its tokens were not kept."""
    name = f"{run_id}-{record.step}-{record.group}-{record.member}"
    told = {
        "task": record.task,
        "reward": record.reward,
        "advantage": record.advantage,
        "policy_step": record.policy_step,
    }
    turns = [
        {"node_id": f"{name}-{place}-{number}", **turn, "metadata": told}
        for place, conversation in enumerate(record.conversations)
        for number, turn in enumerate(_turns(conversation))
    ]
    return {"schema_version": SCHEMA, "turns": turns}


def _turns(conversation: SampledIds) -> Iterator[JsonObject]:
    """Each answer of the model with everything that it read before: a run of tokens that the mask
    names. What the environment said between two answers is part of the later one's prompt."""
    at = 0
    for is_sampled, run in groupby(conversation.loss_mask):
        length = len(list(run))
        if is_sampled:
            read = conversation.prompt_ids + conversation.ids[:at]
            yield {
                "prompt_token_ids": read,
                "completion_token_ids": conversation.ids[at : at + length],
                "per_token_logps": conversation.logprobs[at : at + length],
                "loss_mask": [0] * len(read) + [1] * length,
            }
        at += length

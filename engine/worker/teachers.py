"""The teacher of a distillation: it reads completions of the policy, token by token.

A teacher gets token ids and returns a log-probability for each. It never samples and never sees a
message. `NetworkTeacher` is a model in this process; if it is an adapter on the policy's own base,
only that adapter is loaded.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from engine.home.hashes import weight_hashes
from engine.home.user_config import key_of
from engine.records.run_config import DistillConfig
from engine.records.run_config import EndpointTeacher as EndpointEntry
from engine.worker.components import Components, loading_of
from engine.worker.core.batch import Row, rows_of
from engine.worker.core.job import Job
from engine.worker.core.trajectory import Trajectory
from engine.worker.network.adapter import Adapter, LoraSpec, read_adapter
from engine.worker.network.network import Network
from engine.worker.network.policy import Base, load_base
from engine.worker.teacher_endpoint import SAMPLE, Endpoint, EndpointTeacher
from engine.worker.update import checkpoint


class Teacher(Protocol):
    """A model that rates the tokens of trajectories."""

    def logprobs(self, trajectories: Sequence[Trajectory], budget: int) -> list[list[float]]:
        """Return the log-probability of each trained token in nats, at temperature 1: one list per
        trajectory, in the order of its tokens.

        Args:
            budget: the most tokens, padding included, that may go through a model in this process
                at once.
        """
        ...

    def is_finest(self, trajectories: Sequence[Trajectory], budget: int) -> bool:
        """Tell whether this budget already makes every trajectory go through the model alone, so
        that a smaller one would change nothing."""
        ...

    def close(self) -> None:
        """Free what the teacher holds, such as connections. It rates nothing afterwards."""
        ...


class NetworkTeacher:
    """A teacher that is a model in this process."""

    def __init__(self, network: Network, adapter: Adapter | None) -> None:
        """Rate with `network` and the adapter; without an adapter (None) with the network alone."""
        self.network = network
        self.adapter = adapter

    @torch.no_grad()
    def logprobs(self, trajectories: Sequence[Trajectory], budget: int) -> list[list[float]]:
        """Return the log-probabilities of the trained tokens of each trajectory, in nats; see
        `Teacher`. `budget`: the most tokens that go through the model at once."""
        rows = rows_of(trajectories)
        rated: list[list[float]] = [[] for _ in trajectories]
        for row_indices in self.network.split(rows, budget):
            microbatch = [rows[index] for index in row_indices]
            for index, logprobs in zip(row_indices, self._rate(microbatch), strict=True):
                rated[index] = logprobs
        return rated

    def _rate(self, rows: Sequence[Row]) -> list[list[float]]:
        """Return the log-probabilities of the trained tokens of each row, in nats.

        All rows go through the model together.
        """
        batch = self.network.collate(rows).to(self.network.device)
        logprobs, _ = self.network.logprobs(batch, self.adapter)  # of all rows, one after the other
        trained_tokens = [sum(row.loss_mask) for row in rows]
        return [row_logprobs.tolist() for row_logprobs in logprobs.split(trained_tokens)]

    def is_finest(self, trajectories: Sequence[Trajectory], budget: int) -> bool:
        """Tell whether this budget already makes every trajectory go through the model alone."""
        return len(self.network.split(rows_of(trajectories), budget)) == len(trajectories)

    def close(self) -> None:
        """Do nothing: the model ends with the process."""


class TeacherPass:
    """One reading of a step's trajectories by the teacher. As a `BatchPass` (memory_retry.py) it is
    repeated in smaller parts if memory runs out."""

    def __init__(self, teacher: Teacher, trajectories: Sequence[Trajectory]) -> None:
        """Prepare to have `teacher` read `trajectories`; nothing is read yet."""
        self.teacher = teacher
        self.trajectories = trajectories

    def run(self, token_limit: int) -> list[list[float]]:
        """Return the log-probabilities of the trained tokens, one list per trajectory."""
        return self.teacher.logprobs(self.trajectories, token_limit)

    def is_finest(self, token_limit: int) -> bool:
        """Tell whether at most `token_limit` tokens at once already make every trajectory go
        alone."""
        return self.teacher.is_finest(self.trajectories, token_limit)


def load_teacher(job: Job[DistillConfig], components: Components) -> Teacher:
    """Load the teacher of the run, or connect to the endpoint that is the teacher. The event
    `teacher` names it.

    Raises:
        WorkerFailure: kind config, if the teacher cannot be loaded or its adapter was trained on
            another base; the kinds of `EndpointTeacher.check_tokens`, if an endpoint does not fit.
    """
    entry = job.config.teacher
    if isinstance(entry, EndpointEntry):
        return _reach_endpoint(job, entry, components)
    base_path = Path(entry.base_path)
    shares_base = base_path == components.base.path
    # On the policy's base the teacher is a second adapter, or the base itself (adapter None).
    base = components.base if shares_base else _load_base(job, components, base_path)
    adapter = _load_adapter(job, base.network, base_path, entry.adapter)
    form = "an adapter beside the policy's" if shares_base else "a model of its own"
    job.event("teacher", f"{entry.ref}, {form}", ref=entry.ref, shares_base=shares_base)
    return NetworkTeacher(base.network, adapter)


def _load_base(job: Job[DistillConfig], components: Components, base_path: Path) -> Base:
    """Load the teacher's base model in `base_path`, on the policy's device. The run's settings give
    the number format."""
    loading = loading_of(job.config)
    return load_base(
        base_path,
        components.base.network.device,
        precision=loading.precision,
        quantization=loading.quantization,
        comparisons_file=job.run.home.comparisons,
    )


def _reach_endpoint(
    job: Job[DistillConfig], entry: EndpointEntry, components: Components
) -> EndpointTeacher:
    """Connect to the teacher behind `entry`, and check that it answers and has the student's
    tokens. Raises WorkerFailure if not."""
    key = key_of(job.run.home.root, entry.key_env)
    teacher = EndpointTeacher(Endpoint(entry.url, entry.model, key), job.check_stop)
    renderer = components.renderer
    try:
        # The first request: it also shows whether the endpoint answers.
        teacher.check_tokens(renderer.encode(SAMPLE), renderer.token_text, job.config.base.ref)
    except BaseException:  # Stopped too: whatever the error is, no threads may be left
        teacher.close()
        raise
    job.event("teacher", str(teacher.endpoint), ref=entry.model, url=entry.url)
    return teacher


def _load_adapter(
    job: Job[DistillConfig], network: Network, base_path: Path, folder_name: str | None
) -> Adapter | None:
    """Load the teacher's adapter in the folder `folder_name` onto `network`, the base in
    `base_path`; return None without a folder. Raises WorkerFailure if the adapter was trained on
    another base or does not fit."""
    if folder_name is None:
        return None
    folder = Path(folder_name)
    checkpoint.require_base(folder, weight_hashes(job.run.home, base_path))
    # Any seed: the initial weights are replaced at once.
    adapter = network.new_adapter(LoraSpec.from_folder(folder), seed=0)
    adapter.load(read_adapter(folder))
    return adapter

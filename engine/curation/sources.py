"""Answers that runs stored: attempts to curate from, and files of rows to score again."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.core.errors import UserError
from engine.core.files import JsonObject, read_object
from engine.core.hints import Call, Hint
from engine.curation.selection import Attempt
from engine.environments import registry
from engine.environments.registry import EnvRecord
from engine.home.rows import TERMINAL, RunRow
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.records.lines.answer import Answer
from engine.records.lines.evaluation_row import EvaluationRow
from engine.records.lines.trajectory_record import TrajectoryRecord
from engine.records.run_config import GRPOConfig, ProbeConfig, RunConfig, TrainConfig

MOST_SOURCES = 32
MOST_STEPS = 8  # of a training run, whose answers one regrade scores again

Row = TrajectoryRecord | EvaluationRow


@dataclass(frozen=True)
class SourceSummary:
    """A source as replies show it, and as the card of the dataset made from it names it.

    Attributes:
        id: the reference, as it was given.
        kind: algorithm of a training run, else the kind of run.
        attempts: how many were read.
        files: SHA-256 by path within the run's folder; in the card only, else None.
    """

    id: str
    kind: str
    env_id: str
    models: list[str]
    attempts: int
    files: dict[str, str] | None = None


@dataclass(frozen=True)
class Source:
    """One run with its attempts, its environment version and the files they were read from.

    Attributes:
        files: SHA-256 by path within the run's folder.
        skipped: how many damaged lines they hold.
    """

    ref: str
    row: RunRow
    record: EnvRecord
    attempts: list[Attempt]
    files: dict[str, str]
    skipped: int
    config: RunConfig

    @property
    def models(self) -> list[str]:
        """The models whose attempts these are, each once."""
        return list(dict.fromkeys(attempt.model for attempt in self.attempts))

    def summary(self, *, with_files: bool = False) -> SourceSummary:
        """The source without its attempts; `with_files` adds the hashes of its files."""
        row = self.row
        return SourceSummary(
            id=self.ref,
            kind=row.algorithm if row.kind == "train" else row.kind,
            env_id=self.record.env_id,
            models=self.models,
            attempts=len(self.attempts),
            files=self.files if with_files else None,
        )


def load_sources(home: Home, source_ids: Sequence[str]) -> list[Source]:
    """The runs behind `source_ids`, each with its attempts.

    Raises UserError BAD_ARGUMENT (too many or none, the same run twice, a step that there is not),
    RUN_NOT_FOUND, NO_EVALUATION (a run has no answers) or ENV_NOT_FOUND.
    """
    refs = list(dict.fromkeys(str(ref).strip() for ref in source_ids if str(ref).strip()))
    if not 1 <= len(refs) <= MOST_SOURCES:
        raise UserError(
            "BAD_ARGUMENT",
            f"{len(refs)} sources were given",
            hint=f"Name 1 to {MOST_SOURCES} evaluations or GRPO runs.",
            field="source_ids",
        )
    sources = []
    for ref in refs:
        run_id, _, step_name = ref.partition("@")
        with Store(home) as store:
            row = store.get_run(run_id)
        sources.append(_load_source(home, ref, row, step_name))
    run_ids = [source.row.run_id for source in sources]
    repeated = [source.ref for source in sources if run_ids.count(source.row.run_id) > 1]
    # Single steps of a run may stand side by side, but not the whole run beside one of its steps.
    if any("@" not in ref for ref in repeated):
        raise UserError(
            "BAD_ARGUMENT",
            f"{', '.join(repeated)} name the same rollouts twice",
            hint="Name a run once, or only single steps of it.",
            field="source_ids",
        )
    return sources


@dataclass(frozen=True)
class _AnswerFile:
    """A file of answers, with the model and the training step (0 in an evaluation) they are of."""

    path: Path
    model: str
    step: int
    record: type[TrajectoryRecord] | type[EvaluationRow]


def _load_source(home: Home, ref: str, row: RunRow, step_name: str) -> Source:
    """One source with its attempts; `step_name` is what follows the @ of its reference, or "".

    Raises UserError as `load_sources` does.
    """
    run = home.run(row.run_id)
    config = run.read_config()
    attempts: list[Attempt] = []
    hashes: dict[str, str] = {}
    skipped = 0
    for file in _answer_files(run, row, config, ref, step_name):
        answers = file.record.read_file(file.path)
        skipped += answers.skipped
        if answers.records:
            attempts += [
                _attempt(row, file, index, answer) for index, answer in enumerate(answers.records)
            ]
            digest = hashlib.sha256(file.path.read_bytes()).hexdigest()
            hashes[str(file.path.relative_to(run.path))] = digest
    if not attempts:
        raise UserError(
            "NO_EVALUATION",
            f"{ref} has no rollouts to choose from (it is {row.state})",
            hint=_how_to_get_rollouts(row),
            field="source_ids",
        )
    record = registry.find_env(home, row.env_id)
    return Source(ref, row, record, attempts, hashes, skipped, config)


def _how_to_get_rollouts(row: RunRow) -> Hint:
    """The advice how a run without rollouts gets some."""
    if row.kind != "train":
        return Hint("Wait until it has some:", Call("wait_run", {"run_id": row.run_id}))
    evaluation = {"env_id": row.env_id, "models": [row.run_id], "split": "train", "attempts": 8}
    return Hint(
        "Name an evaluation or a GRPO run that has played. SFT plays no training tasks; to play:",
        Call("evaluate", evaluation),
    )


def _answer_files(
    run: RunDir, row: RunRow, config: RunConfig, ref: str, step_name: str
) -> list[_AnswerFile]:
    """The files of a source: one per step of training, or one per model of an evaluation.

    Raises UserError BAD_ARGUMENT for a step that does not exist.
    """
    if row.kind == "train":
        return [
            _AnswerFile(run.rollouts(step), row.run_id, step, TrajectoryRecord)
            for step in _chosen_steps(run, row, step_name)
        ]
    if step_name:
        raise UserError(
            "BAD_ARGUMENT",
            f"{ref}: only the rollouts of a training run have steps",
            hint=f"Name {row.run_id}.",
            field="source_ids",
        )
    return [
        _AnswerFile(run.model_evals(index), model, 0, EvaluationRow)
        for index, model in enumerate(config.model_refs)
    ]


def _chosen_steps(run: RunDir, row: RunRow, step_name: str) -> list[int]:
    """All steps with rollouts, or only the one that is named (`step20`); "" names none.

    Raises UserError BAD_ARGUMENT where that step has no rollouts.
    """
    steps = run.rollout_steps()
    if not step_name:
        return steps
    number = step_name.removeprefix("step")
    if not number.isdecimal() or int(number) not in steps:
        present = f"steps {steps[0]} to {steps[-1]}" if steps else "no rollouts"
        raise UserError(
            "BAD_ARGUMENT",
            f"{row.run_id} has no rollouts of {step_name}",
            hint=f"It has {present}; write {row.run_id}@step{steps[-1] if steps else 'N'}.",
            field="source_ids",
        )
    return [int(number)]


def _attempt(run: RunRow, file: _AnswerFile, index: int, answer: Row) -> Attempt:
    """The line at `index` of an answer file as an attempt. Missing values get neutral ones."""
    messages = answer.messages
    if not messages:
        messages = [{"role": "assistant", "content": answer.completion or ""}]
    return Attempt(
        source=run.run_id,
        env_id=run.env_id,
        task=answer.task,
        model=file.model,
        step=file.step,
        member=_member(answer, index),
        prompt=answer.prompt or [],
        messages=messages,
        reward=answer.reward or 0.0,
        success=answer.success,
        tokens=answer.tokens,
        stop_reason=answer.stop_reason or "stop",
        error=answer.error,
        metrics=answer.metrics or {},
    )


def _member(answer: Row, index: int) -> int:
    """Which attempt at its task an answer is; its place in the file where the line does not say."""
    if isinstance(answer, TrajectoryRecord):
        return answer.member
    return (answer.attempt or 0) if "attempt" in answer.model_fields_set else index


@dataclass(frozen=True)
class Stored:
    """The answers of a run that can be scored again.

    Attributes:
        models: (reference, path of its rows within the run's folder) of each model.
        tasks: how many different tasks were answered.
        attempts: how many at each task; 1 was greedy.
        sampling: the settings they were sampled with, whatever the run's algorithm.
    """

    run_id: str
    env_id: str
    models: list[tuple[str, str]]
    tasks: int
    attempts: int
    sampling: JsonObject
    warnings: list[str]


def stored_answers(home: Home, run_id: str, split: str = "heldout") -> Stored:
    """The answers that `evaluate(regrade=run_id)` scores again.

    Of an evaluation or a probe: the answers of all its models. Of a training run: its held-out
    answers at up to eight steps, the first, the best and the last among them; with `split="train"`
    its rollouts of up to eight steps.

    Raises UserError RUN_NOT_FOUND, RUN_STATE (an evaluation has not ended) or NO_EVALUATION (no
    answer was scored).
    """
    with Store(home) as store:
        row = store.get_run(run_id)
    run = home.run(row.run_id)
    config = run.read_config()
    if row.kind != "train" and row.state not in TERMINAL:
        raise UserError(
            "RUN_STATE",
            f"{row.run_id} is {row.state}: its answers are not complete",
            hint=Hint("Wait for it, then regrade.", Call("wait_run", {"run_id": row.run_id})),
            field="regrade",
            retryable=True,
        )
    settings, attempts, warnings = config.settings, 1, []
    sampling = settings if isinstance(settings, dict) else settings.model_dump()
    if not isinstance(config, TrainConfig):
        files = [(model, run.model_evals(index)) for index, model in enumerate(config.model_refs)]
        attempts = (
            config.settings.group_size if isinstance(config, ProbeConfig) else config.attempts
        )
    elif split == "train":
        steps = _spread_steps(run.rollout_steps(), best=None)
        files = [(f"{row.run_id}, rollouts of step {step}", run.rollouts(step)) for step in steps]
        attempts = config.settings.group_size if isinstance(config, GRPOConfig) else 1
    else:
        files, warnings = _heldout_files(run, config.model)
        sampling |= _evaluation_sampling(run)
    rows = {ref: Answer.read_all(path) for ref, path in files}
    scored = [
        answer for answers in rows.values() for answer in answers if answer.reward is not None
    ]
    if not scored:
        raise UserError(
            "NO_EVALUATION",
            f"{row.run_id} has no stored answers to score again (it is {row.state})",
            hint="Name an evaluation, or a run whose environment scores.",
            field="regrade",
        )
    return Stored(
        run_id=row.run_id,
        env_id=row.env_id,
        models=[(ref, str(path.relative_to(run.path))) for ref, path in files if rows[ref]],
        tasks=len({answer.task for answer in scored}),
        attempts=attempts,
        sampling=sampling,
        warnings=warnings,
    )


def _heldout_files(run: RunDir, start_model: str) -> tuple[list[tuple[str, Path]], list[str]]:
    """The held-out answers of a training run: (model, file) of each chosen step, and warnings.

    Step 0 holds the answers of the model it started from.
    """
    evaluated = run.eval_steps()
    best = run.resolve_checkpoint("best")
    best_step = int(best.name.rpartition("_")[2]) if best else None  # from "step_000020"
    steps = _spread_steps(evaluated, best_step)
    files = [(f"{run.id}@step{step}" if step else start_model, run.evals(step)) for step in steps]
    left_out = len(evaluated) - len(steps)
    if not left_out:
        return files, []
    return files, [f"{left_out} of the evaluated steps are left out; at most {MOST_STEPS} are"]


def _spread_steps(steps: Sequence[int], best: int | None) -> list[int]:
    """At most `MOST_STEPS` of the steps, evenly spread, with the first, the last and the best.

    `best` is None where there is none, or ignored where it is none of `steps`.
    """
    if len(steps) <= MOST_STEPS:
        return list(steps)
    required = {steps[0], steps[-1], *([best] if best in steps else [])}
    room = MOST_STEPS - len(required)
    others = [step for step in steps if step not in required]
    between = {others[round((index + 1) * (len(others) - 1) / (room + 1))] for index in range(room)}
    return sorted(required | between)


def _evaluation_sampling(run: RunDir) -> JsonObject:
    """The settings that a training run samples its evaluations with; {} without a manifest."""
    return dict(read_object(run.manifest).get("eval_sampling") or {})

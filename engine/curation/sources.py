"""Answers that runs stored: attempts to curate from, and files of rows to score again."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.core.errors import UserError
from engine.core.files import JsonObject, read_object
from engine.core.hints import Call, Hint
from engine.curation.selection import Attempt
from engine.environments import registry
from engine.environments.registry import EnvRecord
from engine.home.owner_marks import refuse_if_of_sealed
from engine.home.rows import TERMINAL, RunRow
from engine.home.run_dir import Home, RunDir
from engine.home.sanitize import Redactor, redactor_for
from engine.home.store import Store
from engine.records.lines.answer import Answer
from engine.records.lines.evaluation_row import EvaluationRow
from engine.records.lines.trajectory_record import TrajectoryRecord
from engine.records.run_config import (
    DistillConfig,
    EvaluateConfig,
    GRPOConfig,
    ProbeConfig,
    RunConfig,
    TrainConfig,
)

MOST_SOURCES = 32
MOST_STEPS = 8  # of a training run, whose answers one regrade scores again

Row = TrajectoryRecord | EvaluationRow


@dataclass(frozen=True)
class SourceSummary:
    """A source as replies show it, and as the curation.json of a dataset lists it.

    Attributes:
        id: the reference as the caller wrote it, such as "r-1@step20".
        kind: algorithm of a training run, else the kind of run.
        attempts: how many were read.
        files: SHA-256 by path within the run's folder; in curation.json only, else None.
        providers: of models behind a URL, by reference: the model's name there and the host; None
            without any.
    """

    id: str
    kind: str
    env_id: str
    models: list[str]
    attempts: int
    files: dict[str, str] | None = None
    providers: dict[str, str] | None = None


@dataclass(frozen=True)
class Source:
    """One run with its attempts, its environment version and the files they were read from.

    Attributes:
        ref: the reference as the caller wrote it, such as "r-1@step20".
        record: the environment version that scored the attempts.
        files: SHA-256 of each file of answers, by path within the run's folder.
        skipped: number of damaged lines in these files.
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
            providers=self.providers or None,
        )

    @property
    def providers(self) -> dict[str, str]:
        """Of the models behind a URL, by reference: the model's name there and the host."""
        if not isinstance(self.config, EvaluateConfig):
            return {}
        return {ref: str(endpoint) for ref, endpoint in self.config.endpoints.items()}


def load_sources(home: Home, source_ids: Sequence[str]) -> list[Source]:
    """Read the attempts of every run ("r-1") or step of a run ("r-1@step20") in `source_ids`.

    Raises UserError BAD_ARGUMENT (no id or more than 32, a run beside one of its steps, or a step
    without rollouts), RUN_NOT_FOUND, NO_EVALUATION (a run has no answers), ENV_NOT_FOUND or
    ENV_SEALED.
    """
    sources = []
    for ref in _distinct_refs(source_ids):
        run_id, _, step_name = ref.partition("@")
        with Store(home) as store:
            row = store.get_run(run_id)
        sources.append(_load_source(home, ref, row, step_name))
    _refuse_run_beside_its_steps(sources)
    return sources


def _distinct_refs(source_ids: Sequence[str]) -> list[str]:
    """The references, each once. Raises UserError BAD_ARGUMENT for none or more than 32."""
    refs = list(dict.fromkeys(str(ref).strip() for ref in source_ids if str(ref).strip()))
    if not 1 <= len(refs) <= MOST_SOURCES:
        raise UserError(
            "BAD_ARGUMENT",
            f"{len(refs)} sources were given",
            hint=f"Name 1 to {MOST_SOURCES} evaluations, GRPO or distill runs.",
            field="source_ids",
        )
    return refs


def _refuse_run_beside_its_steps(sources: Sequence[Source]) -> None:
    """Raise UserError BAD_ARGUMENT if a whole run is named beside single steps of it."""
    run_ids = [source.row.run_id for source in sources]
    repeated_refs = [source.ref for source in sources if run_ids.count(source.row.run_id) > 1]
    # A reference without an @ means the whole run.
    if any("@" not in ref for ref in repeated_refs):
        raise UserError(
            "BAD_ARGUMENT",
            f"{', '.join(repeated_refs)} name the same rollouts twice",
            hint="Name a run once, or only single steps of it.",
            field="source_ids",
        )


@dataclass(frozen=True)
class _AnswerFile:
    """A file of answers.

    Attributes:
        model: the model that gave them; a training run itself for its rollouts.
        step: training step of the answers; 0 in an evaluation.
        record: the class that reads a line of the file.
    """

    path: Path
    model: str
    step: int
    record: type[TrajectoryRecord] | type[EvaluationRow]


def _load_source(home: Home, ref: str, row: RunRow, step_name: str) -> Source:
    """Read the attempts of one run.

    Args:
        ref: the reference as the caller wrote it.
        step_name: what follows the @ of the reference, such as "step20"; "" reads all steps.

    Raises UserError as `load_sources` does.
    """
    run = home.run(row.run_id)
    config = run.read_config()
    refuse_if_of_sealed(config, "its answers cannot be trained on")
    stored_attempts = _StoredAttempts()
    for file in _answer_files(run, row, config, ref, step_name):
        stored_attempts.read(run, row, file)
    if not stored_attempts.attempts:
        raise _no_rollouts(ref, row)
    return Source(
        ref=ref,
        row=row,
        record=registry.find_env(home, row.env_id),
        attempts=stored_attempts.attempts,
        files=stored_attempts.hashes,
        skipped=stored_attempts.skipped,
        config=config,
    )


@dataclass
class _StoredAttempts:
    """The attempts of one run, read file by file.

    Attributes:
        hashes: SHA-256 of each file that holds attempts, by its path within the run's folder.
        skipped: number of damaged lines in the files.
    """

    attempts: list[Attempt] = field(default_factory=list)
    hashes: dict[str, str] = field(default_factory=dict)
    skipped: int = 0

    def read(self, run: RunDir, row: RunRow, file: _AnswerFile) -> None:
        """Add the attempts of one file of the run."""
        answers = file.record.read_file(file.path)
        self.skipped += answers.skipped
        if not answers.records:  # an empty file, or one that does not exist yet, is no source
            return
        for index, answer in enumerate(answers.records):
            self.attempts.append(_to_attempt(row, file, index, answer))
        digest = hashlib.sha256(file.path.read_bytes()).hexdigest()
        self.hashes[_path_within(run, file.path)] = digest


def _path_within(run: RunDir, path: Path) -> str:
    """The path of a file of a run, from the run's folder on."""
    return str(path.relative_to(run.path))


def _no_rollouts(ref: str, row: RunRow) -> UserError:
    """The error for a run without answers; `ref` is the reference as the caller wrote it."""
    return UserError(
        "NO_EVALUATION",
        f"{ref} has no rollouts to choose from (it is {row.state})",
        hint=_how_to_get_rollouts(row),
        field="source_ids",
    )


def _how_to_get_rollouts(row: RunRow) -> Hint:
    """What to do about a run that has no rollouts: wait for it, or evaluate the trained model."""
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
    """The files with a run's answers: one per training step, or one per model of an evaluation.

    `step_name` is the one step that is wanted, such as "step20"; "" wants all. Raises UserError
    BAD_ARGUMENT for a step that has no rollouts, or any step of an evaluation.
    """
    if row.kind == "train":
        # The model of rollouts changes at every step: the run itself stands for it.
        return [
            _AnswerFile(run.rollouts(step), model=row.run_id, step=step, record=TrajectoryRecord)
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
        _AnswerFile(run.model_evals(index), model=model, step=0, record=EvaluationRow)
        for index, model in enumerate(config.model_refs)
    ]


def _chosen_steps(run: RunDir, row: RunRow, step_name: str) -> list[int]:
    """The numbers of the wanted training steps, such as [20] for "step20".

    A `step_name` of "" wants all steps that have rollouts. Raises UserError BAD_ARGUMENT if the
    named step has none.
    """
    steps = run.rollout_steps()
    if not step_name:
        return steps
    number = step_name.removeprefix("step")
    if not number.isdecimal() or int(number) not in steps:
        hint = f"It has no rollouts; write {row.run_id}@stepN."
        if steps:
            present = f"steps {steps[0]} to {steps[-1]}"
            hint = f"It has {present}; write {row.run_id}@step{steps[-1]}."
        raise UserError(
            "BAD_ARGUMENT",
            f"{row.run_id} has no rollouts of {step_name}",
            hint=hint,
            field="source_ids",
        )
    return [int(number)]


def _to_attempt(run: RunRow, file: _AnswerFile, index: int, answer: Row) -> Attempt:
    """Convert the line at `index` of an answer file to an attempt.

    A value that the line lacks becomes a neutral one, such as reward 0 and stop_reason "stop".
    """
    messages = answer.messages
    if not messages:  # a line that keeps the answer as plain text
        messages = [{"role": "assistant", "content": answer.completion or ""}]
    return Attempt(
        source=run.run_id,
        env_id=run.env_id,
        task=answer.task,
        model=file.model,
        step=file.step,
        member=_attempt_number(answer, index),
        prompt=answer.prompt or [],
        messages=messages,
        reward=answer.reward or 0.0,
        success=answer.success,
        tokens=answer.tokens,
        stop_reason=answer.stop_reason or "stop",
        error=answer.error,
        metrics=answer.metrics or {},
    )


def _attempt_number(answer: Row, index: int) -> int:
    """The number of an answer among the attempts at its task.

    A line of an evaluation without the number gets the line's `index` in the file instead.
    """
    if isinstance(answer, TrajectoryRecord):
        return answer.member
    if "attempt" not in answer.model_fields_set:
        return index
    return answer.attempt or 0  # null in the line


def warnings_of_providers(sources: Sequence[Source]) -> list[str]:
    """A warning where answers are of models behind a URL: not every provider lets others be trained
    on them. [] without such answers."""
    providers = sorted({name for source in sources for name in source.providers.values()})
    if not providers:
        return []
    return [f"Answers of {', '.join(providers)}: its terms may not allow to train on them."]


def redactor_of_sources(home: Home, sources: Sequence[Source]) -> Redactor:
    """A redactor that hides the secrets of every environment among the sources."""
    # One redactor is enough if all sources are of the same environment version.
    if len({source.record.env_id for source in sources}) == 1:
        return redactor_for(home, sources[0].config.env_dir)
    return _AllRedactors([redactor_for(home, source.config.env_dir) for source in sources])


class _AllRedactors(Redactor):
    """Hides what any of several redactors hides."""

    def __init__(self, redactors: Sequence[Redactor]) -> None:
        super().__init__()
        self._redactors = redactors

    def __call__(self, text: str) -> str:
        for redact in self._redactors:
            text = redact(text)
        return text


@dataclass(frozen=True)
class Stored:
    """The answers of a run that can be scored again.

    Attributes:
        models: of each model its reference, and the path of its answers within the run's folder.
        tasks: how many different tasks were answered.
        attempts: how many at each task; a single one was sampled greedily.
        sampling: the settings that the answers were sampled with.
    """

    run_id: str
    env_id: str
    models: list[tuple[str, str]]
    tasks: int
    attempts: int
    sampling: JsonObject
    warnings: list[str]

    @property
    def refs(self) -> list[str]:
        """The references of the models."""
        return [ref for ref, _ in self.models]


def stored_answers(home: Home, run_id: str, split: str = "heldout") -> Stored:
    """Find the stored answers of a run that `evaluate(regrade=run_id)` scores again.

    Of an evaluation these are the answers of all its models; of a training run its held-out
    answers, or with split="train" its rollouts, at no more than eight of its steps.

    Raises UserError RUN_NOT_FOUND, RUN_STATE (an evaluation or a probe has not ended),
    ENV_SEALED or NO_EVALUATION (no answer has a reward).
    """
    with Store(home) as store:
        row = store.get_run(run_id)
    run = home.run(row.run_id)
    config = run.read_config()
    refuse_if_of_sealed(config, "its answers cannot be scored again")
    _require_complete_answers(row)
    files, warnings = _files_to_regrade(run, config, split)
    sampling = _sampling_of(run, config, split)
    answers_by_ref = {ref: Answer.read_all(path) for ref, path in files}
    scored_tasks = _scored_tasks(answers_by_ref.values())
    if not scored_tasks:
        raise _nothing_to_regrade(row)
    return Stored(
        run_id=row.run_id,
        env_id=row.env_id,
        models=[(ref, _path_within(run, path)) for ref, path in files if answers_by_ref[ref]],
        tasks=len(scored_tasks),
        attempts=_attempts_per_task(config, split),
        sampling=sampling,
        warnings=warnings,
    )


def _scored_tasks(answers_of_models: Iterable[Sequence[Answer]]) -> set[str]:
    """The tasks at which any of the models has an answer with a reward."""
    return {
        answer.task
        for answers in answers_of_models
        for answer in answers
        if answer.reward is not None
    }


def _require_complete_answers(row: RunRow) -> None:
    """Raise UserError RUN_STATE for an evaluation or a probe that may still store answers."""
    if row.kind != "train" and row.state not in TERMINAL:
        raise UserError(
            "RUN_STATE",
            f"{row.run_id} is {row.state}: its answers are not complete",
            hint=Hint("Wait for it, then regrade.", Call("wait_run", {"run_id": row.run_id})),
            field="regrade",
            retryable=True,
        )


def _nothing_to_regrade(row: RunRow) -> UserError:
    """The error for a run without an answer that was scored."""
    return UserError(
        "NO_EVALUATION",
        f"{row.run_id} has no stored answers to score again (it is {row.state})",
        hint="Name an evaluation, or a run whose environment scores.",
        field="regrade",
    )


def _files_to_regrade(
    run: RunDir, config: RunConfig, split: str
) -> tuple[list[tuple[str, Path]], list[str]]:
    """(the files with the answers to score again, warnings).

    Of a training run `split` chooses its rollouts ("train") or its held-out answers. A file comes
    as a pair: the name of the model that answered, such as "r-1@step20", or for rollouts "r-1,
    rollouts of step 20"; and the path.
    """
    if not isinstance(config, TrainConfig):
        models = enumerate(config.model_refs)
        return [(model, run.model_evals(index)) for index, model in models], []
    if split == "train":
        steps = _spread_steps(run.rollout_steps(), best=None)
        return [(f"{run.id}, rollouts of step {step}", run.rollouts(step)) for step in steps], []
    return _heldout_files(run, config.model)


def _sampling_of(run: RunDir, config: RunConfig, split: str) -> JsonObject:
    """The settings that the answers of `split` were sampled with."""
    settings = config.settings
    # A regraded evaluation has its settings as a plain dict.
    sampling = settings if isinstance(settings, dict) else settings.model_dump()
    if isinstance(config, TrainConfig) and split != "train":
        sampling |= _evaluation_sampling(run)
    return sampling


def _attempts_per_task(config: RunConfig, split: str) -> int:
    """How many answers the run stored for each task of `split`, as its config asks for them."""
    if isinstance(config, TrainConfig):
        if split != "train":
            return 1  # held-out tasks are answered once
        if isinstance(config, GRPOConfig | DistillConfig):
            return config.settings.group_size
        return 1  # SFT and DPO have no rollouts that this could be wrong about
    if isinstance(config, ProbeConfig):
        return config.settings.group_size
    return config.attempts


def _heldout_files(run: RunDir, start_model: str) -> tuple[list[tuple[str, Path]], list[str]]:
    """(the files with the held-out answers of a training run at up to eight steps, warnings).

    A file comes as a pair: the name of the model that answered, such as "r-1@step20"
    (`start_model` at step 0), and the path.
    """
    evaluated_steps = run.eval_steps()
    steps = _spread_steps(evaluated_steps, _best_step(run))
    files = []
    for step in steps:
        model = f"{run.id}@step{step}" if step else start_model
        files.append((model, run.evals(step)))
    left_out = len(evaluated_steps) - len(steps)
    if not left_out:
        return files, []
    return files, [f"{left_out} of the evaluated steps are left out; at most {MOST_STEPS} are"]


def _best_step(run: RunDir) -> int | None:
    """The step of a run's best checkpoint; None without one."""
    checkpoint = run.resolve_checkpoint("best")
    if checkpoint is None:
        return None
    # A checkpoint's folder is named after its step, as in step_000020.
    _, _, digits = checkpoint.name.rpartition("_")
    return int(digits)


def _spread_steps(steps: Sequence[int], best: int | None) -> list[int]:
    """At most `MOST_STEPS` of the steps; all of them if they are no more.

    They are the first, the last, `best` if it is one of the steps, and others spread evenly.
    """
    if len(steps) <= MOST_STEPS:
        return list(steps)
    required_steps = {steps[0], steps[-1]}
    if best is not None and best in steps:
        required_steps.add(best)
    others = [step for step in steps if step not in required_steps]
    return sorted(required_steps | _evenly_spaced(others, MOST_STEPS - len(required_steps)))


def _evenly_spaced(steps: Sequence[int], count: int) -> set[int]:
    """About `count` of the steps at evenly spaced positions, without both ends."""
    gaps = count + 1
    positions = {round(number * (len(steps) - 1) / gaps) for number in range(1, gaps)}
    return {steps[position] for position in positions}


def _evaluation_sampling(run: RunDir) -> JsonObject:
    """The sampling settings of a training run's evaluations, from its manifest.

    {} if the manifest is missing or does not hold them.
    """
    return dict(read_object(run.manifest).get("eval_sampling") or {})

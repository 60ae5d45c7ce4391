"""Reads answers that runs stored: attempts from which training rows are chosen (curate), and files
of answers that are scored again (regrade)."""

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
    LearningConfig,
    ProbeConfig,
    PromptConfig,
    RunConfig,
    TrainConfig,
)

MOST_SOURCES = 32
MOST_STEPS = 8  # steps of a training run whose answers one regrade scores again

Row = TrajectoryRecord | EvaluationRow


@dataclass(frozen=True)
class SourceSummary:
    """A source as replies show it, and as the curation.json of a dataset lists it.

    Attributes:
        id: the reference as the caller wrote it, such as "r-1@step20".
        kind: the algorithm of a training run; of any other run its kind, such as "evaluate".
        models: references of the models that made the attempts.
        attempts: how many attempts were read.
        files: path within the run's folder -> SHA-256; only in curation.json, else None.
        providers: for models behind a URL, reference -> name of the model there and the host; None
            if there are none.
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
    """One run with its attempts, its environment version and its files of answers.

    Attributes:
        ref: the reference as the caller wrote it, such as "r-1@step20".
        row: the database row of the run.
        record: the environment version that scored the attempts.
        files: path within the run's folder -> SHA-256, for each file of answers.
        skipped: number of damaged lines in these files.
        config: the config.json of the run.
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
        """References of the models that made the attempts, each once."""
        return list(dict.fromkeys(attempt.model for attempt in self.attempts))

    def summary(self, *, with_files: bool = False) -> SourceSummary:
        """Return what replies show of the source; `with_files` adds the SHA-256 of its files."""
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
        """Map the reference of each model behind a URL to the name of the model there and the host;
        {} if there are none."""
        if not isinstance(self.config, EvaluateConfig):
            return {}
        return {ref: str(endpoint) for ref, endpoint in self.config.endpoints.items()}


def load_sources(home: Home, source_ids: Sequence[str]) -> list[Source]:
    """Read the attempts of every run ("r-1") or step of a run ("r-1@step20") in `source_ids`.

    Raises UserError BAD_ARGUMENT if there is no id or more than 32, if a run is named beside one of
    its steps, or if a step has no rollouts; RUN_NOT_FOUND if there is no such run; NO_EVALUATION if
    a run has no answers; ENV_NOT_FOUND or ENV_SEALED if its environment is gone or sealed (reserved
    for a final exam).
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
    """Return the references in `source_ids`, each once and without white space around it. Raises
    UserError BAD_ARGUMENT if there are none or more than `MOST_SOURCES`."""
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
    # A reference without an @ names the whole run.
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
        path: the file.
        model: reference of the model that gave the answers; for rollouts the id of the training
            run.
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
        home: the home that holds the run.
        ref: the reference as the caller wrote it.
        row: the database row of the run.
        step_name: the part of the reference after the @, such as "step20"; "" reads all steps.

    Raises UserError BAD_ARGUMENT if the step has no rollouts, NO_EVALUATION if the run has no
    answers, and ENV_NOT_FOUND or ENV_SEALED if its environment is gone or sealed.
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
        hashes: path within the run's folder -> SHA-256, for each file that holds attempts.
        skipped: number of damaged lines in the files.
    """

    attempts: list[Attempt] = field(default_factory=list)
    hashes: dict[str, str] = field(default_factory=dict)
    skipped: int = 0

    def read(self, run: RunDir, row: RunRow, file: _AnswerFile) -> None:
        """Add the attempts in one file of the run, whose database row is `row`, and the hash of the
        file. Damaged lines are counted."""
        answers = file.record.read_file(file.path)
        self.skipped += answers.skipped
        if not answers.records:  # the file is empty or does not exist yet: it gets no hash
            return
        for index, answer in enumerate(answers.records):
            self.attempts.append(_to_attempt(row, file, index, answer))
        digest = hashlib.sha256(file.path.read_bytes()).hexdigest()
        self.hashes[_path_within(run, file.path)] = digest


def _path_within(run: RunDir, path: Path) -> str:
    """Return the path of a file relative to the folder of its run."""
    return str(path.relative_to(run.path))


def _no_rollouts(ref: str, row: RunRow) -> UserError:
    """Make the error for a run without answers; `ref` is the reference as the caller wrote it."""
    return UserError(
        "NO_EVALUATION",
        f"{ref} has no rollouts to choose from (it is {row.state})",
        hint=_how_to_get_rollouts(row),
        field="source_ids",
    )


def _how_to_get_rollouts(row: RunRow) -> Hint:
    """Return the hint for a run without rollouts: wait for an evaluation, or evaluate the model of
    a training run."""
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
    """List the files with a run's answers: one per training step, or one per evaluated model.

    `step_name`, such as "step20", asks for one step; "" asks for all. `ref` is the reference as the
    caller wrote it, for messages. Raises UserError BAD_ARGUMENT if that step has no rollouts, or if
    a step of an evaluation is asked for.
    """
    if row.kind == "train":
        # The model that made the rollouts changes at every step, so the run's id stands for it.
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
    """Return the number of the step that `step_name` names, e.g. [20] for "step20"; for "" those of
    all steps with rollouts. Raises UserError BAD_ARGUMENT if the named step has no rollouts.
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
    """Convert the line at `index` of an answer file to an attempt; `run` is its run's row.

    A value that the line lacks gets a neutral one, e.g. reward 0 and stop_reason "stop".
    """
    messages = answer.messages
    if not messages:  # the line holds the answer as plain text
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
    """Return the number of an answer among the attempts at its task. If a line of an evaluation
    does not hold the number, the line's `index` in the file is returned.
    """
    if isinstance(answer, TrajectoryRecord):
        return answer.member
    if "attempt" not in answer.model_fields_set:
        return index
    return answer.attempt or 0  # the line may hold null


def warnings_of_providers(sources: Sequence[Source]) -> list[str]:
    """Return a list with one warning if models behind a URL gave some of the answers, because not
    every provider allows training on its answers; else []."""
    providers = sorted({name for source in sources for name in source.providers.values()})
    if not providers:
        return []
    return [f"Answers of {', '.join(providers)}: its terms may not allow to train on them."]


def redactor_of_sources(home: Home, sources: Sequence[Source]) -> Redactor:
    """Return a redactor, which hides in a text the secrets of the environments of all sources."""
    # One redactor is enough if all sources are of the same environment version.
    if len({source.record.env_id for source in sources}) == 1:
        return redactor_for(home, sources[0].config.env_dir)
    return _AllRedactors([redactor_for(home, source.config.env_dir) for source in sources])


class _AllRedactors(Redactor):
    """A redactor that hides what any of several redactors hides."""

    def __init__(self, redactors: Sequence[Redactor]) -> None:
        """Combine `redactors`, which are applied in order."""
        super().__init__()
        self._redactors = redactors

    def __call__(self, text: str) -> str:
        """Return `text` with all secrets hidden."""
        for redact in self._redactors:
            text = redact(text)
        return text


@dataclass(frozen=True)
class Stored:
    """The answers of a run that can be scored again.

    Attributes:
        models: for each model its reference and the path of its answers within the run's folder.
        tasks: number of different tasks with an answer that was scored.
        attempts: number of attempts at each task; a single one was sampled greedily.
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

    For an evaluation these are the answers of all its models. For a training run these are its
    held-out answers, or with split="train" its rollouts, of at most `MOST_STEPS` steps.

    Raises UserError RUN_NOT_FOUND if there is no such run, RUN_STATE if it is an evaluation or a
    probe that has not ended, ENV_SEALED if its environment is sealed (reserved for a final exam),
    and NO_EVALUATION if no answer has a reward.
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
    """Return the ids of the tasks for which any model has an answer with a reward."""
    return {
        answer.task
        for answers in answers_of_models
        for answer in answers
        if answer.reward is not None
    }


def _require_complete_answers(row: RunRow) -> None:
    """Raise UserError RUN_STATE if the run is an evaluation or a probe that has not ended, because
    it may still store answers."""
    if row.kind != "train" and row.state not in TERMINAL:
        raise UserError(
            "RUN_STATE",
            f"{row.run_id} is {row.state}: its answers are not complete",
            hint=Hint("Wait for it, then regrade.", Call("wait_run", {"run_id": row.run_id})),
            field="regrade",
            retryable=True,
        )


def _nothing_to_regrade(row: RunRow) -> UserError:
    """Make the error for a run none of whose answers was scored."""
    return UserError(
        "NO_EVALUATION",
        f"{row.run_id} has no stored answers to score again (it is {row.state})",
        hint="Name an evaluation, or a run whose environment scores.",
        field="regrade",
    )


def _files_to_regrade(
    run: RunDir, config: RunConfig, split: str
) -> tuple[list[tuple[str, Path]], list[str]]:
    """Return the files with the answers to score again, and warnings.

    For a training run, `split` chooses its rollouts ("train") or its held-out answers. Each file is
    a pair (name, path). The name is that of the model that answered, e.g. "r-1@step20"; for
    rollouts it is e.g. "r-1, rollouts of step 20".
    """
    if not isinstance(config, LearningConfig):
        models = enumerate(config.model_refs)
        return [(model, run.model_evals(index)) for index, model in models], []
    if split == "train":
        steps = _spread_steps(run.rollout_steps(), best=None)
        return [(f"{run.id}, rollouts of step {step}", run.rollouts(step)) for step in steps], []
    return _heldout_files(run, config.model)


def _sampling_of(run: RunDir, config: RunConfig, split: str) -> JsonObject:
    """Return the settings that the answers of `split` were sampled with."""
    settings = config.settings
    # The config of a regraded evaluation holds the settings as a plain dict.
    sampling = settings if isinstance(settings, dict) else settings.model_dump()
    if isinstance(config, LearningConfig) and split != "train":
        sampling |= _evaluation_sampling(run)  # a training run evaluates in a way of its own
    return sampling


def _attempts_per_task(config: RunConfig, split: str) -> int:
    """Return how many answers the config of the run asks for at each task of `split`."""
    if isinstance(config, TrainConfig):
        if split != "train":
            return 1  # held-out tasks are answered once
        if isinstance(config, GRPOConfig | DistillConfig):
            return config.settings.group_size
        return 1  # SFT and DPO have no rollouts, so the number does not matter
    if isinstance(config, ProbeConfig):
        return config.settings.group_size
    return 1 if isinstance(config, PromptConfig) else config.attempts


def _heldout_files(run: RunDir, start_model: str) -> tuple[list[tuple[str, Path]], list[str]]:
    """Return the files with the held-out answers of a training run at up to `MOST_STEPS` steps, and
    warnings.

    Each file is a pair: the name of the model that answered, e.g. "r-1@step20" (at step 0 it is
    `start_model`), and the path.
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
    """Return the step of a run's best checkpoint; None if it has none."""
    checkpoint = run.resolve_checkpoint("best")
    if checkpoint is None:
        return None
    # A checkpoint's folder is named after its step, as in step_000020.
    _, _, digits = checkpoint.name.rpartition("_")
    return int(digits)


def _spread_steps(steps: Sequence[int], best: int | None) -> list[int]:
    """Choose at most `MOST_STEPS` of the steps: the first, the last, `best` if it is one of them,
    and others spread evenly between."""
    if len(steps) <= MOST_STEPS:
        return list(steps)
    required_steps = {steps[0], steps[-1]}
    if best is not None and best in steps:
        required_steps.add(best)
    others = [step for step in steps if step not in required_steps]
    return sorted(required_steps | _evenly_spaced(others, MOST_STEPS - len(required_steps)))


def _evenly_spaced(steps: Sequence[int], count: int) -> set[int]:
    """Choose about `count` of the steps at evenly spaced positions, without the first and last. It
    is fewer if two positions are rounded to the same."""
    gaps = count + 1
    last_position = len(steps) - 1
    positions = {round(number * last_position / gaps) for number in range(1, gaps)}
    return {steps[position] for position in positions}


def _evaluation_sampling(run: RunDir) -> JsonObject:
    """Return the sampling settings of a training run's evaluations, from its manifest; {} if the
    manifest is missing or does not hold them."""
    return dict(read_object(run.manifest).get("eval_sampling") or {})

"""Evaluates any models on one environment, probes whether GRPO could learn something there, and
searches for a better prompt.

Every model plays the same tasks with the same sampling parameters. Models that share a base are
played on one loaded base, each with its own adapter. A single attempt is greedy; several attempts
are sampled at temperature 1.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine.core.files import Appender, write_text
from engine.endpoints.chat_client import EndpointDown, Refused
from engine.endpoints.judges import judges_used
from engine.environments.registry import EnvRecord, endpoints_of
from engine.evidence.stats.basics.summary import summarise
from engine.evidence.stats.learnability import Sample, learnability
from engine.home.hashes import weight_hashes
from engine.records.manifest import BasesAsked
from engine.records.run_config import EvaluateConfig, ModelEntry, ProbeConfig, PromptConfig
from engine.records.settings import EvaluationSettings
from engine.runs.evaluation import exam, stored_answers
from engine.runs.evaluation.result import evaluation_result, model_result, result_in_words
from engine.runs.prompts.checks import require_gepa
from engine.runs.prompts.job import PromptJob
from engine.runs.prompts.reflection import Reflection
from engine.worker.components import Components, environment, prepare, tasks_of
from engine.worker.core import pulse
from engine.worker.core.failures import WorkerFailure
from engine.worker.core.job import Job, Result, require
from engine.worker.core.trajectory import Group, Trajectory
from engine.worker.evaluation import heldout
from engine.worker.evaluation.prompt_desk import Desk, endpoint_failure
from engine.worker.evaluation.reworded import RewordedExam, reworded_exams
from engine.worker.network.adapter import LoraSpec, read_adapter
from engine.worker.network.sampler import SamplingParams
from engine.worker.rollouts.collect import RolloutContext, fits
from engine.worker.rollouts.rewording import Rewording
from engine.worker.update.checkpoint import require_base
from envs.host.process import EnvProcess
from envs.json_types import TaskRow

# How many tasks are played between two checks for a stop request, so that a cancelled evaluation
# ends soon.
SLICE = 256


def evaluate(job: Job[EvaluateConfig]) -> Result:
    """Play the tasks with every model, one model after the other, and compare the answers. Returns
    the result record: a summary for each model, and the verdict on how they differ.

    Raises:
        WorkerFailure: kind config if the environment scores nothing, data if no task fits.
        Stopped: the run was asked to stop; rows written so far stay.
    """
    models = job.config.models
    results: dict[int, Result] = {}  # by the model's index
    job.event("started", f"{len(models)} models", total_steps=len(models))
    for base_path, indices in _indices_by_base(models).items():
        with _play_setup(job, Path(base_path)) as setup:
            answers = len(setup.tasks) * job.config.attempts
            pulse.plan({"evaluation": answers * len(models)})
            for index in indices:
                groups = _play_model(job, index, setup)
                is_last_model = len(results) == len(models) - 1
                if is_last_model:  # the environment's process has scored all answers by now
                    _score_sample_again(job, setup, index)
                results[index] = _model_result(models[index].ref, groups, setup.left_out)
                _report_model(job, len(results), results[index], groups)
    return evaluation_result(job.run, [results[index] for index in sorted(results)])


def _indices_by_base(models: Sequence[ModelEntry]) -> dict[str, list[int]]:
    """Group the indices of the models by the folder of their base, so that each base is loaded
    once."""
    indices: dict[str, list[int]] = {}
    for index, model in enumerate(models):
        indices.setdefault(model.base_path, []).append(index)
    return indices


def _report_model(
    job: Job[EvaluateConfig], evaluated_count: int, result: Result, groups: Sequence[Group]
) -> None:
    """Write the event and the metrics of the model that has just been played. `result` is its
    record, `groups` are its answers; `evaluated_count` models, including this one, have been played
    so far."""
    ref = result["ref"]
    job.event("evaluated", f"{ref}: {result_in_words(result)}", **result)
    # The number of models played so far stands in for a step.
    curves = _metric_curves(groups, job.config.split)
    job.metrics(step=evaluated_count, values={"model": ref} | curves)


def search_prompt(job: Job[PromptConfig]) -> Result:
    """Search for a better prompt with a model that is loaded here; no weight is trained. Returns
    the result record.

    Raises:
        WorkerFailure: the search cannot go on; its kind says why.
        Stopped: when asked to stop; a later attempt goes on after the last round.
    """
    config = job.config
    require_gepa()
    model = config.models[0]
    components = prepare(job, Path(model.base_path))
    base_weights = weight_hashes(job.run.home, components.base.path)
    with (
        closing(components.sampler),
        environment(components, job) as process,
        adapter_loaded(components, model.adapter, base_weights),
        closing(Reflection(job.run, config, job.stop_signal, pulse.beat)) as reflection,
    ):
        if process is None:
            raise WorkerFailure("config", "This environment scores nothing to search by.")
        context = components.context(process, config.settings)
        desk = Desk(job, components.sampler, context)
        work = PromptJob(job.run, config, components.env, desk, desk.why_not)
        try:
            return work.carry_out(reflection)
        except (Refused, EndpointDown) as failure:
            raise endpoint_failure(job, failure) from failure


def probe(job: Job[ProbeConfig]) -> Result:
    """Sample a few training tasks `group_size` times each, to see whether rewards within a group
    differ; only then can GRPO learn something.

    Returns the numbers of engine/evidence/stats/learnability.py, and `ref`, the model's name. The
    `verdict` is always "unknown", as nothing is compared. Raises WorkerFailure, kind config if the
    environment scores nothing, data if no task fits.
    """
    settings = job.config.settings
    model = job.config.models[0]  # a probe has only one
    components = prepare(job, Path(model.base_path))
    job.event("started", "probe", total_steps=1)
    groups = _probe_groups(job, components)
    _write_groups(job, groups)
    result = learnability(samples_of(groups), settings.group_size, settings.max_tokens).to_json()
    # The metrics hold shares and means (floats); counts, texts and lists are in the result alone.
    means = {key: value for key, value in result.items() if isinstance(value, float)}
    job.metrics(step=1, values=means)
    return result | {"verdict": "unknown", "ref": model.ref}


def _probe_groups(job: Job[ProbeConfig], components: Components) -> list[Group]:
    """Sample the probe's tasks with its model and score the answers. Returns one group per task.

    Raises:
        WorkerFailure: kind config if the environment scores nothing, data if no task fits.
    """
    config, settings = job.config, job.config.settings
    with _scoring_process(job, components, "probe") as process:
        context = components.context(process, settings)
        params = SamplingParams.drawn(settings, settings.seed)
        all_tasks = tasks_of(components, "train")
        fitting_tasks = [task for task in all_tasks if fits(task, context, params)]
        tasks = exam.ordered(fitting_tasks, config.samples)  # at most `samples` of them
        require(tasks, "training tasks that fit into max_length", "Raise max_length.")
        base_weights = weight_hashes(job.run.home, components.base.path)
        model = config.models[0]  # a probe has only one
        answers = len(tasks) * settings.group_size
        pulse.plan({"evaluation": answers})
        loaded = adapter_loaded(components, model.adapter, base_weights)
        with loaded, pulse.phase("evaluation", of=answers):
            return heldout.evaluate(
                tasks, context, components.sampler, params, attempts=settings.group_size
            )


def _write_groups(job: Job[ProbeConfig], groups: Sequence[Group]) -> None:
    """Append the answers of the probe to the file of its only model."""
    path = job.run.model_evals(index=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    with Appender(path) as file:
        # Training tasks have no halves.
        heldout.write_rows(file, groups, half_of_task={}, model=job.config.models[0].ref)


def samples_of(groups: Sequence[Group]) -> list[list[Sample]]:
    """Convert the trajectories of each group to the samples that `learnability` takes.

    Returns one list per group, in the same order.
    """
    return [[_sample_of(trajectory) for trajectory in group.members] for group in groups]


def _sample_of(trajectory: Trajectory) -> Sample:
    """Convert a trajectory to the sample that `learnability` takes: its reward, length and text."""
    return Sample(
        reward=trajectory.reward,
        success=trajectory.success,
        error=trajectory.error is not None,
        tokens=trajectory.trained_tokens,
        cut=trajectory.cut,
        text=trajectory.completion,
    )


@contextmanager
def adapter_loaded(
    components: Components, folder: str | None, base_weights: dict[str, str]
) -> Iterator[None]:
    """Context manager within which the sampler uses the adapter in the PEFT folder `folder` (None
    for the base alone); on exit the adapter is unloaded.

    Raises:
        WorkerFailure: kind config, if the adapter cannot be read or was trained on other weights
            than `base_weights` (SHA-256 by file name).
    """
    if folder is None:
        components.sampler.load(None)
        yield
        return
    network = components.base.network
    require_base(Path(folder), base_weights)
    # Any seed: the initial weights are replaced at once.
    adapter = network.new_adapter(LoraSpec.from_folder(Path(folder)), seed=0)
    try:
        adapter.load(read_adapter(Path(folder)))
        components.sampler.load(adapter)
        yield
    finally:
        components.sampler.load(None)
        network.drop_adapter(adapter)


@dataclass(frozen=True)
class _PlaySetup:
    """What all models on one base share in an evaluation.

    Attributes:
        components: the loaded base, the sampler on it, and the environment.
        base_weights: SHA-256 of the base's weight files, by file name.
        tasks: the tasks that are played.
        left_out: how many tasks are not played, as their prompts leave no room for an answer.
        half_of_task: the half (validation or test) of each task, by its id
            (engine/runs/evaluation/exam.py).
        context: the environment's process, and how prompts are written.
        params: how answers are sampled.
        reworded: the same tasks in other words: one exam for each kind of rewording that the
            config asks for.
    """

    components: Components
    base_weights: dict[str, str]
    tasks: list[TaskRow]
    left_out: int
    half_of_task: dict[str, str]
    context: RolloutContext
    params: SamplingParams
    reworded: Sequence[RewordedExam] = ()


@contextmanager
def _play_setup(job: Job[EvaluateConfig], base_path: Path) -> Iterator[_PlaySetup]:
    """Context manager that makes the base in `base_path` and the environment ready to play.

    The same tasks are chosen for every base and in every run; those that do not fit into the length
    limit are left out.

    Raises:
        WorkerFailure: kind config if the environment scores nothing, data if no task fits into the
            length limit.
    """
    config = job.config
    components = prepare(job, base_path)
    with _scoring_process(job, components, "evaluate") as process:
        base_weights = weight_hashes(job.run.home, components.base.path)
        _record_base(job, base_path, base_weights, components.env)
        context = components.context(process, config.settings)
        params = _sampling_params(config.settings, config.attempts)
        pool = tasks_of(components, config.split)
        all_tasks, half_of_task = exam.chosen_tasks(config, components.env, pool)
        tasks = [task for task in all_tasks if fits(task, context, params)]
        require(tasks, f"{config.split} tasks that fit into max_length", "Raise max_length.")
        yield _PlaySetup(
            components=components,
            base_weights=base_weights,
            tasks=tasks,
            left_out=len(all_tasks) - len(tasks),
            half_of_task=half_of_task,
            context=context,
            params=params,
            reworded=_reworded_exams(job, tasks, context, params),
        )


def _record_base(
    job: Job[EvaluateConfig], base_path: Path, base_weights: dict[str, str], env: EnvRecord
) -> None:
    """Record in the run's file which weights lie under the models on this base, and which judges
    score their answers: names alone may mean other models by the time of a later comparison.
    `base_weights` is file name -> SHA-256."""
    recorded = BasesAsked.read(job.run.bases).weights if job.run.bases.is_file() else {}
    judges = judges_used(job.run.home, endpoints_of(env))
    all_weights = recorded | {str(base_path): base_weights}
    BasesAsked(weights=all_weights, judges=judges).write(job.run.bases)


def _reworded_exams(
    job: Job[EvaluateConfig],
    tasks: Sequence[TaskRow],
    context: RolloutContext,
    params: SamplingParams,
) -> list[RewordedExam]:
    """Reword the tasks in each way that the config asks for. How many tasks each exam has is
    written to the run's files."""
    config = job.config
    if not config.perturb:
        return []
    # "probe": other words than those in which tasks are reworded for training.
    rewording = Rewording(context.process, context.tools, context.multi_turn, stock="probe")
    exams = reworded_exams(
        config.perturb,
        tasks,
        rewording,
        config.settings.seed,
        fits=lambda task: fits(task, context, params),
    )
    lines = [json.dumps(exam.counts.to_line()) + "\n" for exam in exams]
    job.run.reworded_kinds.parent.mkdir(parents=True, exist_ok=True)
    write_text(job.run.reworded_kinds, "".join(lines))
    return exams


@contextmanager
def _scoring_process(
    job: Job[EvaluateConfig] | Job[ProbeConfig], components: Components, purpose: str
) -> Iterator[EnvProcess]:
    """Context manager that yields the environment's process. Raises WorkerFailure (kind config) if
    the environment scores nothing; its message names the purpose."""
    with environment(components, job) as process:
        if process is None:
            raise WorkerFailure("config", f"This environment scores nothing to {purpose}.")
        yield process


def _sampling_params(settings: EvaluationSettings, attempts: int) -> SamplingParams:
    """Return how answers are sampled: greedily if there is one attempt per task. Several attempts
    use the settings' temperature, as greedy answers to a task would all be the same."""
    if attempts == 1:
        return SamplingParams.greedy(settings, settings.seed)
    return SamplingParams.drawn(settings, settings.seed)


def _play_model(job: Job[EvaluateConfig], index: int, setup: _PlaySetup) -> list[Group]:
    """Play the tasks of `setup` with the model at `index` of the config, and write the answers to
    the model's file, which replaces an earlier one. Returns one group of answers per task, in the
    order of the tasks.

    Raises:
        Stopped: the run was asked to stop; rows written so far stay.
    """
    model = job.config.models[index]
    path = job.run.model_evals(index)
    groups: list[Group] = []
    with adapter_loaded(setup.components, model.adapter, setup.base_weights):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        answers = len(setup.tasks) * job.config.attempts
        with Appender(path) as file, pulse.phase("evaluation", of=answers):
            for part_groups in _groups_by_slice(job, setup, setup.tasks):
                heldout.write_rows(file, part_groups, setup.half_of_task, model=model.ref)
                groups += part_groups
        for exam in setup.reworded:
            _play_reworded(job, index, setup, exam)
    return groups


def _play_reworded(
    job: Job[EvaluateConfig], index: int, setup: _PlaySetup, exam: RewordedExam
) -> None:
    """Play the reworded tasks of `exam` with the model at `index` of the config, which the sampler
    has loaded, and write the answers to a file of their own, which replaces an earlier one."""
    path = job.run.reworded_evals(index, exam.kind)
    path.unlink(missing_ok=True)
    with Appender(path) as file:
        for groups in _groups_by_slice(job, setup, exam.tasks):
            ref = job.config.models[index].ref
            for row in heldout.rows_of(groups, setup.half_of_task, model=ref, with_tools=True):
                file.append(row.to_line())


def _groups_by_slice(
    job: Job[EvaluateConfig], setup: _PlaySetup, tasks: Sequence[TaskRow]
) -> Iterator[list[Group]]:
    """Play these tasks with the adapter that the sampler has loaded, and yield their groups of
    answers, SLICE tasks at a time. `setup` says how they are played. Raises Stopped between two
    slices if the run was asked to stop."""
    for start in range(0, len(tasks), SLICE):
        job.check_stop()
        yield heldout.evaluate(
            tasks[start : start + SLICE],
            setup.context,
            setup.components.sampler,
            setup.params,
            attempts=job.config.attempts,
        )


def _score_sample_again(job: Job[EvaluateConfig], setup: _PlaySetup, index: int) -> None:
    """Score a sample of the answers of the model at `index` a second time, to check that scores are
    repeatable, and wait for it. A second process of the environment does this. If it is impossible,
    the event `rescore_skipped` gives the reason."""
    task_by_id = {task["id"]: task for task in setup.tasks}
    with stored_answers.rescoring(
        job.run, setup.components.env, lambda reason: job.event("rescore_skipped", reason)
    ) as begin_rescoring:
        both_halves = ""  # the sample is not restricted to one half of the tasks
        begin_rescoring(job.run.model_evals(index), both_halves, task_by_id)


def _model_result(ref: str, groups: Sequence[Group], left_out: int) -> Result:
    """Summarise the answers of the model named `ref` for result.json. `left_out` is the number of
    tasks that were not played, since their prompts leave no room for an answer."""
    answers = (answer for group in groups for answer in group.members)
    return model_result(ref, len(groups), answers, left_out)


def _metric_curves(groups: Sequence[Group], split: str) -> dict[str, float]:
    """Return the means over all answers of one model to tasks of `split`, as metrics by name."""
    answers = (answer for group in groups for answer in group.members)
    return summarise(answers).curves(split)

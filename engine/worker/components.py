"""Loads what a training loop works with: base model, renderer, environment and sampler."""

import os
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from engine.core.errors import UserError
from engine.core.hardware import Device, detect
from engine.core.hints import Call, Hint
from engine.environments.env_facts import env_facts
from engine.environments.registry import (
    EnvRecord,
    endpoints_of,
    find_env,
    open_process,
    read_tasks,
)
from engine.machine.fast_paths.examine import examine_device
from engine.machine.fast_paths.results import DeviceResults, identity_of, read_results
from engine.models.served.judge import local_judges, serve
from engine.models.sizing import plan as sizing
from engine.records.run_config import (
    DistillConfig,
    DPOConfig,
    EvaluateConfig,
    GRPOConfig,
    ProbeConfig,
    PromptConfig,
    RegradeConfig,
    RunConfig,
    SFTConfig,
)
from engine.records.settings import GRPOSettings
from engine.settings import defaults
from engine.worker.core import switched_off
from engine.worker.core.failures import WorkerFailure
from engine.worker.core.job import Job, require
from engine.worker.core.limits import AnswerLimits, EvaluationLimits
from engine.worker.evaluation.replay_rows import Start
from engine.worker.network import room
from engine.worker.network.policy import Base, Policy, load_base, pick_device
from engine.worker.network.sampler import Sampler, SamplerNeeds, SamplingParams
from engine.worker.ops import flash3
from engine.worker.ranks.leader import (
    Ranks,
    devices_of,
    is_sharded,
    rank_count,
    training_ranks,
)
from engine.worker.ranks.shared_sampler import SharedSampler
from engine.worker.rollouts import samplers
from engine.worker.rollouts.collect import PlayPrograms, RolloutContext, fits
from engine.worker.rollouts.renderer import Renderer
from envs.config.problem import EnvProblem
from envs.host.judge_budget import JudgeBudget
from envs.host.process import EnvProcess
from envs.json_types import TaskRow
from envs.metering.judge_calls import JudgeUse

MOST_CHAT_TOKENS = 4096  # the prompt and the answer of a chat rarely have more tokens together


@dataclass(frozen=True)
class Components:
    """What is loaded once per worker: base model, renderer, sampler, the environment's record, and
    (in `size`) the parts of the run that have to fit into the device."""

    base: Base
    renderer: Renderer
    sampler: Sampler
    env: EnvRecord
    size: sizing.Job
    ranks: Ranks | None = None  # None: this process is the whole run

    def context(self, process: EnvProcess, limits: AnswerLimits) -> RolloutContext:
        """Return what rollouts need besides tasks and a sampler. `process` is the environment's
        running process; `limits` says how long a rollout may get."""
        return RolloutContext(
            process=process,
            renderer=self.renderer,
            multi_turn=self.env.kind == "multi",
            tools=self.env.tools,
            max_length=limits.max_length,
            max_turns=limits.max_turns,
            score_workers=limits.score_workers,
            play=_player_of(process) if self.env.kind == "command" else None,
        )


def _player_of(process: EnvProcess) -> PlayPrograms:
    """Return the function that plays the rollouts of a command (a program that asks the model over
    HTTP), whose environment `process` runs."""
    # Imported late: its HTTP server takes 0.14 s and 4 MB, and few environments name a command.
    from engine.worker.gateway.play import programs_of  # noqa: PLC0415

    return programs_of(process)


@dataclass(frozen=True)
class Loading:
    """How a base model is loaded.

    Attributes:
        precision: number format of the weights: "auto", "float32" or "bfloat16".
        quantization: "none", or the 4-bit format of the weights ("nf4").
        steps: optimizer steps that will follow; 0 if there are none or their number is unknown.
        thinking: whether answers begin with a think block.
    """

    precision: str = "auto"
    quantization: str = "none"
    steps: int = 0
    thinking: bool = False


def loading_of(config: RunConfig) -> Loading:
    """Return how a run loads its base model, from the run's config.

    Evaluations and searches for prompts have no settings for precision and quantization, and DPO
    has none for thinking; these keep their defaults.

    Raises:
        ValueError: for a regrade, which loads no model.
    """
    match config:
        case SFTConfig(settings=settings):
            return Loading(
                precision=settings.precision,
                quantization=settings.quantization,
                steps=settings.steps,
                # In SFT this is a word, and only "require" makes every answer begin with a thought.
                thinking=settings.thinking == "require",
            )
        case DPOConfig(settings=settings):
            return Loading(
                precision=settings.precision,
                quantization=settings.quantization,
                steps=settings.steps,
            )
        case (
            GRPOConfig(settings=settings)
            | DistillConfig(settings=settings)
            | ProbeConfig(settings=settings)
        ):
            return Loading(
                precision=settings.precision,
                quantization=settings.quantization,
                steps=settings.steps,
                thinking=settings.thinking,
            )
        case EvaluateConfig(settings=settings) | PromptConfig(settings=settings):
            return Loading(thinking=settings.thinking)
        case RegradeConfig():
            raise ValueError("stored answers are scored again without a model")


def prepare(job: Job[RunConfig], base_path: Path) -> Components:
    """Load the base model in `base_path`, make the sampler and find the environment of the run. A
    run on several devices has one process, called a rank, for each; they are started here too.
    Writes the event `kernels`, with the reason, if torch's own functions replace faster ones.

    Raises:
        WorkerFailure: kind config if the model cannot be loaded, env_import if the environment is
            gone.
    """
    devices = devices_of(job)  # [] for a run in one process, and for a rank that another started
    training_count = training_ranks(job.config, len(devices))  # ranks that train; they come first
    process_count = max(len(devices), rank_count())
    gpus = []
    if devices:
        gpus = [gpu for gpu in detect().devices if gpu.kind == "cuda"]
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[0].visible
    set_threads(process_count)
    device = pick_device(job.device)
    env = pinned_env(job)
    _serve_judges(job, env)
    memory = _usable_memory(job, device, process_count)
    switch_off_what_fails(job, device, gpus)
    sampling_devices = devices[training_count:]  # these only sample, while the first ones train
    # The other ranks load the model at the same time as this process.
    ranks = Ranks(job, devices, training_count) if devices else None
    if ranks is not None and sampling_devices and not samplers.wants_server(job.config):
        ranks.start_samplers()
    loading = loading_of(job.config)
    base = _load_base_model(job, base_path, device, loading, ranks)
    if base.network.kernels_why:
        job.event(
            "kernels",
            f"torch's own functions are used: {base.network.kernels_why}",
            kernels=base.network.kernels,
        )
    renderer = Renderer(base.tokenizer, base.stop_ids, thinking=loading.thinking)
    size = room.size_of_run(job, base, env, memory)
    size = replace(size, sampling_gpus=len(sampling_devices))
    needs = sampler_needs(base, renderer, size)
    sampler = _sampler_of(job, base, needs, size, ranks)
    if ranks is not None and is_sharded(job.config, len(devices)):
        network: Any = base.network  # a transformers network, whose type is slow to import
        ranks.start_lockstep(network)
    return Components(base, renderer, sampler, env, size, ranks)


def _serve_judges(job: Job[RunConfig], env: EnvRecord) -> None:
    """Start a server for each judge (a language model that scores answers for the environment) that
    is a model of this home. This is done before this process takes the memory that the servers
    need. Raises WorkerFailure (kind endpoint) if one cannot be started."""
    if not env.scored:  # then the environment has no process that could ask a judge
        return
    for judge in local_judges(job.run.home, endpoints_of(env)):
        try:
            serve(job.run.home, judge)
        except UserError as error:
            raise WorkerFailure(
                "endpoint",
                f"The judge {judge.ref} of the environment is not served.",
                evidence=f"{error.code}: {error.message}",
                hint=error.hint,
            ) from error


def _usable_memory(job: Job[RunConfig], device: torch.device, process_count: int) -> int:
    """Return the bytes that this process may use of the device.

    On a CPU, the `process_count` processes of the run share the memory equally. On a GPU that runs
    share, it is the memory that the run was planned with, which then becomes a limit.
    """
    memory = room.usable_bytes(device)
    if device.type == "cpu":
        return memory // process_count
    if job.run.home.user_config().runs_per_gpu > 1:
        planned = job.config.planned_memory or memory  # without a plan, all that is usable
        return room.limit_gpu_memory(device, min(memory, planned))
    return memory


def _load_base_model(
    job: Job[RunConfig],
    path: Path,
    device: torch.device,
    loading: Loading,
    ranks: Ranks | None,
) -> Base:
    """Load the base model in the folder `path` onto the device, in the number format that `loading`
    asks for.

    If the run shards it, each of the processes that train (ranks) holds a part of every layer, and
    they all load it together. `ranks` is None if this process has not started any others.
    """
    device_count = ranks.devices if ranks is not None else rank_count()
    if is_sharded(job.config, device_count):
        # Imported late: torch's distributed tensors and PEFT take seconds, and are rarely needed.
        from engine.worker.ranks.sharding import load_in_step  # noqa: PLC0415

        return load_in_step(job, path, device, loading.precision, ranks)
    return load_base(
        path,
        device,
        precision=loading.precision,
        quantization=loading.quantization,
        comparisons_file=job.run.home.comparisons,
        steps=loading.steps,
    )


def _sampler_of(
    job: Job[RunConfig], base: Base, needs: SamplerNeeds, size: sizing.Job, ranks: Ranks | None
) -> Sampler:
    """Make the sampler of this process, which is one of the ranks (processes) of the run.

    - The only process of a run, and a rank other than 0, samples by itself.
    - Rank 0 shares the work with the other ranks, or leaves it to the devices that only sample.

    Args:
        base: the loaded base model, which the sampler reads.
        needs: what every sampler has to know, such as the ids that end a completion.
        size: the parts of the run that have to fit into the device.
        ranks: the other ranks, as rank 0 sees them; None on another rank or without others.
    """
    if ranks is None:
        process_count = rank_count()  # 1 for the only process of a run
        some_only_sample = training_ranks(job.config, process_count) < process_count
        if some_only_sample:
            # This rank either only samples, which ranks do with our own sampler, or only trains: it
            # makes the same sampler, and does not use it. A vLLM server is started by rank 0.
            return base.network.sampler(needs)
        return samplers.make_sampler(job, base, needs, size)
    if not ranks.sampling_devices:
        return SharedSampler(samplers.make_sampler(job, base, needs, size), ranks)
    if is_sharded(job.config, ranks.devices):
        # The other ranks that train make a sampler too (above). That runs checks, whose passes all
        # ranks of a sharded base must do together: so this rank makes one, only for its checks.
        base.network.sampler(needs)
    return _sampler_on_other_devices(job, base, needs, size, ranks)


def _sampler_on_other_devices(
    job: Job[RunConfig], base: Base, needs: SamplerNeeds, size: sizing.Job, ranks: Ranks
) -> Sampler:
    """Make rank 0's sampler in a run in which some devices do nothing but sample: a vLLM server on
    all of these, or a rank (process of the run) with our own sampler on each.

    The arguments are those of `_sampler_of`, except that `ranks` is never None.
    """
    if samplers.wants_server(job.config) and not samplers.why_no_server(job, size):
        return samplers.start_vllm(job, base, needs, size, ranks.sampling_devices)
    if not ranks.samples_beside:  # not started yet, because a vLLM server was to take their place
        ranks.start_samplers()
    own_sampler = None  # this rank trains while those ranks sample
    return SharedSampler(own_sampler, ranks)


def switch_off_what_fails(
    job: Job[RunConfig], device: torch.device, gpus: Sequence[Device] = ()
) -> None:
    """Switch off the fast paths (faster ways to compute) that do not work on this device.

    The event `fast_paths` names them. A GPU that was not tried yet with this driver and these
    libraries is tried first, in a process of its own; that takes about a minute, once, and longer
    if vLLM is set up. Likewise, the first run on several GPUs tries sums over them. A CPU is only
    tried by `honesmith doctor --gpu`.

    Args:
        gpus: all GPUs of the run's ranks; empty for a run in one process.
    """
    results = _fast_path_results(job, device, gpus)
    if results is None:
        return
    if results.is_on("flash_attention_3"):
        use_flash3(job)
    if not results.off:
        return
    switched_off.switch_off(results.off)
    if "flash_attention" in results.off:
        leave_fused_attention()
    reasons = "; ".join(f"{name}: {reason}" for name, reason in results.off.items())
    job.event("fast_paths", f"switched off on this device: {reasons}", off=results.off)


def _fast_path_results(
    job: Job[RunConfig], device: torch.device, gpus: Sequence[Device]
) -> DeviceResults | None:
    """Return which fast paths (faster ways to compute) work on this device, by the stored results
    of trials.

    Trials that are missing for a GPU, or for sums over `gpus`, are done now and announced by an
    event. Returns None for a CPU that was never tried.
    """
    hardware_device = detect().device
    home = job.run.home
    results = read_results(home, identity_of(hardware_device, home))
    if results is None and device.type == "cuda":
        job.event("fast_paths", f"trying what works on {hardware_device.name}, once")
        return examine_device(home, hardware_device, all_gpus=gpus)
    if results is not None and len(gpus) > 1 and results.state_of("collectives") == "skipped":
        job.event("fast_paths", f"trying sums over {len(gpus)} GPUs, once")
        return examine_device(home, hardware_device, names=["collectives"], all_gpus=gpus)
    return results


def use_flash3(job: Job[RunConfig]) -> None:
    """Compute attention with FlashAttention 3 from now on. If that fails, go on without it and
    write the reason in the event `fast_paths`."""
    try:
        flash3.activate()
    except Exception as error:  # noqa: BLE001 - a package may fail in any way; torch's own remains
        switched_off.switch_off({"flash_attention_3": str(error)})
        job.event("fast_paths", f"FlashAttention 3 was tried and does not load any more: {error}")


def leave_fused_attention() -> None:
    """Make scaled_dot_product_attention use its unfused form on GPUs from now on."""
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


def pinned_env(job: Job[RunConfig]) -> EnvRecord:
    """Find the environment version that the run's config names. Raises UserError if it is gone."""
    return find_env(job.run.home, job.config.env_id, sealed=True)


def make_sampler(base: Base, renderer: Renderer) -> Sampler:
    """Make the sampler of our own engine on this base, for prompts and answers of up to
    `MOST_CHAT_TOKENS` tokens together. (`prepare` may choose another sampler.)"""
    longest = min(base.network.shape.context, MOST_CHAT_TOKENS)
    size = room.size_of_answers(base, room.usable_bytes(base.network.device), longest)
    return base.network.sampler(sampler_needs(base, renderer, size))


def sampler_needs(base: Base, renderer: Renderer, size: sizing.Job) -> SamplerNeeds:
    """Return what every sampler on this base has to know. `size` says how many completions are
    sampled at once."""
    return SamplerNeeds(
        pad_id=base.pad_id,
        stop_ids=base.stop_ids,
        decode=renderer.completion_text,
        max_rows=size.sampler_rows,
    )


@contextmanager
def environment(components: Components, job: Job[RunConfig]) -> Iterator[EnvProcess | None]:
    """Context manager that yields the environment's running process, or None for a dataset without
    a scorer, which needs no process.

    Raises:
        WorkerFailure: kind env_import, if the environment cannot be started.
    """
    if not components.env.scored:
        yield None
        return
    with open_process(components.env, log=job.run.logs / "environment.log") as process:
        process.judge_budget = judge_budget_of(job.config)
        try:
            process.describe()  # loads the environment's code, so that its errors come now
        except EnvProblem as problem:
            raise WorkerFailure(
                "env_import",
                f"The environment {components.env.env_id} could not be started.",
                evidence=str(problem),
                hint=Hint(
                    "Mend what a dry run names, push again, submit with the new id.",
                    Call("dry_run", {"env_id": components.env.env_id}),
                ),
            ) from problem
        try:
            yield process
        finally:
            _report_judge_use(job, process.judge_budget.used)


def _report_judge_use(job: Job[RunConfig], use: JudgeUse) -> None:
    """Write the event `judge`: what language models as judges cost the whole run. Nothing is
    written if none was asked, in which case `use` is false."""
    if not use:
        return
    text = f"{use.calls:g} judge calls, {use.retries:g} sent again, {use.cached:g} from the cache"
    if use.refused:
        text += f", {use.refused:g} not allowed"
    job.event("judge", f"{text}; {use.cost:g} in money", **use.to_json())


def judge_budget_of(config: RunConfig) -> JudgeBudget:
    """Return how many calls and how much money the judges of a run's environment may use, by its
    settings."""
    if isinstance(config, RegradeConfig):
        return JudgeBudget()
    settings = config.settings
    return JudgeBudget(
        settings.max_judge_calls, settings.max_judge_cost, borrowers=settings.score_workers
    )


def start_of(components: Components, policy: Policy) -> Start:
    """Bundle what the answers of the untrained model are sampled with: `policy` before its first
    step, and the run's sampler, renderer and environment."""
    return Start(policy, components.sampler, components.renderer, components.env)


def tasks_of(components: Components, split: str) -> Sequence[TaskRow]:
    """Return the task rows of `split`: train, dev or heldout."""
    return read_tasks(components.env, split)


def sample_rows(tasks: Sequence[TaskRow], limit: int | None, seed: int) -> Sequence[TaskRow]:
    """Draw `limit` tasks by the seed and return them in their original order. All tasks are
    returned if `limit` is None or 0, or if there are not more than `limit`."""
    if not limit or limit >= len(tasks):
        return tasks
    indices = random.Random(f"{seed}-examples").sample(range(len(tasks)), limit)
    return [tasks[index] for index in sorted(indices)]


def training_tasks(
    job: Job[GRPOConfig] | Job[DistillConfig],
    components: Components,
    context: RolloutContext,
    settings: GRPOSettings,
) -> tuple[Sequence[TaskRow], int]:
    """Choose the tasks to train on: at most `max_examples` of those whose prompt leaves room for an
    answer.

    Returns (these tasks, how many leave no room), and writes the event `tasks_left_out` about the
    latter. Raises WorkerFailure (kind data) if no task leaves room.
    """
    params = SamplingParams.drawn(settings, seed=0)  # used by `fits` only; nothing is drawn
    every_task = tasks_of(components, "train")
    tasks = [task for task in every_task if fits(task, context, params)]
    require(tasks, "training tasks that fit into max_length", "Raise max_length.")
    left_out = len(every_task) - len(tasks)
    if left_out:
        text = f"{left_out} of {len(every_task)} train tasks: no room for an answer in max_length"
        job.event("tasks_left_out", text, left_out=left_out, tasks=len(every_task))
    return sample_rows(tasks, settings.max_examples, settings.seed), left_out


def evaluation_limits(
    job: Job[SFTConfig] | Job[DPOConfig], components: Components
) -> EvaluationLimits:
    """Return how long answers may get in the evaluations of an SFT or DPO run. No setting says so,
    so the limits follow from the lengths in the dataset and from the model's context."""
    config = job.config
    context = components.base.network.shape.context
    # DPO has no setting `thinking`; it keeps the reasoning in its conversations.
    thinking = config.settings.thinking if isinstance(config, SFTConfig) else "keep"
    facts = env_facts(job.run.home, components.env, Path(config.base.path), thinking=thinking)
    limits = defaults.exam_limits(
        facts, context, config.settings.max_length, thinking=thinking == "require"
    )
    return EvaluationLimits(
        limits.max_tokens,
        limits.max_turns,
        limits.max_length,
        score_workers=config.settings.score_workers,
    )


def microbatch_tokens(components: Components) -> int:
    """Return the most tokens, padding included, that may go through the model at once in
    training."""
    return int(components.size.microbatch_tokens)


def quiet_libraries() -> None:
    """Keep progress bars and deprecation notes of libraries out of the console log, which people
    read to find out why a run failed."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    warnings.filterwarnings("ignore", category=UserWarning, module="peft")


def set_threads(ranks: int = 1) -> None:
    """Give torch one thread per core that this process may use, which in a container is fewer than
    cpu_count(). If there are several `ranks`, each gets its share."""
    threads = 2  # for macOS, which does not tell which cores a process may use
    if hasattr(os, "sched_getaffinity"):
        threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, threads // ranks))

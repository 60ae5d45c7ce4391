"""The manifest of a run: which model was trained on which data, with which versions and machine.

It is written once, before step 1. Hashes of large files are cached in the home, keyed by path, size
and modification time, so that the second run on a base model does not read its weights again.
"""

import hashlib
import json
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from engine.core.hardware import detect
from engine.core.wording.shared import shared_texts
from engine.endpoints.judges import judges_used
from engine.environments.registry import EnvRecord, endpoints_of
from engine.evidence.bases.bases import model_used, parts_of_model
from engine.evidence.bases.lookalikes import lookalikes
from engine.home.hashes import file_hashes, then_and_now
from engine.home.run_dir import Home
from engine.records.manifest import (
    Choice,
    EnvironmentUsed,
    MachineUsed,
    Manifest,
    ModelUsed,
    ReplayUsed,
    SamplingUsed,
)
from engine.records.run_config import TrainConfig
from engine.records.settings import CommonSettings
from engine.worker.components import Components, tasks_of
from engine.worker.core import switched_off
from engine.worker.core.failures import WorkerFailure
from engine.worker.core.job import Job
from engine.worker.network.sampler import SamplingParams
from engine.worker.update.checkpoint import digest

# The packages whose versions may change a run's numbers.
PACKAGES = ("honesmith", "torch", "transformers", "peft", "tokenizers", "safetensors")


def write_manifest(
    job: Job[TrainConfig],
    components: Components,
    isolation: str,
    eval_sampling: SamplingParams,
    matrix_flops: float,
    replayed: ReplayUsed | None = None,
) -> None:
    """Write manifest.json: what the run trains, on what, with which versions and on which machine.
    If an earlier attempt has written it, nothing is written, but the base must still be the one
    that it names.

    Args:
        isolation: how the environment's process is confined; "" if none runs.
        eval_sampling: how the run's own evaluations are sampled.
        matrix_flops: operations per second of a large matrix product on this machine.
        replayed: the rows that `keep` replays; None for none.

    Raises:
        WorkerFailure: kind config, if an earlier attempt began with another base.
    """
    if job.run.manifest.exists():
        _require_recorded_base(job, components.base.path)
        return
    config, settings = job.config, job.config.settings
    network = components.base.network
    Manifest(
        run_id=job.run.id,
        time=time.time(),
        env=_environment_used(components.env),
        model=_model_used(job, components.base.path),
        settings_sha256=settings_hash(settings),
        seed=settings.seed,
        parent=config.parent,
        note=config.note,
        reward_risk_accepted=settings.accept_reward_risk,
        versions=_all_versions(),
        hardware=_machine_used(job.device),
        matrix_flops=matrix_flops,
        quantization=settings.quantization,
        precision=str(network.dtype).removeprefix("torch."),
        forward=Choice(kind=network.forward, why=network.why),
        kernels=Choice(kind=network.kernels, why=network.kernels_why),
        isolation=isolation,
        eval_sampling=_sampling_used(eval_sampling),
        replayed=replayed,
        shared_texts=shared_texts(tasks_of(components, "train"), components.env.tools).kinds,
        switched_off=switched_off.reasons(),
        judges=judges_used(job.run.home, endpoints_of(components.env)),
    ).write(job.run.manifest)


def _require_recorded_base(job: Job[TrainConfig], base_folder: Path) -> None:
    """Check that the base in `base_folder` is what the manifest says the run began with. Raises
    WorkerFailure (kind config) if any of its files is another."""
    recorded = model_used(job.run)
    if recorded is None:  # it cannot be read, so it vouches for nothing
        return
    present = parts_of_model(model_hashes(job.run.home, base_folder))
    difference = then_and_now(parts_of_model(recorded.files), present)
    if difference:
        raise WorkerFailure(
            "config",
            f"The base {recorded.ref} is not the model that this run began with.",
            evidence=f"{base_folder}: {difference}",
            hint="Put the files back as they were and resume, or submit a new run on the model as "
            "it is.",
        )


def _environment_used(env: EnvRecord) -> EnvironmentUsed:
    """Describe the environment version, with the SHA-256 of its tasks."""
    return EnvironmentUsed(env_id=env.env_id, tasks_sha256=digest(Path(env.dir) / "tasks.jsonl"))


def _sampling_used(params: SamplingParams) -> SamplingUsed:
    """Describe how answers are sampled, in the manifest's form."""
    return SamplingUsed(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        stop=list(params.stop),
        seed=params.seed,
    )


def _model_used(job: Job[TrainConfig], base_folder: Path) -> ModelUsed:
    """Describe the base model in `base_folder` and the adapter that the run started from (None for
    none), with the SHA-256 of their files."""
    home = job.run.home
    files = model_hashes(home, base_folder)
    start = job.config.start_adapter
    start_files = None
    if start:
        start_files = file_hashes(home, [Path(start) / "adapter_model.safetensors"])
    ref = job.config.base.ref
    return ModelUsed(
        ref=ref,
        files=files,
        start_adapter=start_files,
        others=lookalikes(home, ref, base_folder, files, job.run.id),
    )


def _machine_used(device: str) -> MachineUsed:
    """Describe the device that the run computes on, and the machine's processor, cores and memory
    in bytes."""
    hardware = detect()
    return MachineUsed(
        device=device,
        threads=torch.get_num_threads(),
        machine=platform.machine(),
        cores=hardware.cores,
        ram=hardware.ram_total,
    )


def _all_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages in PACKAGES."""
    return {"python": platform.python_version()} | versions()


def versions() -> dict[str, str]:
    """Return the installed version of each package in PACKAGES, or "source" for a package that is
    imported from its source tree without being installed."""
    installed = {}
    for name in PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            installed[name] = "source"
    return installed


def settings_hash(settings: CommonSettings) -> str:
    """Return the SHA-256 of the settings as sorted JSON."""
    return hashlib.sha256(json.dumps(settings.model_dump(), sort_keys=True).encode()).hexdigest()


def model_hashes(home: Home, folder: Path) -> dict[str, str]:
    """Return the SHA-256 of a model's weights, configuration and templates, by file name.

    card.json is left out, because this project adds that file to a model.
    """
    files = [
        file
        for file in sorted(folder.iterdir())
        if file.suffix in (".safetensors", ".json", ".jinja") and file.name != "card.json"
    ]
    return file_hashes(home, files)

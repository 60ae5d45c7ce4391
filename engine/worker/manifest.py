"""The manifest of a run: everything needed to say later what was trained on what, with what.

Written once, before step 1. Hashes of large files are kept in the home, keyed by path, size and
modification time, so that the second run on a base model does not read its weights again.
"""

import hashlib
import json
import platform
import time
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from engine.core.files import read_object, write_json
from engine.core.hardware import detect
from engine.home.run_dir import Home
from engine.worker.components import Workbench
from engine.worker.core.job import Job
from engine.worker.update.checkpoint import digest

PACKAGES = ("honesmith", "torch", "transformers", "peft", "tokenizers", "safetensors")


def write_manifest(
    job: Job,
    bench: Workbench,
    isolation: str,
    eval_sampling: dict[str, Any],
    matrix_flops: float,
) -> None:
    """Write manifest.json unless an earlier attempt already did.

    Args:
        isolation: how the environment's process is confined; "" where none runs.
        eval_sampling: how the run's own exams are sampled.
        matrix_flops: operations per second of a large matrix product here.
    """
    if job.run.manifest.exists():
        return
    config = job.config
    home = job.run.home
    tasks_file = Path(bench.env.dir) / "tasks.jsonl"
    start = config.get("start_adapter")
    hardware = detect()
    network = bench.base.network
    write_json(
        job.run.manifest,
        {
            "run_id": job.run.id,
            "time": time.time(),
            "env": {"env_id": bench.env.env_id, "tasks_sha256": digest(tasks_file)},
            "model": {
                "ref": config["base"]["ref"],
                "files": model_hashes(home, bench.base.path),
                "start_adapter": file_hashes(home, [Path(start) / "adapter_model.safetensors"])
                if start
                else None,
            },
            "settings_sha256": settings_hash(job.settings),
            "seed": job.settings["seed"],
            "parent": config.get("parent", ""),
            "note": config.get("note", ""),
            "reward_risk_accepted": bool(job.settings.get("accept_reward_risk")),
            "versions": {"python": platform.python_version()} | versions(),
            "hardware": {
                "device": job.device,
                "threads": torch.get_num_threads(),
                "machine": platform.machine(),
                "cores": hardware.cores,
                "ram": hardware.ram_total,
            },
            "matrix_flops": matrix_flops,
            "quantization": job.settings.get("quantization", "none"),
            "precision": str(network.dtype).removeprefix("torch."),
            "forward": {"kind": network.forward, "why": network.why},
            "kernels": {"kind": network.kernels, "why": network.kernels_why},
            "isolation": isolation,
            "eval_sampling": eval_sampling,
        },
    )


def versions() -> dict[str, str]:
    """Installed versions of what decides the numbers."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "source"
    return found


def settings_hash(settings: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def weight_hashes(home: Home, folder: Path) -> dict[str, str]:
    """SHA-256 of the weight files alone."""
    return file_hashes(home, sorted(folder.glob("*.safetensors")))


def model_hashes(home: Home, folder: Path) -> dict[str, str]:
    """SHA-256 of every file that makes the model what it is."""
    files = [
        p
        for p in sorted(folder.iterdir())
        if p.suffix in (".safetensors", ".json", ".jinja") and p.name != "card.json"
    ]
    return file_hashes(home, files)


def file_hashes(home: Home, files: Iterable[Path]) -> dict[str, str]:
    """SHA-256 by file name, read from the cache in the home where path, size and time agree."""
    cache_file = home.cache / "hashes.json"
    cache: dict[str, str] = read_object(cache_file)
    hashes = {}
    for file in files:
        facts = file.stat()
        key = f"{file.resolve()}|{facts.st_size}|{facts.st_mtime_ns}"
        if key not in cache:
            cache[key] = digest(file)
        hashes[file.name] = cache[key]
    home.cache.mkdir(parents=True, exist_ok=True)
    write_json(cache_file, cache)
    return hashes

"""What a run takes along."""

import hashlib
import io
import tarfile

from run_configs import train_config

from engine.core.files import write_json
from engine.environments import registry
from engine.executors import bundle as bundles
from engine.home.run_dir import Home
from engine.models import catalog
from engine.records.run_config import read_run_config


def test_the_same_source_is_the_same_archive_with_all_that_a_run_imports():
    first = bundles.source_archive()
    assert first == bundles.source_archive()
    with tarfile.open(fileobj=io.BytesIO(first)) as archive:
        members = archive.getmembers()
    names = {member.name for member in members}
    assert {"engine/supervisor.py", "engine/worker/__main__.py", "envs/host/child.py"} <= names
    assert "engine/pebble/model.safetensors" in names
    assert not [name for name in names if "__pycache__" in name or name.startswith(("/", "."))]
    assert {(member.uid, member.mtime, member.uname) for member in members} == {(0, 0, "")}


def test_a_run_takes_model_environment_and_files_along_with_paths_of_over_there(
    home: Home, env: str
):
    run = home.run("far-1")
    run.create()
    run.start_adapter.mkdir()
    (run.start_adapter / "adapter_config.json").write_text("{}")
    for name, text in (("metrics.jsonl", "{}\n"), ("exit.json", "{}"), ("STATUS.md", "x")):
        (run.path / name).write_text(text)
    run.checkpoint(2).mkdir()
    (run.checkpoint(2) / "MANIFEST.json").write_text("{}")
    run.best.symlink_to("step_000002")
    base = {"ref": "pebble", "path": str(catalog.BUILTIN["pebble"])}
    config = train_config(run.id, base=base) | {"env_id": env, "env_dir": "/here/env"}
    write_json(run.config, config | {"start_adapter": str(run.start_adapter), "extra": 1})
    bundle = bundles.bundle_of(
        run,
        read_run_config(run.config),  # pyright: ignore
        "/far/root",
        "h1",
        f"homes/h1/runs/{run.id}",
    )
    (model,) = bundle.models
    assert bundle.config["base"]["path"] == f"/far/root/{model.name}"
    assert (
        model.digests["config.json"]
        == hashlib.sha256((catalog.BUILTIN["pebble"] / "config.json").read_bytes()).hexdigest()
    )
    assert bundle.config["start_adapter"] == "/far/root/homes/h1/runs/far-1/start"
    name, digest = env.split("@")
    assert bundle.config["env_dir"] == f"/far/root/homes/h1/envs/{name}/{digest}"
    assert (bundle.config["extra"], str(home.root) in str(bundle.config)) == (1, False)
    assert set(bundle.run_files.files) == {
        "metrics.jsonl",
        "start/adapter_config.json",
        "checkpoints/step_000002/MANIFEST.json",
    }


def test_an_environment_that_asks_a_model_by_name_is_not_sent(home: Home, env: str):
    record = registry.find_env(home, env)
    assert bundles.why_not_sent(record) == ""
    with (record.source / "environment.toml").open("a") as settings:
        settings.write('endpoints = ["openai:big"]\n')
    assert "asks models by name" in bundles.why_not_sent(record)

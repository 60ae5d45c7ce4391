"""The folder of a base holds another model than the one that was trained, with the same name, size
and time: nobody goes on as if nothing had happened, and both fingerprints are named."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loops import PEBBLE, SFT, go, go_until, make_run, push
from run_configs import evaluate_config

from engine.core.errors import UserError
from engine.core.files import read_json, write_json
from engine.evidence.compare.compare import compare_runs
from engine.evidence.report.html_report import model_card
from engine.evidence.verdict.provenance import seal, verify
from engine.evidence.verdict.verdict import run_verdict
from engine.home.hashes import sha256, shown
from engine.home.rows import NewRun
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.models import catalog
from engine.serving.export import export
from engine.serving.service import target_of
from engine.settings.start_models import model_to_train
from engine.worker.core.failures import WorkerFailure
from engine.worker.core.job import Job
from engine.worker.evaluate import evaluate

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]

SHORT = SFT | {"steps": 2, "eval_rows": 8, "skill_rows": 1}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A copy of pebble in a folder of the user's own."""
    folder = tmp_path / "my-base"
    shutil.copytree(PEBBLE, folder)
    return folder


@pytest.fixture
def env_id(home: Home, tmp_path: Path) -> str:
    return push(home, tmp_path / "sums")


def swap(base: Path) -> str:
    """Put weights of the same size and time in the place of those there; their fingerprint, as a
    sentence shows it."""
    file = base / "model.safetensors"
    status, content = file.stat(), bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    other = base / "aside"
    other.write_bytes(content)
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.replace(other, file)
    return shown(sha256(file))


def with_row(home: Home, env_id: str, base: Path, kind: str = "train") -> RunDir:
    """The folder of a run that the database knows, too, as `make_run` of the loops makes it."""
    algorithm = "sft" if kind == "train" else "evaluate"

    def folder(run_id: str) -> None:
        make_run(home, env_id, "sft", SHORT, model=str(base), run_id=run_id)

    with Store(home) as store:
        new = NewRun(f"sums-{algorithm}", kind, algorithm, env_id, str(base))
        run_id = store.insert_run(new, folder).run_id
        for before, after in (("queued", "preparing"), ("preparing", "running")):
            store.set_state(run_id, after, only_from={before})
    return home.run(run_id)


def done(run: RunDir, result: dict[str, Any]) -> None:
    write_json(run.result, result)
    seal(run)
    with Store(run.home) as store:
        word = run_verdict(run).word
        store.set_state(run.id, "done", only_from={"running"}, verdict=word)


def evaluated(home: Home, env_id: str, base: Path) -> RunDir:
    """A finished evaluation of the base alone."""
    run = with_row(home, env_id, base, kind="evaluate")
    trained = read_json(run.config)
    config = evaluate_config(
        run.id,
        env_id=trained["env_id"],
        env_dir=trained["env_dir"],
        models=[{"ref": str(base), "base_path": str(base)}],
        rows=8,
        settings={"max_tokens": 20, "max_length": 256},
    )
    write_json(run.config, config)
    done(run, evaluate(Job(run.path)))
    return run


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    assert caught.value.code == "ADAPTER_MISMATCH"
    return caught.value.message


def test_a27_a_base_that_was_swapped_is_refused_and_named_wherever_a_run_rests_on_it(
    home: Home, env_id: str, base: Path, tmp_path: Path
):
    run = with_row(home, env_id, base)
    done(run, go(run))
    killed = make_run(home, env_id, "sft", SHORT, model=str(base), run_id="killed-1")
    go_until(killed, 1, killed=True)
    then = shown(sha256(base / "model.safetensors"))
    assert verify(home, run.id).intact
    now = swap(base)
    assert now != then
    both, ref = f"weights {then} then, {now} now", f"{run.id}@best"
    for use in (
        lambda: catalog.resolve_model(home, ref),  # evaluate, chat, dry_run
        lambda: target_of(home, ref),  # deploy
        lambda: model_to_train(home, ref),  # another run from it
        lambda: export(home, ref, "adapter", str(tmp_path / "out")),
        lambda: export(home, ref, "merged", str(tmp_path / "merged")),
    ):
        assert both in refused(use)
    # Without a checkpoint, which would tell, its step 0 is still of the base that it began with.
    assert not killed.checkpoint_steps()
    with pytest.raises(WorkerFailure) as caught:
        go(killed)
    assert caught.value.kind == "config" and both in str(caught.value.evidence)
    changed = verify(home, run.id)
    assert not changed.intact and both in changed.summary and f"the base {base}" in changed.summary
    # Whoever writes the new hash into the manifest breaks the seal instead.
    manifest = read_json(run.manifest)
    manifest["model"]["files"]["model.safetensors"] = sha256(base / "model.safetensors")
    write_json(run.manifest, manifest)
    assert "manifest.json was changed" in verify(home, run.id).summary


def test_a27_runs_and_evaluations_of_one_name_with_two_weights_are_told_apart(
    home: Home, env_id: str, base: Path
):
    first, before = with_row(home, env_id, base), evaluated(home, env_id, base)
    done(first, go(first))
    then, now = shown(sha256(base / "model.safetensors")), swap(base)
    second, after = with_row(home, env_id, base), evaluated(home, env_id, base)
    done(second, go(second))
    # The verdict of the second run, and with it report and card: the name, and pebble's tuned copy.
    warnings = run_verdict(second).warnings
    assert any(first.id in text and then in text and now in text for text in warnings)
    assert any("vocabulary of pebble" in text and now in text for text in warnings)
    assert now in model_card(home, second.id) and then in model_card(home, second.id)
    assert not any("weights" in text for text in run_verdict(first).warnings)
    for one, other in ((first, second), (before, after)):
        compared = compare_runs(home, [one.id, other.id])
        assert "do not rest on one base" in compared["warnings"][0]
        assert then in compared["warnings"][0] and now in compared["warnings"][0]
        assert "base weights" in str(compared["comparisons"])
    assert "bases.json" in str(read_json(before.chain))
    assert not verify(home, before.id).intact and verify(home, after.id).intact

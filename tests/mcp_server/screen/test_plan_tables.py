"""A plan and merged files, as a person at a terminal sees them before anything is spent."""

from pathlib import Path

import pytest
from command_line import call, spy

from engine.home.run_dir import Home

HOURS = {"low": 0.02, "likely": 0.05, "high": 0.2}
FIRST = {"step": 1, "algorithm": "sft", "env_id": "sums@1", "label": "seed=1", "hours": HOURS}
LAST = {"step": 2, "algorithm": "evaluate", "hours": HOURS}


def test_a_dry_run_of_a_plan_shows_its_steps(home: Home, monkeypatch: pytest.MonkeyPatch):
    checks = [{"step": 1, "name": "data", "status": "warn", "detail": "few", "fix": "add"}]
    steps = [FIRST | {"settings": {"steps": 3}}, LAST]
    warnings = ["step 1: data: few"]
    spy(monkeypatch, "dry_run", {"checks": checks, "steps": steps, "warnings": warnings})
    told = call("dry-run", "sums").stdout
    assert "sft sums@1 seed=1" in told and "3 min (72 s to 12 min)" in told
    assert "money" not in told and told.count("few") == 1, "a warning stands beside its check once"
    assert "steps = 3" not in told and "steps = 3" in call("dry-run", "sums", "--all").stdout


def test_an_estimate_of_a_plan_shows_the_price_of_each_step(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    money = {"low": 0.04, "likely": 0.1, "high": 0.4}
    reply = {"hours": HOURS, "gpu_hours": HOURS, "money": money, "gpu_hour_price": 2.0}
    reply |= {"steps": [FIRST | {"money": money}, LAST | {"money": money}], "device": "cuda:0"}
    spy(monkeypatch, "estimate_cost", reply)
    told = call("estimate", "sums").stdout
    assert told.count("0.10 (0.04 to 0.40)") == 2 and "GPU-hours" in told


def test_merged_files_say_what_each_changed(
    home: Home, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    spy(monkeypatch, "dry_run", {"checks": []})
    base, more = tmp_path / "base.toml", tmp_path / "more.toml"
    base.write_text('env = "sums"\n[settings]\nsteps = 3\n')
    more.write_text("[settings]\nsteps = 5\n")
    told = call("dry-run", str(base), str(more)).stdout
    assert f'{base}: env = "sums", settings.steps = 3' in told
    assert f"{more}: settings.steps 3 -> 5" in told


def test_an_estimate_of_a_run_has_no_table_of_steps(home: Home, monkeypatch: pytest.MonkeyPatch):
    """There `steps` is their number."""
    memory = {"total": 2_000_000_000, "weights": 1_500_000_000}
    reply = {"hours": HOURS, "gpu_hours": HOURS, "device": "cpu", "steps": 60, "disk_bytes": 9e6}
    reply |= {"peak_memory": memory, "memory_available": 8e9, "basis": "measured", "fit": "fits"}
    spy(monkeypatch, "estimate_cost", reply)
    told = call("estimate", "sums")
    assert told.exit_code == 0 and "2.0 GB of 8.0 GB" in told.stdout

"""Sensors of a GPU in the metrics of a run; NVML is a stand-in."""

from pathlib import Path

import pytest
import torch
from loops import SFT, go, make_run, metrics, push

from engine.core.hardware import Gauges
from engine.home.rows import NewRun
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.runs.reading import logs
from engine.worker.update import meter, telemetry
from engine.worker.update.telemetry import Telemetry, telemetry_of


@pytest.fixture
def sensors(monkeypatch: pytest.MonkeyPatch) -> list[Gauges | None]:
    """What the next looks see, one after the other; the last one again and again."""
    looks: list[Gauges | None] = []
    monkeypatch.setattr(
        telemetry, "read_gauges", lambda visible: looks.pop(0) if len(looks) > 1 else looks[0]
    )
    return looks


def test_a_step_has_mean_utilisation_and_power_and_the_highest_temperature(
    sensors: list[Gauges | None],
):
    sensors += [Gauges(1.0, 70.0, 600.0), Gauges(0.5, 60.0, 400.0), Gauges(0.2, 50.0, None), None]
    looking = Telemetry("GPU-1", every_s=3600)
    said = looking.step()
    assert said == {"gpu_utilization": 0.75, "gpu_temperature": 70.0, "gpu_power": 500.0}
    assert looking.step() == {"gpu_utilization": 0.2, "gpu_temperature": 50.0}
    assert looking.step() == {}  # the driver does not answer any more
    looking.close()


def test_a_cpu_has_no_sensors():
    assert telemetry_of(torch.device("cpu")) is None


@pytest.mark.worker
@pytest.mark.timeout(60)
def test_a_run_writes_them_and_logs_show_them(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sensors: list[Gauges | None]
):
    sensors.append(Gauges(0.9, 65.0, 550.0))
    looking = Telemetry("GPU-1", every_s=3600)
    monkeypatch.setattr(meter, "telemetry_of", lambda device: looking)
    env_id = push(home, tmp_path / "sums")
    with Store(home) as store:
        row = store.insert_run(NewRun("sums", "train", "sft", env_id, "pebble"), lambda _: None)
    run = make_run(home, env_id, "sft", SFT, run_id=row.run_id)
    go(run)
    looking.close()
    assert all(line["gpu_power"] == 550.0 for line in metrics(run)[1:])
    shown = str(logs.read_logs(home, run.id, keys=["gpu_utilization", "gpu_power"]))
    assert "gpu_power" in shown and "550" in shown

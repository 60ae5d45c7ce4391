"""Deployments, a sleeping sampler and runs on one GPU: none takes what another was promised."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_configs import train_config
from stand_ins import stand_in
from stub_gpu import ASLEEP, StubGpu

from engine.core import hardware
from engine.core.errors import UserError
from engine.core.files import write_json
from engine.core.hardware import Device, Hardware
from engine.home.rows import NewRun
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.machine.processes import deployments
from engine.machine.processes.vllm_process import Plan, VllmProcess
from engine.models import catalog
from engine.models.sizing import servers
from engine.serving import service
from engine.serving.chat_request import Patience
from engine.worker.network.sampler import SamplingParams
from engine.worker.rollouts.vllm_sampler import VllmSampler

pytestmark = pytest.mark.timeout(60)

GB = 1_000_000_000
TOTAL, TRAINER, SAMPLER = 20 * GB, 2 * GB, 6 * GB
STUB = Path(__file__).parents[2] / "helpers" / "stub_gpu.py"


@pytest.fixture
def gpu(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubGpu]:
    """The only device of this machine. Deployments take memory of it once they may load."""
    made = StubGpu(tmp_path / "gpu.json", TOTAL)

    def machine(disk: Path | None = None) -> Hardware:
        device = Device("cuda:0", "GPU", "cuda", TOTAL, made.free, "GPU-1", bf16=True)
        return Hardware((device,), 2, TOTAL, TOTAL, TOTAL)

    script = tmp_path / "deployment.py"
    script.write_text(
        f"import runpy, sys\nsys.argv[1:] = [{str(made.ledger)!r}, 'deployment', sys.argv[1]]\n"
        f"runpy.run_path({str(STUB)!r}, run_name='__main__')\n"
    )
    monkeypatch.setattr(hardware, "detect", machine)
    stand_in(monkeypatch, server=script)
    stand_in(monkeypatch, trainer=Path(__file__).parents[1] / "fake_trainer.py")
    monkeypatch.setattr(deployments, "STOP_S", 0.5)
    # pebble is so small that a deployment would take next to nothing.
    monkeypatch.setitem(servers.OVERHEAD, ("torch", "cuda"), 4 * GB)
    yield made
    (home.root / "load").touch()
    for row in deployments.living(home):
        deployments.stop(home, row, "the test is over")


@pytest.fixture
def sampler(gpu: StubGpu, tmp_path: Path) -> Iterator[VllmSampler]:
    """The sampler of a run on this GPU; it has sampled once and sleeps now."""
    plan = Plan(Path("/v"), Path("/m"), "cuda", "bfloat16", 256, sleeps=True, memory=0.3)
    argv = [sys.executable, str(STUB), str(gpu.ledger), "vllm", str(SAMPLER)]
    made = VllmSampler(
        VllmProcess(plan, tmp_path / "vllm.log", argv),
        folder=tmp_path / "adapters",
        stop_ids=[99],
        vocab=100,
        model_vocab=100,
    )
    assert gpu.take("trainer", TRAINER)
    made.generate([[90]], 1, SamplingParams(2, 0.0))
    made.release_memory()
    yield made
    made.close()


def run_on(home: Home, name: str, expected: int) -> RunDir:
    """A run that holds the GPU and is expected to take so many bytes of it."""
    with Store(home) as store:
        row = store.insert_run(NewRun(name, "train", "sft", "e@1", "pebble"), lambda _: None)
        store.lease_next(["cuda:0"])
    config = train_config(row.run_id)
    config["estimate"]["peak_memory"] = config["estimate"]["peak_memory"] | {"total": expected}
    run = home.run(row.run_id)
    run.create()
    write_json(run.config, config)
    return run


@pytest.fixture
def models(tmp_path: Path) -> list[str]:
    """Three base models, which share no deployment."""
    folders = [tmp_path / name for name in ("one", "two", "three")]
    for folder in folders:
        shutil.copytree(catalog.BUILTIN["pebble"], folder)
    return [str(folder) for folder in folders]


def test_two_deployments_and_a_sleeping_sampler_share_a_device(
    home: Home, gpu: StubGpu, sampler: VllmSampler, models: list[str]
):
    run_on(home, "grpo", TRAINER + SAMPLER)
    (home.root / "load").touch()
    assert gpu.free == TOTAL - TRAINER - ASLEEP
    for name in models[:2]:
        assert service.deploy(home, name)["state"] == "ready"
    # What the third would take is free now, and the sampler's as soon as it wakes up.
    assert gpu.free > 4 * GB
    with pytest.raises(UserError) as refused:
        service.deploy(home, models[2])
    assert refused.value.code == "DEVICE_BUSY" and refused.value.retryable
    ((completion,),) = sampler.generate([[90]], 1, SamplingParams(2, 0.0))
    assert completion.ids == [91, 92]
    sampler.release_memory()
    service.deploy(home, models[0], "stop")
    assert service.deploy(home, models[2])["state"] == "ready"


def test_a_deployment_that_still_loads_keeps_its_memory_from_the_next_one(
    home: Home, gpu: StubGpu, models: list[str]
):
    assert gpu.take("others", TOTAL - 6 * GB)
    hurried = Patience(call_s=1.0, start_s=0.3, stall_s=1.0)
    with pytest.raises(UserError, match="still being loaded"):
        service.deploy(home, models[0], patience=hurried)
    assert gpu.take("others", TOTAL - 9 * GB)  # 9 GB are free, 4 of them promised
    with pytest.raises(UserError, match="still being loaded"):
        service.deploy(home, models[1], patience=hurried)
    with pytest.raises(UserError, match=r"1\.\d GB of cuda:0 are free"):
        service.deploy(home, models[2], patience=hurried)
    (home.root / "load").touch()
    for name in models[:2]:
        assert service.deploy(home, name)["state"] == "ready"


def test_an_idle_deployment_on_another_device_is_left_alone(
    home: Home, gpu: StubGpu, models: list[str], monkeypatch: pytest.MonkeyPatch
):
    (home.root / "load").touch()
    first = service.deploy(home, models[0])["deployment_id"]
    one_gpu = hardware.detect()
    full = Device("cuda:1", "GPU", "cuda", TOTAL, GB, "GPU-2", bf16=True)
    two_gpus = Hardware((*one_gpu.devices, full), 2, TOTAL, TOTAL, TOTAL)
    monkeypatch.setattr(hardware, "detect", lambda disk=None: two_gpus)
    run = run_on(home, "grpo", 17 * GB)
    assert deployments.make_room(home, run, "cuda:1") == []
    assert deployments.make_room(home, run, "cuda:1,cuda:0") == [first]


def test_an_idle_deployment_makes_room_for_a_run_that_its_memory_was_counted_against(
    home: Home, gpu: StubGpu, models: list[str]
):
    (home.root / "load").touch()
    first = service.deploy(home, models[0])["deployment_id"]
    run = run_on(home, "grpo", 17 * GB)
    assert deployments.make_room(home, run, "cuda:0") == [first]
    with pytest.raises(UserError, match="GB of cuda:0 are free"):
        service.deploy(home, models[0])

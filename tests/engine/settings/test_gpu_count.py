"""How many devices a run takes: as many as it was given, else as many as are free and pay."""

from dataclasses import replace

import pytest
from machines import CPU, GB, GPU
from run_configs import ESTIMATE

from engine.core.errors import UserError
from engine.core.hardware import Device, Hardware
from engine.home.rows import NewRun
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.models.model_files import ModelFacts
from engine.models.sizing import ranks
from engine.records.estimate import Estimate, Range
from engine.settings import gpu_count, resolution, run_size
from engine.settings.resolution import Resolved

MODEL = ModelFacts(
    "Qwen3ForCausalLM", 192, 4, 6, 2, 32, 512, 264, True, 1_628_992, 1024, "float32", 6_515_968
)
FOUR = replace(
    GPU,
    devices=(
        *(Device(f"cuda:{i}", "H200", "cuda", 140 * GB, 139 * GB, f"GPU-{i}") for i in range(4)),
        Device("cuda:4", "RTX 4090", "cuda", 24 * GB, 23 * GB, "GPU-4"),
    ),
)


def settings(machine: Hardware = FOUR, **given: object) -> Resolved:
    given = {"steps": 100, "batch_size": 16} | given
    return resolution.resolve("sft", given, model=MODEL, env=None, hardware=machine)


def hours_of(hours: float):
    """Estimates of a run that takes so many hours on one device."""

    def estimate(resolved: Resolved) -> Estimate:
        gpus = resolved.settings.gpus
        seconds = ranks.seconds_on({"startup": 30.0, "training": 3600 * hours}, gpus)
        each = sum(seconds.values()) / 3600
        return Estimate.model_validate(ESTIMATE).model_copy(
            update={
                "hours": Range(low=each, likely=each, high=each),
                "gpu_hours": Range(low=gpus * each, likely=gpus * each, high=gpus * each),
            }
        )

    return estimate


def decided(home: Home, hours: float, resolved: Resolved, machine: Hardware = FOUR) -> int:
    return gpu_count.decide(home, resolved, machine, hours_of(hours))[0].settings.gpus


def test_a_long_run_takes_the_gpus_of_one_model_and_a_short_one_takes_one(home: Home) -> None:
    assert decided(home, 8.0, settings()) == 4
    assert decided(home, 0.1, settings()) == 1
    assert decided(home, 8.0, settings(gpus="auto")) == 4
    assert decided(home, 8.0, settings(gpus=1)) == 1
    assert decided(home, 8.0, settings(gpus=3)) == 3


def test_every_number_of_gpus_is_priced_and_only_free_ones_are_chosen(home: Home) -> None:
    with Store(home) as store:
        store.insert_run(NewRun("busy", "train", "sft", "e@1", "pebble", gpus=2), lambda _: None)
        assert store.lease_next(["cuda:0", "cuda:1"]) is not None
    resolved, on_gpus = gpu_count.decide(home, settings(), FOUR, hours_of(8.0))
    assert resolved.settings.gpus == 2 and resolved.sources["gpus"] == "hardware"
    shown = [option.shown() for option in on_gpus]
    assert [(each["gpus"], each["free_now"]) for each in shown] == [
        (1, True),
        (2, True),
        (3, False),
        (4, False),
    ]
    assert shown[3]["hours"] < shown[1]["hours"] < shown[0]["hours"]
    assert shown[3]["gpu_hours"] > shown[1]["gpu_hours"] > shown[0]["gpu_hours"]


def test_more_devices_than_there_are_or_than_rows_to_share_are_refused(home: Home) -> None:
    for resolved, machine, most in (
        (settings(gpus=5), FOUR, 4),
        (settings(gpus=4, batch_size=2), FOUR, 2),
        (settings(CPU, gpus=2), CPU, 1),
    ):
        with pytest.raises(UserError) as refused:
            gpu_count.decide(home, resolved, machine, hours_of(1.0))
        assert refused.value.code == "SETTING_INVALID"
        assert refused.value.field == "settings.gpus"
        assert f"at most {most}" in refused.value.hint


def test_the_owner_may_have_runs_on_a_cpu_shared(home: Home) -> None:
    home.config_file.parent.mkdir(parents=True, exist_ok=True)
    home.config_file.write_text("cpu_ranks = 3\n")
    assert decided(home, 8.0, settings(CPU, gpus=3), CPU) == 3
    assert decided(home, 8.0, settings(CPU), CPU) == 1  # nobody asked for it
    with pytest.raises(UserError):
        gpu_count.decide(home, settings(CPU, gpus=4), CPU, hours_of(1.0))


def test_devices_that_sample_beside_training_are_shown(home: Home) -> None:
    given = {"async_sampling": True, "steps": 10, "prompts_per_step": 8, "group_size": 4}
    resolved = resolution.resolve("grpo", given, model=MODEL, env=None, hardware=FOUR)
    chosen, on_gpus = gpu_count.decide(home, resolved, FOUR, hours_of(8.0))
    assert [option.shown().get("sampling") for option in on_gpus] == [None, 1, 2, 2]
    assert run_size.sampling_gpus(chosen.settings) > 0


def test_a_base_that_fits_no_gpu_is_sharded_over_the_fewest_that_hold_it(home: Home) -> None:
    def figures(resolved: Resolved) -> Estimate:
        fits = resolved.settings.shard_base and resolved.settings.gpus >= 3
        return hours_of(0.1)(resolved).model_copy(update={"fits": fits})

    chosen, on_gpus = gpu_count.decide(home, settings(), FOUR, figures)
    assert chosen.settings.gpus == 3 and chosen.settings.shard_base
    assert chosen.sources["shard_base"] == "hardware"
    assert [option.figures.fits for option in on_gpus] == [False, False, True, True]
    whole, _ = gpu_count.decide(home, settings(shard_base=False), FOUR, figures)
    assert not whole.settings.shard_base  # as its user wants it


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"gpus": 1}, "one device to train"),
        ({"gpus": 2, "quantization": "nf4"}, "4 bits"),
        ({"gpus": 4, "async_sampling": True, "sampler": "torch"}, "our own sampler"),
    ],
)
def test_a_base_that_cannot_be_sharded_so_is_refused(
    home: Home, given: dict[str, object], why: str
) -> None:
    given = {"steps": 10, "prompts_per_step": 8, "shard_base": True} | given
    resolved = resolution.resolve("grpo", given, model=MODEL, env=None, hardware=FOUR)
    with pytest.raises(UserError, match=why) as refused:
        gpu_count.check_gpus(home, resolved.settings, FOUR)
    assert refused.value.field == "settings.shard_base"

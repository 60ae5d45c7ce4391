"""Estimates: bands, monotone in what makes a run larger, corrected by what runs really took."""

import math
import random
import shutil
import statistics
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import CPU, GB, GPU
from run_configs import train_config

from engine.core.files import write_json
from engine.core.hardware import Device, Hardware
from engine.cost import estimate, flops, throughput
from engine.cost import hours as hours_of_run
from engine.cost.batteries import PEBBLE_SKILLS
from engine.cost.estimate import Forecast
from engine.dry_run.dry_run import dry_run
from engine.environments import push
from engine.environments.env_facts import EnvFacts, RowLengths
from engine.home.rows import NewRun
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.hub.repository import RemoteFile
from engine.machine.processes import launcher
from engine.models import catalog, tokens
from engine.models.hub import DownloadPlan
from engine.models.model_files import ModelFacts
from engine.records.estimate import Workload
from engine.runs import lifecycle
from engine.runs.submit.requests import TrainRequest
from engine.settings import resolution
from engine.skills.batteries import LANGUAGE_TOKENS, battery_of

SMALL = ModelFacts(
    "Qwen3ForCausalLM", 192, 4, 6, 2, 32, 512, 264, True, 1_628_992, 1024, "float32", 6_515_968
)
LARGE = ModelFacts(
    "Qwen3ForCausalLM",
    2560,
    36,
    32,
    8,
    128,
    9728,
    151936,
    True,
    4_022_468_096,
    40960,
    "bfloat16",
    8_044_936_192,
)


def rows(prompt: int, said: int, count: int = 40) -> tuple[RowLengths, ...]:
    """Rows of several lengths around the given ones."""
    found = []
    for number in range(count):
        opening, answer = prompt + number % 7, max(1, said - number % 5)
        found.append(RowLengths(opening, opening + answer, ((opening, opening + answer),)))
    return tuple(found)


ENV = EnvFacts("sums@0123456789ab", "single", True, 2000, 400, 2000, rows(60, 30))
CHAT = replace(ENV, kind="multi")


def resolve(
    algorithm: str,
    given: dict[str, Any],
    model: ModelFacts = SMALL,
    env: EnvFacts = ENV,
    hardware: Hardware = CPU,
) -> resolution.Resolved:
    return resolution.resolve(algorithm, given, model=model, env=env, hardware=hardware)


def figures(
    home: Home,
    algorithm: str = "sft",
    given: dict[str, Any] | None = None,
    model: ModelFacts = SMALL,
    env: EnvFacts = ENV,
    hardware: Hardware = CPU,
) -> dict[str, Any]:
    """The estimate as config.json keeps it."""
    return forecast(home, algorithm, given, model, env, hardware).estimate.to_json()


def forecast(
    home: Home,
    algorithm: str = "sft",
    given: dict[str, Any] | None = None,
    model: ModelFacts = SMALL,
    env: EnvFacts = ENV,
    hardware: Hardware = CPU,
) -> Forecast:
    resolved = resolve(algorithm, given or {}, model, env, hardware)
    return estimate.estimate(home, resolved, model, env, hardware)


# Values a setting may be raised from, and what holds the others still meanwhile.
STILL = {"eval_every": 10, "save_every": 10, "eval_rows": 50, "steps": 40, "max_length": 512}
RAISED = {
    "sft": {"max_length": (16, 900), "batch_size": (1, 500), "lora_rank": (1, 200)},
    "grpo": {
        "max_length": (200, 800),
        "max_tokens": (1, 150),
        "group_size": (2, 60),
        "prompts_per_step": (1, 300),
        "lora_rank": (1, 200),
        "updates_per_batch": (1, 8),
    },
}
CASES = [(algorithm, name) for algorithm, names in RAISED.items() for name in names]


@pytest.mark.timeout(20)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
@pytest.mark.parametrize(("algorithm", "name"), CASES)
def test_a_larger_run_never_takes_less_time_or_memory(
    algorithm: str, name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
):
    home = Home(Path("/nowhere"))  # without measurements or finished runs
    low, high = RAISED[algorithm][name]
    first = data.draw(st.integers(low, high - 1))
    second = data.draw(st.integers(first + 1, high))
    model, hardware = data.draw(st.sampled_from([(SMALL, CPU), (LARGE, GPU)]))
    env = data.draw(st.sampled_from([ENV, CHAT]))
    checkpointing = {"gradient_checkpointing": data.draw(st.booleans())}
    small, large = (
        figures(home, algorithm, STILL | checkpointing | {name: value}, model, env, hardware)
        for value in (first, second)
    )
    for level in estimate.LEVELS:
        assert small["hours"][level] <= large["hours"][level] * (1 + 1e-9)
    assert small["peak_memory"]["total"] <= large["peak_memory"]["total"]
    assert small["disk_bytes"] <= large["disk_bytes"]


@pytest.mark.timeout(20)
@given(st.integers(1, 400), st.integers(1, 400), st.integers(1, 300))
def test_longer_rows_never_take_less(prompt: int, said: int, more: int):
    home = Home(Path("/nowhere"))
    model = replace(SMALL, max_positions=4096)  # a full context leaves less room for answers
    for algorithm in ("sft", "grpo"):
        given_settings = STILL | ({"max_tokens": 64} if algorithm == "grpo" else {})
        short, long = (
            figures(home, algorithm, given_settings, model, replace(ENV, lengths=lengths))
            for lengths in (rows(prompt, said), rows(prompt + more, said + more))
        )
        assert short["hours"]["likely"] <= long["hours"]["likely"]
        assert short["peak_memory"]["total"] <= long["peak_memory"]["total"]


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
@pytest.mark.parametrize(("model", "hardware"), [(SMALL, CPU), (LARGE, GPU)])
def test_low_likely_and_high_are_in_order_and_add_up(
    home: Home, algorithm: str, model: ModelFacts, hardware: Hardware
):
    found = figures(home, algorithm, model=model, hardware=hardware)
    hours = found["hours"]
    assert 0 < hours["low"] < hours["likely"] < hours["high"]
    assert sum(found["seconds"].values()) / 3600 == pytest.approx(hours["likely"], rel=0.02)
    memory = found["peak_memory"]
    assert memory["total"] <= sum(memory.values()) - memory["total"]
    assert all(value >= 0 for value in memory.values())


@pytest.mark.parametrize(
    ("algorithm", "change"),
    [
        ("grpo", {"updates_per_batch": 2}),
        ("grpo", {"kl_coef": 0.1}),
        ("grpo", {"eval_every": 1}),
        ("grpo", {"save_every": 1}),
        ("grpo", {"gradient_checkpointing": True}),
        ("sft", {"gradient_checkpointing": True}),
        ("sft", {"steps": 80}),
        ("sft", {"eval_rows": 200}),
    ],
)
def test_what_costs_time_is_counted(home: Home, algorithm: str, change: dict[str, Any]):
    plain = figures(home, algorithm, STILL)["hours"]["likely"]
    assert figures(home, algorithm, STILL | change)["hours"]["likely"] > plain


def test_prompts_turns_and_a_slow_scorer_cost_time(home: Home):
    plain = figures(home, "grpo", STILL)["hours"]["likely"]
    longer = replace(ENV, lengths=rows(300, 30))
    slow = replace(ENV, score_s=0.5)
    for env in (longer, CHAT, slow):
        assert figures(home, "grpo", STILL, env=env)["hours"]["likely"] > plain
    alone = STILL | {"score_workers": 1}
    one_by_one = figures(home, "grpo", alone, env=slow)["seconds"]["rewards"]
    assert one_by_one > 40 * 128 * 0.5
    assert figures(home, "grpo", STILL, env=slow)["seconds"]["rewards"] < one_by_one


def test_an_unscored_set_is_judged_by_its_loss_alone(home: Home):
    unscored = replace(ENV, scored=False, kind="sft")
    found = figures(home, "sft", env=unscored)
    assert found["tokens"]["generated"] == 0
    assert found["hours"]["likely"] < figures(home, "sft")["hours"]["likely"]


def test_money_is_hours_times_the_rate_of_the_home(home: Home):
    assert figures(home)["money"]["likely"] == 0
    home.config_file.write_text("gpu_hour_price = 2.5\n")
    found = forecast(home).estimate
    assert found.money.likely == pytest.approx(2.5 * found.gpu_hours.likely, rel=1e-3)
    assert "2.5 an hour" in estimate.summary(found)


def test_a_model_too_large_for_the_device_does_not_fit_and_says_what_to_lower(home: Home):
    little = replace(GPU, devices=(replace(GPU.devices[0], memory_total=12 * GB),))
    given_settings = {"max_length": 4096, "batch_size": 32, "eval_rows": 4}
    long = replace(ENV, lengths=rows(3000, 500))
    found = figures(home, "sft", given_settings, LARGE, long, little)
    assert not found["fits"] and found["fit"] == "too_big"
    assert found["peak_memory"]["weights"] == LARGE.params * 2
    name = found["lower_this"].split()[0]
    assert name in ("gradient_checkpointing", "lora_rank", "batch_size")  # the rows need 3507
    assert figures(home, "sft", model=LARGE, hardware=GPU)["fits"]


def test_a_run_that_shares_its_gpu_is_planned_with_a_share_where_it_fits_into_one(home: Home):
    whole = figures(home, "sft", model=LARGE, hardware=GPU)
    home.config_file.write_text("runs_per_gpu = 2\n")
    shared = figures(home, "sft", model=LARGE, hardware=GPU)
    assert shared["memory_available"] == 70 * GB and shared["fits"]
    assert shared["peak_memory"]["total"] <= min(70 * GB, whole["peak_memory"]["total"])
    small = replace(GPU, devices=(replace(GPU.devices[0], memory_total=24 * GB),))
    alone = figures(home, "sft", model=LARGE, hardware=small)
    assert alone["memory_available"] == 24 * GB  # half of it is too little


LONG_ROWS = """
from envs import SingleTurnEnv, Task

class Long(SingleTurnEnv):
    def tasks(self):
        return [Task(str(n), f"{n} " * 200, answer="yes", split="heldout" if n < 20 else "train")
                for n in range(60)]
    def score(self, task, completion):
        return float(completion == task.answer)

def load_environment():
    return Long()
"""


def test_a_plan_that_no_row_fits_is_warned_of_and_not_offered(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(estimate.throughput, "ensure", lambda *_: None)
    (tmp_path / "environment.py").write_text(LONG_ROWS)
    env_id = push.push_env(home, str(tmp_path), name="long", roots=[tmp_path]).env_id
    found = estimate.estimate_cost(home, env_id, algorithm="sft", settings={"max_length": 64})
    assert found["next"] == [] and "no row fits into max_length = 64" in found["warnings"][0]
    assert "no row fits" in found["summary"]
    whole = estimate.estimate_cost(home, env_id, algorithm="sft")
    assert whole["next"][-1]["tool"] == "submit_train"


def test_disk_counts_what_is_kept_and_what_is_fetched(home: Home, tmp_path: Path):
    resolved = resolve("sft", {})
    plain = estimate.estimate(home, resolved, SMALL, ENV, CPU).estimate
    weights = [RemoteFile(name="model.safetensors", size=10 * GB)]
    plan = DownloadPlan(repo="a/b", commit="0" * 40, endpoint="http://h", weights=weights)
    plan.write(tmp_path / "download.json")
    fetched = estimate.estimate(home, resolved, SMALL, ENV, CPU, base_path=tmp_path).estimate
    assert fetched.disk_bytes - plain.disk_bytes == 10 * GB
    assert fetched.hours.likely > plain.hours.likely
    assert plain.disk_fits
    full = replace(CPU, disk_free=10**8)
    assert not estimate.estimate(home, resolved, SMALL, ENV, full).estimate.disk_fits


def measured(home: Home, **changes: Any) -> None:
    figures = {
        "device": "cpu",
        "train_flops": 6e10,
        "sample_flops": 5e10,
        "decode_step_s": 0.02,
        "update_s": 0.004,
        "layers": 4,
        "startup_s": 3.0,
    }
    write_json(home.speed, figures | changes)


def test_a_measured_machine_gives_a_narrower_band(home: Home):
    guessed = figures(home)
    measured(home)
    found = figures(home)
    assert (guessed["basis"], found["basis"]) == ("model", "measured")
    spread = [f["hours"]["high"] / f["hours"]["low"] for f in (guessed, found)]
    assert spread[1] < spread[0]


def test_a_faster_machine_takes_less_time(home: Home):
    measured(home)
    slow = figures(home, "grpo")["hours"]["likely"]
    measured(home, train_flops=6e11, decode_step_s=0.002)
    assert figures(home, "grpo")["hours"]["likely"] < slow


@pytest.mark.parametrize(
    "changes",
    [{"device": "cuda"}, {"train_flops": -1.0}, {"train_flops": True}, {"train_flops": "fast"}],
)
def test_a_measurement_that_is_none_is_not_used(home: Home, changes: dict[str, Any]):
    measured(home, **changes)
    assert figures(home)["basis"] == "model"


def test_known_gpus_are_faster_than_unknown_ones_and_cpus():
    def rate(name: str, kind: str = "cuda") -> float:
        return throughput.table(Device("x", name, kind, GB, GB), 8, "bfloat16").train_flops_per_s

    assert rate("NVIDIA H200") > rate("NVIDIA L4") > rate("Some Card") > rate("CPU", "cpu")


# What a finished run computed, as its config.json keeps it.
WORKS = {
    "training": flops.Work(train_operations=3e12, microbatches=40),
    "evaluation": flops.Work(sample_operations=1e12, decode_steps=400, moved_bytes=1e9, scores=100),
    "saving": flops.Work(saves=4),
}
WORKED = {
    "works": {name: astuple(work) for name, work in WORKS.items()},
    "score_s": 5e-4,
    "layers": 4,
    "weight_bytes": 6_515_968,
    "first": False,
}


def predicted() -> dict[str, float]:
    """Seconds of it by phase, on a CPU that nobody has measured."""
    return throughput.table(CPU.device, CPU.cores, "float32").phases(
        WORKS, 4, 6_515_968, is_first_run=False
    )


def finished(
    home: Home,
    ratios: list[float],
    algorithm: str = "sft",
    *,
    base: str = "/models/a",
    memory: float = 1.0,
    shares: dict[str, float] | None = None,
    device: str = "cpu",
) -> None:
    """Runs that took `ratio` times what their estimate said before correction."""
    with Store(home) as store:
        for number, ratio in enumerate(ratios):
            row = store.insert_run(
                NewRun(f"old{number}", "train", algorithm, "e@1", "pebble"), lambda run_id: None
            )
            home.run(row.run_id).create()
            said = {"uncalibrated": WORKED | {"memory": 1_000_000_000}}
            config_of = train_config(
                row.run_id,
                algorithm=algorithm,
                estimate=said,
                base={"ref": "pebble", "path": base},
            )
            write_json(home.run(row.run_id).config, config_of)
            phases = predicted()
            took = {
                "train_s": phases["training"] * ratio,
                "exam_s": phases["evaluation"] * ratio,
                "save_s": phases["checkpoints"] * ratio,
            }
            hours = sum(phases.values()) * ratio / 3600
            measured = {"seconds": took, "peak_memory": int(1e9 * memory)} | (shares or {})
            write_json(home.run(row.run_id).result, {"measured": measured})
            # What was predicted then was corrected already, and must not be corrected twice.
            features = {"run_id": row.run_id, "device": device}
            store.record_estimate(algorithm, features, hours, hours)


def test_three_finished_runs_correct_the_estimate(home: Home):
    before = figures(home)
    finished(home, [2.0, 2.0])
    assert figures(home)["hours"] == before["hours"]
    finished(home, [2.0])
    after = figures(home)
    # A little still speaks for the prediction as it was.
    assert 1.92 < after["hours"]["likely"] / before["hours"]["likely"] < 2.0
    assert (after["basis"], after["calibrated_on_runs"]) == ("measured", 3)
    assert after["hours"]["low"] < after["hours"]["likely"] < after["hours"]["high"]
    assert figures(home, "grpo")["calibrated_on_runs"] == 0


@pytest.mark.parametrize("name", ["config", "result"])
def test_a_run_with_a_damaged_file_is_left_out_by_name_and_the_others_still_teach(
    home: Home, name: str
):
    finished(home, [2.0] * 4)
    run = home.run(sorted(home.runs.iterdir())[0].name)
    file: Path = getattr(run, name)
    file.write_text(file.read_text()[:-5])
    after = forecast(home)
    (sentence,) = after.left_out
    assert sentence.startswith(f"{run.id} is left out of this estimate: {file} is damaged: ")
    assert (after.estimate.basis, after.estimate.calibrated_on_runs) == ("measured", 3)
    assert forecast(home, "grpo").left_out == after.left_out  # its start would teach that as well
    assert "left_out" not in after.estimate.to_json()


def test_what_an_estimate_left_out_is_a_warning_of_every_answer_with_an_estimate(
    home: Home, env: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(estimate.throughput, "ensure", lambda *_: None)
    monkeypatch.setattr(launcher, "reap", lambda _home: None)  # nothing is started
    finished(home, [1.0])
    (run,) = [home.run(path.name) for path in home.runs.iterdir()]
    run.config.write_text('{"kind": "train", "algorithm": "sft"}')
    estimated = estimate.estimate_cost(home, env, algorithm="sft")
    rehearsed = dry_run(home, env, algorithm="sft")
    submitted = lifecycle.submit(home, TrainRequest(env_id=env, algorithm="sft"))
    for reply in (estimated, rehearsed, submitted):
        assert any(str(run.config) in warning for warning in reply["warnings"]), reply["warnings"]
    (check,) = [check for check in rehearsed["checks"] if check["name"] == "estimate"]
    assert check["status"] == "warn" and check["fix"]


def test_eight_of_ten_later_runs_fall_into_the_band():
    rng = random.Random(7)
    raw = {"low": 0.5, "likely": 1.0, "high": 2.0}
    inside = []
    for _ in range(60):  # machines, each with its own bias and noise
        bias, noise = rng.uniform(-1.5, 1.5), rng.uniform(0.02, 0.5)
        taken = [math.exp(rng.gauss(bias, noise)) for _ in range(9)]
        for seen in range(3, 9):
            # As `estimate` does it: the phases are corrected first, then the band is laid.
            middle = math.log(sum(taken[:seen]) / seen)
            logs = [math.log(value) - middle for value in taken[:seen]]
            corrected = {level: value * math.exp(middle) for level, value in raw.items()}
            hours, basis, used = hours_of_run.hours_by_level(logs, corrected, measured=True)
            assert (basis, used) == ("measured", seen)
            inside.append(hours["low"] <= taken[seen] <= hours["high"])
    assert sum(inside) / len(inside) >= 0.8


def test_only_the_phase_that_was_wrong_is_corrected(home: Home):
    before = figures(home)["seconds"]
    finished(home, [1.0, 1.0, 1.0])
    for run in [home.run(path.name) for path in sorted(home.runs.iterdir())]:
        phases = predicted()
        took = {
            "train_s": 3 * phases["training"],
            "exam_s": phases["evaluation"],
            "save_s": phases["checkpoints"],
        }
        write_json(run.result, {"measured": {"seconds": took, "peak_memory": 1e9}})
    with Store(home) as store:  # the time of the whole run is the supervisor's
        whole = sum(predicted().values()) + 2 * predicted()["training"]
        store._db.execute("UPDATE estimates SET actual = ?", (whole / 3600,))
    after = figures(home)["seconds"]
    assert after["training"] == pytest.approx(before["training"] * (3 + 1 / 12) / (13 / 12), 0.01)
    for phase in ("startup", "evaluation", "checkpoints"):
        assert after[phase] == pytest.approx(before[phase], abs=0.11)


def test_runs_on_another_kind_of_device_teach_nothing(home: Home):
    before = figures(home)
    finished(home, [4.0] * 3, device="cuda:0")
    assert figures(home) == before


def test_starts_and_evaluations_of_one_algorithm_teach_the_other(home: Home):
    before = figures(home, "grpo")["seconds"]
    finished(home, [4.0, 4.0, 4.0])
    after = figures(home, "grpo")["seconds"]
    assert after["startup"] > 2 * before["startup"]
    assert after["evaluation"] > 2 * before["evaluation"]
    assert after["training"] == before["training"]


def test_a_model_that_never_stops_is_known_by_its_earlier_runs(home: Home):
    def taken() -> dict[str, float]:
        resolved = resolve("grpo", {})
        base = Path("/models/talks")
        found = estimate.estimate(home, resolved, SMALL, ENV, CPU, base_path=base).estimate
        assert isinstance(found.uncalibrated, Workload)
        works = {n: flops.Work(*v) for n, v in found.uncalibrated.works.items()}
        table = throughput.table(CPU.device, CPU.cores, "float32")
        return table.phases(works, 6, 6_515_968, is_first_run=False)

    before = taken()
    shares = {"said_share": 1.0, "turns_mean": 1.0, "effective_share": 0.0}
    finished(home, [1.0], "grpo", base="/models/talks", shares=shares)
    after = taken()
    assert after["rollouts"] > before["rollouts"]
    assert after["training"] < before["training"]  # what never differs is never trained on


def test_memory_is_corrected_by_what_runs_held(home: Home):
    before = figures(home)["peak_memory"]
    finished(home, [1.0] * 3, memory=1.5)
    after = figures(home)["peak_memory"]
    assert after["total"] == pytest.approx(before["total"] * 1.25, rel=0.01)
    assert after["total"] <= sum(after.values()) - after["total"]


def test_skills_are_asked_as_the_worker_asks_them(home: Home, tmp_path: Path):
    assert estimate.batteries(home, None, 200) == (PEBBLE_SKILLS,)
    assert estimate.batteries(home, catalog.BUILTIN["pebble"], 200) == (PEBBLE_SKILLS,)
    copy = shutil.copytree(catalog.BUILTIN["pebble"], tmp_path / "copy")
    asked = estimate.batteries(home, copy, 200)
    assert [battery.tasks for battery in asked] == [len(battery_of("any other").tasks)]
    chat = tokens.load(copy).format()
    prompts = [len(chat.prompt(task["prompt"])) for task in battery_of("any other").tasks]
    assert asked[0].answer.prompt == pytest.approx(statistics.fmean(prompts), rel=0.2)
    assert asked[0].answer.longest_turn == LANGUAGE_TOKENS


def test_four_bits_are_counted_for_the_projections_alone(home: Home):
    items = figures(home, given={"quantization": "nf4"}, model=LARGE, hardware=GPU)["peak_memory"]
    linear = LARGE.linear_params
    assert items["weights"] == int(0.55 * linear + 2 * (LARGE.params - linear))
    assert items["weights"] < figures(home, model=LARGE, hardware=GPU)["peak_memory"]["weights"] / 2


def test_rows_that_go_one_by_one_take_less_memory_and_more_time(home: Home):
    given = {"max_length": 512}  # shorter than a microbatch
    packed, single = (figures(home, given=given | {"packing": each}) for each in (True, False))
    memory = [each["peak_memory"] for each in (single, packed)]
    assert memory[0]["activations"] < memory[1]["activations"]
    assert memory[0]["total"] <= memory[1]["total"]
    assert single["hours"]["likely"] > packed["hours"]["likely"]


def test_playing_uniform_groups_again_costs_time_at_worst_and_likely(home: Home):
    plain, again = (figures(home, "grpo", {"resample_uniform": n}) for n in (0, 3))
    assert again["hours"]["likely"] > plain["hours"]["likely"]
    assert again["hours"]["high"] > plain["hours"]["high"]


def test_a_batch_is_split_as_the_worker_splits_it():
    resolved = resolve("sft", {})
    plan = flops.Plan(resolved.settings, SMALL, ENV, CPU.device)
    layer = 18 * SMALL.hidden + 5 * SMALL.intermediate
    per_token = 4 * (SMALL.layers * layer + 4 * SMALL.hidden) + 12 * SMALL.vocab
    assert plan.job.microbatch_tokens == min(1024, 0.25 * 16 * GB / per_token)


@pytest.mark.parametrize(
    ("hours", "words"), [(0.0001, "1 s"), (0.01, "36 s"), (0.2, "12 min"), (3.54, "3.5 h")]
)
def test_times_are_said_in_words(hours: float, words: str):
    assert estimate.words(hours) == words


def test_a_run_that_may_stop_early_may_take_half_the_time(home: Home):
    """Four of its eight evaluations have to pass; the likely time is that of the whole run."""
    given = {"steps": 400, "eval_every": 50}
    may_stop = figures(home, "sft", given | {"stop_early": "heldout"})["hours"]
    goes_on = figures(home, "sft", given | {"stop_early": "none"})["hours"]
    assert 0.5 <= may_stop["low"] / goes_on["low"] < 0.7
    assert (may_stop["likely"], may_stop["high"]) == (goes_on["likely"], goes_on["high"])

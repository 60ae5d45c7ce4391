"""What the benchmarks read off runs and processes, and what they say of it."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks import all as everything
from benchmarks import bench, busy_cores, demo_phases, inputs, ours, peer, processes
from benchmarks.cases import CASES, GPU_CASES, REAL_CASES, jobs
from benchmarks.cases import settings as settings_of
from engine.home.rows import NewRun
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.settings import resolution


def test_steps_are_timed_between_lines_without_the_first_and_the_last():
    lines = [{"step": step, "time": when} for step, when in enumerate([10, 13, 14, 16, 99])]
    assert ours.step_times(lines) == [(2, 13.0, 14.0), (3, 14.0, 16.0)]


def test_processor_time_between_samples_is_in_proportion():
    samples = [(0.0, 1.0), (10.0, 3.0), (20.0, 3.0)]
    assert [ours.interpolate(samples, at) for at in (-1, 0, 5, 10, 15, 30)] == [1, 1, 2, 3, 3, 3]
    assert ours.interpolate([], 5.0) == 0.0


def test_a_process_is_watched_with_everything_below_it():
    inner = "import time; b = bytearray(40 << 20); print('up', flush=True); time.sleep(60)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {inner!r}])"
    process = subprocess.Popen([sys.executable, "-S", "-c", outer], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        watched = ours.Watched()
        watched.look(process.pid)
        assert len(watched.peaks) == 2
        assert watched.peak_mb > 40
        assert watched.samples[0][1] == sum(watched.spent.values())
    finally:
        for pid in processes.family(process.pid):
            os.kill(pid, 9)
        process.wait()


def test_what_is_started_on_a_core_stays_there_and_the_caller_does_not():
    before = os.sched_getaffinity(0)
    core = min(before)
    with ours.on_cores([core]):
        said = subprocess.check_output(
            [sys.executable, "-S", "-c", "import os; print(os.sched_getaffinity(0))"]
        )
    assert said.strip() == str({core}).encode()
    assert os.sched_getaffinity(0) == before


def test_what_an_interrupted_call_left_in_the_queue_is_cancelled(tmp_path):
    home = Home.locate(tmp_path)
    with Store(home) as store:
        row = store.insert_run(NewRun("left", "train", "sft", "e@1", "pebble"), lambda _: None)
    ours.end_all(home)
    with Store(home) as store:
        assert store.get_run(row.run_id).state == "cancelled"


def test_more_threads_than_cores_are_refused():
    with pytest.raises(ValueError, match="1000 threads"):
        ours.cores_for(1000)


def test_second_matrices_are_zeroed_and_first_ones_kept(tmp_path):
    tensors = {"m.lora_A.weight": b"\x01" * 8, "m.lora_B.weight": b"\x02" * 4}
    header, body = {"__metadata__": {"format": "pt"}}, b""
    for name, data in tensors.items():
        entry = {"dtype": "F32", "shape": [len(data) // 4]}
        header[name] = {**entry, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    source, target = tmp_path / "a.safetensors", tmp_path / "new" / "b.safetensors"
    source.write_bytes(len(text).to_bytes(8, "little") + text + body)
    bench.zero_second_matrices(source, target)
    assert target.read_bytes() == source.read_bytes()[:-4] + bytes(4)


def test_throughput_is_tokens_for_sft_and_steps_for_grpo():
    entry = {"seconds": 2.0, "cpu_s": 4.0, "tokens": 100, "steps": 3}
    assert bench.rated(entry, CASES["sft-tiny"])["rate"] == 50.0
    grpo = bench.rated(entry, CASES["grpo-tiny"])
    assert (grpo["rate"], grpo["rate_cpu"]) == (1.5, 0.75)


def test_work_is_counted_over_the_rows_of_the_measured_steps():
    case = CASES["sft-tiny"]
    rows = [{"tokens": 10, "prompt_tokens": 4}] * (3 * case.prompts)
    one = bench.work(case, {"rows": rows}, [2])
    assert bench.work(case, {"rows": rows}, [2, 3]) == 2 * one > 0


TRAINED = [c for c in [*CASES.values(), *GPU_CASES.values()] if c.algorithm != "decode"]


@pytest.mark.parametrize("case", TRAINED, ids=lambda c: c.name)
def test_every_case_uses_settings_that_exist_and_rows_that_suffice(case):
    given = settings_of(case)
    assert resolution.validate(case.algorithm, given) == given
    assert case.rows >= case.steps * case.prompts
    assert case.steps >= 4, "the first and the last step are not measured"
    assert case.padded in case.variants
    assert set(case.targets) <= {*case.variants, "best"}


def test_a_round_goes_on_where_it_was_interrupted(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "BEGUN", tmp_path / "begun.json")
    names = {"job": "sft-tiny@1", "key": "k", "round": 2}
    line = bench.begun(names)
    assert names.items() < line.items() and "ours" not in line
    bench.BEGUN.write_text(json.dumps(line | {"ours": {"rate": 3.0}}))
    assert bench.begun(names) == line | {"ours": {"rate": 3.0}}
    assert "ours" not in bench.begun(names | {"round": 3})
    monkeypatch.setattr(bench, "GO_ON_S", -1.0)
    assert "ours" not in bench.begun(names)


@pytest.mark.parametrize("case", REAL_CASES.values(), ids=lambda c: c.name)
def test_cases_of_a_real_model_run_only_where_they_are_named(case):
    given = settings_of(case)
    assert resolution.validate(case.algorithm, given) == given
    assert case.rows >= case.steps * case.prompts and case.steps >= 3
    assert case.name not in {job.case.name for job in [*jobs(), *jobs(case.algorithm)]}
    assert [job.name for job in jobs(f"{case.name}@1")] == [f"{case.name}@1"]
    assert case.name in {job.case.name for job in jobs("smollm2")}


def test_made_up_text_is_the_same_every_time():
    vocabulary = inputs.words()
    assert len(set(vocabulary)) == 900 and vocabulary == inputs.words()
    import random

    one, two = (inputs.text(random.Random(3), vocabulary, 50) for _ in range(2))
    assert one == two and len(one.split()) == 50


def test_log_normal_lengths_have_their_median_and_stay_in_bounds():
    import random

    rng = random.Random(0)
    found = sorted(inputs.lognormal(rng, 40, 0.9, 3, 300) for _ in range(4001))
    assert 36 <= found[2000] <= 44 and found[0] >= 3 and found[-1] <= 300


def test_sections_and_cases_are_told_apart():
    assert everything.choose("") == (list(everything.SECTIONS), "")
    assert everything.choose("cold") == (["cold"], "")
    assert everything.choose("sft-tiny,demo") == (["demo", "train"], "sft-tiny")
    with pytest.raises(ValueError, match="parity"):
        everything.choose("sft-tinny")


def test_busy_cores_are_judged_by_the_share_of_idle_throughput_that_is_left():
    rates = {"shipped idle": [100.0, 90.0, 110.0], "shipped busy": [30.0, 40.0, 35.0]}
    report = busy_cores.summary(rates | {"default idle": [100.0], "default busy": [3.0]})
    assert report["shipped_share"] == 0.35 and report["default_share"] == 0.03
    said = busy_cores.said(report)
    assert "35%" in said and "pass" in said and "3.0%" in said
    assert "MISS" in busy_cores.said({"shipped_share": 0.18})


def phases(ours_s, theirs_s, curve=(1.0, 0.5)):
    def side(seconds):
        one = {"seconds": seconds, "curve": list(curve), "steps": 2}
        return {"sft": dict(one), "grpo": {**one, "seconds": 3 * seconds}}

    return {"ours": side(ours_s), "trl": side(theirs_s)}


def test_demo_phases_are_compared_inside_rounds():
    report = demo_phases.summary([phases(1.0, 4.0), phases(2.0, 10.0), phases(1.0, 7.0)])
    assert report["ratio"] == 5.0 and report["ours_s"] == 4.0
    assert report["sft_loss_gap"] == 0.0
    assert "pass" in demo_phases.said(report)


def test_an_earlier_state_of_the_code_is_compared_inside_rounds_too():
    lines = [phases(1.0, 4.0) | {"before": {"sft": 2.0, "grpo": spent}} for spent in (6.0, 10.0)]
    report = demo_phases.summary(lines)
    assert report["before_ratio"] == 2.5  # of 8 and of 12 seconds by 4
    assert "2.50x as fast as before" in demo_phases.said(report)


def test_demo_losses_that_differ_are_told():
    line = phases(1.0, 2.0)
    line["trl"]["sft"]["curve"] = [1.0, 0.6]
    said = demo_phases.said(demo_phases.summary([line]))
    assert "MISS" in said and "DIFFERENT" in said


def test_the_peer_gets_the_libraries_both_sides_use_in_our_versions():
    from importlib.metadata import version

    wanted = peer.requirements()
    assert wanted[0] == f"trl=={peer.TRL}"
    assert f"transformers=={version('transformers')}" in wanted
    assert all("+" not in each for each in wanted)

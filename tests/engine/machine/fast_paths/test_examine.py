"""Paths are tried in processes that may die of them."""

from pathlib import Path

import pytest
from stand_ins import stand_in

from engine.core.errors import UserError
from engine.core.hardware import Device
from engine.home.run_dir import Home
from engine.machine.fast_paths.catalogue import FAST_PATHS, paths_of
from engine.machine.fast_paths.examine import examine_device
from engine.machine.fast_paths.results import (
    DeviceResults,
    PathResult,
    all_results,
    keep_results,
    read_results,
    why_off,
)

CPU = Device("cpu", "a processor", "cpu", memory_total=1, memory_free=1)
NAMES = paths_of("cpu")


@pytest.fixture(autouse=True)
def stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, fast_paths=Path(__file__).parents[2] / "fake_fast_paths.py")


def test_all_that_work_are_kept_with_what_they_hold_for(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HONESMITH_TEST_PATH", "")
    told: list[str] = []
    results = examine_device(home, CPU, report=lambda result: told.append(result.name))
    assert told == NAMES == [path.name for path in results.paths] and results.off == {}
    assert read_results(home, {"device": "a card", "driver": "580.1"}) == results
    assert read_results(home, {"device": "a card", "driver": "580.2"}) is None


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("segfault", "the process that tried it was killed by SIGSEGV"),
        ("exit", "ended with status 1: an illegal memory access was encountered"),
        ("hang", "wrote nothing for"),
    ],
)
def test_a_path_that_ends_its_process_is_off_and_the_next_ones_are_tried(
    home: Home, monkeypatch: pytest.MonkeyPatch, what: str, reason: str
):
    broken = NAMES[1]
    monkeypatch.setenv("HONESMITH_TEST_PATH", f"{broken}:{what}")
    monkeypatch.setattr("engine.machine.fast_paths.examine.START_S", 0.0)
    results = examine_device(home, CPU, path_s=1.0)
    assert list(results.off) == [broken] and reason in results.off[broken]
    assert [path.name for path in results.paths] == NAMES
    assert [path.state for path in results.paths].count("on") == len(NAMES) - 1


def test_a_device_on_which_nothing_starts_is_an_error_with_its_last_words(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HONESMITH_TEST_PATH", "start")
    with pytest.raises(UserError, match="no CUDA driver") as raised:
        examine_device(home, CPU)
    assert raised.value.code == "DEVICE_UNUSABLE" and all_results(home) == []


def test_a_part_of_the_paths_is_not_kept_as_if_it_were_all(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HONESMITH_TEST_PATH", "")
    assert len(examine_device(home, CPU, names=NAMES[:1]).paths) == 1
    assert all_results(home) == []


def test_a_part_of_a_path_that_hangs_is_named(home: Home, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HONESMITH_TEST_PATH", "vllm:hang")
    monkeypatch.setattr("engine.machine.fast_paths.examine.START_S", 0.0)
    result = examine_device(home, CPU, names=["vllm"], path_s=1.0)
    assert "wrote nothing for 1 s, asked to wake up" in result.off["vllm"]


def test_what_is_tried_again_takes_the_place_of_what_was_found_before(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HONESMITH_TEST_PATH", f"{NAMES[0]}:exit")
    assert list(examine_device(home, CPU).off) == NAMES[:1]
    monkeypatch.setenv("HONESMITH_TEST_PATH", "")
    assert examine_device(home, CPU, names=NAMES[:1]).off == {}
    (stored,) = all_results(home)
    assert sorted(path.name for path in stored.paths) == sorted(NAMES) and stored.off == {}


def test_what_holds_for_all_devices_of_a_name_is_tried_on_one(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HONESMITH_TEST_PATH", "")
    known = PathResult(name=NAMES[0], state="off", reason="it differed")
    told: list[str] = []
    results = examine_device(
        home, CPU, report=lambda one: told.append(one.name), known_results=[known]
    )
    assert told == NAMES[1:] and results.off == {NAMES[0]: "it differed"}


def test_a_processor_without_torch_knows_what_the_newest_trial_found(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("engine.machine.fast_paths.results.driver_version", lambda: "580.1")
    monkeypatch.setattr("engine.machine.install.vllm_env.version_in", lambda home: "vllm==1")
    gpu = Device("cuda:0", "a card", "cuda", 1, 1)
    off = PathResult(name="vllm", state="off", reason="it does not start")
    known = {"device": "a card", "driver": "580.1", "vllm": "vllm==1", "torch": "2.13"}
    keep_results(home, DeviceResults(identity=known, time=1.0, paths=(off,)))
    assert why_off(home, gpu, "vllm") == "it does not start"
    assert why_off(home, gpu, "bfloat16") == ""
    monkeypatch.setattr("engine.machine.install.vllm_env.version_in", lambda home: "vllm==2")
    assert why_off(home, gpu, "vllm") == ""  # another vLLM was not tried yet


def test_every_path_says_what_is_done_without_it():
    assert all(path.without and path.devices for path in FAST_PATHS.values())

"""The gap between sampler and trainer, judged at every step."""

from pathlib import Path
from typing import Any

import pytest
from loops import go, make_run, metrics, push

from engine.home.run_dir import Home
from engine.worker.core.failures import WorkerFailure
from engine.worker.rollouts import samplers
from engine.worker.rollouts.sync_check import SyncCheck


class Told:
    """Keeps the events a check writes."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, name: str, message: str, **fields: Any) -> None:
        self.events.append((name, {"message": message, **fields}))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.events]


def looked(check: SyncCheck, gaps: list[float]) -> list[dict[str, float]]:
    return [check.check(step, gap, 10 * gap) for step, gap in enumerate(gaps, 1)]


def test_rounding_is_no_news():
    told = Told()
    lines = looked(SyncCheck("float32", told, {}), [1e-6, 3e-6, 2e-6, 8e-6, 4e-6, 9e-6])
    assert told.events == []
    assert lines[3]["sampler_gap_mean"] == 8e-6
    assert lines[3]["sampler_gap_max"] == pytest.approx(8e-5)


def test_drift_is_the_latest_four_steps_against_the_first_four():
    lines = looked(SyncCheck("bfloat16", Told(), {}), [0.001, 0.003, 0.001, 0.003, 0.006, 0.008])
    assert lines[0]["sampler_gap_drift"] == 0.0
    assert lines[3]["sampler_gap_drift"] == 0.0
    # first: median of .001 .003 .001 .003 = .002; latest: .001 .003 .006 .008 -> .0045
    assert lines[5]["sampler_gap_drift"] == pytest.approx(0.0025)


def test_an_adapter_that_never_arrives_is_seen_before_it_ends_the_run():
    # The sampler stays at the base; the policy moves by 0.0004 nats a step.
    told = Told()
    check = SyncCheck("float32", told, {})
    with pytest.raises(WorkerFailure, match="adapter not delivered") as failure:
        looked(check, [1e-6 + 0.0004 * step for step in range(80)])
    assert failure.value.kind == "internal" and "sampler torch" in str(failure.value.advice)
    assert "step 51" in failure.value.evidence  # 0.0004 * 50 is the limit of 0.02
    assert told.names == ["sampler_gap"]
    assert told.events[0][1]["step"] == 4  # 0.0004 * 3 is the first above 0.001


def test_a_gap_that_grows_is_told_once_each_time_it_begins():
    told = Told()
    looked(SyncCheck("bfloat16", told, {}), [0.003] * 4 + [0.02] * 8 + [0.003] * 6 + [0.02] * 4)
    assert told.names == ["sampler_gap_grows", "sampler_gap_grows"]
    assert told.events[0][1]["step"] == 7  # the median of the last four passes 5 * 0.003


def test_one_high_step_does_not_count_as_growth():
    told = Told()
    looked(SyncCheck("bfloat16", told, {}), [0.003] * 4 + [0.03] + [0.003] * 6)
    assert told.events == []


@pytest.mark.parametrize(("precision", "gap"), [("float32", 0.05), ("bfloat16", 0.3)])
def test_a_gap_no_rounding_makes_ends_the_run_at_once(precision, gap):
    with pytest.raises(WorkerFailure):
        SyncCheck(precision, Told(), {}).check(1, gap, gap)


def test_what_float32_must_not_show_is_usual_for_bfloat16():
    told = Told()
    looked(SyncCheck("bfloat16", told, {}), [0.015] * 6)
    assert told.events == []
    looked(SyncCheck("float32", told, {}), [0.015] * 6)
    assert told.names == ["sampler_gap"]


def test_a_gap_that_is_no_number_ends_the_run():
    with pytest.raises(WorkerFailure):
        SyncCheck("float32", Told(), {}).check(3, float("nan"), float("nan"))


def test_a_sampler_that_differs_on_purpose_is_judged_by_growth_alone():
    told = Told()
    looked(SyncCheck("float32", told, {}, exact=False), [0.3] * 6)
    assert told.events == []
    looked(SyncCheck("float32", told, {}, exact=False), [0.02] * 4 + [0.3] * 4)
    assert told.names == ["sampler_gap_grows"]


def test_the_first_steps_are_remembered_across_a_resume():
    state: dict[str, Any] = {}
    looked(SyncCheck("bfloat16", Told(), state), [0.003] * 6)
    told = Told()
    looked(SyncCheck("bfloat16", told, state), [0.02] * 3)
    assert told.names == ["sampler_gap_grows"]


class Deaf:
    """Our own sampler, except that no adapter ever reaches it after the one it has."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def load(self, adapter: Any) -> None:
        return

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


@pytest.mark.worker
@pytest.mark.timeout(60)
def test_a_run_whose_adapter_never_reaches_the_sampler_fails_by_name(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make = samplers.make_sampler
    monkeypatch.setattr(samplers, "make_sampler", lambda *given: Deaf(make(*given)))
    settings = {"steps": 8, "prompts_per_step": 6, "group_size": 4, "max_tokens": 20}
    settings |= {"eval_rows": 4, "eval_every": 8, "learning_rate": 3e-3}
    run = make_run(home, push(home, tmp_path / "sums"), "grpo", settings)
    with pytest.raises(WorkerFailure, match="adapter not delivered"):
        go(run)
    before = [line["sampler_gap_mean"] for line in metrics(run) if line["step"] > 0]
    assert before[0] < 1e-4  # at step 1 base and policy are still the same
    assert len(before) < 8

"""The file rounds are kept in, and what is read off them."""

from dataclasses import replace

import pytest

from benchmarks import cases, pairs
from benchmarks.cases import CASES, Job

JOB = Job(CASES["sft-tiny"], 1)
TWO = Job(CASES["sft-tiny"], 2)


def entry(rate, *, cpu=None, rss=100.0, losses=(), same=False, gflops=0.0):
    return {
        "rate": rate,
        "rate_cpu": rate if cpu is None else cpu,
        "rss_mb": rss,
        "losses": list(losses),
        "same_batches": same,
        "gflops": gflops,
        "gflops_cpu": gflops / 2,
    }


def rounds(*numbers, job=JOB, **kinds):
    """A round for every ours' rate in `numbers`; `kinds` name a variant's rates."""
    found = []
    for at, rate in enumerate(numbers):
        line = {
            "job": job.name,
            "key": "k",
            "matmul": {"gflops": 50.0, "gflops_cpu": 25.0},
            "ours": entry(rate),
        }
        line |= {name: entry(rates[at]) for name, rates in kinds.items() if at < len(rates)}
        found.append(line)
    return found


def test_a_round_that_was_kept_is_read_back(tmp_path):
    path = tmp_path / "deep" / "results.jsonl"
    pairs.append(path, {"job": "a", "key": "k"})
    pairs.append(path, {"job": "b", "key": "k"})
    assert [line["job"] for line in pairs.read(path)] == ["a", "b"]


def test_a_line_cut_short_counts_for_nothing_and_spoils_no_later_one(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"job": "a", "key": "k"}\n{"job": "b", "k')
    assert [line["job"] for line in pairs.read(path)] == ["a"]
    pairs.append(path, {"job": "c", "key": "k"})
    assert [line["job"] for line in pairs.read(path)] == ["a", "c"]


def test_no_file_is_no_round(tmp_path):
    assert pairs.read(tmp_path / "none.jsonl") == []


def test_only_rounds_of_the_same_software_and_settings_are_pooled():
    found = [*rounds(1.0), {**rounds(2.0)[0], "key": "other"}, *rounds(3.0, job=TWO)]
    assert [line["ours"]["rate"] for line in pairs.of(found, JOB, "k")] == [1.0]


def test_sides_take_turns_from_either_end():
    first, second = pairs.due(JOB, 0), pairs.due(JOB, 1)
    assert first[0] == "ours" and second == first[::-1]


def test_a_variant_with_a_limit_leaves_after_its_rounds():
    job = Job(CASES["sft-small"], 1)
    assert "by_length" in pairs.due(job, 1) and "by_length" not in pairs.due(job, 2)
    assert "packed" in pairs.due(job, 2)


def test_the_ratio_is_the_median_of_ratios_inside_rounds():
    # Rounds of 4x, 5x and 9x: not the ratio of the medians, which would be 40 / 5 = 8.
    found = rounds(40.0, 25.0, 90.0, padded=(10.0, 5.0, 10.0))
    assert pairs.ratio(found, "padded") == 5.0


def test_a_variant_that_never_ran_has_no_ratio():
    with pytest.raises(ValueError, match="packed"):
        pairs.ratio(rounds(1.0, padded=(1.0,)), "packed")


def test_the_best_variant_is_the_one_with_the_highest_rate():
    found = rounds(10.0, 10.0, padded=(1.0, 1.0), packed=(3.0, 2.0), by_length=(2.0, 2.0))
    assert pairs.best_variant(JOB, found) == "packed"
    lines = pairs.verdicts(JOB, found)
    best = [line for line in lines if line.variant.startswith("best")]
    assert [line.variant for line in best] == ["best (packed)"]
    assert best[0].ratio == pytest.approx((10 / 3 + 5) / 2)


def test_two_threads_ask_for_a_share_of_the_ratio():
    assert JOB.target("padded") == 4.0 and TWO.target("padded") == pytest.approx(2.6)


def test_a_ratio_below_its_target_is_missed():
    (line,) = [v for v in pairs.verdicts(JOB, rounds(3.0, padded=(1.0,))) if v.variant == "padded"]
    assert line.passed is False and pairs.judged(line) == "MISS ratio, memory"


def test_the_matrix_rate_stands_in_for_a_ratio():
    found = rounds(3.0, padded=(1.0,))
    # 90 % of 50 by the wall, 86 % of 25 by the processor
    found[0]["ours"] |= {"gflops": 45.0, "gflops_cpu": 21.5, "rss_mb": 50.0}
    line = pairs.verdicts(JOB, found)[0]
    assert line.share == pytest.approx(0.86)
    assert pairs.judged(line) == "pass (85% of matmul)"


def test_memory_is_held_against_the_padded_variant_alone():
    found = rounds(9.0, padded=(1.0,), packed=(1.0,))
    by_name = {line.variant: line for line in pairs.verdicts(JOB, found)}
    assert "memory" in pairs.judged(by_name["padded"])
    assert "memory" not in pairs.judged(by_name["packed"])
    found[0]["ours"]["rss_mb"] = 50.0  # exactly half
    assert pairs.judged(pairs.verdicts(JOB, found)[0]) == "pass"


def test_losses_are_compared_step_by_step_and_only_on_the_same_batches():
    found = rounds(9.0, padded=(1.0,), packed=(1.0,))
    found[0]["ours"] |= {"losses": [2.0, 1.02]}
    found[0]["padded"] |= {"losses": [2.0, 1.0], "same_batches": True}
    found[0]["packed"] |= {"losses": [9.0, 9.0]}
    assert pairs.loss_gap(found, "padded") == pytest.approx(0.02)
    assert pairs.loss_gap(found, "packed") is None
    assert "loss" in pairs.judged(pairs.verdicts(JOB, found)[0])


def test_the_table_has_a_row_for_each_verdict():
    lines = pairs.verdicts(JOB, rounds(9.0, padded=(1.0,), packed=(2.0,)))
    text = pairs.table(lines).splitlines()
    assert len(text) == 2 + len(lines)
    assert all(row.count("|") == text[0].count("|") for row in text)
    assert "| **9.00** |" in text[2] and "| 4.0 |" in text[2]


def test_names_select_cases_by_name_by_algorithm_and_by_thread():
    assert [job.name for job in cases.jobs("sft-tiny@2")] == ["sft-tiny@2"]
    assert {job.case.algorithm for job in cases.jobs("grpo")} == {"grpo"}
    assert len(cases.jobs()) == 2 * len(CASES)
    assert len(cases.jobs("sft-tiny,sft")) == len(cases.jobs("sft"))


def test_a_name_that_selects_nothing_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"sft-tinny.*grpo-long"):
        cases.jobs("sft-tinny")


def test_what_was_measured_is_pooled_by_settings_and_versions_but_not_by_targets():
    base = cases.fingerprint(JOB, {"torch": "1"})
    assert base == cases.fingerprint(JOB, {"torch": "1"})
    assert base != cases.fingerprint(TWO, {"torch": "1"})
    assert base != cases.fingerprint(JOB, {"torch": "2"})
    other = replace(JOB.case, targets={"padded": 9.0})
    assert base == cases.fingerprint(Job(other, 1), {"torch": "1"})
    other = replace(JOB.case, steps=99)
    assert base != cases.fingerprint(Job(other, 1), {"torch": "1"})

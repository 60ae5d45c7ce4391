"""When faults of the rows are findings, and when they did no harm."""

import random
from dataclasses import replace

import pytest
from simulated import judged
from troubled import TROUBLES

from engine.evidence.detect.detectors import find_all
from engine.evidence.verdict.row_facts import RowFacts

OF_ROWS = ("contradictory_rows", "duplicates", "pairs_alike", "rows_disagree")


@pytest.mark.parametrize("trouble", OF_ROWS)
def test_rows_of_a_run_that_got_better_are_left_in_peace(trouble: str):
    facts = TROUBLES[trouble](2003).facts()
    assert find_all(facts)[0].id == trouble
    better = replace(facts, comparison=judged(random.Random(3), 0.2, 0.8, 300))
    assert trouble not in [finding.id for finding in find_all(better)]


def test_an_exam_in_other_words_is_a_finding_though_a_little_of_it_came_along():
    facts = TROUBLES["other_exam"](2003).facts()
    lines = [
        line | ({"heldout_success": 0.2} if "heldout_success" in line else {})
        for line in facts.lines
    ]
    better = replace(facts, lines=lines, comparison=judged(random.Random(3), 0.0, 0.2, 300))
    assert find_all(better)[0].id == "other_exam"


def test_a_leak_is_told_of_a_run_that_got_better():
    run = TROUBLES["leak"](2004)
    assert run.verdict is not None and run.verdict.outcome.verdict == "better"
    (finding,) = find_all(run.facts())
    assert finding.id == "leak" and finding.severity == "high"
    run.row_facts = RowFacts()
    assert find_all(run.facts()) == []


def test_rows_that_were_not_read_say_nothing():
    run = TROUBLES["duplicates"](2003)
    run.row_facts = RowFacts()
    assert find_all(run.facts()) == []


def test_one_answer_to_all_is_no_finding_where_the_model_is_clearly_worse_or_nothing_was_gained():
    run = TROUBLES["constant_answer"](2003)
    assert [finding.id for finding in find_all(run.facts())] == ["constant_answer"]
    assert run.constant is not None
    often = replace(run.facts(), constant=replace(run.constant, right=190))
    assert "constant_answer" not in [finding.id for finding in find_all(often)]
    same = replace(run.facts(), comparison=judged(random.Random(3), 0.3, 0.3, 200))
    assert "constant_answer" not in [finding.id for finding in find_all(same)]


# What a run learnt by heart is changed to, from half of its way on: metric, then its factor.
NO_MEMORY = {
    "the held-out loss rises": ("heldout_loss", lambda way: 1 + way),
    "the held-out loss still falls": ("heldout_loss", lambda way: 2 - way),
    "success still rises": ("heldout_success", lambda way: 0.5 + 1.5 * way),
    "the rows are not known by heart": ("loss", lambda way: 8.0),
}


@pytest.mark.parametrize("change", NO_MEMORY)
def test_rows_are_known_by_heart_only_where_all_else_is_at_rest(change: str):
    facts = TROUBLES["memorised_rows"](2004).facts()
    assert find_all(facts)[0].id == "memorised_rows"
    metric, factor = NO_MEMORY[change]
    last = facts.lines[-1]["step"]
    lines = [
        line | ({metric: line[metric] * factor(line["step"] / last)} if metric in line else {})
        for line in facts.lines
    ]
    changed = find_all(replace(facts, lines=lines))
    assert "memorised_rows" not in [finding.id for finding in changed]


def test_rows_that_were_seen_a_few_times_are_not_known_by_heart():
    facts = TROUBLES["memorised_rows"](2004).facts()
    many = replace(facts, training_rows=replace(facts.training_rows, rows=10_000))
    assert find_all(many) == []

"""What an exam can show, before the run."""

import pytest
from typed_settings import grpo_settings

from engine.core.files import write_json
from engine.cost.exam import Exam, exam_of
from engine.environments.env_facts import EnvFacts, RowLengths
from engine.evidence.stats.power import mcnemar_power
from engine.home.rows import NewRun
from engine.home.run_dir import Home
from engine.home.store import Store

ENV = "sums@0123456789ab"


def finished(home: Home, *, before: float, gained: int, lost: int, n: int = 100) -> str:
    """A run that is done, with the evidence of its verdict."""

    def prepare(run_id: str) -> None:
        run = home.run(run_id)
        run.create()
        evidence = {"metric": "success", "n": n, "gained": gained, "lost": lost}
        evidence |= {"before": {"step": 0, "value": before}, "difference": (gained - lost) / n}
        write_json(run.result, {"verdict": "better", "evidence": evidence})

    with Store(home) as store:
        row = store.insert_run(NewRun("sums-grpo", "train", "grpo", ENV, "pebble"), prepare)
        for state, before_it in (("preparing", "queued"), ("running", "preparing")):
            store.set_state(row.run_id, state, only_from={before_it})
        store.set_state(row.run_id, "done", only_from={"running"}, verdict="better")
    return row.run_id


def exam(
    home: Home, heldout: int = 400, eval_rows: int = 400, *, scored: bool = True, dev: int = 0
):
    lengths = (RowLengths(10, 14, ((10, 14),)),)
    facts = EnvFacts(ENV, "single", scored, 200, heldout, 200, lengths, dev_rows=dev)
    return exam_of(home, ENV, "pebble", grpo_settings({"eval_rows": eval_rows}), facts)


def sure(found: Exam | None) -> Exam:
    assert found is not None
    return found


@pytest.mark.parametrize("heldout", [60, 200, 400, 1000])
def test_the_difference_that_is_told_shows_in_four_cases_of_five(home: Home, heldout: int):
    found = sure(exam(home, heldout, eval_rows=1000))
    assert (found.asked, found.reported) == (heldout, heldout // 2)
    power = mcnemar_power(found.reported, found.gap, discordant_share=0.2)
    assert 0.7 < power < 0.9
    assert found.doubts() == [] and "base" not in found.to_json()


def test_what_chooses_the_checkpoint_does_not_count(home: Home):
    found = sure(exam(home, heldout=400))
    assert found.in_words() == (
        "200 tasks show a difference of 9 points or more (80% power); the other 200 of 400 choose "
        "the checkpoint"
    )
    assert sure(exam(home, 400, eval_rows=100)).reported == 50
    assert exam(home, 400, eval_rows=0) is None and exam(home, scored=False) is None


def test_where_dev_tasks_choose_all_held_out_tasks_are_reported(home: Home):
    found = sure(exam(home, heldout=100, eval_rows=80, dev=150))
    assert (found.asked, found.reported, found.dev) == (80, 80, 80)
    assert found.gap == sure(exam(home, heldout=160)).gap
    assert found.in_words().endswith("; 80 dev tasks choose the checkpoint")
    assert found.to_json()["dev"] == 80 and "dev" not in sure(exam(home)).to_json()


def test_finished_runs_tell_how_much_changes_and_where_it_starts(home: Home):
    assumed = sure(exam(home)).gap
    finished(home, before=0.5, gained=3, lost=1)
    best = finished(home, before=0.56, gained=24, lost=2)
    known = sure(exam(home))
    assert known.gap < assumed, "15 % of the tasks changed, not 20 %"
    assert known.to_json()["base"] == 0.56
    assert known.to_json()["best_so_far"] == {"run_id": best, "gain": 0.22}
    assert known.doubts() == [] and "56% are solved before" in known.in_words()


def test_a_gain_that_cannot_be_seen_is_out_of_reach(home: Home):
    finished(home, before=0.97, gained=2, lost=1)
    (doubt,) = sure(exam(home, heldout=100)).doubts()
    assert doubt.startswith("out of reach: 97% are solved already, so at most 3 points")


def test_a_best_run_below_what_can_be_shown_names_the_tasks_that_would_do(home: Home):
    best = finished(home, before=0.3, gained=9, lost=6)
    (doubt,) = sure(exam(home, heldout=100)).doubts()
    assert f"({best}) gained 3 points" in doubt and "held out" in doubt
    needed = int(doubt.split(" it takes ")[1].split(" ")[0].replace(",", ""))
    assert 0.75 < mcnemar_power(needed, 0.03, discordant_share=0.15) < 0.85


def test_a_damaged_result_says_nothing(home: Home):
    run_id = finished(home, before=0.3, gained=9, lost=6)
    home.run(run_id).result.write_text('{"verdict": "better", "evidence": {"metric": "success"}}')
    assert sure(exam(home)).earlier is None

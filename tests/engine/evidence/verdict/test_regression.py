"""Kept skills, from rows alone."""

import json

import pytest
from as_json import kept_skills, records, run_verdict
from hypothesis import given
from hypothesis import strategies as st
from run_configs import MANIFEST

from engine.core.files import write_json
from engine.evidence.report.html_report import model_card, report_markdown, write_report
from engine.evidence.verdict import regression
from engine.evidence.verdict.comparison import LostOfRight, worst_kind
from engine.records.manifest import ReplayUsed
from tests.helpers.env_versions import write_version

SKILLS = ("reverse", "copy", "count", "upper")


@pytest.fixture
def asked(make_run, rows):
    """asked(before, after) -> a run whose tasks `skill-i` were solved where the functions say."""

    def make(before, after, battery="pebble skills", n=12, error_from=None):
        run = make_run("sft")
        for step in (0, 9):
            run.evals(step, rows.halved(lambda i, s=step: s == 9 or i % 9 == 0, 100))
        run.checkpoint(9, best=True)
        for when, solved in (("before", before), ("after", after)):
            lines = []
            for skill in SKILLS:
                for i in range(n):
                    error = (
                        "boom"
                        if error_from is not None and when == "after" and (i >= error_from)
                        else None
                    )
                    lines.append(
                        rows.eval(
                            f"{skill}-{i}",
                            solved(skill, i),
                            error=error,
                            battery=battery,
                            family=skill,
                            model=run.id,
                        )
                    )
            path = run.run.kept(when)
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return run

    return make


def test_a_run_that_lost_old_skills_is_said_to_have_forgotten_them(home, asked):
    run = asked(lambda skill, i: True, lambda skill, i: skill != "reverse" or i < 2)
    found = kept_skills(run.run)
    (battery,) = found["batteries"]
    assert found["verdict"] == battery["verdict"] == "forgotten"
    assert (battery["before"], battery["after"]) == (1.0, pytest.approx(38 / 48, abs=1e-4))
    assert (battery["n"], battery["lost"], battery["gained"]) == (48, 10, 0)
    # Wilson's interval of 10 of 12 by hand: 0.552 to 0.953.
    lost = {"right": 12, "lost": 10, "share": 0.8333, "interval": (0.552, 0.953)}
    reverse = {"skill": "reverse", "before": 1.0, "after": 0.1667, "lost_of_right": lost}
    assert battery["skills"][0] == {**reverse, "is_lost": True}
    assert [skill["is_lost"] for skill in battery["skills"][1:]] == [False] * 3
    assert battery["lost_of_right"]["right"] == 48 and battery["lost_of_right"]["lost"] == 10
    all_and_worst = "10 of 48 right ones lost (12 to 34 %), most in reverse: 10 of 12 right ones"
    assert f"{all_and_worst} lost (55 to 95 %)" in found["summary"]
    assert "most of all reverse 1.00 to 0.17." in found["summary"]
    verdict = run_verdict(run.run)
    assert verdict["verdict"] == "better", "the word is about the task that was trained"
    assert verdict["kept_skills"]["verdict"] == "forgotten"
    assert found["summary"] in verdict["summary"] and found["summary"] in verdict["warnings"]
    run.finish(verdict="better")
    for text in (write_report(home, run.id).read_text(), report_markdown(home, run.id)):
        assert "reverse" in text and "forgotten" in text.lower()
    assert "forgotten" in model_card(home, run.id).lower()


def test_a_run_that_lost_nothing_says_what_would_have_shown(asked):
    run = asked(lambda skill, i: i != 0, lambda skill, i: i != 1)
    found = kept_skills(run.run)
    assert found["verdict"] == "kept" and "no clear loss" in found["summary"]
    # As many are gained as lost, and the mean hides both.
    levels = "92 % to 92 % on 48 tasks (95 % interval of the change -"
    assert levels in found["summary"] and "points; a loss of" in found["summary"]
    assert "4 of 44 right ones lost (4 to 21 %)" in found["summary"]
    verdict = run_verdict(run.run)
    assert not any("Forgotten" in text for text in verdict["warnings"])
    assert found["summary"] not in verdict["summary"], "good news stays where one looks for it"


def test_one_lost_skill_is_named_although_others_gained_as_much(asked):
    """Ten of twelve are lost in one skill and ten gained in another: the mean hides it."""
    run = asked(
        lambda skill, i: skill != SKILLS[1] or i < 2,
        lambda skill, i: skill != SKILLS[0] or i < 2,
    )
    found = kept_skills(run.run)
    assert found["verdict"] == "kept", "the word is about all skills together"
    assert found["summary"] == (
        f"Kept skills (pebble skills): {SKILLS[0]} was lost: 10 of 12 right ones lost (55 to "
        "95 %); all skills together: no clear loss, 79 % to 79 % on 48 tasks (95 % interval of the "
        "change -18.5 to +18.5 points)."
    )
    verdict = run_verdict(run.run)
    assert found["summary"] in verdict["summary"] and found["summary"] in verdict["warnings"]


def test_two_of_two_lost_are_too_few_to_name_a_kind_of_task():
    dates, sums = LostOfRight.from_counts(2, 2), LostOfRight.from_counts(9, 3)
    assert worst_kind({"dates": dates, "sums": sums}) == "sums"
    fewer = LostOfRight.from_counts(right=9, lost=1)
    assert worst_kind({"dates": dates, "sums": fewer}) is None, "sums lost less than dates"
    assert worst_kind({"sums": LostOfRight.from_counts(right=9, lost=0)}) is None


def test_a_sample_of_an_environment_says_of_how_many_tasks_it_is(home, make_run, rows):
    """An environment named keep with 1,340 tasks, of which 200 are asked and a tenth is lost."""
    version = home.envs / "keep" / "0123456789ab" / "env.json"
    version.parent.mkdir(parents=True)
    write_version(version, rows={"heldout": 1340})
    run = make_run("sft")
    for when, right in (("before", lambda i: i < 100), ("after", lambda i: 10 <= i < 112)):
        path = run.run.kept(when)
        path.parent.mkdir(parents=True, exist_ok=True)
        answers = [
            rows.eval(f"t{i}", right(i), battery="keep@0123456789ab", family=f"kind {i % 2}")
            for i in range(200)
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in answers))
    found = kept_skills(run.run)
    (battery,) = found["batteries"]
    assert battery["of_tasks"] == 1340 and battery["verdict"] == "kept"
    assert "50 % to 51 % on 200 of 1,340 tasks" in found["summary"]
    assert "10 of 100 right ones lost (6 to 17 %)" in found["summary"]
    assert "most in kind" in found["summary"]


def test_a_battery_the_model_never_could_solve_shows_no_loss_and_says_why(asked):
    run = asked(lambda skill, i: False, lambda skill, i: False)
    found = kept_skills(run.run)
    assert found["verdict"] == "kept"
    assert found["summary"] == "Kept skills (pebble skills): nothing to lose, 0 before on 48 tasks."


def test_a_battery_whose_scoring_failed_is_unknown_and_hides_nothing(asked):
    run = asked(lambda skill, i: True, lambda skill, i: False, error_from=6)
    found = kept_skills(run.run)
    assert found["verdict"] == "unknown" and "scoring failed on 24 of 48" in found["summary"]


def test_what_keep_replayed_stands_beside_what_was_kept(home, asked):
    """In the verdict, in the reports and in the card; without it good news stays apart."""
    run = asked(lambda skill, i: True, lambda skill, i: True)
    settings = {**run.config["settings"], "keep": 0.2}
    write_json(run.run.config, {**run.config, "algorithm": "sft", "settings": settings})
    used = ReplayUsed(share=0.2, source="pebble skills", rows=767, questions=800)
    manifest = {**MANIFEST, "run_id": run.id, "replayed": used.to_json()}
    write_json(run.run.manifest, manifest)
    verdict = run_verdict(run.run)
    assert verdict["kept_skills"]["replayed"] == used.to_json()
    said = (
        "keep = 0.2 replayed 767 rows: the starting model's right answers to 800 practice "
        "questions of pebble skills."
    )
    assert "no clear loss, 100 % to 100 %" in verdict["summary"]
    assert verdict["summary"].endswith(said)
    run.finish(verdict="better")
    assert "keep = 0.2 replayed 767 rows" in report_markdown(home, run.id)


def test_a_run_that_is_not_over_has_no_second_half(asked):
    run = asked(lambda skill, i: True, lambda skill, i: True)
    run.run.kept("after").unlink()
    assert kept_skills(run.run)["verdict"] == "unknown"
    run.run.kept("before").unlink()
    assert kept_skills(run.run) == {} and "kept_skills" not in run_verdict(run.run)


def test_each_battery_is_judged_apart(asked, rows):
    run = asked(lambda skill, i: True, lambda skill, i: True)
    for when, right in (("before", True), ("after", False)):
        with run.run.kept(when).open("a") as file:
            for i in range(20):
                line = rows.eval(f"t{i}", right, battery="keep@1", family="")
                file.write(json.dumps(line) + "\n")
    found = kept_skills(run.run)
    words = {battery["battery"]: battery["verdict"] for battery in found["batteries"]}
    assert words == {"pebble skills": "kept", "keep@1": "forgotten"}
    assert found["verdict"] == "forgotten"
    assert found["batteries"][1]["skills"] == []


def test_four_lost_and_none_gained_is_no_finding_and_no_all_clear(home, asked):
    run = asked(lambda skill, i: i < 11 or skill == "copy", lambda skill, i: 0 < i < 11)
    found = kept_skills(run.run)
    (battery,) = found["batteries"]
    assert (battery["lost"], battery["gained"], battery["verdict"]) == (5, 0, "forgotten")
    run = asked(lambda skill, i: i < 11, lambda skill, i: 0 < i < 11)
    found = kept_skills(run.run)
    (battery,) = found["batteries"]
    assert (battery["lost"], battery["gained"], battery["n"]) == (4, 0, 48)
    assert found["verdict"] == battery["verdict"] == "inconclusive"
    low, high = battery["interval"]
    assert low < -0.15 and high == 0.0, "the interval of the test, which does not exclude 0"
    change = "95 % interval of the change -19.6 to +0.0 points"
    assert f"inconclusive, 92 % to 83 % on 48 tasks ({change}), 4 lost" in found["summary"]
    assert "no clear loss" not in found["summary"]
    run.finish(verdict="better")
    card, page = model_card(home, run.id), write_report(home, run.id).read_text()
    for text in (card, report_markdown(home, run.id)):
        assert "| 4 | inconclusive |" in text
    assert 'class="tag inconclusive">inconclusive' in page.replace("\n", "")


def test_a_loss_that_is_no_finding_among_many_batteries_is_inconclusive():
    def rows(names: str, lost: int) -> list[dict]:
        return [
            {
                "task": f"{name}{i}",
                "battery": name,
                "reward": 0.0,
                "error": None,
                "success": name != "a" or i >= lost,
            }
            for name in names
            for i in range(48)
        ]

    for names, word in (("a", "forgotten"), ("ab", "inconclusive")):
        sides = records(rows(names, 0)), records(rows(names, 5))
        found = regression.compare_skills(*sides)  # p = 0.031
        assert found.verdict == found.batteries[0].verdict == word
    assert "5 lost, 0 gained" in regression.sentence_of(found.batteries[0])


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 300))
def test_a_word_about_kept_skills_never_contradicts_its_interval(gained, lost, same):
    n = gained + lost + same
    if n == 0:
        return
    before = [
        {"task": f"t{i}", "battery": "b", "success": i >= gained, "reward": 0.0} for i in range(n)
    ]
    after = [row | {"success": not gained <= i < gained + lost} for i, row in enumerate(before)]
    (battery,) = regression.compare_skills(records(before), records(after)).batteries
    low, high = battery.interval
    word, said = battery.verdict, regression.sentence_of(battery)
    assert (low > 0) == (word == "improved") and (high < 0) == (word == "forgotten"), battery
    assert ("no clear loss" in said) <= (high >= 0)


@pytest.fixture
def chained(asked, make_run, rows):
    """chained(level, ...) -> runs, each continuing the one before; kept skills fall to each level
    of 48 in turn."""

    def make(*levels):
        runs, model, before = [], "pebble", 45
        for after in levels:
            run = make_run("sft", model=model)
            for step in (0, 9):
                run.evals(step, rows.halved(lambda i, s=step: s == 9 or i % 9 == 0, 100))
            run.checkpoint(9, best=True)
            for when, solved in (("before", before), ("after", after)):
                lines = [
                    rows.eval(f"t{i}", i < solved, battery="pebble skills", family=SKILLS[i % 4])
                    for i in range(48)
                ]
                path = run.run.kept(when)
                path.write_text("".join(json.dumps(line) + "\n" for line in lines))
            runs.append(run.finish(verdict="better"))
            model, before = run.id, after
        return runs

    return make


def test_what_a_parent_forgot_is_said_of_its_children(home, chained):
    first, child, grandchild = chained(12, 14, 14)
    assert "against_base" not in kept_skills(first.run)
    for run in (child, grandchild):
        found = kept_skills(run.run)
        assert found["verdict"] == "kept", "it lost nothing itself"
        since = found["against_base"]
        assert (since["base"], since["verdict"], since["lost_by"]) == (
            "pebble",
            "forgotten",
            [first.id],
        )
        words = "Forgotten since pebble (pebble skills): 94 % to 29 % on 48 tasks"
        assert since["summary"].startswith(words)
        assert since["summary"].endswith(f"Lost by {first.id}.")
        verdict = run_verdict(run.run)
        assert since["summary"] in verdict["summary"] and since["summary"] in verdict["warnings"]
        for text in (
            model_card(home, run.id),
            report_markdown(home, run.id),
            write_report(home, run.id).read_text(),
        ):
            assert "pebble skills, against pebble" in text and "forgotten" in text


def test_a_chain_that_lost_nothing_says_nothing_of_its_base(chained):
    _, child = chained(45, 46)
    assert kept_skills(child.run)["against_base"]["verdict"] == "kept"
    assert "since" not in run_verdict(child.run)["summary"]


def test_a_chain_whose_first_run_is_gone_is_held_against_the_oldest_that_is_left(chained):
    first, second, third = chained(12, 14, 16)
    first.run.config.unlink()
    assert "against_base" not in kept_skills(second.run)
    assert kept_skills(third.run)["against_base"]["base"] == first.id

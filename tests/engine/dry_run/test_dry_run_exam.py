"""The check `exam` of a dry run: how many tasks and groups there are, and what they can show."""

from typing import Any

from engine.core.files import write_json
from engine.dry_run import dry_run
from engine.home.run_dir import Home
from engine.records.env_version import SEAL
from tests.engine.dry_run.conftest import add_env


def check(report: dict[str, Any], name: str) -> dict[str, str]:
    return next(entry for entry in report["checks"] if entry["name"] == name)


def test_the_exam_is_in_the_report(home: Home):
    add_env(home, "sums", heldout=300)
    report = dry_run.dry_run(home, "sums")
    assert report["exam"]["reported"] == 150 and report["exam"]["asked"] == 300
    assert "150 tasks show a difference" in check(report, "exam")["detail"]


def test_what_one_answer_to_all_tasks_reaches_is_told_before_the_run_unless_they_are_sealed(
    home: Home,
):
    env_id = add_env(home, "sums")  # the answer to all of its tasks is 46
    told = "always answering '46' is right on 100%: only more than that is learnt"
    assert told in check(dry_run.dry_run(home, env_id), "exam")["detail"]
    write_json(home.env("sums", "0123456789ab") / SEAL, {"looks": 3, "sealed": 1.0})
    assert "46" not in check(dry_run.dry_run(home, env_id), "exam")["detail"]
    other = add_env(home, "words", answer=None)
    assert "always" not in check(dry_run.dry_run(home, other), "exam")["detail"]


def test_groups_are_counted_before_the_run_with_what_they_cost_in_power(home: Home):
    alone = dry_run.dry_run(home, add_env(home, "sums"))["exam"]
    grouped = dry_run.dry_run(home, add_env(home, "grouped", groups=20))["exam"]
    assert "groups" not in alone and grouped["reported"] == alone["reported"] == 100
    assert grouped["groups"] == 10, "the other ten choose the checkpoint"
    assert grouped["smallest_gap"] > 2 * alone["smallest_gap"]
    assert grouped["about"].startswith("100 tasks in 10 groups count like 8 and show a difference")
    assert "13 points if the tasks of a group change one by one" in grouped["about"]


def test_too_few_groups_are_a_warning_that_says_where_a_group_is_written(home: Home):
    report = dry_run.dry_run(home, add_env(home, "sums", groups=12))
    exam = check(report, "exam")
    assert exam["status"] == "warn" and "6 groups are hardly evidence" in exam["detail"]
    assert 'Task(..., group="...")' in exam["detail"] and 'key "group"' in exam["detail"]

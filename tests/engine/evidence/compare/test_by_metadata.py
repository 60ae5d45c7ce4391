"""Results by a key of the tasks' metadata."""

import json

import pytest

from engine.core.errors import UserError
from engine.evidence.compare.compare import compare_runs
from engine.evidence.stats.inference import wilson
from engine.home.run_dir import Home

ENV_ID = "arith@0123456789ab"
SETTINGS = {"max_tokens": 64, "temperature": 1.0, "top_p": 1.0, "stop": [], "thinking": False}


@pytest.fixture
def evaluated(home: Home, make_run, rows):
    """evaluated({"pebble": solved}, {"t1": {"operation": "plus"}}) -> an evaluation of these
    models, each of which solves the tasks in `solved`, on a version whose tasks have that
    metadata."""

    def make(solved: dict[str, set[str]], metadata: dict[str, dict], **fields):
        folder = home.env("arith", "0123456789ab")
        folder.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"id": t, "metadata": m, **fields}) for t, m in metadata.items()]
        (folder / "tasks.jsonl").write_text("\n".join(lines) + "\n")
        run = make_run(
            "evaluate",
            kind="evaluate",
            env_id=ENV_ID,
            models=[{"ref": ref} for ref in solved],
            attempts=1,
            settings=SETTINGS,
        )
        for index, right in enumerate(solved.values()):
            run.model_evals(index, [rows.eval(task, task in right) for task in metadata])
        return run.finish()

    return make


def operations(plus: int, minus: int) -> dict[str, dict]:
    plus_tasks = {f"p{n}": {"operation": "plus"} for n in range(plus)}
    return plus_tasks | {f"m{n}": {"operation": "minus"} for n in range(minus)}


def first(count: int, letter: str) -> set[str]:
    return {f"{letter}{n}" for n in range(count)}


def test_one_model_is_shown_by_operation_with_intervals(home, evaluated):
    run = evaluated({"tuned": first(93, "p") | first(41, "m")}, operations(100, 100))
    result = compare_runs(home, [run.id], group_by="operation")
    low, high = wilson(93, 100).low, wilson(93, 100).high
    assert f"plus 93.0 % ({100 * low:.1f} to {100 * high:.1f} %)" in result["summary"]
    assert "minus 41.0 %" in result["summary"]
    plus = next(each for each in result["by"] if each["value"] == "plus")
    assert plus["models"]["tuned"]["interval"] == [round(low, 4), round(high, 4)]
    assert result["arms"][0]["value"] == 0.67
    assert result["warnings"] == []


def test_two_models_are_compared_within_each_value(home, evaluated):
    run = evaluated(
        {"pebble": first(40, "p") | first(40, "m"), "tuned": first(90, "p") | first(40, "m")},
        operations(100, 100),
    )
    result = compare_runs(home, [run.id], group_by="operation")
    assert result["verdict"] == "better"
    by = {each["value"]: each for each in result["by"]}
    assert by["plus"]["difference"] == 0.5 and by["minus"]["difference"] == 0
    low, high = by["plus"]["interval"]
    assert 0.39 < low < 0.5 < high < 0.61
    assert by["minus"]["interval"][0] < 0 < by["minus"]["interval"][1]


def test_a_value_with_few_tasks_is_warned_of(home, evaluated):
    run = evaluated({"tuned": first(3, "m")}, operations(60, 5))
    (warning,) = compare_runs(home, [run.id], group_by="operation")["warnings"]
    assert "minus (5)" in warning and "plus" not in warning


def test_tasks_without_the_key_stand_apart_and_values_of_any_type_are_named(home, evaluated):
    metadata = {f"t{n}": {"level": n % 2} if n < 40 else {} for n in range(60)}
    run = evaluated({"tuned": {"t0", "t2"}}, metadata)
    by = compare_runs(home, [run.id], group_by="level")["by"]
    assert {each["value"]: each["tasks"] for each in by} == {"0": 20, "1": 20, "(none)": 20}


def test_the_group_of_a_task_is_a_key_too(home, evaluated):
    run = evaluated({"tuned": set()}, {f"t{n}": {} for n in range(20)}, group="sums")
    assert compare_runs(home, [run.id], group_by="group")["by"][0]["value"] == "sums"


def test_a_key_that_no_task_has_is_refused_with_those_there_are(home, evaluated):
    run = evaluated({"tuned": set()}, operations(20, 20))
    with pytest.raises(UserError) as caught:
        compare_runs(home, [run.id], group_by="level")
    assert (caught.value.code, caught.value.field) == ("BAD_ARGUMENT", "group_by")
    assert "Known: operation." in str(caught.value.hint)


def test_one_model_without_a_key_is_still_refused(home, evaluated):
    run = evaluated({"tuned": set()}, operations(20, 20))
    with pytest.raises(UserError, match="2 to 8 can be compared"):
        compare_runs(home, [run.id])


def test_numbers_are_shown_in_their_order_and_not_by_how_many_tasks_they_have(home, evaluated):
    lengths = {f"w{n}": {"length": 10 if n < 30 else 4 if n < 50 else 7} for n in range(60)}
    result = compare_runs(home, [evaluated({"tuned": set()}, lengths).id], group_by="length")
    assert [each["value"] for each in result["by"]] == ["4", "7", "10"]

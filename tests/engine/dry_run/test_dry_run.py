"""The dry run: what would fail is found before anything is spent, and said with its fix."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from command_line import call
from official_templates import REASON, TEMPLATES, source

from engine.core import hardware
from engine.core.errors import UserError
from engine.core.files import append_line
from engine.core.hardware import Device, Hardware
from engine.dry_run import checks, dry_run
from engine.dry_run.judgements import judge_probe, narrow_form
from engine.dry_run.report import shortened
from engine.environments.push import push_env
from engine.evidence.stats.learnability import Sample, learnability
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.machine.processes.programs import STAND_INS
from engine.records.run_result import ProbeResult
from engine.runs import lifecycle
from envs.config.problem import EnvProblem
from envs.isolation.sandbox import Sandbox
from tests import tiny_model
from tests.engine.dry_run.conftest import GB, LEARNABLE, add_env

EXAMPLES = Path(dry_run.__file__).parents[2] / "envs" / "examples"
ORDER = [
    "env",
    "model",
    "settings",
    "resolve",
    "interpreter",
    "packages",
    "secrets",
    "isolation",
    "data",
    "exam",
    "wording",
    "contamination",
    "reward_audit",
    "estimate",
    "memory",
    "disk",
    "budget",
]


def test_a_sandbox_too_weak_for_its_owner_fails_by_name(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(sandbox: Sandbox) -> None:
        assert sandbox == Sandbox("required", hidden=(str(home.root),))
        raise EnvProblem("ENV_SANDBOX", "held by limits alone", hint="another kernel")

    home.config_file.write_text('sandbox = "required"\n')
    monkeypatch.setattr(checks, "isolation_here", refuse)
    found = check(dry_run.dry_run(home, add(home)), "isolation")
    assert (found["status"], found["code"], found["fix"]) == (
        "fail",
        "ENV_SANDBOX",
        "another kernel",
    )


def add(home: Home, name: str = "sums", **changes: Any) -> str:
    return add_env(home, name, **changes)


def check(report: dict[str, Any], name: str) -> dict[str, str]:
    return next(entry for entry in report["checks"] if entry["name"] == name)


@pytest.mark.timeout(30)
@pytest.mark.skipif(not TEMPLATES.is_dir(), reason=REASON)
def test_the_shipped_games_pass_under_the_official_template_of_qwen3(
    home: Home, tmp_path: Path
) -> None:
    """It writes earlier turns without their think blocks once more messages follow."""
    model, folder = tmp_path / "model", tmp_path / "games"
    tiny_model.write_model(model, template=source("qwen3"), max_position_embeddings=4096)
    folder.mkdir()
    text = (EXAMPLES / "guess_number" / "environment.py").read_text()
    (folder / "environment.py").write_text(text.replace("games: int = 600", "games: int = 24"))
    push_env(home, str(folder), name="guess-number", roots=[folder])
    for algorithm in ("grpo", "sft"):
        told = call(
            *("dry-run", "guess-number", "--model", str(model)),
            *("--algorithm", algorithm, "--json"),
        )
        report = json.loads(told.stdout)
        assert check(report, "data")["status"] != "fail", check(report, "data")
        assert "fail" not in statuses(report).values()


def statuses(report: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry["status"] for entry in report["checks"]}


def queued(home: Home) -> list[str]:
    with Store(home) as store:
        return [row.run_id for row in store.list_runs(10)]


def finish(home: Home, run_id: str) -> None:
    """Wait until a run has ended and its supervisor is gone."""
    assert lifecycle.wait(home, run_id, "end", 4)["state"] in ("done", "failed")
    deadline = time.monotonic() + 2
    while lifecycle.launcher.is_alive(home.run(run_id)) and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.parametrize(("algorithm", "settings"), [("sft", {"keep": 0.2}), ("grpo", {})])
def test_a_sound_plan_passes_every_check_in_order(
    home: Home, algorithm: str, settings: dict[str, Any]
):
    env_id = add(home)
    report = dry_run.dry_run(home, "sums", algorithm=algorithm, settings=settings)
    assert [entry["name"] for entry in report["checks"]] == ORDER
    assert set(statuses(report).values()) == {"pass"}
    assert report["summary"].startswith("Ready to train")
    assert report["settings"].keys() == report["sources"].keys()
    assert report["statistics"]["rows"] == 200 and report["estimate"]["fits"]
    call = {"env_id": env_id, "model": "pebble", "algorithm": algorithm}
    call |= {"settings": settings} if settings else {}
    assert report["next"] == [{"tool": "submit_train", "arguments": call}]
    assert queued(home) == []
    assert len(json.dumps(report)) < 10_000


def test_the_same_call_gives_the_same_report(home: Home, monkeypatch: pytest.MonkeyPatch):
    add(home)
    first = dry_run.dry_run(home, "sums", settings={"steps": 30})
    busy = Hardware((Device("cpu", "CPU", "cpu", 16 * GB, GB),), 2, 16 * GB, GB, 98 * GB)
    monkeypatch.setattr(hardware, "detect", lambda *_: busy)
    assert (
        dry_run.dry_run(home, "sums", settings={"steps": 30})["report_hash"]
        == (first["report_hash"])
    )
    other = dry_run.dry_run(home, "sums", settings={"steps": 31})
    assert other["report_hash"] != first["report_hash"]


def playbook_section(name: str) -> dict:
    return {"tool": "read_playbook", "arguments": {"section": name}}


def test_what_cannot_be_judged_after_a_failure_is_skipped(home: Home):
    report = dry_run.dry_run(home, "nothing")
    found = statuses(report)
    assert found["env"] == "fail" and found["model"] == found["settings"] == "pass"
    for name in ("resolve", "packages", "secrets", "data", "reward_audit", "estimate", "budget"):
        assert found[name] == "skip"
    assert check(report, "env")["code"] == "ENV_NOT_FOUND"
    assert report["summary"].startswith("Not ready: env")
    assert report["next"] == [playbook_section("environments")]


@pytest.mark.parametrize(
    ("arguments", "step", "code"),
    [
        ({"model": "peble"}, "model", "MODEL_NOT_FOUND"),
        ({"algorithm": "ppo"}, "settings", "BAD_ARGUMENT"),
        ({"settings": {"group_size": 1}}, "settings", "SETTING_INVALID"),
        ({"settings": {"stepz": 1}}, "settings", "SETTING_UNKNOWN"),
        ({"settings": {"prompts_per_step": 201}}, "resolve", "SETTING_INVALID"),
        ({"settings": {"steps": 1_000_000}}, "budget", "BUDGET"),
    ],
)
def test_a_failing_step_has_a_code_a_reason_and_a_fix(
    home: Home, arguments: dict[str, Any], step: str, code: str
):
    add(home)
    report = dry_run.dry_run(home, "sums", **arguments, samples=4)
    entry = check(report, step)
    assert (entry["status"], entry["code"]) == ("fail", code)
    assert entry["detail"] and entry["fix"]
    assert check(report, "probe")["status"] == "skip"
    assert queued(home) == [], "nothing is queued after a refusal"


def test_a_missing_interpreter_says_how_to_get_one(home: Home, monkeypatch: pytest.MonkeyPatch):
    add(home)
    monkeypatch.delenv(STAND_INS)
    monkeypatch.setattr(lifecycle.launcher.importlib.util, "find_spec", lambda name: None)
    entry = check(dry_run.dry_run(home, "sums"), "interpreter")
    assert entry["code"] == "NO_TORCH" and "honesmith setup" in entry["fix"]


def test_missing_packages_and_secrets_are_named(home: Home, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SUMS_KEY", raising=False)
    add(home, requirements="no-such-package-here==1.0\n", secrets=["SUMS_KEY"])
    report = dry_run.dry_run(home, "sums")
    assert "no-such-package-here==1.0" in check(report, "packages")["detail"]
    assert "SUMS_KEY" in check(report, "secrets")["detail"]
    monkeypatch.setenv("SUMS_KEY", "hush")
    report = dry_run.dry_run(home, "sums")
    assert check(report, "secrets")["status"] == "pass"
    assert "hush" not in json.dumps(report)


def test_packages_that_are_here_pass(home: Home):
    add(home, requirements="pydantic>=2\n")
    assert check(dry_run.dry_run(home, "sums"), "packages")["status"] == "pass"


RISK = {"verdict": "risk", "headline": "risk: gold earns 1.00, but look at: empty 1.00"}


def test_a_risky_reward_fails_grpo_unless_accepted(home: Home):
    add(home, audit=RISK)
    entry = check(dry_run.dry_run(home, "sums"), "reward_audit")
    assert (entry["status"], entry["code"]) == ("fail", "REWARD_RISK")
    assert "accept_reward_risk" in entry["fix"] and "empty 1.00" in entry["detail"]
    accepted = dry_run.dry_run(home, "sums", settings={"accept_reward_risk": True})
    assert check(accepted, "reward_audit")["status"] == "warn"
    sft = dry_run.dry_run(home, "sums", algorithm="sft")
    assert check(sft, "reward_audit")["status"] == "warn" and sft["next"]


def test_a_reward_that_pays_near_misses_is_a_warning_and_no_refusal(home: Home):
    headline = "warn: gold earns 1.00, but look at: off by one 0.70"
    add(home, audit={"verdict": "warn", "headline": headline, "separability": {"off by one": 0.6}})
    report = dry_run.dry_run(home, "sums")
    entry = check(report, "reward_audit")
    assert (entry["status"], entry["detail"]) == ("warn", headline)
    assert report["next"] and report["audit"]["separability"] == {"off by one": 0.6}


PROBE = {"what": "", "rows": 9, "mean": 0.0, "success": 0.0, "paid": 0.0, "errors": 0}


def test_an_environment_without_audit_is_a_warning(home: Home):
    add(home, audit={})
    assert check(dry_run.dry_run(home, "sums"), "reward_audit")["status"] == "warn"


def test_the_audit_table_is_in_the_report(home: Home):
    line = PROBE | {"probe": "empty", "verdict": "ok"}
    audit = {"verdict": "ok", "headline": "ok", "probes": [line], "seconds": 1.5, "seed": 0}
    add(home, audit=audit)
    table = dry_run.dry_run(home, "sums")["audit"]["probes"]
    assert table == [{"probe": "empty", "mean": 0.0, "success": 0.0, "errors": 0, "verdict": "ok"}]


def test_an_sft_plan_shows_one_row_as_it_is_trained(home: Home):
    env_id = add(home, train=8, heldout=2)
    row = dry_run.dry_run(home, env_id, algorithm="sft")["row"]
    assert row["task"] == "train-0"
    assert [piece["trained"] for piece in row["pieces"]] == [False, True]
    assert "train: 0 + 12?" in row["pieces"][0]["text"] and row["pieces"][1]["text"][:2] == "46"
    assert row["trained"] == row["pieces"][1]["tokens"] == 3  # two digits and the end of the turn
    assert dry_run.dry_run(home, env_id, algorithm="grpo")["row"] == {}


def test_weak_data_is_a_warning_that_names_the_weakness(home: Home):
    add(home, train=40, heldout=20)
    report = dry_run.dry_run(home, "sums")
    entry = check(report, "data")
    assert entry["status"] == "warn"
    assert "20 held-out rows" in entry["detail"] and "at least 100" in entry["fix"]
    assert report["next"], "a warning does not stand in the way"


def test_reference_answers_that_max_tokens_cuts_fail_with_the_number_that_would_do(home: Home):
    add(home, train=40, heldout=20, answer="a rather long answer to a simple question")
    report = dry_run.dry_run(home, "sums", settings={"max_tokens": 20})
    entry = check(report, "data")
    assert entry["status"] == "fail"
    assert report["next"] == [entry["call"], playbook_section("sft")]
    assert "100% of the reference answers do not fit into max_tokens = 20" in entry["detail"]
    enough = entry["call"]["arguments"]["settings"]["max_tokens"]
    assert f"max_tokens = {enough}" in entry["fix"]
    assert check(dry_run.dry_run(home, **entry["call"]["arguments"]), "data")["status"] == "warn"
    fewer = {"max_tokens": enough - 1}
    assert check(dry_run.dry_run(home, "sums", settings=fewer), "data")["status"] == "fail"


def test_the_number_that_would_do_comes_with_the_length_it_needs(home: Home):
    add(home, train=40, heldout=20, answer="a rather long answer to a simple question")
    tight = {"max_tokens": 8, "max_length": 40}
    entry = check(dry_run.dry_run(home, "sums", settings=tight), "data")
    mended = entry["call"]["arguments"]["settings"]
    assert mended["max_length"] > 40 and "max_length" in entry["fix"]
    assert check(dry_run.dry_run(home, "sums", settings=mended), "data")["status"] == "warn"


def test_rows_that_cannot_be_trained_on_fail(home: Home):
    add(home)
    report = dry_run.dry_run(home, "sums", algorithm="sft", settings={"max_length": 8})
    assert check(report, "data")["status"] == "fail"
    add(home, "empty", answer="")
    report = dry_run.dry_run(home, "empty", algorithm="sft")
    assert check(report, "data")["status"] in ("pass", "warn")  # the end token can be learned


def test_rows_the_chat_template_refuses_fail(home: Home):
    env_id = add(home)
    bad = {"id": "x", "prompt": [{"role": "user", "content": None}], "split": "train"}
    append_line(
        home.env("sums", "0123456789ab") / "tasks.jsonl", bad | {"answer": None, "gold": None}
    )
    entry = check(dry_run.dry_run(home, env_id), "data")
    assert entry["status"] == "fail" and "row x" in entry["detail"]


def test_too_little_memory_or_disk_fails(home: Home, monkeypatch: pytest.MonkeyPatch):
    add(home)
    little = GB // 4
    small = Hardware((Device("cpu", "CPU", "cpu", little, little),), 2, little, little, 1000)
    monkeypatch.setattr(hardware, "detect", lambda *_: small)
    report = dry_run.dry_run(home, "sums")
    memory, disk = check(report, "memory"), check(report, "disk")
    assert (memory["status"], memory["code"]) == ("fail", "DOES_NOT_FIT")
    assert (disk["status"], disk["code"]) == ("fail", "DISK_FULL")


def test_a_probe_is_run_once_and_judged(home: Home):
    add(home)
    report = dry_run.dry_run(home, "sums", samples=6)
    assert report["probe"]["tasks"] == 6
    entry = check(report, "probe")
    assert entry["status"] == "pass" and "pass@8 0.60" in entry["detail"]
    finish(home, report["run_id"])
    again = dry_run.dry_run(home, "sums", samples=6)
    assert again["run_id"] == report["run_id"] and again["probe"] == report["probe"]
    assert again["report_hash"] == report["report_hash"]
    assert queued(home) == [report["run_id"]]


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"effective": 0.05, "too_hard": 0.9}, "warn", "SFT first"),
        ({"effective": 0.05, "too_hard": 0.0, "too_easy": 0.95}, "warn", "harder"),
        ({"truncated_share": 0.4}, "warn", "max_tokens"),
        ({"error_share": 0.5}, "fail", "score()"),
        ({"error_share": 0.1}, "warn", "score()"),
        ({"error_share": 0.1, "effective": 0.05, "too_hard": 0.9}, "warn", "SFT first"),
    ],
)
def test_a_probe_points_at_one_lever(change: dict[str, float], status: str, words: str):
    found = judge_probe(ProbeResult.model_validate(LEARNABLE | {"tasks": 16} | change))
    assert found.status == status and words in str(found.fix)


def test_a_probe_whose_scores_fail_says_so_whoever_waits_for_it(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    groups = [[Sample(1.0, True), Sample(0.0, error=True)]] * 4
    monkeypatch.setenv("HONESMITH_TEST_PROBE", learnability(groups, 2, 32).model_dump_json())
    report = dry_run.dry_run(home, add(home), samples=4)
    assert report["summary"].startswith("Not ready: probe: 50% of the scores failed")
    assert report["next"] == [playbook_section("curriculum")]
    waited = lifecycle.wait(home, report["run_id"])
    assert "Not ready: 50% of the scores failed" in waited["summary"]
    assert waited["warnings"][0].startswith("4 of 8 scores failed")
    assert [call["tool"] for call in waited["next"]] == ["diagnose", "read_rollouts"]
    assert "solved" not in json.dumps(waited["result"]["advice"])


@pytest.mark.timeout(20)
def test_a_model_that_earns_less_than_nothing_pays_is_warned_about(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    lines = [
        PROBE | {"probe": "gold", "mean": 1.0, "verdict": "info"},
        PROBE | {"probe": "off by one", "mean": 0.9, "verdict": "warn"},  # nearly an answer
        PROBE | {"probe": "empty", "mean": 0.45, "verdict": "ok"},
    ]
    add(home, audit={"verdict": "warn", "headline": "warn", "probes": lines})
    for earned, status in ((0.02, "warn"), (0.5, "pass")):
        monkeypatch.setenv("HONESMITH_TEST_PROBE", json.dumps(LEARNABLE | {"reward_mean": earned}))
        report = dry_run.dry_run(home, "sums", samples=4, settings={"seed": int(100 * earned)})
        entry = check(report, "probe")
        assert entry["status"] == status
        said = "empty pays 0.45, the model earns 0.02 on average: empty is the best it can reach"
        assert (said in entry["detail"]) == (status == "warn")
        assert any(said in text for text in report["warnings"]) == (status == "warn")
        finish(home, report["run_id"])


@pytest.mark.parametrize(("answer", "truncated"), [("46", 0.0), ("46", 0.5), (None, 0.0)])
def test_tasks_that_are_too_hard_are_not_proposed_for_grpo(
    home: Home, monkeypatch: pytest.MonkeyPatch, answer: str | None, truncated: float
):
    env_id = add(home, answer=answer)
    hard = LEARNABLE | {"effective": 0.0, "too_easy": 0.0, "too_hard": 1.0}
    hard["truncated_share"] = truncated
    monkeypatch.setenv("HONESMITH_TEST_PROBE", json.dumps(hard))
    report = dry_run.dry_run(home, "sums", settings={"steps": 9, "seed": 3}, samples=4)
    entry, calls = check(report, "probe"), report["next"]
    assert entry["status"] == "warn" and "SFT first" in entry["fix"]
    assert "GRPO would learn little: 100% of 4 groups are too hard" in report["summary"]
    assert "Ready" not in report["summary"]
    assert calls[-1]["arguments"] == {"run_id": report["run_id"], "pick": "best"}
    sft = {"env_id": env_id, "model": "pebble", "algorithm": "sft", "settings": {"seed": 3}}
    assert [call["arguments"] for call in calls[:-1]] == ([sft] if answer else [])
    finish(home, report["run_id"])


def test_tasks_too_hard_for_grpo_do_not_stand_in_the_way_of_sft(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    add(home)
    hard = LEARNABLE | {"effective": 0.0, "too_easy": 0.0, "too_hard": 1.0}
    monkeypatch.setenv("HONESMITH_TEST_PROBE", json.dumps(hard))
    report = dry_run.dry_run(home, "sums", algorithm="sft", samples=4)
    assert report["summary"].startswith("Ready to train")
    assert [call["arguments"]["algorithm"] for call in report["next"]] == ["sft"]
    finish(home, report["run_id"])


def test_a_probe_that_fails_says_why(home: Home, monkeypatch: pytest.MonkeyPatch):
    add(home)
    monkeypatch.setenv("HONESMITH_TEST_PROBE", "null")
    report = dry_run.dry_run(home, "sums", samples=4)
    entry = check(report, "probe")
    assert entry["status"] == "fail" and "score raised" in entry["detail"]
    assert report["next"] == [playbook_section("curriculum")]
    finish(home, report["run_id"])


def test_a_probe_that_outlasts_the_call_is_named_and_found_later(
    home: Home, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    add(home)
    monkeypatch.setenv("HONESMITH_TEST_HOLD", str(tmp_path / "go"))
    monkeypatch.setattr(checks, "CALL_S", 0.3)
    report = dry_run.dry_run(home, "sums", samples=4)
    run_id = report["run_id"]
    assert check(report, "probe")["status"] == "skip" and run_id in check(report, "probe")["fix"]
    assert report["next"][0] == {"tool": "wait_run", "arguments": {"run_id": run_id}}
    (tmp_path / "go").touch()
    finish(home, run_id)
    assert dry_run.dry_run(home, "sums", samples=4)["probe"]["effective"] == 0.5


def test_the_probe_of_an_sft_plan_leaves_out_what_is_for_sft_alone(home: Home):
    add(home)
    report = dry_run.dry_run(
        home, "sums", algorithm="sft", settings={"epochs": 1, "seed": 3}, samples=2
    )
    assert check(report, "probe")["status"] == "pass"
    config = json.loads(home.run(report["run_id"]).config.read_text())
    assert config["settings"]["seed"] == 3
    finish(home, report["run_id"])


def test_grpo_that_cannot_start_is_told_with_the_chance_of_a_right_answer(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    hard = LEARNABLE | {"effective": 0.0, "too_easy": 0.0, "too_hard": 1.0}
    none_right = hard | {"tasks": 32, "samples_per_task": 8, "solved_counts": [0] * 32}
    found = judge_probe(ProbeResult.model_validate(none_right))
    assert found.detail.startswith("out of reach for GRPO: none of 256 answers is right")
    assert "fewer than 1.5% are, one in 68" in found.detail
    one_right = none_right | {"solved_counts": [1] + [0] * 31}
    assert "out of reach" not in judge_probe(ProbeResult.model_validate(one_right)).detail


def test_the_default_batch_size_says_that_it_moves_with_the_rows(home: Home):
    env_id = add(home)
    short = shortened(dry_run.dry_run(home, env_id, algorithm="sft"))
    assert short["batch_size_is"] == (
        "from the 200 rows (8 to 32, for enough steps): it moves with them unless given"
    )
    given = dry_run.dry_run(home, env_id, algorithm="sft", settings={"batch_size": 8})
    assert "batch_size_is" not in shortened(given)
    assert "batch_size_is" not in shortened(dry_run.dry_run(home, env_id, algorithm="grpo"))


def test_a_short_reply_leaves_out_what_passed_and_says_how_to_see_it(home: Home):
    lines = [
        PROBE | {"probe": "empty", "verdict": "ok"},
        PROBE | {"probe": "off", "verdict": "warn"},
    ]
    add(home, audit={"verdict": "warn", "headline": "warn: look", "probes": lines})
    whole = dry_run.dry_run(home, "sums", algorithm="sft")
    short = shortened(whole)
    assert len(json.dumps(short)) < 0.5 * len(json.dumps(whole))
    assert "full=true" in short["left_out"]
    shown = [name for name, status in statuses(whole).items() if status not in ("pass", "skip")]
    assert list(statuses(short)) == [name for name in ORDER if name in {*shown, "exam"}]
    assert short["passed"] == len(ORDER) - len(short["checks"])
    assert "about" not in short["exam"], "the check of that name says it"
    assert "counted" not in short["statistics"]
    assert check(short, "exam")["detail"] == check(whole, "exam")["detail"]
    for each in short["checks"]:  # what a warning says is not said again
        assert not any(each.get("detail", "-") in warning for warning in short["warnings"])
    assert short["settings"].items() <= whole["settings"].items() and "sources" not in short
    assert {"steps", "learning_rate", "keep"} <= short["settings"].keys()
    assert [probe["probe"] for probe in short["audit"]["probes"]] == ["off"]
    assert short["estimate"]["hours"] == whole["estimate"]["hours"]
    for name in ("summary", "next", "warnings", "report_hash"):
        assert short[name] == whole[name]


def test_a_short_reply_keeps_a_setting_that_was_given(home: Home):
    add(home)
    given = {"lora_dropout": 0.1}
    short = shortened(dry_run.dry_run(home, "sums", algorithm="sft", settings=given))
    assert short["settings"]["lora_dropout"] == 0.1


def test_a_reply_of_many_probes_stays_short_with_each_setting_once(home: Home):
    """What cost an agent most: 20 probes and 15 checks that passed, and every setting twice."""
    lines = [PROBE | {"probe": f"probe {at}", "verdict": "ok"} for at in range(20)]
    add(home, audit={"verdict": "ok", "headline": "ok: gold earns 1.00", "probes": lines})
    for algorithm in ("sft", "grpo"):
        short = shortened(dry_run.dry_run(home, "sums", algorithm=algorithm))
        text = json.dumps(short)
        assert len(text) <= 2_600
        assert text.count('"learning_rate"') <= 1 and text.count('"lora_rank"') == 1
        passed = [each for each in short["checks"] if each["status"] == "pass"]
        assert [each["name"] for each in passed] in ([], ["exam"])
        assert "probe 7" not in text


def test_the_summary_says_first_what_to_do_about_the_first_warning(home: Home):
    add(home, train=40, heldout=20)
    summary = dry_run.dry_run(home, "sums")["summary"]
    assert summary.startswith("Ready to train, about ") and "; look at data" in summary
    assert "Give the environment at least 100 held-out rows" in summary


@pytest.mark.parametrize("samples", [-1, 257, True, 2.0])
def test_samples_outside_the_range_are_refused(home: Home, samples: Any):
    with pytest.raises(UserError) as caught:
        dry_run.dry_run(home, "sums", samples=samples)
    assert caught.value.code == "BAD_ARGUMENT" and caught.value.field == "samples"


def test_sft_is_told_what_is_at_stake_with_the_call_that_keeps_it(home: Home):
    add(home, answer="46")  # one answer to every question: a narrow task
    given = {"epochs": 4, "keep": 0}
    report = dry_run.dry_run(home, "sums", algorithm="sft", settings=given)
    entry = check(report, "data")
    assert entry["status"] == "warn" and "200 answers are only 1 different ones" in entry["detail"]
    assert "asked before and after" in entry["detail"] and "keep = 0.35" in entry["fix"]
    call = entry["call"]["arguments"]
    assert call["settings"] == {**given, "keep": 0.35}
    kept = check(dry_run.dry_run(home, **call), "data")
    assert kept["status"] == "pass" and "before and after" not in kept["detail"]
    # Who chose nothing is told what the recipe chose, and why.
    report = dry_run.dry_run(home, "sums", algorithm="sft", settings={"epochs": 4})
    chosen = check(report, "data")
    assert chosen["status"] == "pass" and "keep = 0.35 replays its own right" in chosen["detail"]
    assert "steps on the task alone would overwrite" in chosen["detail"]
    assert (report["settings"]["keep"], report["sources"]["keep"]) == (0.35, "recipe")
    short = check(dry_run.dry_run(home, "sums", algorithm="sft", settings={"steps": 10}), "data")
    assert "keep" not in short["detail"] and "keep" not in short.get("fix", "")
    assert "keep = " not in check(dry_run.dry_run(home, "sums"), "data").get("fix", "")


@pytest.mark.parametrize(
    ("answers", "form"),
    [
        ([f"<{number}/>" for number in range(40)], "begin with '<'"),
        ([f"{number}%" for number in range(40)], "end with '%'"),
        ([f"[{number}] is it" for number in range(40)], "begin with '['"),
        ([f'{{"a": {number}}}' for number in range(40)], "begin with '{'"),
        (["left", "right"] * 20, "40 answers are only 2 different ones"),
        ([f"The answer is {number}." for number in range(40)], ""),
        ([str(number) for number in range(40)], ""),
        (["<1/>"] * 5, ""),  # too few to tell
    ],
)
def test_a_form_that_nearly_all_answers_share_is_named(answers: list[str], form: str):
    tasks = [{"gold": [{"role": "assistant", "content": answer}]} for answer in answers]
    named = narrow_form(tasks)
    assert (form in named) if form else named == ""


def test_an_environment_to_replay_that_is_not_here_fails_by_the_name_of_the_setting(home: Home):
    add(home)
    settings = {"keep": 0.2, "keep_env": "nowhere"}
    report = dry_run.dry_run(home, "sums", algorithm="sft", settings=settings)
    entry = check(report, "resolve")
    assert (entry["status"], entry["code"]) == ("fail", "ENV_NOT_FOUND")
    assert entry["detail"].startswith("keep_env: ")

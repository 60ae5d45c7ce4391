"""A judge behind an endpoint is held against gold labels, and its biases are named."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from as_json import run_verdict
from typer.testing import CliRunner

from engine.core.errors import UserError
from engine.core.files import write_json
from engine.evidence.judges.agreement import Judged, kappa, length_lean, with_interval
from engine.evidence.judges.calibration import calibrate, calibrate_files, find_calibration
from engine.evidence.judges.gold import GoldAnswer, read_gold
from engine.evidence.judges.trust import judge_refusal
from engine.evidence.report.dossier import gather
from engine.evidence.report.html_report import html_of
from engine.evidence.report.markdown import markdown_of
from engine.home.run_dir import Home
from envs.judge import Judge, Rubric
from mcp_server.cli.main import app

pytestmark = pytest.mark.timeout(30)
RUBRIC = """
[judge]
url = "%s"
model = "fake"

[[criteria]]
id = "right"
description = "Is right."
"""
Grade = Callable[[str], float]


def fair(answer: str) -> float:
    return float("right" in answer)


def likes_length(answer: str) -> float:
    return float(len(answer) > 30)


class FakeJudge:
    """A chat API that grades each answer by `grade`, and adds `first` to what stands first."""

    def __init__(self, grade: Grade = fair, first: float = 0.0) -> None:
        self.grade, self.first = grade, first
        self.keys: list[str] = []
        self.lenient = ""  # a pattern of questions to which it takes every answer for right
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.keys.append(self.headers.get("Authorization", ""))
                data = json.dumps(outer.reply(asked["messages"][-1]["content"])).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def reply(self, question: str) -> dict:
        answers = re.findall(r"<ANSWER[^>]*>\n(.*?)\n</ANSWER", question, re.DOTALL)
        values = [self.grade(answer) for answer in answers]
        if self.lenient and re.search(self.lenient, question):
            values = [1.0 for _ in answers]
        if len(answers) == 1:
            grades = {"right": values[0]}
        else:
            values[0] = min(1.0, values[0] / 2 + self.first)
            grades = {str(n): value / (1 if n == 1 else 2) for n, value in enumerate(values, 1)}
        return {"choices": [{"message": {"content": json.dumps(grades)}}]}


@pytest.fixture
def judge() -> Iterator[FakeJudge]:
    made = FakeJudge()
    yield made
    made.http.shutdown()
    made.http.server_close()


def gold(count: int = 60) -> list[GoldAnswer]:
    """Right and wrong answers to each prompt, half of either kind long, half by the judge."""
    answers = []
    for number in range(count):
        word = "right" if number % 2 else "wrong"
        padding = " and so on and on, and on once more" if number // 2 % 2 else ""
        author = "fake" if number // 4 % 2 else "other"
        prompt = f"Question {number // 4}?"
        answers.append(GoldAnswer(prompt, word + padding, float(number % 2), author=author))
    return answers


def held(tmp_path: Path, judge: FakeJudge) -> tuple[Home, Judge, Rubric]:
    home = Home.locate(tmp_path / "home")
    return home, Judge(judge.url, "fake"), Rubric.from_file(rubric_file(tmp_path, judge))


def rubric_file(folder: Path, judge: FakeJudge) -> Path:
    path = folder / "rubric.toml"
    path.write_text(RUBRIC % judge.url)
    return path


def test_a_judge_that_agrees_may_decide(tmp_path: Path, judge: FakeJudge):
    home, asked, rubric = held(tmp_path, judge)
    calibration = calibrate(home, asked, rubric, gold())
    assert (calibration.kappa.value, calibration.agreement.value, calibration.answers) == (1, 1, 60)
    assert calibration.length and calibration.length.value == 0
    assert calibration.own and calibration.own.value == 0
    assert calibration.faults == []
    assert find_calibration(home, asked, rubric) == calibration
    assert find_calibration(home, Judge(judge.url, "another"), rubric) is None


def test_a_judge_that_likes_length_is_named_with_an_interval_and_refused(
    tmp_path: Path, judge: FakeJudge
):
    judge.grade = likes_length
    home, asked, rubric = held(tmp_path, judge)
    calibration = calibrate(home, asked, rubric, gold())
    assert calibration.kappa.value == pytest.approx(0, abs=0.1)
    assert calibration.length is not None
    assert calibration.length.low == calibration.length.value == 1.0  # long 1, short 0, always
    kappa_fault, length_fault = calibration.faults
    assert kappa_fault.startswith("kappa 0.00 (-0.2")
    assert length_fault == "it favours longer answers by 1.00 (1.00 to 1.00)"
    env_dir = tmp_path / "version"
    (env_dir / "source").mkdir(parents=True)
    rubric_file(env_dir / "source", judge)
    refusal = judge_refusal(home, env_dir, "success")
    assert refusal.startswith("The judge fake may not decide: kappa 0.00")


def test_a_judge_that_prefers_a_place_or_itself_is_told(tmp_path: Path, judge: FakeJudge):
    judge.first = 0.3
    home, asked, rubric = held(tmp_path, judge)
    position = calibrate(home, asked, rubric, gold()).position
    assert position is not None and position.low == position.value == 0.3
    again = calibrate(home, asked, rubric, gold())
    *_, sentence, before, drift = again.sentences
    assert before == "Kappa was 1.00 the time before."
    assert drift.startswith("No clear drift of the judge: on the same gold labels its agreement")
    assert sentence.startswith("What stands first of two: +0.") and sentence.endswith("a bias.")


def test_a_verdict_on_a_judge_that_nobody_held_against_people_is_refused(
    learned_run, tmp_path: Path, judge: FakeJudge
):
    before = run_verdict(learned_run.run)
    assert before["verdict"] == "better"
    config = json.loads(learned_run.run.config.read_text())
    version = tmp_path / "version"
    (version / "source").mkdir(parents=True)
    path = rubric_file(version / "source", judge)
    write_json(learned_run.run.config, config | {"env_dir": str(version)})
    refused = run_verdict(learned_run.run)
    assert refused["verdict"] == "unknown"
    assert "The judge fake was never held against people" in refused["summary"]
    calibrate(learned_run.run.home, Judge.from_file(path), Rubric.from_file(path), gold())
    assert run_verdict(learned_run.run)["verdict"] == "better"


def test_a_judge_that_drifts_after_a_run_is_named_in_the_verdict_and_the_report(
    learned_run, tmp_path: Path, judge: FakeJudge
):
    run = learned_run.run
    config = json.loads(run.config.read_text())
    version = tmp_path / "version"
    (version / "source").mkdir(parents=True)
    path = rubric_file(version / "source", judge)
    write_json(run.config, config | {"env_dir": str(version)})
    asked, rubric = Judge.from_file(path), Rubric.from_file(path)
    first = calibrate(run.home, asked, rubric, gold())
    write_json(run.started_record, {"time": first.time + 1})
    agreed = "it agreed with people on 1.00 (1.00 to 1.00) of 60 gold labels"
    assert [agreed in text for text in run_verdict(run)["warnings"]].count(True) == 1
    judge.lenient = r"Question [258]\?"  # six of 30 wrong answers: it still may decide
    again = calibrate(run.home, Judge.from_file(path), rubric, gold()[::-1])
    assert again.faults == [] and again.gold == first.gold, "the order of the labels is nothing"
    assert again.earlier[0].change and again.earlier[0].change.high < 0
    assert again.sentences[-1].startswith("The judge drifted: on the same gold labels")
    verdict = run_verdict(run)
    assert verdict["verdict"] == "better"
    said = " ".join(verdict["warnings"])
    assert agreed in said and "The judge drifted" in said and "score the stored answers" in said
    dossier = gather(run.home, run.id)
    for report in (html_of(dossier), markdown_of(dossier)):
        assert "The judge drifted" in report and agreed in report
    # Other labels say nothing of a change; that on the first ones stays known.
    others = calibrate(run.home, Judge.from_file(path), rubric, gold(40))
    assert "drift" not in " ".join(others.sentences)
    assert [past.change is not None for past in others.earlier] == [True, False]
    assert "The judge drifted" in " ".join(run_verdict(run)["warnings"])


def test_the_command_says_whether_the_judge_may_decide(tmp_path: Path, judge: FakeJudge):
    rows = tmp_path / "gold.jsonl"
    rows.write_text("\n".join(json.dumps(vars(answer)) for answer in gold()))
    rubric = rubric_file(tmp_path, judge)
    call = ["judge", "calibrate", str(rubric), str(rows), "--home", str(tmp_path / "home")]
    done = CliRunner().invoke(app, call)
    assert done.exit_code == 0 and "may decide verdicts" in done.output
    judge.grade = likes_length
    (tmp_path / "home" / "judges").rename(tmp_path / "earlier")
    assert CliRunner().invoke(app, call).exit_code == 1


def test_a_judge_by_name_is_calibrated_with_its_key_and_told_apart_by_its_address(
    tmp_path: Path, judge: FakeJudge, monkeypatch: pytest.MonkeyPatch
):
    home = Home.locate(tmp_path / "home")
    env_dir = tmp_path / "version"
    (env_dir / "source").mkdir(parents=True)
    rubric = rubric_file(env_dir / "source", judge)
    table = rubric.read_text().partition("[[")
    rubric.write_text('judge = "openai:big"\n[[' + table[2])
    rows = tmp_path / "gold.jsonl"
    rows.write_text("\n".join(json.dumps(vars(answer)) for answer in gold()))
    with pytest.raises(UserError, match=r"has no .endpoints.big") as caught:
        calibrate_files(home, rubric, rows)
    assert caught.value.code == "MODEL_NOT_FOUND"
    assert "has no [endpoints.big]" in judge_refusal(home, env_dir, "reward")
    home.config_file.write_text(
        f'[endpoints.big]\nurl = "{judge.url}"\nmodel = "fake"\nkey_env = "BIG_KEY"\n'
    )
    with pytest.raises(UserError, match="BIG_KEY is not set"):
        calibrate_files(home, rubric, rows)
    monkeypatch.setenv("BIG_KEY", "sk-big-key-1")
    assert calibrate_files(home, rubric, rows)["trusted"]
    assert set(judge.keys) == {"Bearer sk-big-key-1"}
    monkeypatch.delenv("BIG_KEY")
    assert judge_refusal(home, env_dir, "reward") == "", "reading a verdict needs no key"
    rubric_file(env_dir / "source", judge)
    assert judge_refusal(home, env_dir, "reward") == "", "the same model by its address"
    home.config_file.write_text(f'[endpoints.big]\nurl = "{judge.url}"\nmodel = "new"\n')
    rubric.write_text('judge = "openai:big"\n[[' + table[2])
    assert "was never held against people" in judge_refusal(home, env_dir, "reward")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "a", "answer": "b", "label": 2}', "line 2: label is true, false"),
        ('{"answer": "b", "label": 1}', "line 2: prompt, answer"),
        ("[]", "line 2 is no JSON object"),
    ],
)
def test_a_bad_gold_answer_is_named_by_its_line(tmp_path: Path, line: str, said: str):
    path = tmp_path / "gold.jsonl"
    path.write_text('{"prompt": "a", "answer": "b", "label": true}\n' + line)
    with pytest.raises(UserError, match=said):
        read_gold(path)


def test_kappa_and_the_lean_are_those_computed_by_hand():
    # 20 right by both, 5 by the judge alone, 10 by people alone, 15 by neither: observed 0.7,
    # chance 0.5, kappa 0.4 (the example of Cohen's kappa that textbooks use).
    table = {(True, True): 20, (False, True): 5, (True, False): 10, (False, False): 15}
    judged = [
        Judged(float(label), float(passed), passed, length=1)
        for (label, passed), count in table.items()
        for _ in range(count)
    ]
    assert kappa(judged) == pytest.approx(0.4)
    interval = with_interval(judged, kappa)
    assert interval is not None and interval.low < 0.4 < interval.high
    # Right answers: long 1.0, short 0.6; wrong ones: long 0.4, short 0.2; the mean of 0.4 and 0.2.
    leaning = [Judged(1, 1, True, 9), Judged(1, 0.6, True, 1)]
    leaning += [Judged(0, 0.4, False, 9), Judged(0, 0.2, False, 1)]
    assert length_lean(leaning) == pytest.approx(0.3)

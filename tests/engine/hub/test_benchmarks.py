"""Known benchmarks: their columns as tasks, scored; pushed from a hub on the loopback."""

import errno
import importlib.util
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from engine.core.errors import UserError
from engine.environments import push, registry
from engine.hub import benchmarks
from engine.hub.benchmarks import BENCHMARKS
from envs.config.problem import EnvProblem
from tests import hub_server
from tests.hub_server import Hub

ARC = {
    "id": "x",
    "question": "What is hot?",
    "choices": {"text": ["ice", "fire"], "label": ["1", "2"]},
    "answerKey": "2",
}
# A row with the columns that the card of each dataset names.
ROWS: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": "Half of 48?", "answer": "It is 48/2 = <<48/2=24>>24.\n#### 24"},
    "aime-2024": {"id": 60, "problem": "Find $n$.", "solution": "So 204.", "answer": "204"},
    "math-500": {
        "problem": "Half of a third?",
        "solution": "It is \\boxed{\\frac16}.",
        "answer": "\\frac{1}{6}",
        "subject": "Algebra",
        "level": 2,
    },
    "arc-easy": ARC,
    "arc-challenge": ARC,
    "openbookqa": {**{k: v for k, v in ARC.items() if k != "question"}, "question_stem": "Hot?"},
    "commonsense-qa": ARC,
    "sciq": {
        "question": "What is hot?",
        "correct_answer": "fire",
        "distractor1": "ice",
        "distractor2": "snow",
        "distractor3": "hail",
        "support": "Fire burns.",
    },
    "mmlu": {
        "question": "What is hot?",
        "subject": "physics",
        "choices": ["ice", "fire"],
        "answer": 1,
    },
    "hellaswag": {
        "ctx": "A man",
        "endings": ["sits", "fire"],
        "label": "1",
        "activity_label": "Fun",
    },
    "boolq": {"question": "is fire hot", "passage": "Fire burns.", "answer": True},
    "mbpp": {
        "task_id": 2,
        "prompt": "Write a function to add.",
        "code": "def add(a, b):\r\n    return a + b",
        "test_list": ["assert add(2, 3) == 5", "assert add(1, 1) == 2", "assert add(1, 2)"],
    },
}
WRONG = {
    "number": "Answer: 7",
    "maths": "\\boxed{\\frac{1}{7}}",
    "choice": "Answer: Z",
    "code": "x",
}


def environment(name: str, folder: Path, rows: list[Mapping[str, Any]]) -> Any:
    """The environment of a benchmark, loaded in this process over a file of these rows."""
    source = Path(benchmarks.__file__).parents[2] / "envs" / "benchmarks"
    file = source / BENCHMARKS[name].environment / "environment.py"
    target = folder / name / "environment.py"
    (target.parent / "datasets").mkdir(parents=True)
    target.write_bytes(file.read_bytes())
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (target.parent / "datasets" / "test-00000.jsonl").write_text(lines)
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", target)
    assert spec is not None and spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.load_environment()


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_reference_answer_of_a_benchmark_is_right_and_another_one_wrong(
    name: str, tmp_path: Path
):
    env = environment(name, tmp_path, [ROWS[name]])
    [task] = env.tasks()
    assert task.split == "heldout"
    assert env.score(task, task.answer_text).success is True
    wrong = env.score(task, WRONG[BENCHMARKS[name].environment])
    assert (wrong.reward, wrong.success) == (0.0, False)


def test_notes_of_gsm8k_are_taken_out_of_its_solutions(tmp_path: Path):
    [task] = environment("gsm8k", tmp_path, [ROWS["gsm8k"]]).tasks()
    assert task.answer == "It is 48/2 = 24.\nAnswer: 24"


def test_a_choice_may_be_answered_by_its_letter_or_its_text(tmp_path: Path):
    env = environment("mmlu", tmp_path, [ROWS["mmlu"]])
    [task] = env.tasks()
    assert "A) ice\nB) fire" in task.prompt
    assert [env.score(task, text).reward for text in ("B", "Answer: (b)", "fire", "ice")] == [
        1,
        1,
        1,
        0,
    ]
    assert task.metadata["category"] == "physics"


def test_a_closed_test_split_is_refused_and_not_scored_as_wrong(tmp_path: Path):
    env = environment("hellaswag", tmp_path, [ROWS["hellaswag"] | {"label": ""}])
    with pytest.raises(ValueError, match="no right option"):
        env.tasks()


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ("\\dfrac12", "\\frac{1}{2}", True),
        ("0.5", "\\frac{1}{2}", True),
        ("$3\\,\\text{cm}$", "3cm", True),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3,\\frac{\\pi}{2})", True),
        ("90^\\circ", "90", True),
        ("-\\frac{7}{8}", "-7/8", True),
        ("x+1", "x-1", False),
        ("\\rightarrow", "arrow", False),
        ("", "", False),
    ],
)
def test_expressions_are_compared_without_what_means_nothing(
    left: str, right: str, same: bool, tmp_path: Path
):
    env = environment("math-500", tmp_path, [ROWS["math-500"] | {"answer": right}])
    [task] = env.tasks()
    assert env.score(task, f"So \\boxed{{{left}}}.").success is same


def test_tests_that_compare_with_no_literal_are_left_out(tmp_path: Path):
    other = {"test_list": ["assert set(f(1)) == {1}", "assert not f(2)", "import math"]}
    env = environment("mbpp", tmp_path, [ROWS["mbpp"], ROWS["mbpp"] | other])
    [task] = env.tasks()
    assert [test["call"] for test in task.metadata["tests"]] == ["add(2, 3)", "add(1, 1)"]
    assert env.score(task, "```python\ndef add(a, b): return 2\n```").reward == 0.5


def sums(word: str, count: int) -> bytes:
    rows = (
        {"question": f"{word}: {number} and 1?", "answer": f"They are\n#### {number + 1}"}
        for number in range(count)
    )
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    state = Hub({"main/train.jsonl": sums("train", 60), "main/test.jsonl": sums("test", 50)})
    state.card = {
        "configs": [
            {
                "config_name": "main",
                "data_files": [
                    {"split": "train", "path": "main/train*"},
                    {"split": "test", "path": "main/test*"},
                ],
            }
        ]
    }
    with hub_server.serving(state, tmp_path / "shared-cache", monkeypatch):
        yield state


@pytest.mark.timeout(20)
def test_a_benchmark_is_pushed_by_its_name_with_its_scorer(home, server: Hub):
    reply = push.push_env(home, "benchmark:gsm8k")
    assert reply.env_id.startswith("gsm8k@")
    assert reply.rows == {"train": 60, "heldout": 50}
    assert reply.kind == "single"
    assert reply.audit["verdict"] == "ok"
    assert "From openai/gsm8k:main" in reply.summary
    prompts = registry.read_tasks(registry.find_env(home, reply.env_id), "heldout")
    assert prompts[0]["prompt"][0]["content"].startswith("test: ")
    assert push.push_env(home, "benchmark:gsm8k").env_id == reply.env_id


@pytest.mark.timeout(20)
def test_a_benchmark_without_training_rows_is_for_evaluation(home, server: Hub):
    server.card = None
    server.files = {"train.jsonl": sums("contest", 30)}
    reply = push.push_env(home, "benchmark:aime-2024")
    assert reply.rows == {"train": 0, "heldout": 30}


def test_validation_stands_for_a_closed_test_split_and_nothing_else_is_fetched(
    home, server: Hub, tmp_path: Path
):
    row = json.dumps(ROWS["hellaswag"]).encode()
    server.files = {f"data/{split}.jsonl": row for split in ("train", "validation", "test")}
    files = [
        {"split": split, "path": f"data/{split}*"} for split in ("train", "validation", "test")
    ]
    server.card = {"configs": [{"config_name": "default", "data_files": files}]}
    fetched = benchmarks.named_benchmark(home, "benchmark:hellaswag", deadline=float("inf"))
    assert fetched is not None
    names = sorted(path.name for path in (fetched.folder / "datasets").iterdir())
    assert names == ["test-00001.jsonl", "train-00000.jsonl"]
    assert not any("data/test" in path for path, _, _ in server.asked)


def test_an_unknown_benchmark_is_refused_with_those_that_there_are(home):
    with pytest.raises(UserError) as caught:
        push.push_env(home, "benchmark:gsm9k")
    assert "did you mean benchmark:gsm8k?" in caught.value.message
    assert "math-500" in str(caught.value.hint)


def test_a_name_in_capitals_is_suggested_and_a_long_one_cut(home):
    with pytest.raises(UserError, match="did you mean benchmark:gsm8k"):
        push.push_env(home, "benchmark:GSM8K")
    with pytest.raises(UserError) as caught:
        push.push_env(home, "benchmark:" + "g" * 100_000)
    assert len(caught.value.message) < 200


def fetched_gsm8k(home) -> Path:
    fetched = benchmarks.named_benchmark(home, "benchmark:gsm8k", deadline=float("inf"))
    assert fetched is not None
    return fetched.folder


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_benchmark_without_one_of_its_splits_is_refused(home, server: Hub, split: str):
    del server.files[f"main/{split}.jsonl"]
    with pytest.raises(UserError, match=f"no file of the split '{split}'"):
        fetched_gsm8k(home)


def test_a_folder_in_the_cache_that_lost_a_file_is_made_again(home, server: Hub):
    lost = fetched_gsm8k(home) / "datasets" / "test-00001.jsonl"
    lost.unlink()
    fetched_gsm8k(home)
    assert lost.is_file()


def test_data_are_copied_where_there_are_no_hard_links(
    home, server: Hub, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(benchmarks.os, "link", refuse)
    assert (fetched_gsm8k(home) / "datasets" / "test-00001.jsonl").read_bytes() == sums("test", 50)


def test_a_bad_line_of_a_benchmark_is_named_and_not_left_out(tmp_path: Path):
    env = environment("gsm8k", tmp_path, [ROWS["gsm8k"]])
    with open(tmp_path / "gsm8k" / "datasets" / "test-00000.jsonl", "a") as file:
        file.write("{broken\n")
    with pytest.raises(EnvProblem, match="2"):
        env.tasks()

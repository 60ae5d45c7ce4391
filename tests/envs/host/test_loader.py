"""What is wrong with an environment is said in words, with file and line."""

from collections.abc import Callable
from pathlib import Path

import pytest

from envs.host.loader import EnvProblem
from envs.host.process import EnvProcess

SINGLE = """
class Env(SingleTurnEnv):
    def tasks(self):
        return {tasks}

    def score(self, task, completion):
        return Score(1.0)
"""
WHOLE = """
from envs import Score, SingleTurnEnv, Task
class Env(SingleTurnEnv):
    def tasks(self):
        return [Task("a", "p")]
    def score(self, task, completion):
        return Score(1.0)
"""


@pytest.fixture
def problem_of(write_env, start) -> Callable[..., EnvProblem]:
    """The problem that loading an environment and asking for its tasks gives."""

    def find(body: str, files: dict[str, str] | None = None) -> EnvProblem:
        process: EnvProcess = start(write_env(body, files))
        with pytest.raises(EnvProblem) as caught:
            process.tasks()
        return caught.value

    return find


def test_a_folder_without_environment_py_is_named(start, tmp_path: Path):
    with pytest.raises(EnvProblem, match=r"no environment\.py") as caught:
        start(tmp_path).describe()
    assert caught.value.code == "ENV_INVALID"


def test_a_scorer_of_data_files_without_a_data_file_says_what_is_missing(start, tmp_path: Path):
    (tmp_path / "environment.toml").write_text('scorer = "exact"\n')
    with pytest.raises(EnvProblem, match="the folder has none") as caught:
        start(tmp_path).describe()
    assert "rows.jsonl" in caught.value.hint


def test_the_folder_that_was_meant_is_suggested(start, write_env, tmp_path: Path):
    write_env(WHOLE + "def load_environment(): return Env()")
    with pytest.raises(EnvProblem) as caught:
        start(tmp_path).describe()
    assert "'env'" in caught.value.hint


def test_a_syntax_error_has_its_line(problem_of):
    problem = problem_of("x = 1\ndef load_environment(:\n    pass\n")
    assert (problem.code, problem.file, problem.line) == ("ENV_IMPORT", "environment.py", 2)


def test_an_exception_at_import_has_the_line_of_the_users_frame(problem_of):
    problem = problem_of(
        "import helper\ndef load_environment(): ...\n", {"helper.py": "\n\nvalue = 1 / 0\n"}
    )
    assert (problem.file, problem.line) == ("helper.py", 3)
    assert "ZeroDivisionError" in problem.message


def test_leaving_the_process_at_import_is_a_problem_like_any_other(problem_of):
    problem = problem_of("import sys\nsys.exit(3)\ndef load_environment(): ...\n")
    assert "sys.exit(3)" in problem.message and problem.line == 2


def test_a_missing_package_is_named(problem_of):
    problem = problem_of("import no_such_package.part\ndef load_environment(): ...\n")
    assert problem.code == "ENV_DEPS"
    assert "'no_such_package'" in problem.message and "requirements.txt" in problem.hint


def test_a_misspelt_entry_point_is_found(problem_of):
    problem = problem_of("# load_environment\ndef load_enviroment(): ...\n")
    assert "load_enviroment" in problem.hint


def test_params_that_are_not_accepted_name_those_that_are(problem_of):
    body = WHOLE + "def load_environment(rows=1, seed=2):\n    return Env()\n"
    problem = problem_of(body, {"environment.toml": "[params]\nrowz = 3\n"})
    assert problem.code == "ENV_PARAM"
    assert "rows, seed" in problem.hint and "Did you mean rows?" in problem.hint


def test_params_reach_the_entry_point(write_env, start):
    body = WHOLE + "def load_environment(rows):\n    assert rows == [3, 4]\n    return Env()\n"
    folder = write_env(body, {"environment.toml": "[params]\nrows = [3, 4]\n"})
    assert start(folder).describe()["kind"] == "single"


@pytest.mark.parametrize(
    ("returned", "said"),
    [("Env", "the class Env"), ("None", "None"), ("[1]", "type list"), ("{}.x", "AttributeError")],
)
def test_what_is_returned_must_be_an_environment(problem_of, returned: str, said: str):
    problem = problem_of(WHOLE + f"def load_environment():\n    return {returned}\n")
    assert said in problem.message and problem.file == "environment.py" and problem.line > 0


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("class Env(SingleTurnEnv):\n    pass\n", "does not define tasks()"),
        (
            "class Env(MultiTurnEnv):\n    def tasks(self): ...\n    def start(self, task): ...\n"
            "    def score(self, task, state): ...\n",
            "does not define step()",
        ),
        (
            "class Env(SingleTurnEnv):\n    def tasks(self): ...\n    def score(self, x): ...\n",
            "does not take (task, completion)",
        ),
        (
            "class Env(SingleTurnEnv):\n    async def tasks(self): ...\n"
            "    async def score(self, t, c): ...\n",
            "tasks() is async",
        ),
        (
            "class Env(SingleTurnEnv):\n    def tasks(self): ...\n"
            "    def score_group(self, task, completions): ...\n",
            "nothing scores one alone",
        ),
        (
            "class Env(SingleTurnEnv):\n    tools = ['add']\n    def tasks(self): ...\n"
            "    def score(self, t, c): ...\n",
            "tools[0] is no function schema",
        ),
    ],
)
def test_methods_and_tools_are_checked_when_it_is_loaded(problem_of, body: str, said: str):
    problem = problem_of(body)
    assert said in problem.message and problem.code == "ENV_INVALID"


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ("None", "returned None"),
        ("[]", "no task"),
        ("['a']", "type str, not a Task"),
        ("[Task('a', 'p'), Task('a', 'q')]", "share the id 'a'"),
        ("[Task('a', '')]", "prompt of task 'a' is empty"),
        ("[Task('a', 'p', metadata={'x': {1}})]", "metadata of task 'a' is not JSON"),
        ("[Task('a', 'p', metadata={'x': float('nan')})]", "metadata of task 'a' is not JSON"),
        ("[Task('a', 'p', metadata={'x': '\\ud800'})]", "half of a surrogate pair"),
        ("[Task('a', 'p\\ud800')]", "half of a surrogate pair"),
        ("[Task('a', 'p', [Message('user', 'x')])]", "no assistant message"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_tasks_are_checked_one_by_one(problem_of, tasks: str, said: str):
    problem = problem_of(SINGLE.format(tasks=tasks))
    assert said in problem.message
    assert problem.file == "environment.py" and problem.line in (5, 6)


def test_an_sft_row_needs_an_answer(problem_of):
    body = "class Env(SingleTurnEnv):\n    def tasks(self): return [Task('a', 'p')]\n"
    assert "has no answer" in problem_of(body).message


def test_tasks_may_be_a_generator(write_env, start):
    body = SINGLE.format(tasks="(Task(str(n), 'p') for n in range(3))")
    assert [row["id"] for row in start(write_env(body)).tasks()] == ["0", "1", "2"]


def test_a_folder_of_data_files_alone_is_a_dataset(start, tmp_path: Path):
    (tmp_path / "datasets").mkdir()
    row = '{"prompt": "p", "completion": "c"}\n'
    (tmp_path / "datasets" / "train.jsonl").write_text(row)
    process = start(tmp_path)
    assert process.describe()["kind"] == "sft"
    assert process.tasks()[0]["split"] is None  # alone, it is divided by the push


def test_a_bad_line_of_a_dataset_is_named_by_its_number(start, tmp_path: Path):
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "rows.jsonl").write_text('{"prompt": "p", "answer": "c"}\n{"x"\n')
    with pytest.raises(EnvProblem, match="line 2") as caught:
        start(tmp_path).describe()
    assert caught.value.code == "DATASET_INVALID"
    assert (caught.value.file, caught.value.line) == ("datasets/rows.jsonl", 2)

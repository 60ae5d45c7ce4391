"""Python functions under tests: MBPP.

Reads `prompt` (or `text`), `code`, `test_list` and `task_id`. A test is used if it compares a call
with a literal, as in `assert add(2, 3) == 5`; a row without such a test is left out. The code runs
in a process of its own and never sees what is expected.
"""

import ast
import json

from envs import Score, SingleTurnEnv, Task
from envs.code_tests import code
from envs.strict_rows import tasks_beside

SECONDS = 5.0  # time limit for all tests of one answer


class Programs(SingleTurnEnv):
    """One task per usable row of the data files; a file's name says its split."""

    def tasks(self) -> list[Task]:
        """Return every problem with the first of its tests, which names the function to write."""
        return tasks_beside(__file__, task_of)

    def score(self, task: Task, completion: str) -> Score:
        """Reward the share of tests that pass; the task counts as solved if all of them pass."""
        share = code(completion, task.metadata["tests"], timeout_s=SECONDS)
        return Score(share, success=share == 1.0)


def task_of(row: dict, task_id: str, split: str | None) -> Task | None:
    """Make the task of a row, with those of its tests that can be used; None if there are none."""
    parsed_tests = [call_and_value(text) for text in row["test_list"]]
    tests = [test for test in parsed_tests if test is not None]
    if not tests:
        return None
    problem = str(row.get("prompt") or row["text"]).strip()
    # The first test names the function to write.
    example = f"{tests[0]['call']} == {tests[0]['expect']!r}"
    source = str(row["code"]).replace("\r\n", "\n").strip()
    return Task(
        task_id,
        f"{problem}\nWrite it in Python. For example, {example}",
        answer=f"```python\n{source}\n```",
        split=split,
        metadata={"tests": tests},
    )


def call_and_value(test: str) -> dict | None:
    """Return a test such as "assert add(2, 3) == 5" as {"call": "add(2, 3)", "expect": 5}; None if it
    does not compare a call with a literal that JSON can hold."""
    try:
        [statement] = ast.parse(test.strip()).body
        if not isinstance(statement, ast.Assert):
            return None
        comparison = statement.test
        if not isinstance(comparison, ast.Compare) or not isinstance(comparison.left, ast.Call):
            return None
        if len(comparison.ops) != 1 or not isinstance(comparison.ops[0], ast.Eq):
            return None
        value = ast.literal_eval(comparison.comparators[0])
        # Tuples become lists; a set or a complex number is no JSON, so the test is left out.
        expected = json.loads(json.dumps(value, allow_nan=False))
    except (ValueError, SyntaxError, TypeError):
        return None
    return {"call": ast.unparse(comparison.left), "expect": expected}


def load_environment() -> Programs:
    """Return the environment; it takes no parameters."""
    return Programs()

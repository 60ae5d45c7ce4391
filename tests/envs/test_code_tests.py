"""Code of a model runs under limits and cannot grade itself."""

import time

import pytest

from envs.code_tests import code, extract

ADD = [{"call": "add(2, 3)", "expect": 5}, {"call": "add(-1, 1)", "expect": 0}]
GOOD = "def add(a, b):\n    return a + b"


@pytest.mark.parametrize(
    "completion",
    [GOOD, f"Here:\n```python\n{GOOD}\n```\nDone.", f"```py\nx\n```\n```\n{GOOD}\n```"],
)
def test_right_code_passes_however_it_is_wrapped(completion: str):
    assert code(completion, ADD) == 1.0


def test_half_right_code_passes_half():
    assert code("def add(a, b): return 5", ADD) == 0.5


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "def add(a, b: return",
        "def add(a, b): raise SystemExit(0)",
        "import os; os._exit(0)",
        "def add(a, b): return float('nan')",
        "def add(a, b): return str(a + b)",
        "def add(a, b): return lambda: 5",
        "class Five:\n  def __eq__(self, other): return True\ndef add(a, b): return Five()",
        "print('{\"value\": 5}')\nprint('{\"value\": 0}')",
        "import ctypes; ctypes.string_at(0)",
        "def add(a, b): return bytearray(1 << 32)",
        "import sys\nsys.stdout.write('x' * 10**7)",
    ],
)
def test_wrong_or_crafty_code_passes_nothing(completion: str):
    assert code(completion, ADD) == 0.0


def test_code_that_hangs_is_stopped_and_what_came_before_counts():
    began = time.monotonic()
    hangs = "def add(a, b):\n    while b == 1: pass\n    return a + b"
    assert code(hangs, ADD, timeout_s=1.0) == 0.5
    assert time.monotonic() - began < 4


def test_a_program_reads_and_prints():
    program = "print(sum(map(int, input().split())))"
    tests = [{"stdin": "2 3\n", "stdout": "5"}, {"stdin": "1 1\n", "stdout": "2 \n"}]
    assert code(program, tests) == 1.0
    assert code("print(5)", tests) == 0.5
    assert code(program + "\nimport time; time.sleep(9)", tests[:1], timeout_s=0.7) == 0.0


def test_values_are_compared_as_json():
    body = "def f(x): return {'a': [1, 2.5, (x,)], 'b': None, 'c': True}"
    wanted = {"a": [1, 2.5, [3]], "b": None, "c": True}
    assert code(body, [{"call": "f(3)", "expect": wanted}]) == 1.0
    assert code(body, [{"call": "f(4)", "expect": wanted}]) == 0.0
    assert code("def f(): return 1", [{"call": "f()", "expect": True}]) == 0.0
    assert code("def f(): return 0.1 + 0.2", [{"call": "f()", "expect": 0.3}]) == 1.0


@pytest.mark.parametrize("tests", [[], [{"call": "f()"}], [{"assert": "f() == 1"}]])
def test_tests_of_another_form_are_refused(tests: list):
    with pytest.raises(ValueError):
        code("x", tests)


def test_the_last_block_is_the_answer():
    assert extract("```python\na\n```\ntext\n```\nb\n```") == "b\n"
    assert extract("a = 1") == "a = 1"

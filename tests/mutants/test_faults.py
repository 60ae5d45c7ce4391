"""The list of planted faults fits the tree as it is; planting them is `make mutants`."""

import ast
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.fault import Fault
from tests.mutants.faults import FAULTS

ROOT = Path(__file__).resolve().parents[2]


def test_there_are_many_and_no_two_are_the_same() -> None:
    assert len(FAULTS) >= 30
    for facts in ([f.name for f in FAULTS], [(f.file, f.old, f.new) for f in FAULTS]):
        assert [x for x, n in Counter(facts).items() if n > 1] == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_its_text_stands_once_in_the_file_and_what_replaces_it_is_python(fault: Fault) -> None:
    source = (ROOT / fault.path).read_text("utf-8")
    assert source.count(fault.old) == 1, f"{fault.path}: {fault.old!r}"
    changed = source.replace(fault.old, fault.new)
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_the_tests_that_must_catch_it_exist(fault: Fault) -> None:
    assert fault.ids
    for test in fault.ids:
        file, _, name = test.partition("::")
        functions = {
            node.name
            for node in ast.parse((ROOT / file).read_text("utf-8")).body
            if isinstance(node, ast.FunctionDef)
        }
        assert name.partition("[")[0] in functions, test

"""The source tree as the tests of its structure read it."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("mcp_server", "playbook", "engine", "envs")


@cache
def tree(*folders: str) -> list[Path]:
    """Every file of our own under the folders, relative to the repository."""
    return sorted(
        path.relative_to(ROOT)
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
        and "__pycache__" not in path.parts
        and path.suffix != ".pyc"
        and path.name != "py.typed"
    )


@cache
def sources() -> list[Path]:
    """Our Python modules, without environments that are data (templates and so on)."""
    data = (Path("envs/templates"), Path("envs/benchmarks"), Path("envs/examples"))
    return [
        path
        for path in tree(*PACKAGES)
        if path.suffix == ".py" and not any(path.is_relative_to(folder) for folder in data)
    ]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text("utf-8"), str(path))


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Every node of a file. The tree is large, so it is walked once."""
    return list(ast.walk(parsed(path)))


@cache
def statements(path: Path) -> list[tuple[ast.stmt, bool]]:
    """Every statement of a file, and whether it stands inside a function."""
    listed: list[tuple[ast.stmt, bool]] = []
    waiting: list[tuple[ast.AST, bool]] = [(parsed(path), False)]
    while waiting:
        node, is_inside = waiting.pop()
        is_inside = is_inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                listed.append((child, is_inside))
            if not isinstance(child, ast.expr):  # an expression holds no statement
                waiting.append((child, is_inside))
    return listed


def docstrings(module: ast.Module) -> set[int]:
    """The ids of the constants that are docstrings or bare strings: prose, not values."""
    return {
        id(node.value)
        for node in ast.walk(module)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


@cache
def strings(path: Path) -> list[tuple[int, str]]:
    """(line, value) of every string constant in the code of a file."""
    module = parsed(path)
    prose = docstrings(module)
    return [
        (node.lineno, node.value)
        for node in nodes(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose
    ]


def calls(path: Path, *names: str) -> list[ast.Call]:
    return [
        node
        for node in nodes(path)
        if isinstance(node, ast.Call)
        and (getattr(node.func, "id", None) or getattr(node.func, "attr", None)) in names
    ]


def module_name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> list[ast.Import | ast.ImportFrom]:
    return [node for node, _ in statements(path) if isinstance(node, ast.Import | ast.ImportFrom)]


def late_imports(path: Path) -> set[int]:
    """The lines of imports inside functions."""
    return {
        node.lineno
        for node, is_inside in statements(path)
        if is_inside and isinstance(node, ast.Import | ast.ImportFrom)
    }


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many parameters a function has, `self` and `cls` left out."""
    arguments = function.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))

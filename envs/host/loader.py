"""Loads an `Env` from its folder. What is wrong is reported in words, with file and line.

This runs inside the env process: user code is imported nowhere else.
"""

import difflib
import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from envs.base import Env, MultiTurnEnv, SingleTurnEnv, Task, is_scored, kind_of
from envs.config.problem import EnvProblem
from envs.config.settings import read_settings
from envs.dataset import DatasetEnv, data_files
from envs.isolation.packages import add_source
from envs.json_types import JsonObject, TaskRow

__all__ = [
    "EnvProblem",
    "check_tools",
    "explain",
    "load_folder",
    "read_task_rows",
    "task_problem",
    "where",
]

ENTRY = "environment.py"
MAX_TASKS = 200_000  # of one environment
MAX_TOOLS_BYTES = 1 << 20  # of all tool schemas together, as JSON
TOOL_CHARS = 120  # of a faulty schema, in the message
ERROR_CHARS = 500  # of an exception, in the message


def load_folder(folder: Path, params: JsonObject | None = None) -> Env:
    """The environment in `folder`, checked against the contract.

    A folder with data files and no environment.py is an SFT dataset.

    Args:
        params: arguments of load_environment(); None takes those of environment.toml.

    Raises:
        EnvProblem: ENV_INVALID (the contract is broken), ENV_IMPORT (its code raised), ENV_DEPS (a
            package is missing), ENV_PARAM (params do not fit) or DATASET_INVALID.
    """
    folder = Path(folder)
    files = [] if (folder / ENTRY).is_file() else data_files(folder)
    if files:
        return _run(lambda: DatasetEnv(*files), folder, "reading the data", "DATASET_INVALID")
    params = read_settings(folder).params if params is None else params
    module = _import(folder)
    entry = _entry(module, folder)
    _check_params(entry, params, folder)
    env = _run(lambda: entry(**params), folder, "load_environment()", "ENV_IMPORT")
    if inspect.isclass(env) and issubclass(env, Env):
        raise _problem_at(
            entry,
            folder,
            f"load_environment() returned the class {env.__name__}",
            f"Return an instance: {env.__name__}().",
        )
    if not isinstance(env, SingleTurnEnv | MultiTurnEnv):
        raise _problem_at(
            entry,
            folder,
            f"load_environment() returned {_kind(env)}",
            "Return an instance of a class derived from SingleTurnEnv or MultiTurnEnv.",
        )
    _check_methods(env, folder)
    check_tools(env.tools)
    return env


def read_task_rows(env: Env, folder: Path) -> list[TaskRow]:
    """Every task of `env` as a row of plain JSON values.

    Raises EnvProblem (ENV_INVALID) naming the first task at fault.
    """
    source = type(env).tasks
    returned = _run(env.tasks, folder, "tasks()", "ENV_INVALID")
    if not isinstance(returned, Iterable) or isinstance(returned, str | dict):
        raise _problem_at(
            source, folder, f"tasks() returned {_kind(returned)}", "Return a list of Task."
        )
    tasks = _run(lambda: list(returned), folder, "tasks()", "ENV_INVALID")
    if not tasks:
        raise _problem_at(source, folder, "tasks() returned no task", "Return at least one Task.")
    if len(tasks) > MAX_TASKS:
        message = f"tasks() returned {len(tasks)} tasks, above {MAX_TASKS}"
        raise _problem_at(
            source, folder, message, "Return a sample of them, drawn with a fixed seed."
        )
    rows, index_of_id = [], {}
    needs_answer = kind_of(env) == "sft"
    for index, task in enumerate(tasks):
        problem = task_problem(task, index, index_of_id, needs_answer)
        if problem:
            raise _problem_at(source, folder, *problem)
        index_of_id[task.id] = index
        rows.append(task.to_row())
    return rows


def check_tools(tools: Any) -> None:
    """Refuse `tools` unless it is a list of OpenAI function schemas that can be stored as JSON.

    Raises EnvProblem ENV_INVALID.
    """
    size = 0
    if isinstance(tools, str | dict) or not isinstance(tools, Iterable):
        raise EnvProblem("ENV_INVALID", f"tools is a list of functions, got {_kind(tools)}")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise EnvProblem(
                "ENV_INVALID",
                f"tools[{index}] is no function schema: {str(tool)[:TOOL_CHARS]}",
                'Write {"type": "function", "function": {"name": ..., "parameters": {...}}}.',
                ENTRY,
            )
        try:
            size += len(json.dumps(tool, ensure_ascii=False, allow_nan=False).encode())
        except UnicodeEncodeError:
            message = f"a text of tools[{index}] has half of a surrogate pair in it"
            raise EnvProblem("ENV_INVALID", message, file=ENTRY) from None
        except (TypeError, ValueError, RecursionError) as error:
            raise EnvProblem(
                "ENV_INVALID", f"tools[{index}] is not JSON: {error}", file=ENTRY
            ) from error
        if size > MAX_TOOLS_BYTES:
            too_large = f"the schemas of tools take more than {MAX_TOOLS_BYTES >> 20} MB"
            raise EnvProblem("ENV_INVALID", too_large, "Describe them in less.", ENTRY)


def where(error: BaseException, folder: Path) -> tuple[str, int]:
    """File (relative to `folder`) and line of the deepest frame of `error` inside `folder`.

    ("", 0) when no frame is inside it. A SyntaxError has no such frame: its own place is used.
    """
    if isinstance(error, SyntaxError) and error.filename:
        inside = _relative(error.filename, folder)
        if inside:
            return inside, error.lineno or 0
    deepest = ("", 0)
    for frame in traceback.extract_tb(error.__traceback__):
        inside = _relative(frame.filename, folder)
        if inside:
            deepest = (inside, frame.lineno or 0)
    return deepest


def explain(error: BaseException) -> str:
    """An exception in one line: its type, and its text cut at 500 characters."""
    text = str(error).strip().replace("\n", " ")
    if isinstance(error, SyntaxError):
        text = error.msg or text
    name = type(error).__name__
    return f"{name}: {text}"[:ERROR_CHARS] if text else name


def _import(folder: Path) -> ModuleType:
    """Run environment.py and return it as a module.

    Raises EnvProblem: ENV_INVALID when the file is missing, ENV_DEPS when a package is, ENV_IMPORT
    for anything else that goes wrong in it.
    """
    path = folder / ENTRY
    if not path.is_file():
        subfolders = sorted(p.parent.name for p in folder.glob(f"*/{ENTRY}"))
        hint = (
            f"Push the folder {subfolders[0]!r} instead."
            if subfolders
            else f"Create {ENTRY} there."
        )
        hint += " Rows to learn from alone go into datasets/ as JSONL."
        raise EnvProblem("ENV_INVALID", f"the folder has no {ENTRY}", hint=hint)
    add_source(folder)
    spec = importlib.util.spec_from_file_location("environment", path)
    assert spec is not None and spec.loader is not None  # a .py path always has a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["environment"] = module  # dataclasses look their module up there
    loader = spec.loader
    _run(lambda: loader.exec_module(module), folder, ENTRY, "ENV_IMPORT")
    return module


def _entry(module: ModuleType, folder: Path) -> Callable[..., Any]:
    """The function load_environment of the module. Raises EnvProblem ENV_INVALID."""
    entry = getattr(module, "load_environment", None)
    if callable(entry):
        if inspect.iscoroutinefunction(entry):
            raise _problem_at(
                entry, folder, "load_environment is async", "Define it with plain def."
            )
        return entry
    names = [name for name, value in vars(module).items() if inspect.isfunction(value)]
    similar = difflib.get_close_matches("load_environment", names, 1, 0.7)
    suggestion = f" There is {similar[0]}(): rename it." if similar else ""
    raise EnvProblem(
        "ENV_INVALID",
        f"{ENTRY} has no function load_environment",
        hint=f"Define load_environment(**params) and return an environment.{suggestion}",
        file=ENTRY,
    )


def _check_params(entry: Callable[..., Any], params: JsonObject, folder: Path) -> None:
    """Raises EnvProblem ENV_PARAM unless `entry` can be called with `params`."""
    signature = inspect.signature(entry)
    try:
        signature.bind(**params)
    except TypeError as error:
        known = [p.name for p in signature.parameters.values()]
        unknown = [name for name in params if name not in known]
        similar = difflib.get_close_matches(unknown[0], known, 1) if unknown else []
        suggestion = f" Did you mean {similar[0]}?" if similar else ""
        raise EnvProblem(
            "ENV_PARAM",
            f"load_environment() does not accept these params: {error}",
            hint=f"It accepts: {', '.join(known) or 'none'}.{suggestion} Edit [params] in "
            "environment.toml.",
            file=ENTRY,
            line=_line(entry),
        ) from error


def _check_methods(env: Env, folder: Path) -> None:
    """Refuse an environment that lacks a method of its kind, or has one that is async or takes
    other arguments than the contract says.

    Raises EnvProblem ENV_INVALID at the line of the class or method.
    """
    # Each with the number of arguments it is called with, besides self.
    needed: list[tuple[str, int]] = [("tasks", 0)]
    if isinstance(env, MultiTurnEnv) and is_scored(env):
        needed += [("start", 1), ("step", 2)]
    if is_scored(env):
        needed.append(("score", 2))
    for name, count in needed:
        method = getattr(env, name, None)
        function = getattr(type(env), name, None)
        if function in (Env.tasks, MultiTurnEnv.start, MultiTurnEnv.step):
            raise _problem_at(
                type(env),
                folder,
                f"{type(env).__name__} does not define {name}()",
                f"Define {name}; see envs/base.py.",
            )
        if not callable(method):
            raise _problem_at(type(env), folder, f"{name} of {type(env).__name__} is no method", "")
        if inspect.iscoroutinefunction(method):
            raise _problem_at(function, folder, f"{name}() is async", "Define it with plain def.")
        try:
            inspect.signature(method).bind(*range(count))
        except TypeError:
            arguments = {"score": "task, completion", "start": "task", "step": "state, completion"}
            expected = arguments.get(name, "")
            if name == "score" and isinstance(env, MultiTurnEnv):
                expected = "task, state"
            raise _problem_at(
                function,
                folder,
                f"{name}{inspect.signature(method)} does not take ({expected})",
                f"Define {name}(self{', ' if expected else ''}{expected}).",
            ) from None


def task_problem(
    task: Any, index: int, index_of_id: dict[str, int], needs_answer: bool
) -> tuple[str, str] | None:
    """What is wrong with one task, as a message and a hint; None when nothing is.

    Args:
        task: what tasks() returned at `index`; anything at all.
        index_of_id: index of every earlier task by its id.
        needs_answer: whether every task must have an answer (an SFT dataset).
    """
    if not isinstance(task, Task):
        return f"tasks()[{index}] is {_kind(task)}, not a Task", "Build Task(id, prompt, ...)."
    if task.id in index_of_id:
        first = index_of_id[task.id]
        return f"tasks()[{first}] and [{index}] share the id {task.id!r}", "Make every id unique."
    if needs_answer and not task.answer_messages:
        return (
            f"task {task.id!r} has no answer, and without score() this is an SFT dataset",
            "Give every task an answer, or define score().",
        )
    answer = task.answer_messages
    if answer and not any(message.role == "assistant" for message in answer):
        return f"the answer of task {task.id!r} has no assistant message", ""
    try:
        json.dumps(task.to_row(), ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        problem = f"a text of task {task.id!r} has half of a surrogate pair in it"
        return problem, "Decode the file it comes from as UTF-8."
    except (TypeError, ValueError, RecursionError) as error:
        return f"the metadata of task {task.id!r} is not JSON: {error}", "Keep plain values in it."
    return None


def _run(call: Callable[[], Any], folder: Path, what: str, code: str) -> Any:
    """The result of `call()`, with whatever user code raises turned into an EnvProblem.

    `what` names the call in the message and `code` is the error code; a missing package is always
    ENV_DEPS. An EnvProblem passes through, with file and line added if it has none.
    """
    try:
        return call()
    except EnvProblem as problem:
        if not problem.file:
            problem.file, problem.line = where(problem, folder)
        raise
    except ModuleNotFoundError as error:
        file, line = where(error, folder)
        package = (error.name or str(error)).partition(".")[0]
        raise EnvProblem(
            "ENV_DEPS",
            f"the package {package!r} is not installed for this environment",
            hint=f"Name it in requirements.txt and push with install=true (or correct the import "
            f"of {error.name!r}).",
            file=file,
            line=line,
        ) from error
    except BaseException as error:  # user code may raise anything, SystemExit included
        file, line = where(error, folder)
        failure = "raised " + explain(error)
        if isinstance(error, SystemExit):
            failure = f"left the process with sys.exit({error.code!r})"
        elif isinstance(error, SyntaxError):
            failure = f"is no valid Python: {error.msg}"
        raise EnvProblem(
            code, f"{what} {failure}", hint="Correct it and push again.", file=file, line=line
        ) from error


def _problem_at(source: Any, folder: Path, message: str, hint: str) -> EnvProblem:
    """An ENV_INVALID at the line where `source` (a function or class) is defined.

    Without a place where `source` is built in or lies outside `folder`.
    """
    try:
        file = _relative(inspect.getsourcefile(source) or "", folder)
    except TypeError:  # what is built in has no source file
        file = ""
    line = _line(source) if file else 0
    return EnvProblem("ENV_INVALID", message, hint, file, line)


def _line(source: Any) -> int:
    """The line where a function or class is defined; 0 where that cannot be told."""
    code = getattr(inspect.unwrap(source), "__code__", None) if callable(source) else None
    if code is not None:
        return code.co_firstlineno
    try:
        _, first_line = inspect.getsourcelines(source)
        return first_line
    except (OSError, TypeError):
        return 0


def _relative(filename: str, folder: Path) -> str:
    """`filename` relative to `folder`; "" when it lies outside or cannot be resolved."""
    try:
        return Path(filename).resolve().relative_to(folder.resolve()).as_posix()
    except (ValueError, OSError):
        return ""


def _kind(value: Any) -> str:
    """What a value is, to end a sentence such as "tasks() returned ..."."""
    return "None" if value is None else f"a value of type {type(value).__name__}"

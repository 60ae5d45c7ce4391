"""Loads an `Env` from its folder. Errors say in words what is wrong, with file and line.

This runs inside the env process: user code is imported nowhere else.
"""

import difflib
import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from envs.adapters.load import load as load_adapter
from envs.base import (
    Env,
    MultiTurnEnv,
    SingleTurnEnv,
    Task,
    compares_groups,
    defines_perturb,
    defines_score,
    is_scored,
    kind_of,
)
from envs.config.problem import EnvProblem
from envs.config.settings import FILE as SETTINGS_FILE
from envs.config.settings import EnvSettings, read_settings
from envs.dataset import DatasetEnv, data_files
from envs.isolation.packages import add_source
from envs.json_types import JsonObject, TaskRow
from envs.scored_rows import ScoredRows
from envs.tool_schemas import check_tools

__all__ = [
    "EnvProblem",
    "check_tools",
    "error_place",
    "explain",
    "load_folder",
    "read_task_rows",
    "task_problem",
]

ENTRY = "environment.py"
MAY_BE_ASYNC = ("score", "score_group")
MAX_TASKS = 200_000  # the most tasks of one environment
ERROR_CHARS = 500  # how much of an exception's text a message shows


def load_folder(folder: Path, params: JsonObject | None = None) -> Env:
    """Load the environment in `folder` and check that it defines what its kind needs.

    A folder whose environment.toml names an adapter (a foreign format) is read by that adapter. A
    folder with data files and no environment.py is an SFT dataset, or a single-turn environment if
    environment.toml names a scorer; `params` are ignored there.

    Args:
        folder: the environment's folder.
        params: arguments of load_environment(); None takes those of environment.toml.

    Raises:
        EnvProblem: with one of these codes:
            ENV_INVALID: the environment breaks the contract.
            ENV_IMPORT: its code raised an exception.
            ENV_DEPS: a package is missing.
            ENV_PARAM: load_environment() does not accept `params`.
            DATASET_INVALID: a data file or a row in it cannot be read.
    """
    folder = Path(folder)
    settings = read_settings(folder)
    used_params = settings.params if params is None else params
    if settings.adapter is not None:
        return _load_adapter(folder, settings, used_params)
    # If there is an environment.py, its code reads the data files.
    files = [] if (folder / ENTRY).is_file() else data_files(folder)
    if not files:
        return _load_code(folder, settings, used_params)
    env = _call_user_code(
        lambda: _dataset(files, settings),
        folder,
        call_name="reading the data",
        code="DATASET_INVALID",
    )
    if settings.rollout:
        env.command = settings.rollout.command
    return env


def _load_code(folder: Path, settings: EnvSettings, params: JsonObject) -> Env:
    """Call load_environment(**params) of environment.py and check the environment that it returns.

    Raises EnvProblem ENV_INVALID if the file is missing or the environment breaks the contract,
    ENV_IMPORT if its code raises, ENV_DEPS for a missing package, and ENV_PARAM for wrong `params`.
    """
    if settings.scorer and not (folder / ENTRY).is_file():
        raise EnvProblem(
            "ENV_INVALID",
            f"environment.toml names the scorer {settings.scorer!r} of data files, and the folder "
            "has none",
            hint='Put rows.jsonl beside it, a line for each task: {"prompt": ..., "answer": ...}.',
        )
    if settings.scorer:
        raise EnvProblem(
            "ENV_INVALID",
            f"environment.toml names the scorer {settings.scorer!r} of data files, and the folder "
            f"has {ENTRY}, which scores by itself",
            hint="Leave one of them out.",
            file=SETTINGS_FILE,
        )
    module = _import_entry_file(folder)
    load_environment = _entry_function(module, folder)
    _check_params(load_environment, params, folder)
    env = _call_user_code(
        lambda: load_environment(**params),
        folder,
        call_name="load_environment()",
        code="ENV_IMPORT",
    )
    if not isinstance(env, SingleTurnEnv | MultiTurnEnv):
        message, hint = _no_environment(env)
        raise _problem_at(load_environment, folder, message, hint)
    if settings.rollout:
        _check_scores_nothing(env, folder)
        env.command = settings.rollout.command
    _check_methods(env, folder)
    check_tools(env.tools)
    return env


def _dataset(files: Sequence[Path], settings: EnvSettings) -> DatasetEnv:
    """Return the rows of data files as an environment: played by a command, scored by a named
    scorer, or neither."""
    if settings.rollout:
        return CommandDataset(*files)
    return ScoredRows(settings.scorer, *files) if settings.scorer else DatasetEnv(*files)


def _load_adapter(folder: Path, settings: EnvSettings, params: JsonObject) -> Env:
    """Load a folder in a foreign format with the adapter that `settings` name. Raises EnvProblem
    ENV_IMPORT if the foreign code raises, ENV_DEPS for a missing package, ENV_INVALID for options
    or tools that are not valid."""
    adapter = settings.adapter
    assert adapter is not None  # the caller has checked
    env = _call_user_code(
        lambda: load_adapter(folder, adapter, params),
        folder,
        call_name=f"the adapter {adapter.kind}",
        code="ENV_IMPORT",
    )
    if settings.rollout:
        env.command = settings.rollout.command
    check_tools(env.tools)
    return env


class CommandDataset(DatasetEnv):
    """Rows of data files that a command plays; therefore they need no answers."""

    rows_need_answers = False


def _check_scores_nothing(env: Env, folder: Path) -> None:
    """Raise EnvProblem ENV_INVALID if an environment whose tasks a command plays also scores or
    answers them itself, because that code would never be used."""
    plays_itself = defines_score(env) or isinstance(env, MultiTurnEnv)
    if not plays_itself:
        return
    raise _problem_at(
        type(env),
        folder,
        "environment.toml names a command, which plays the tasks and earns their rewards, and "
        f"{type(env).__name__} scores answers itself",
        "Leave one of them out; beside a command a SingleTurnEnv with tasks() alone is enough.",
    )


def _no_environment(returned: Any) -> tuple[str, str]:
    """Return (message, hint) about what load_environment() returned instead of an environment."""
    if inspect.isclass(returned) and issubclass(returned, Env):
        name = returned.__name__
        return f"load_environment() returned the class {name}", f"Return an instance: {name}()."
    return (
        f"load_environment() returned {_type_in_words(returned)}",
        "Return an instance of a class derived from SingleTurnEnv or MultiTurnEnv.",
    )


def read_task_rows(env: Env, folder: Path) -> list[TaskRow]:
    """Call `env.tasks()` and return every task as a row of plain JSON values.

    Raises EnvProblem ENV_INVALID, with the place in the code of `folder`, if tasks() raises, does
    not return a list of tasks, or returns a bad task (the message names the first one).
    """
    source = type(env).tasks  # errors name the line of this function
    tasks = _call_tasks(env, folder)
    rows = []
    index_of_id = {}  # id of a task -> its index, to find an id that occurs twice
    needs_answer = kind_of(env) == "sft"
    for index, task in enumerate(tasks):
        problem = task_problem(task, index, index_of_id, needs_answer)
        if problem is not None:
            message, hint = problem
            raise _problem_at(source, folder, message, hint)
        index_of_id[task.id] = index
        rows.append(task.to_row())
    return rows


def _call_tasks(env: Env, folder: Path) -> list[Any]:
    """Call `env.tasks()`; return its 1 to MAX_TASKS items, which may be of any type.

    Raises EnvProblem ENV_INVALID if it raises or returns anything else; `folder` is used to give
    the place in the code.
    """
    source = type(env).tasks  # errors name the line of this function
    returned = _call_user_code(env.tasks, folder, call_name="tasks()", code="ENV_INVALID")
    # A text or a dict can be iterated too, but is no list of tasks.
    if not isinstance(returned, Iterable) or isinstance(returned, str | dict):
        raise _problem_at(
            source, folder, f"tasks() returned {_type_in_words(returned)}", "Return a list of Task."
        )
    # If tasks() is a generator, the author's code runs only here, while its items are taken.
    tasks = _call_user_code(lambda: list(returned), folder, call_name="tasks()", code="ENV_INVALID")
    if not tasks:
        raise _problem_at(source, folder, "tasks() returned no task", "Return at least one Task.")
    if len(tasks) > MAX_TASKS:
        message = f"tasks() returned {len(tasks)} tasks, above {MAX_TASKS}"
        raise _problem_at(
            source, folder, message, "Return a sample of them, drawn with a fixed seed."
        )
    return tasks


def error_place(error: BaseException, folder: Path) -> tuple[str, int]:
    """Return where in the code of `folder` an exception was raised: (file relative to `folder`,
    line).

    That is the place of a SyntaxError in one of its files, or else the deepest frame of the
    traceback that is inside `folder`. Returns ("", 0) if there is none.
    """
    if isinstance(error, SyntaxError) and error.filename:
        file = _path_in_folder(error.filename, folder)
        if file:
            return file, error.lineno or 0
    deepest_place = ("", 0)
    for frame in traceback.extract_tb(error.__traceback__):  # from the outermost call inwards
        file = _path_in_folder(frame.filename, folder)
        if file:
            deepest_place = (file, frame.lineno or 0)
    return deepest_place


def explain(error: BaseException) -> str:
    """Return an exception as one line of at most ERROR_CHARS (500) characters, e.g. "ValueError: no
    such row"."""
    text = str(error).strip().replace("\n", " ")
    if isinstance(error, SyntaxError):
        text = error.msg or text  # str() adds file and line, which the caller reports separately
    name = type(error).__name__
    return f"{name}: {text}"[:ERROR_CHARS] if text else name


def _import_entry_file(folder: Path) -> ModuleType:
    """Run environment.py in `folder` and return it as a module.

    Raises EnvProblem ENV_INVALID if the file is missing, ENV_DEPS if it imports a package that is
    not installed, and ENV_IMPORT if it raises anything else.
    """
    path = folder / ENTRY
    if not path.is_file():
        raise _no_entry_file(folder)
    add_source(folder)
    spec = importlib.util.spec_from_file_location("environment", path)
    assert spec is not None and spec.loader is not None  # a .py path always has a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["environment"] = module  # a dataclass in the file looks its module up there
    loader = spec.loader
    _call_user_code(lambda: loader.exec_module(module), folder, call_name=ENTRY, code="ENV_IMPORT")
    return module


def _no_entry_file(folder: Path) -> EnvProblem:
    """Return the problem ENV_INVALID for a folder without environment.py."""
    hint = f"Create {ENTRY} there."
    # The author may have pushed the folder above the environment's own.
    subfolders = sorted(path.parent.name for path in folder.glob(f"*/{ENTRY}"))
    if subfolders:
        hint = f"Push the folder {subfolders[0]!r} instead."
    hint += " Rows to learn from alone go into datasets/ as JSONL."
    return EnvProblem("ENV_INVALID", f"the folder has no {ENTRY}", hint=hint)


def _entry_function(module: ModuleType, folder: Path) -> Callable[..., Any]:
    """Return the function `load_environment` of the module.

    Raises EnvProblem ENV_INVALID if it is missing (the hint names a function with a similar name)
    or is async.
    """
    entry = getattr(module, "load_environment", None)
    if callable(entry):
        if inspect.iscoroutinefunction(entry):
            raise _problem_at(
                entry, folder, "load_environment is async", "Define it with plain def."
            )
        return entry
    names = [name for name, value in vars(module).items() if inspect.isfunction(value)]
    similar = difflib.get_close_matches("load_environment", names, n=1, cutoff=0.7)
    suggestion = f" There is {similar[0]}(): rename it." if similar else ""
    raise EnvProblem(
        "ENV_INVALID",
        f"{ENTRY} has no function load_environment",
        hint=f"Define load_environment(**params) and return an environment.{suggestion}",
        file=ENTRY,
    )


def _check_params(entry: Callable[..., Any], params: JsonObject, folder: Path) -> None:
    """Raise EnvProblem ENV_PARAM unless load_environment (`entry`) can be called with `params`."""
    signature = inspect.signature(entry)
    try:
        signature.bind(**params)
    except TypeError as error:
        raise EnvProblem(
            "ENV_PARAM",
            f"load_environment() does not accept these params: {error}",
            hint=_params_hint(params, accepted_names=list(signature.parameters)),
            file=ENTRY,
            line=_line_of_definition(entry),
        ) from error


def _params_hint(params: JsonObject, accepted_names: list[str]) -> str:
    """Return what to do about params that are not accepted.

    `params` are the [params] of environment.toml, `accepted_names` the parameters of
    load_environment().
    """
    suggestion = ""
    unknown = [name for name in params if name not in accepted_names]
    if unknown:
        similar = difflib.get_close_matches(unknown[0], accepted_names, n=1)
        suggestion = f" Did you mean {similar[0]}?" if similar else ""
    accepted = f"It accepts: {', '.join(accepted_names) or 'none'}."
    return f"{accepted}{suggestion} Edit [params] in environment.toml."


def _check_methods(env: Env, folder: Path) -> None:
    """Raise EnvProblem ENV_INVALID for the first method that is missing or breaks the contract.

    The kind of the environment decides which methods are needed. `folder` is the author's, to give
    the place of the error.
    """
    # Each method that this kind of environment needs -> the names of the arguments it is called
    # with.
    needed: dict[str, tuple[str, ...]] = {"tasks": ()}
    if env.command:
        pass  # the command needs no further methods
    elif is_scored(env) and isinstance(env, MultiTurnEnv):
        needed["start"] = ("task",)
        needed["step"] = ("state", "completion")
        needed["score"] = ("task", "state")
    elif is_scored(env):
        needed["score"] = ("task", "completion")
    if compares_groups(env):
        _check_also_scores_one(env, folder)
        needed["score_group"] = ("task", "completions")
    if defines_perturb(env):
        needed["perturb"] = ("task", "kind", "seed")
    for name, arguments in needed.items():
        _check_method(env, name, arguments, folder)


def _check_also_scores_one(env: Env, folder: Path) -> None:
    """Raise EnvProblem ENV_INVALID if an environment with `score_group`, which scores several
    answers together, has several turns, or has no `score` for single answers."""
    definition = type(env).score_group  # type: ignore[attr-defined]
    if not isinstance(env, SingleTurnEnv):
        message = "score_group is for an environment of one turn"
        raise _problem_at(definition, folder, message, "Compare within score(task, state).")
    if not defines_score(env):
        raise _problem_at(
            definition,
            folder,
            "score_group() ranks the completions of training, and nothing scores one alone",
            "Define score(task, completion) too: evaluations and the verdict ask it.",
        )


def _check_method(env: Env, name: str, arguments: tuple[str, ...], folder: Path) -> None:
    """Raise EnvProblem ENV_INVALID unless the method `name` can be called with `arguments` (names).

    It is refused if it is missing, not callable, async without being allowed to, or takes other
    arguments. The error has the line of the class or the method.
    """
    method = _defined_method(env, name, folder)
    definition = getattr(type(env), name, None)  # unbound, to find its line for an error
    if inspect.iscoroutinefunction(method) and name not in MAY_BE_ASYNC:
        raise _problem_at(definition, folder, f"{name}() is async", "Define it with plain def.")
    signature = inspect.signature(method)
    if not _can_be_called(signature, arguments):
        message = f"{name}{signature} does not take ({', '.join(arguments)})"
        hint = f"Define {name}({', '.join(('self', *arguments))})."
        raise _problem_at(definition, folder, message, hint)


def _defined_method(env: Env, name: str, folder: Path) -> Callable[..., Any]:
    """Return the method `name` of an environment.

    Raises EnvProblem ENV_INVALID, with the line of the author's class, unless that class defines
    the method and it can be called.
    """
    class_name = type(env).__name__
    method = getattr(env, name, None)
    # These methods of the base classes only raise NotImplementedError. `score` is not listed,
    # because an environment that does not define it is a valid SFT dataset.
    if getattr(type(env), name, None) in (Env.tasks, MultiTurnEnv.start, MultiTurnEnv.step):
        message = f"{class_name} does not define {name}()"
        raise _problem_at(type(env), folder, message, f"Define {name}; see envs/base.py.")
    if not callable(method):
        message = f"{name} of {class_name} is no method"
        raise _problem_at(type(env), folder, message, hint="")
    return method


def _can_be_called(signature: inspect.Signature, arguments: tuple[str, ...]) -> bool:
    """Whether a function with this signature can be called with positional arguments, one for each
    name in `arguments`."""
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


def task_problem(
    task: Any, index: int, index_of_id: dict[str, int], needs_answer: bool
) -> tuple[str, str] | None:
    """Return what is wrong with one task, as (message, hint); None if nothing is.

    The hint is "" if the message says enough.

    Args:
        task: the item that tasks() returned at `index`; it may be of any type.
        index: its position in the list, for the message.
        index_of_id: id -> index of every earlier task, to find an id that occurs twice.
        needs_answer: whether every task must have an answer (an SFT dataset).
    """
    if not isinstance(task, Task):
        return (
            f"tasks()[{index}] is {_type_in_words(task)}, not a Task",
            "Build Task(id, prompt, ...).",
        )
    if task.id in index_of_id:
        first = index_of_id[task.id]
        return f"tasks()[{first}] and [{index}] share the id {task.id!r}", "Make every id unique."
    return _answer_problem(task, needs_answer) or _json_problem(task) or _tools_problem(task)


def _tools_problem(task: Task) -> tuple[str, str] | None:
    """Return what is wrong with a task's own tools, as (message, hint); None if nothing is."""
    try:
        check_tools(task.tools or ())
    except EnvProblem as problem:
        return f"task {task.id!r}: {problem.message}", str(problem.hint)
    return None


def _answer_problem(task: Task, needs_answer: bool) -> tuple[str, str] | None:
    """Return what is wrong with the answer of a task, as (message, hint); None if nothing is.

    `needs_answer`: whether the task must have something to learn from: an answer, or a preference
    (a better and a worse answer).
    """
    answer = task.answer_messages
    if needs_answer and not answer and not task.preference:
        return (
            f"task {task.id!r} has no answer, and without score() this is an SFT dataset",
            "Give every task an answer, or define score().",
        )
    if answer and not any(message.role == "assistant" for message in answer):
        return f"the answer of task {task.id!r} has no assistant message", ""
    return None


def _json_problem(task: Task) -> tuple[str, str] | None:
    """Return why a task cannot be stored as JSON, as (message, hint); None if it can."""
    try:
        json.dumps(task.to_row(), ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        message = f"a text of task {task.id!r} has half of a surrogate pair in it"
        return message, "Decode the file it comes from as UTF-8."
    # TypeError: no JSON type; ValueError: nan or a circle; RecursionError: nested too deep.
    except (TypeError, ValueError, RecursionError) as error:
        field_names = "metadata" if task.tools is None else "metadata or the tools"
        return (
            f"the {field_names} of task {task.id!r} is not JSON: {error}",
            "Keep plain values in it.",
        )
    return None


def _call_user_code(call: Callable[[], Any], folder: Path, call_name: str, code: str) -> Any:
    """Return what `call()` returns; turn whatever it raises into an EnvProblem with file and line.

    Args:
        call: runs code of the author.
        folder: the environment's folder, to find the place of an error in it.
        call_name: names the call in the message, e.g. "tasks()".
        code: the error code for exceptions; but an EnvProblem keeps its own code, and a missing
            package is always ENV_DEPS.
    """
    try:
        return call()
    except EnvProblem as problem:  # its message says enough; the place may be missing
        if not problem.file:
            problem.file, problem.line = error_place(problem, folder)
        raise
    except ModuleNotFoundError as error:
        raise _missing_package(error, folder) from error
    except BaseException as error:  # user code may raise anything, SystemExit included
        file, line = error_place(error, folder)
        message = f"{call_name} {_failure_in_words(error)}"
        raise EnvProblem(code, message, "Correct it and push again.", file, line) from error


def _missing_package(error: ModuleNotFoundError, folder: Path) -> EnvProblem:
    """Return the problem ENV_DEPS for an import of a package that is not installed.

    It has the file and line of the import if that is in `folder`, the environment's folder.
    """
    file, line = error_place(error, folder)
    package = (error.name or str(error)).partition(".")[0]
    return EnvProblem(
        "ENV_DEPS",
        f"the package {package!r} is not installed for this environment",
        hint=f"Name it in requirements.txt and push with install=true (or correct the import "
        f"of {error.name!r}).",
        file=file,
        line=line,
    )


def _failure_in_words(error: BaseException) -> str:
    """Return what user code did when `error` was raised, e.g. "raised ValueError: no such row"."""
    if isinstance(error, SystemExit):
        return f"left the process with sys.exit({error.code!r})"
    if isinstance(error, SyntaxError):
        return f"is no valid Python: {error.msg}"
    return "raised " + explain(error)


def _problem_at(source: Any, folder: Path, message: str, hint: str) -> EnvProblem:
    """Return an EnvProblem ENV_INVALID that points to the definition of `source`, a function or
    class.

    If it is built in or defined outside `folder`, the error has no file and line.
    """
    try:
        file = _path_in_folder(inspect.getsourcefile(source) or "", folder)
    except TypeError:  # built-in functions have no source file
        file = ""
    line = _line_of_definition(source) if file else 0
    return EnvProblem("ENV_INVALID", message, hint, file, line)


def _line_of_definition(source: Any) -> int:
    """Return the line where a function or class is defined; 0 if unknown."""
    if callable(source):
        code = getattr(inspect.unwrap(source), "__code__", None)  # without its decorators
        if code is not None:
            return code.co_firstlineno
    try:  # a class has no code object of its own
        _, first_line = inspect.getsourcelines(source)
        return first_line
    except (OSError, TypeError):  # no source, or built in
        return 0


def _path_in_folder(filename: str, folder: Path) -> str:
    """Return `filename` relative to `folder`; "" if it is outside or cannot be resolved."""
    try:
        return Path(filename).resolve().relative_to(folder.resolve()).as_posix()
    except (ValueError, OSError):
        return ""


def _type_in_words(value: Any) -> str:
    """Return the type of a value for a message: "None", or e.g. "a value of type int"."""
    return "None" if value is None else f"a value of type {type(value).__name__}"

"""Environments on the SDK `freesolo`, whose trainer is called flash. `load_environment(**params)`
in environment.py returns an `EnvironmentSingleTurn` or `EnvironmentMultiTurn`.

The rows come from the environment's `dataset` (or `examples`), else from the folder's data files.
The evaluation suites of an `evaluations.py` in the folder become held-out tasks. The reward is
`RewardResult.score`, success is its `resolved_success()`, its metrics become curves.
"""

import importlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from envs.adapters.parts.options import read_options
from envs.adapters.parts.rows import data_rows
from envs.adapters.parts.user_code import load_name
from envs.base import Env, Message, MultiTurnEnv, Score, SingleTurnEnv, Task
from envs.config.adapters import Adapter
from envs.config.problem import EnvProblem
from envs.json_types import ChatMessage, JsonObject

SDK = "freesolo"
EVALUATIONS = "evaluations.py"


@dataclass(frozen=True)
class Options:
    """The options of [adapter] for this format.

    Attributes:
        file: the file that defines `load_environment`.
        prompt: the text that flash passes as the contract; it becomes the system message.
        data: the file with the rows; "" for the environment's own rows, or if it has none, every
            data file.
    """

    file: str = "environment.py"
    prompt: str = ""
    data: str = ""


class _SdkEnvironment:
    """An environment of the SDK with its rows and evaluation suites."""

    def __init__(self, env: Any, folder: Path, options: Options) -> None:
        """Wrap `env`, an environment of the SDK: import the SDK's types, and load the evaluation
        suites of the environment's folder."""
        self.env = env
        self.folder = folder
        self.options = options
        self.records = importlib.import_module(f"{SDK}.datasets.records")
        self.types = importlib.import_module(f"{SDK}.environments.types")
        self.suites = list(_suites(folder, env))

    def tasks(self) -> list[Task]:
        """Return the rows as tasks, followed by the cases of the SDK's evaluation suites as
        held-out tasks."""
        tasks = [self._row_task(number, split, record) for number, split, record in self._rows()]
        for suite_number, suite in enumerate(self.suites):
            for case_number, case in enumerate(suite.cases()):
                example = self._example_of_case(case)
                prompt = self.env.start_episode(example, self.options.prompt)
                task = Task(
                    f"{suite.name}-{case_number}",
                    _messages(prompt),
                    split="heldout",
                    metadata={"suite": suite_number, "case": case_number},
                )
                tasks.append(task)
        return tasks

    def example_of(self, task: Task) -> Any:
        """Rebuild the SDK's example from which the task of a row was made, by its metadata."""
        example = self.records.task_example_from_record(task.metadata["record"])
        return _with_id(example, task.metadata["example"])

    def score_case(self, task: Task, text: str) -> Score:
        """Return the score that the suite of a held-out case gives to an answer."""
        suite = self.suites[task.metadata["suite"]]
        case = suite.cases()[task.metadata["case"]]
        return self.as_score(suite.score(case, text))

    def as_score(self, result: Any) -> Score:
        """Return as a `Score` what a scorer of the SDK returned: a `RewardResult`, a suite's
        result, a bool or a number."""
        if isinstance(result, bool):
            return Score(float(result), success=result)
        if isinstance(result, int | float):
            return Score(float(result), success=None)
        passed = getattr(result, "passed", None)  # only a suite's result has it
        success = result.resolved_success() if passed is None else passed
        metrics: dict[str, float] = {}  # those that are numbers
        for metric in getattr(result, "metrics", ()):
            value = metric.score if metric.score is not None else metric.value
            if isinstance(value, bool | int | float):
                metrics[metric.name] = float(value)
        return Score(float(result.score), success=success, metrics=metrics, error=result.error)

    def _row_task(self, number: int, split: str | None, record: JsonObject) -> Task:
        """Make the task of row `number`. `record` is the row in the SDK's form; a `split` of None
        is undecided."""
        example_id = self.records.stable_example_id(number)
        example = _with_id(self.records.task_example_from_record(record), example_id)
        prompt = self.env.start_episode(example, self.options.prompt)
        answer = self.env.sft_completion(example) if example.output is not None else None
        return Task(
            example_id,
            _messages(prompt),
            answer=_messages(answer) if answer else None,
            split=split,
            metadata={"record": record, "example": example_id},
        )

    def _rows(self) -> Iterator[tuple[int, str | None, JsonObject]]:
        """Yield (number, split, record) of every row: of the SDK's environment if it holds its rows
        itself and no data file is named, otherwise of the folder's data files. A split of None is
        undecided."""
        examples = getattr(self.env, "dataset", None)
        if examples is None:
            examples = getattr(self.env, "examples", None)
        if examples is not None and not self.options.data:
            for number, item in enumerate(examples):
                yield number, None, dict(getattr(item, "record", item))
            return
        for number, row in enumerate(data_rows(self.folder, self.options.data)):
            yield number, row.split, row.value

    def _example_of_case(self, case: Any) -> Any:
        """Return a case of an evaluation suite as an example of the SDK; some suites have examples
        as cases already."""
        if hasattr(case, "record"):
            return case
        record = {"input": case.input, "output": case.expected, "metadata": case.metadata or {}}
        return self.records.task_example_from_record(record)


class FlashSingleTurn(SingleTurnEnv):
    """A single-turn environment of the SDK."""

    def __init__(self, foreign: _SdkEnvironment) -> None:
        """Wrap an environment of the SDK."""
        self.foreign = foreign

    def tasks(self) -> list[Task]:
        """Return the rows and the cases of the suites as tasks."""
        return self.foreign.tasks()

    def score(self, task: Task, completion: str) -> Score:
        """Score an answer with the SDK's `score_response`, or, for a case of an evaluation suite,
        with the suite."""
        if "suite" in task.metadata:
            return self.foreign.score_case(task, completion)
        env, example = self.foreign.env, self.foreign.example_of(task)
        text = env.normalize_response_text(example, completion)
        return self.foreign.as_score(env.score_response(example, text))


@dataclass
class State:
    """One rollout.

    Attributes:
        example: the SDK's example.
        messages: the messages so far.
        prompt_length: how many of them are the prompt.
        turns: how many completions there were.
        final: the text that counts as the final response.
        metadata: what the steps reported.
    """

    example: Any
    messages: list[ChatMessage]
    prompt_length: int
    turns: int = 0
    final: str = ""
    metadata: JsonObject = field(default_factory=dict)


class FlashMultiTurn(MultiTurnEnv):
    """A multi-turn environment of the SDK."""

    def __init__(self, foreign: _SdkEnvironment) -> None:
        """Wrap an environment of the SDK."""
        self.foreign = foreign

    def tasks(self) -> list[Task]:
        """Return the rows and the cases of the suites as tasks."""
        return self.foreign.tasks()

    def start(self, task: Task) -> State:
        """Begin a rollout with the SDK's `start_episode`."""
        foreign = self.foreign
        example = foreign.example_of(task)
        messages = list(foreign.env.start_episode(example, foreign.options.prompt))
        return State(example, messages, prompt_length=len(messages))

    def step(self, state: State, completion: Message) -> list[Message] | None:
        """Pass the completion to the SDK's `step_episode` and return its reply; None once the
        rollout is done or its turns are used up."""
        env, text = self.foreign.env, completion.content
        state.messages.append(completion.to_dict())
        state.turns += 1
        result = env.step_episode(state.example, list(state.messages), text)
        state.metadata.update(result.metadata)
        state.final = text if result.final_response_text is None else result.final_response_text
        state.messages += result.messages
        if result.done or state.turns >= env.max_episode_turns(state.example):
            return None
        return _messages(result.messages)

    def score(self, task: Task, state: State) -> Score:
        """Return the score that the SDK's `score_episode` gives for the whole conversation."""
        types = self.foreign.types
        turns = tuple(  # the messages after the prompt
            types.EnvironmentTurn(role=message["role"], content=message["content"])
            for message in state.messages[state.prompt_length :]
        )
        episode = types.EnvironmentEpisode(
            messages=tuple(state.messages),
            response_text=state.final,
            turns=turns,
            metadata=state.metadata,
        )
        return self.foreign.as_score(self.foreign.env.score_episode(state.example, episode))


def load(folder: Path, adapter: Adapter, params: JsonObject) -> Env:
    """Load the environment that the file's `load_environment(**params)` returns.

    Raises EnvProblem ENV_INVALID if that is not an environment of the SDK.
    """
    options = read_options(adapter, Options)
    sdk_environments = importlib.import_module(f"{SDK}.environments")
    load_environment = load_name(folder, options.file, "load_environment")
    env = load_environment(**params)
    if isinstance(env, sdk_environments.EnvironmentMultiTurn):
        return FlashMultiTurn(_SdkEnvironment(env, folder, options))
    if isinstance(env, sdk_environments.EnvironmentSingleTurn):
        return FlashSingleTurn(_SdkEnvironment(env, folder, options))
    message = f"load_environment() returned {type(env).__name__}, no environment of {SDK}"
    hint = "Return an EnvironmentSingleTurn or EnvironmentMultiTurn."
    raise EnvProblem("ENV_INVALID", message, hint=hint, file=options.file)


def _suites(folder: Path, env: Any) -> Iterable[Any]:
    """Return the evaluation suites that `load_evaluations` of the folder's evaluations.py returns;
    none without that file.

    `env` is the environment of the SDK, which the function may ask for by a parameter
    `environment` without a default.
    """
    if not (folder / EVALUATIONS).is_file():
        return []
    load_evaluations = load_name(folder, EVALUATIONS, "load_evaluations")
    parameter = inspect.signature(load_evaluations).parameters.get("environment")
    needs_environment = parameter is not None and parameter.default is inspect.Parameter.empty
    suites = load_evaluations(environment=env) if needs_environment else load_evaluations()
    return suites if isinstance(suites, Sequence) else [suites]


def _with_id(example: Any, example_id: str) -> Any:
    """Return a copy of an example of the SDK (a dataclass) with this id."""
    return replace(example, id=example_id)


def _messages(messages: Iterable[Mapping[str, Any]]) -> list[Message]:
    """Return messages of the SDK as `Message` objects."""
    return [Message.from_dict(message) for message in messages]

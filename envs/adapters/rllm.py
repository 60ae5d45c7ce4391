"""Evaluators of rLLM over rows of data: the completion is the episode's answer.

An evaluator is a function or an object with `evaluate`, called with `task` and `episode`, or with
`metadata` and `trajectory`. It returns an `EvalOutput`, a dict with its keys, a number, a bool, or
a pair (number, bool).
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.adapters.parts import rllm_names
from envs.adapters.parts.options import read_options
from envs.adapters.parts.rows import data_rows
from envs.adapters.parts.user_code import load_name
from envs.base import Score, SingleTurnEnv, Task
from envs.config.adapters import Adapter
from envs.config.problem import EnvProblem
from envs.json_types import JsonObject

# The columns that may hold the question; the first that a row has is taken.
QUESTIONS = ("instruction", "question", "problem", "prompt")


@dataclass(frozen=True)
class Options:
    """The options of [adapter] for this format.

    Attributes:
        evaluator: what scores: "file.py:name"; without a name, the file's `evaluate`.
        question: the column with the question; "" for the first of QUESTIONS that a row has.
        answer: the column with the reference answer, for the audit and for SFT; "" for none.
        system: a system message for every task; "" for none.
        data: the file with the rows; "" for every data file.
    """

    evaluator: str = "tests/evaluate.py"
    question: str = ""
    answer: str = ""
    system: str = ""
    data: str = ""


class ForeignTask(dict[Any, Any]):
    """A row in the form that evaluators read: as a dict, and with the attributes of rLLM's
    `Task`."""

    def __init__(self, task: Task, folder: Path) -> None:
        """Make the form that evaluators read of `task`; `folder` is the environment's folder."""
        super().__init__(task.metadata["row"])
        self.id = task.id
        self.instruction = task.prompt_text
        self.metadata: JsonObject = dict(self)
        self.dataset_dir = folder
        self.sub_dir = None


class Rllm(SingleTurnEnv):
    """The rows of a folder as tasks, scored by an evaluator."""

    def __init__(self, folder: Path, options: Options) -> None:
        """Import rLLM's types, or our stand-ins if it is not installed, and load the evaluator that
        the options name from the environment's folder."""
        rllm_names.provide()  # the stand-ins, before the evaluator imports rLLM
        self.folder = folder
        self.options = options
        self.types = importlib.import_module(f"{rllm_names.PACKAGE}.types")
        self.evaluate = _evaluator_function(load_name(folder, options.evaluator, "evaluate"))

    def tasks(self) -> list[Task]:
        """Return one task per row."""
        return [
            self._task(row.id, row.split, row.value)
            for row in data_rows(self.folder, self.options.data)
        ]

    def score(self, task: Task, completion: str) -> Score:
        """Return the evaluator's score of an episode with this answer."""
        foreign = ForeignTask(task, self.folder)
        messages = [message.to_dict() for message in task.messages]
        step = self.types.Step(
            input=messages,
            output=completion,
            model_response=completion,
            chat_completions=[*messages, {"role": "assistant", "content": completion}],
        )
        trajectory = self.types.Trajectory(name="solver", task=foreign, steps=[step])
        trajectory.output = completion
        episode = self.types.Episode(
            task=foreign, trajectories=[trajectory], artifacts={"answer": completion}
        )
        return _score_of(self._call_evaluator(foreign, episode, completion))

    def _call_evaluator(self, task: ForeignTask, episode: Any, completion: str) -> Any:
        """Call the evaluator and return its result.

        It gets those of the arguments below that its parameters name; if they name none, it gets
        `task` and `episode` by position.
        """
        argument_by_name = {
            "task": task,
            "metadata": task.metadata,
            "episode": episode,
            "trajectory": {"output": completion, "steps": [{"output": completion}]},
        }
        parameters = inspect.signature(self.evaluate).parameters
        arguments = {
            name: argument_by_name[name] for name in parameters if name in argument_by_name
        }
        return self.evaluate(**arguments) if arguments else self.evaluate(task, episode)

    def _task(self, row_id: str, split: str | None, row: JsonObject) -> Task:
        """Make the task of a row (column -> value); a `split` of None is undecided.

        Raises EnvProblem DATASET_INVALID if the row has no column with a question.
        """
        options = self.options
        first_question = next((name for name in QUESTIONS if name in row), "")
        column = options.question or first_question
        if column not in row:
            raise EnvProblem(
                "DATASET_INVALID",
                f"the row {row_id} has no {column or 'question'}",
                hint=f"Name the column: [adapter] question; it has {', '.join(row)}.",
            )
        prompt = [{"role": "user", "content": str(row[column])}]
        if options.system:
            prompt.insert(0, {"role": "system", "content": options.system})
        return Task(
            row_id,
            prompt,
            answer=str(row[options.answer]) if options.answer else None,
            split=split,
            metadata={"row": row},
        )


def _evaluator_function(evaluator: Any) -> Callable[..., Any]:
    """Return the function that evaluates: `evaluator` itself, or the method `evaluate` of an
    object, or of a new object of a class."""
    if inspect.isclass(evaluator):
        evaluator = evaluator()
    return evaluator.evaluate if hasattr(evaluator, "evaluate") else evaluator


def _score_of(result: Any) -> Score:
    """Return an evaluator's result (a number, a bool, a pair of reward and correctness, a dict, or
    an `EvalOutput`) as a score. Raises TypeError for any other result."""
    if isinstance(result, bool | int | float):
        return Score(float(result), success=float(result) > 0)
    if isinstance(result, tuple):
        reward, is_correct = result
        return Score(float(reward), success=bool(is_correct))
    if isinstance(result, Mapping):  # with the keys of an EvalOutput
        signals = dict(result.get("signals") or {})
        reward = float(result.get("reward", 0.0))
        return Score(reward, bool(result.get("is_correct", reward >= 1.0)), signals)
    return _score_of_output(result)


def _score_of_output(output: Any) -> Score:
    """Return an `EvalOutput` of rLLM as a score. Raises TypeError if `output` is not one."""
    if not hasattr(output, "is_correct"):
        raise TypeError(f"the evaluator returned {type(output).__name__}")
    signals = {signal.name: float(signal.value) for signal in output.signals}
    return Score(float(output.reward), bool(output.is_correct), signals)


def load(folder: Path, adapter: Adapter, params: JsonObject) -> Rllm:
    """Load the rows and the evaluator of a folder."""
    return Rllm(folder, read_options(adapter, Options))

"""What a task is and how an answer is scored: the page an environment author reads.

A single-turn environment:

    from envs import Score, SingleTurnEnv, Task

    class Doubling(SingleTurnEnv):
        def tasks(self):
            return [Task(str(n), f"What is twice {n}?", answer=str(2 * n)) for n in range(100)]

        def score(self, task, completion):
            right = completion.strip() == task.answer
            return Score(1.0 if right else 0.0, success=right)

    def load_environment():
        return Doubling()

A multi-turn environment keeps a state of its own between the model's messages:

    class Guess(MultiTurnEnv):
        def start(self, task):              # a fresh state for one rollout
            return {"left": 5, "found": False}

        def step(self, state, completion):  # the environment's reply, or None when it is over
            ...
            return [Message("user", "higher")]

        def score(self, task, state):
            return Score(1.0 if state["found"] else 0.0)

An environment that defines no `score` is an SFT dataset: its tasks' answers are what is learnt.
Only the standard library is imported here, so that an environment runs in any virtual environment.
"""

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from envs.json_types import ChatMessage, JsonObject, TaskRow, ToolSchema
from envs.tool_schemas import checked_tools

_CLOSING_THINK_TAG = "</think>"
ROLES = ("system", "user", "assistant", "tool")
# Keys of a task's metadata that hold the two answers of a preference.
CHOSEN, REJECTED = "chosen", "rejected"


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool by the model, already parsed.

    Args:
        name: the function's name.
        arguments: its arguments by name; {} if they could not be parsed.
        id: the call's id; the tool message that answers the call repeats it as `tool_call_id`.
        invalid: the raw arguments if they are not a JSON object, else "".
    """

    name: str
    arguments: JsonObject = field(default_factory=dict)
    id: str = ""
    invalid: str = ""

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> "ToolCall":
        """Read a tool call in OpenAI's shape, or in the short form {"name", "arguments"}.

        `arguments` may be missing, an object or a JSON string; anything else is kept as text in
        `invalid`. Raises ValueError if the function has no name.
        """
        function = data.get("function", data)  # in the short form `data` itself has the name
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f"a tool call needs a function name, got {_short_repr(data)}")
        name, call_id = function["name"], str(data.get("id") or "")
        raw_arguments = function.get("arguments")
        arguments = _parsed_arguments(raw_arguments)
        if arguments is None:
            return ToolCall(name, arguments={}, id=call_id, invalid=str(raw_arguments))
        return ToolCall(name, arguments, call_id)

    def to_dict(self) -> JsonObject:
        """Return the call in OpenAI's shape: {"type", "function": {"name", "arguments"}, "id"}.

        `arguments` is a JSON string; for a call whose arguments could not be read it is their raw
        text. An empty id is left out.
        """
        arguments = self.invalid or json.dumps(self.arguments, ensure_ascii=False)
        body: JsonObject = {
            "type": "function",
            "function": {"name": self.name, "arguments": arguments},
        }
        if self.id:
            body["id"] = self.id
        return body


@dataclass(frozen=True)
class Message:
    """One message of a conversation.

    Args:
        role: system, user, assistant or tool.
        content: the text; "" if there is none.
        tool_calls: the calls that an assistant message makes; dicts are parsed into `ToolCall`.
        tool_call_id: in a tool message, the id of the call that it answers.
        name: in a tool message, the tool's name.

    Raises ValueError for another role, for content that is not text, and for a malformed tool call.
    """

    role: str
    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    tool_call_id: str = ""
    name: str = ""

    def __post_init__(self) -> None:
        """Check the fields, join the text parts of `content` into one string, and parse tool calls
        that were given as dicts.

        Raises ValueError for an unknown role, content that is not text, or a malformed tool call.
        The class is frozen, so the fields are set through `object`.
        """
        if self.role not in ROLES:
            raise ValueError(f"a message's role is one of {', '.join(ROLES)}, got {self.role!r}")
        object.__setattr__(self, "content", _content_text(self.content))
        if isinstance(self.tool_calls, str | Mapping):  # can be iterated too, but is no list
            raise ValueError(f"tool_calls is a list of calls, got {_short_repr(self.tool_calls)}")
        calls = [
            call if isinstance(call, ToolCall) else ToolCall.from_dict(call)
            for call in self.tool_calls or []
        ]
        object.__setattr__(self, "tool_calls", calls)

    @staticmethod
    def from_dict(data: "Mapping[str, Any] | Message") -> "Message":
        """Read a message in OpenAI's shape; a `Message` is returned as it is.

        The role "developer", OpenAI's newer word for "system", becomes "system". Raises ValueError
        if `data` is not a message.
        """
        if isinstance(data, Message):
            return data
        if not isinstance(data, Mapping):
            raise ValueError(f"a message is a dict with role and content, got {_short_repr(data)}")
        if not isinstance(data.get("role"), str):
            raise ValueError(f"a message needs a role, got {_short_repr(dict(data))}")
        role = "system" if data["role"] == "developer" else data["role"]
        return Message(
            role,
            content=data.get("content") or "",
            tool_calls=data.get("tool_calls") or [],
            tool_call_id=str(data.get("tool_call_id") or ""),
            name=str(data.get("name") or ""),
        )

    def to_dict(self) -> ChatMessage:
        """Return the message in OpenAI's shape: role, content, and every other field that is not
        empty."""
        body: ChatMessage = {"role": self.role, "content": self.content}
        if self.tool_calls:
            body["tool_calls"] = [call.to_dict() for call in self.tool_calls]
        if self.tool_call_id:
            body["tool_call_id"] = self.tool_call_id
        if self.name:
            body["name"] = self.name
        return body


@dataclass
class Task:
    """One problem an environment poses.

    Args:
        id: unique within the environment.
        prompt: a string (one user message) or a list of messages; dicts become `Message`.
        answer: the reference completion, a string or messages. SFT learns it, and the audit checks
            that `score` accepts it. In a multi-turn environment its assistant messages are
            replayed.
        split: "train", "dev" (tasks that choose the checkpoint, so that no held-out task is used
            for that choice) or "heldout" ("test", "eval" and "validation" mean heldout too). With
            None, the push chooses train or heldout by a hash of the prompt.
        metadata: anything JSON can hold; `score` sees it again.
        group: the family of the task, such as its template. Tasks of one group always get the same
            split, and confidence intervals count groups instead of tasks. "" makes the task a
            family of its own.
        tools: functions the model may call on this task, in OpenAI's function schema, instead of
            the environment's. [] means no functions, None means those of the environment.

    Raises ValueError if a field has another form than described here.
    """

    id: str
    prompt: str | Sequence[Message | Mapping[str, Any]]
    answer: str | Sequence[Message | Mapping[str, Any]] | None = None
    split: str | None = None
    metadata: JsonObject = field(default_factory=dict)
    group: str = ""
    tools: Sequence[ToolSchema] | None = None

    def __post_init__(self) -> None:
        """Check the fields. A number given as id or group becomes text, dicts become messages.

        Raises ValueError, naming the task and the field, for a field of the wrong form.
        """
        self.id = _checked_id(self.id)
        self.prompt = _checked_conversation(self.prompt, f"prompt of task {self.id!r}")
        if not self.prompt:
            raise ValueError(f"the prompt of task {self.id!r} is empty")
        if self.answer is not None:
            self.answer = _checked_conversation(self.answer, f"answer of task {self.id!r}")
        if self.split is not None and not isinstance(self.split, str):
            raise ValueError(f"the split of task {self.id!r} is a string, got {self.split!r}")
        if not isinstance(self.metadata, dict):
            raise ValueError(f"the metadata of task {self.id!r} is a dict")
        self.group = _checked_group(self.group, self.id)
        if self.tools is not None:
            try:
                self.tools = checked_tools(self.tools)
            except ValueError as problem:
                raise ValueError(f"the tools of task {self.id!r}: {problem}") from None

    @property
    def messages(self) -> list[Message]:
        """The prompt as a list of messages; a string is one user message."""
        return _as_messages(self.prompt, "user")

    @property
    def prompt_text(self) -> str:
        """The text of the prompt's last user message (of its last message if there is none)."""
        messages = self.messages
        user_messages = [message for message in messages if message.role == "user"]
        return (user_messages or messages)[-1].content

    @property
    def answer_messages(self) -> list[Message]:
        """The reference completion as a list of messages; [] if the task has none."""
        return [] if self.answer is None else _as_messages(self.answer, "assistant")

    @property
    def answer_text(self) -> str:
        """The text of the reference completion's last assistant message, without what stands
        before a closing think tag, because score() never sees a thought; "" if there is none."""
        texts = [message.content for message in self.answer_messages if message.role == "assistant"]
        if not texts:
            return ""
        _thought, tag, answer = texts[-1].rpartition(_CLOSING_THINK_TAG)
        return answer.lstrip() if tag else answer  # without a tag the whole text is the answer

    @property
    def preference(self) -> tuple[list[Message], list[Message]] | None:
        """The better and the worse answer of a preference task, as (chosen, rejected).

        Each is the list of messages that follow the prompt, read from the metadata keys `chosen`
        and `rejected`. None unless both keys hold a readable answer.
        """
        answers = []
        for key in (CHOSEN, REJECTED):
            try:
                answer = _checked_conversation(self.metadata.get(key), key)
                answers.append(_as_messages(answer, "assistant"))
            except ValueError:  # no answer, but other metadata of the author under that name
                return None
        chosen, rejected = answers
        return (chosen, rejected) if chosen and rejected else None

    def to_row(self) -> TaskRow:
        """Return the task as a row of plain JSON values; `from_row` makes an equal task of it.

        The row's `prompt` and `answer` are lists of messages, even if the author gave strings. The
        row's `text` lists which of the two were strings, e.g. ["answer"]. The keys `group` and
        `tools` are present only if the task has values of its own for them.
        """
        answer = None
        if self.answer is not None:
            answer = [message.to_dict() for message in self.answer_messages]
        fields_given_as_text = [
            name for name in ("prompt", "answer") if isinstance(getattr(self, name), str)
        ]
        row: TaskRow = {
            "id": self.id,
            "prompt": [message.to_dict() for message in self.messages],
            "answer": answer,
            "split": self.split,
            "metadata": self.metadata,
            "text": fields_given_as_text,
        }
        if self.group:
            row["group"] = self.group
        if self.tools is not None:
            row["tools"] = list(self.tools)
        return row

    @staticmethod
    def from_row(row: Mapping[str, Any]) -> "Task":
        """Make a task from a row that `to_row` wrote.

        If the row's `text` lists the prompt or the answer, that field becomes a string again: the
        content of its only message.
        """
        conversations: JsonObject = {"prompt": row["prompt"], "answer": row.get("answer")}
        for name in row.get("text") or []:
            only_message = conversations[name][0]
            conversations[name] = only_message["content"]
        return Task(
            row["id"],
            prompt=conversations["prompt"],
            answer=conversations["answer"],
            split=row.get("split"),
            metadata=row.get("metadata") or {},
            group=row.get("group") or "",
            tools=row.get("tools"),
        )


@dataclass(frozen=True)
class Score:
    """The result of scoring one completion.

    Args:
        reward: any finite number; GRPO maximises it.
        success: whether the task counts as solved. None if there is no yes or no; reports then
            judge the reward alone.
        metrics: named numbers; each becomes a curve.
        error: why the completion could not be scored; the sample then counts as an error.
        reason: why the completion earned this reward, in a sentence; shown with the rollout.
        parts: what the reward is made of, name -> (weight, value); shown with the rollout.
    """

    reward: float
    success: bool | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    reason: str = ""
    parts: Mapping[str, tuple[float, float]] = field(default_factory=dict)


class Env:
    """The base of both kinds of environment. Derive from `SingleTurnEnv` or `MultiTurnEnv`
    instead."""

    tools: Sequence[ToolSchema] = ()
    """Functions the model may call, in OpenAI's function schema; a task may have its own."""
    command: Sequence[str] = ()
    """The program that plays the tasks, from environment.toml; () if `score` scores the answers."""

    def tasks(self) -> list[Task]:
        """Return every task, always in the same order. Called once per push, which stores the
        tasks."""
        raise NotImplementedError("define tasks() and return a list of Task")

    def perturb(self, task: Task, kind: str, seed: int) -> Task | None:
        """Return the same task asked in other words, or None to use the built-in rewording rules.

        The robustness probe and training with `vary_wording` call this.

        Args:
            task: the task to reword.
            kind: what to change: "wording" (of the prompt), "system" (the system message), "tools"
                (their descriptions) or "options" (their order).
            seed: selects the wording; the same seed gives the same task. Training uses even seeds,
                the probe odd ones, so that they never share a wording.

        The model's answer is scored against the returned task. So if rewording changes the
        reference answer (moving options changes the letter of the right one), the returned task
        must have the new `answer` and `metadata`. Return `task` itself if it cannot be reworded: it
        is then left out.
        """
        return None


class SingleTurnEnv(Env):
    """An environment in which the model answers each task with one message."""

    def score(self, task: Task, completion: str) -> Score:
        """Return the score of one completion (its text). Do not define this for an SFT dataset.

        If it is an `async def`, several calls are awaited at once in one process.
        """
        raise NotImplementedError("define score(task, completion) and return a Score")

    def score_group(self, task: Task, completions: list[str]) -> list[Score]:
        """Optional: return the scores of all completions of one task, in their order, for rewards
        that compare completions. May be `async`.

        GRPO maximises these rewards. Evaluations and the verdict use `score`, so define that too. A
        completion's reward may not depend on its place in the list.
        """
        raise NotImplementedError("define score_group(task, completions) and return Scores")


class MultiTurnEnv(Env):
    """An environment in which the model and the environment take turns."""

    def start(self, task: Task) -> Any:
        """Return a fresh state for one rollout of `task`.

        It may be any object: it is passed to each `step` of the rollout and to `score`.
        """
        raise NotImplementedError("define start(task) and return a state")

    def step(self, state: Any, completion: Message) -> list[Message] | None:
        """Return the environment's reply to the assistant message `completion`, or None if the
        rollout is over.

        `state` is what `start` returned; change it in place. `completion.tool_calls` holds the
        parsed tool calls of the message.
        """
        raise NotImplementedError("define step(state, completion) and return messages or None")

    def score(self, task: Task, state: Any) -> Score:
        """Return the score of a finished rollout, including one that ran out of turns."""
        raise NotImplementedError("define score(task, state) and return a Score")


def is_scored(env: Env) -> bool:
    """Whether answers earn rewards: the class of `env` defines `score`, or a command plays its
    tasks. An environment that is not scored is an SFT dataset."""
    return bool(env.command) or defines_score(env)


def defines_score(env: Env) -> bool:
    """Whether the class of `env` defines `score` itself; those of the base classes only raise."""
    score = getattr(type(env), "score", None)
    return score is not None and score not in (SingleTurnEnv.score, MultiTurnEnv.score)


def compares_groups(env: Env) -> bool:
    """Whether the class of `env` defines `score_group`, which scores all completions of one task
    together."""
    # A multi-turn environment has no `score_group` to inherit: that counts as not defined too.
    score_group = getattr(type(env), "score_group", SingleTurnEnv.score_group)
    return score_group is not SingleTurnEnv.score_group


def is_async(env: Env) -> bool:
    """Whether `env` is a single-turn environment whose `score` is an `async def`."""
    score = getattr(type(env), "score", None)
    return isinstance(env, SingleTurnEnv) and inspect.iscoroutinefunction(score)


def defines_perturb(env: Env) -> bool:
    """Whether the class of `env` defines `perturb`, its own way to reword tasks."""
    return getattr(type(env), "perturb", Env.perturb) is not Env.perturb


def kind_of(env: Env) -> str:
    """Return the kind of an environment: `command` if a program plays its tasks, `sft` if it is not
    scored, else `multi` (several turns) or `single`."""
    if env.command:
        return "command"
    if not is_scored(env):
        return "sft"
    return "multi" if isinstance(env, MultiTurnEnv) else "single"


def _checked_conversation(value: Any, value_name: str) -> str | list[Message]:
    """Check a prompt or an answer. Returns a string unchanged, a list with its dicts parsed as
    messages.

    `value_name` names the value in errors, e.g. "prompt of task 'a-1'". Raises ValueError if the
    value is neither text nor a list of messages.
    """
    if isinstance(value, str):  # before the next test, because a str is a Sequence too
        return _check_encodable(value, f"the {value_name}")
    if isinstance(value, Mapping | Message) or not isinstance(value, Sequence):
        shown = _short_repr(value)
        raise ValueError(f"the {value_name} is a string or a list of messages, got {shown}")
    try:
        return [Message.from_dict(item) for item in value]
    except ValueError as problem:
        raise ValueError(f"the {value_name}: {problem}") from None


def _checked_id(task_id: Any) -> str:
    """Return a task's id as text. Raises ValueError if it is neither text nor a whole number."""
    # A bool is an int in Python, so it has to be refused separately.
    if isinstance(task_id, bool) or not isinstance(task_id, str | int):
        raise ValueError(f"a task's id is a string, got {_short_repr(task_id)}")
    return _check_encodable(str(task_id), "a task's id")


def _checked_group(group: Any, task_id: str) -> str:
    """Return a task's group as text. Raises ValueError, naming the task, if it is neither text nor
    a whole number."""
    # A bool is an int in Python, so it has to be refused separately.
    if isinstance(group, bool) or not isinstance(group, str | int):
        raise ValueError(f"the group of task {task_id!r} is a string, got {_short_repr(group)}")
    return _check_encodable(str(group), f"the group of task {task_id!r}")


def _parsed_arguments(raw_arguments: Any) -> JsonObject | None:
    """Return the arguments of a tool call as a dict, or None if they cannot be read.

    `raw_arguments` is a mapping or the JSON text of one; None and "" mean no arguments.
    """
    if isinstance(raw_arguments, Mapping):
        return dict(raw_arguments)
    if raw_arguments is None or raw_arguments == "":
        return {}
    try:
        arguments = json.loads(raw_arguments)
    # TypeError: not a text; ValueError: no JSON; RecursionError: nested too deep.
    except (TypeError, ValueError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None


def _as_messages(value: Any, role: str) -> list[Message]:
    """Return `value` as a list of messages; a string becomes one message with the role `role`."""
    return [Message(role, value)] if isinstance(value, str) else list(value)


def _content_text(content: Any) -> str:
    """Return the text of a message's content.

    `content` may be None (then it is ""), a string, or OpenAI's text parts: a list of them, which
    is joined, or a single one. Raises ValueError for anything else, such as an image.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return _check_encodable(content, "a message's content")
    parts = content if isinstance(content, list) else [content]  # one part without a list passes
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            raise ValueError(f"a message's content is text, got {_short_repr(content)}")
        texts.append(text)
    return _check_encodable("".join(texts), "a message's content")


def _check_encodable(text: str, text_name: str) -> str:
    """Return `text`, after checking that UTF-8 can encode it.

    Raises ValueError for a lone surrogate (half of a pair); `text_name` names the text in the
    error, such as "a task's id".
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"{text_name} has half of a surrogate pair in it, at {error.start}"
        raise ValueError(message) from None
    return text


def _short_repr(value: Any) -> str:
    """The `repr` of `value`, cut to 80 characters for an error message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

"""What a reflecting endpoint is shown of an answer: the question, the answer, what it earned."""

from collections.abc import Sequence

from engine.core.files import JsonObject
from engine.home.sanitize import Redactor
from engine.records.lines.evaluation_row import EvaluationRow
from envs.json_types import ChatMessage, TaskRow

_MOST_CHARS = 4_000  # of a question or an answer


def example_of(task: TaskRow, row: EvaluationRow, redact: Redactor) -> JsonObject:
    """An answer to a train task as gepa shows it to the endpoint, secrets hidden."""
    question = [message for message in task["prompt"] if message["role"] != "system"]
    entry = {
        "Inputs": _cut(_transcript(question)),
        "Generated Outputs": _cut(_transcript(row.messages or [])),
        "Feedback": _feedback(task, row),
    }
    return redact.value(entry)


def _transcript(messages: Sequence[ChatMessage]) -> str:
    """Messages as text; those of one message are its text alone."""
    texts = [_text_of(message) for message in messages]
    if len(messages) == 1:
        return texts[0]
    return "\n".join(
        f"[{message['role']}] {text}" for message, text in zip(messages, texts, strict=True)
    )


def _text_of(message: ChatMessage) -> str:
    """The text of a message, with the tools that it calls."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or []]
    called = [f"calls {call.get('name')}({call.get('arguments')})" for call in calls]
    return "\n".join([str(message.get("content") or ""), *called]).strip()


def _feedback(task: TaskRow, row: EvaluationRow) -> str:
    """What an answer earned and why, as far as the environment says; and the reference answer."""
    said = [f"It earned {row.reward or 0.0:g}."]
    if row.success is not None:
        said.append("It is right." if row.success else "It is not right.")
    if row.error:
        said.append(f"It could not be scored: {row.error[:_MOST_CHARS]}.")
    if row.cut:
        said.append(f"It was cut by a limit ({row.stop_reason}): a shorter answer would fit.")
    if row.reason:
        said.append(row.reason[:_MOST_CHARS])
    said += [f"Invalid tool call, {fault}." for fault in row.invalid_calls or []]
    if task.get("answer") and not row.success:
        said.append(f"A right answer: {_cut(_transcript(task['answer']))}")
    return " ".join(said)


def _cut(text: str) -> str:
    """The text, its middle left out where it is long."""
    if len(text) <= _MOST_CHARS:
        return text
    half = _MOST_CHARS // 2
    return f"{text[:half]} [...] {text[-half:]}"

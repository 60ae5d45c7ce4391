"""What a reflecting endpoint is shown of an answer: the question, the answer, what it earned."""

from collections.abc import Sequence

from engine.core.files import JsonObject
from engine.home.sanitize import Redactor
from engine.records.lines.evaluation_row import EvaluationRow
from envs.json_types import ChatMessage, TaskRow

_MOST_CHARS = 4_000  # of a question or an answer


def example_of(task: TaskRow, row: EvaluationRow, redact: Redactor) -> JsonObject:
    """Describe an answer to a train task as gepa shows it to the endpoint that writes prompts: the
    question, the answer, and what the answer earned. Secrets are hidden."""
    question = [message for message in task["prompt"] if message["role"] != "system"]
    entry = {
        "Inputs": _shorten_middle(_transcript(question)),
        "Generated Outputs": _shorten_middle(_transcript(row.messages or [])),
        "Feedback": _feedback(task, row),
    }
    return redact.value(entry)


def _transcript(messages: Sequence[ChatMessage]) -> str:
    """Write messages as text, one line each, such as "[user] What is 2+2?". A single message is
    written without its role."""
    texts = [_text_of(message) for message in messages]
    if len(messages) == 1:
        return texts[0]
    roles = [message["role"] for message in messages]
    return "\n".join(f"[{role}] {text}" for role, text in zip(roles, texts, strict=True))


def _text_of(message: ChatMessage) -> str:
    """Return the text of a message, followed by the tools that it calls, one per line."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or []]
    call_texts = [f"calls {call.get('name')}({call.get('arguments')})" for call in calls]
    return "\n".join([str(message.get("content") or ""), *call_texts]).strip()


def _feedback(task: TaskRow, row: EvaluationRow) -> str:
    """Say what an answer (`row`) to `task` earned and why, as far as the environment tells it. If
    the answer is not right, the reference answer follows."""
    sentences = [f"It earned {row.reward or 0.0:g}."]
    if row.success is not None:
        sentences.append("It is right." if row.success else "It is not right.")
    if row.error:
        sentences.append(f"It could not be scored: {row.error[:_MOST_CHARS]}.")
    if row.cut:
        sentences.append(f"It was cut by a limit ({row.stop_reason}): a shorter answer would fit.")
    if row.reason:
        sentences.append(row.reason[:_MOST_CHARS])
    sentences += [f"Invalid tool call, {fault}." for fault in row.invalid_calls or []]
    if task.get("answer") and not row.success:
        sentences.append(f"A right answer: {_shorten_middle(_transcript(task['answer']))}")
    return " ".join(sentences)


def _shorten_middle(text: str) -> str:
    """Return the text; if it has more than `_MOST_CHARS` characters, its middle is replaced by
    "[...]"."""
    if len(text) <= _MOST_CHARS:
        return text
    half = _MOST_CHARS // 2
    return f"{text[:half]} [...] {text[-half:]}"

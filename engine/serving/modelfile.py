"""The Modelfile of an exported GGUF file: what Ollama needs to ask the model in the format it was
trained with.

Ollama has a template language of its own. The template is found by rendering the model's chat
template with marks in place of the messages. It walks `.Messages`, so a conversation of any length,
with or without a system message, is written as the chat template writes it. Source: Ollama's
Modelfile reference (docs/modelfile.md in its repository).
"""

from dataclasses import astuple, dataclass
from pathlib import Path

from engine.models import tokens
from engine.models.chat_format import ChatFormat, TemplateError
from envs.json_types import ChatMessage

# The marks that stand for messages: control characters keep them apart from any template's text.
_SYSTEM, _FIRST, _ANSWER, _SECOND = (
    "\u0001s\u0001",
    "\u0001f\u0001",
    "\u0001a\u0001",
    "\u0001q\u0001",
)

_TALK: list[ChatMessage] = [
    {"role": "user", "content": _FIRST},
    {"role": "assistant", "content": _ANSWER},
    {"role": "user", "content": _SECOND},
]


def text(base: Path, file_name: str) -> str:
    """Return the text of the Modelfile, with which Ollama serves the GGUF file `file_name`. The
    folder `base` holds the model's tokenizer and chat template."""
    try:
        format_lines = _format_lines(_turns(tokens.load(base).format()))
    except (TemplateError, ValueError):
        # The chat template takes no system message or no second turn, or cannot be written in
        # Ollama's language. Without a TEMPLATE line, Ollama looks for a template that it knows.
        format_lines = []
    lines = [f"FROM ./{file_name}", *format_lines, "PARAMETER temperature 0", ""]
    return "\n".join(lines)


def _format_lines(turns: "_Turns") -> list[str]:
    """Write the lines of a Modelfile about the format of a conversation: its template, and the text
    at which an answer stops. `turns` are the texts around messages. A text that cannot be quoted in
    a Modelfile is left out."""
    lines = []
    template = _ollama_template(turns)
    if '"""' not in template:
        lines.append(f'TEMPLATE """{template}"""')
    stop = turns.answer_end.strip()
    if stop and '"' not in stop:
        lines.append(f'PARAMETER stop "{stop}"')
    return lines


@dataclass(frozen=True)
class _Turns:
    """The texts that a chat template writes around the messages of a conversation.

    Attributes:
        before_system, after_system: around a system message.
        no_system: instead of a system message, if there is none; many templates write one of their
            own.
        before_user: before a question.
        before_answer: between a question and its answer.
        before_last_answer: between the last question and its answer. Qwen3 writes an empty thought
            there.
        answer_end: after an answer.
    """

    before_system: str
    after_system: str
    no_system: str
    before_user: str
    before_answer: str
    before_last_answer: str
    answer_end: str

    def pieces(self) -> tuple[str, ...]:
        """Return all the texts, in the order of the fields."""
        return astuple(self)


def _turns(chat: ChatFormat) -> _Turns:
    """Find out which texts a chat template writes around the messages of a conversation. A
    conversation whose messages are marks (`_SYSTEM`, `_FIRST`, ...) is rendered, and the text
    between the marks is read.

    Raises TemplateError if the template refuses the conversation, ValueError if it leaves out a
    part of the conversation, or if a template for Ollama cannot write the same.
    """
    system: ChatMessage = {"role": "system", "content": _SYSTEM}
    rendered = chat.text([system, *_TALK], prompt=True)
    before_system, remaining_text = _split_at_mark(rendered, _SYSTEM)
    system_to_question, remaining_text = _split_at_mark(remaining_text, _FIRST)
    before_answer, remaining_text = _split_at_mark(remaining_text, _ANSWER)
    answer_to_question, before_last_answer = _split_at_mark(remaining_text, _SECOND)
    answer_end = _answer_end(chat, system)
    before_user = _before_user(system_to_question, answer_to_question, answer_end)
    first_question = _TALK[:1]
    without_system = chat.text(first_question, prompt=True)
    opening, _ = _split_at_mark(without_system, _FIRST)
    turns = _Turns(
        before_system=before_system,
        after_system=system_to_question.removesuffix(before_user),
        no_system=opening.removesuffix(before_user),
        before_user=before_user,
        before_answer=before_answer,
        before_last_answer=before_last_answer,
        answer_end=answer_end,
    )
    _check_without_system(chat, turns)
    _check_no_instructions(turns)
    return turns


def _before_user(system_to_question: str, answer_to_question: str, answer_end: str) -> str:
    """Return what the chat template writes before a question, whether it is the first or a later
    one.

    Args:
        system_to_question: what it writes between a system message and the first question.
        answer_to_question: what it writes between an answer and the next question.
        answer_end: what it writes after the last answer.

    Raises ValueError if it writes questions, or the ends of answers, in more than one way.
    """
    if not answer_to_question.startswith(answer_end):
        raise ValueError("an answer ends in another way where no question follows")
    before_user = answer_to_question[len(answer_end) :]
    if not system_to_question.endswith(before_user):
        raise ValueError("a first question begins in another way than a later one")
    return before_user


def _check_no_instructions(turns: _Turns) -> None:
    """Raise ValueError if a text of the chat template (in `turns`) would be an instruction in
    Ollama's template language."""
    if any("{{" in piece for piece in turns.pieces()):
        raise ValueError("it holds what Ollama would read as an instruction")


def _answer_end(chat: ChatFormat, system: ChatMessage) -> str:
    """Return what the chat template writes after an answer that ends a conversation, which begins
    with the message `system`. Raises ValueError unless it writes the answer exactly once."""
    question_and_answer = _TALK[:2]  # the answer's text is the mark `_ANSWER`
    conversation = chat.text([system, *question_and_answer], prompt=False)
    _, end = _split_at_mark(conversation, _ANSWER)
    return end


def _check_without_system(chat: ChatFormat, turns: _Turns) -> None:
    """Raise ValueError unless `turns` also describe how the chat template writes a conversation of
    two questions without a system message."""
    first_turn = [turns.before_user, _FIRST, turns.before_answer, _ANSWER, turns.answer_end]
    second_turn = [turns.before_user, _SECOND, turns.before_last_answer]
    expected = turns.no_system + "".join([*first_turn, *second_turn])
    if expected != chat.text(_TALK, prompt=True):
        raise ValueError("without a system message turns are written in another way")


def _ollama_template(turns: _Turns) -> str:
    """Return a template in Ollama's language, which puts the texts in `turns` around the messages
    of a conversation, as the chat template does."""
    no_system = "{{ else }}" + turns.no_system if turns.no_system else ""
    before_answer = turns.before_answer
    if turns.before_last_answer != turns.before_answer:
        is_last = "{{ if eq (len (slice $.Messages $i)) 1 }}"  # no message follows
        before_answer = (
            is_last + turns.before_last_answer + "{{ else }}" + turns.before_answer + "{{ end }}"
        )
    return (
        "{{ if .System }}"
        + turns.before_system
        + "{{ .System }}"
        + turns.after_system
        + no_system
        + '{{ end }}{{ range $i, $_ := .Messages }}{{ if eq .Role "user" }}'
        + turns.before_user
        + "{{ .Content }}"
        + before_answer
        + '{{ else if eq .Role "assistant" }}{{ .Content }}'
        + turns.answer_end
        + "{{ end }}{{ end }}"
    )


def _split_at_mark(rendered: str, mark: str) -> tuple[str, str]:
    """Return the parts of the text `rendered` before and after `mark`. Raises ValueError unless the
    mark is there exactly once."""
    before, after = rendered.split(mark)  # raises ValueError unless there are two parts
    return before, after

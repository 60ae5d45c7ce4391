"""The Modelfile of an exported GGUF file: what Ollama needs to ask the model as it was trained.

Ollama has templates of its own; this one is read off the model's chat template by rendering it with
marks in the place of what people say.
It walks `.Messages`, so a conversation of any length, with a system message or without one, is
written as the chat template writes it.
Source: Ollama's Modelfile reference (docs/modelfile.md in its repository).
"""

from pathlib import Path

from engine.models import tokens
from engine.models.chat_format import TemplateError
from envs.json_types import ChatMessage

_SYSTEM, _FIRST, _ANSWER, _SECOND = (
    "\u0001s\u0001",
    "\u0001f\u0001",
    "\u0001a\u0001",
    "\u0001q\u0001",
)


def text(base: Path, file_name: str) -> str:
    """The Modelfile for the GGUF file `file_name` of a model with the tokenizer in `base`.

    Without TEMPLATE where the chat template takes no system message or no second turn; Ollama then
    looks for one that it knows.
    """
    lines = [f"FROM ./{file_name}"]
    template, ends = "", []
    try:
        template, end = _template(base)
        ends = [end.strip()] if end.strip() else []
    except (TemplateError, ValueError):
        pass
    if template and '"""' not in template:
        lines.append(f'TEMPLATE """{template}"""')
    lines += [f'PARAMETER stop "{end}"' for end in ends if '"' not in end]
    return "\n".join([*lines, "PARAMETER temperature 0", ""])


def _template(base: Path) -> tuple[str, str]:
    """Ollama's template for a conversation, and what ends an answer.

    Raises TemplateError if the chat template refuses the conversation, ValueError if it leaves out
    a part of it, or if Ollama's template cannot say the same.
    """
    system: ChatMessage = {"role": "system", "content": _SYSTEM}
    talk: list[ChatMessage] = [
        {"role": "user", "content": _FIRST},
        {"role": "assistant", "content": _ANSWER},
        {"role": "user", "content": _SECOND},
    ]
    chat = tokens.load(base).format()
    rendered = chat.text([system, *talk], prompt=True)
    start, rest = _around(rendered, _SYSTEM)
    to_user, rest = _around(rest, _FIRST)
    to_answer, rest = _around(rest, _ANSWER)
    between, to_last_answer = _around(rest, _SECOND)
    # What ends an answer stands at the end of a conversation that ends with one, and begins what
    # stands between an answer and the next question.
    closed = chat.text([system, *talk[:2]], prompt=False)
    _, end = _around(closed, _ANSWER)
    if not between.startswith(end):
        raise ValueError("an answer ends in another way where no question follows")
    user = between[len(end) :]
    if not to_user.endswith(user):
        raise ValueError("a first question begins in another way than a later one")
    after_system = to_user.removesuffix(user)
    # Many templates write a system message of their own where there is none.
    opening, _ = _around(chat.text(talk[:1], prompt=True), _FIRST)
    without_system = opening.removesuffix(user)
    written = without_system + "".join(
        [user, _FIRST, to_answer, _ANSWER, end, user, _SECOND, to_last_answer]
    )
    if written != chat.text(talk, prompt=True):
        raise ValueError("without a system message turns are written in another way")
    parts = (start, after_system, without_system, user, to_answer, to_last_answer, end)
    if any("{{" in part for part in parts):
        raise ValueError("it holds what Ollama would read as an instruction")
    otherwise = "{{ else }}" + without_system if without_system else ""
    if to_last_answer != to_answer:  # Qwen3 writes an empty thought before the last answer alone
        to_answer = (
            "{{ if eq (len (slice $.Messages $i)) 1 }}" + to_last_answer + "{{ else }}" + to_answer
        ) + "{{ end }}"
    return (
        "{{ if .System }}" + start + "{{ .System }}" + after_system + otherwise + "{{ end }}"
        '{{ range $i, $_ := .Messages }}{{ if eq .Role "user" }}'
        + user
        + "{{ .Content }}"
        + to_answer
        + '{{ else if eq .Role "assistant" }}{{ .Content }}'
        + end
        + "{{ end }}{{ end }}",
        end,
    )


def _around(rendered: str, mark: str) -> tuple[str, str]:
    """What stands before and after `mark`. Raises ValueError if it is not there once."""
    before, after = rendered.split(mark)
    return before, after

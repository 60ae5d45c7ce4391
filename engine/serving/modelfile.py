"""The Modelfile of an exported GGUF file: what Ollama needs to ask the model as it was trained.

Ollama has templates of its own; this one is read off the model's chat template by rendering it with
marks in the place of what people say.
Source: Ollama's Modelfile reference (docs/modelfile.md in its repository).
"""

from pathlib import Path

from engine.models import tokens
from engine.models.chat_format import TemplateError

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
    """Ollama's template for one turn, and what ends an answer.

    Raises TemplateError if the chat template refuses the conversation, ValueError if it leaves out
    a part of it.
    """
    turns = [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": _FIRST},
        {"role": "assistant", "content": _ANSWER},
        {"role": "user", "content": _SECOND},
    ]
    rendered = tokens.load(base).format().text(turns, prompt=True)
    start, rest = _around(rendered, _SYSTEM)
    to_user, rest = _around(rest, _FIRST)
    to_answer, rest = _around(rest, _ANSWER)
    between, _ = _around(rest, _SECOND)
    # What ends an answer stands at the end of a conversation that ends with one, and begins what
    # stands between an answer and the next question.
    closed = tokens.load(base).format().text(turns[:3], prompt=False)
    _, end = _around(closed, _ANSWER)
    if not between.startswith(end):
        raise ValueError("an answer ends in another way where no question follows")
    user = between[len(end) :]
    if not to_user.endswith(user):
        raise ValueError("a first question begins in another way than a later one")
    system = "{{ if .System }}" + start + "{{ .System }}" + to_user[: len(to_user) - len(user)]
    turn = user + "{{ .Prompt }}" + to_answer + "{{ .Response }}" + end
    return system + "{{ end }}" + turn, end


def _around(rendered: str, mark: str) -> tuple[str, str]:
    """What stands before and after `mark`. Raises ValueError if it is not there once."""
    before, after = rendered.split(mark)
    return before, after

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
    tries to recognise the model and uses a template of its own.
    """
    lines = [f"FROM ./{file_name}"]
    try:
        template, answer_end = _template_and_answer_end(base)
    except (TemplateError, ValueError):
        template, answer_end = "", ""
    # A text that holds the quotes it would stand in cannot be written.
    if template and '"""' not in template:
        lines.append(f'TEMPLATE """{template}"""')
    stop = answer_end.strip()
    if stop and '"' not in stop:
        lines.append(f'PARAMETER stop "{stop}"')
    return "\n".join([*lines, "PARAMETER temperature 0", ""])


def _template_and_answer_end(base: Path) -> tuple[str, str]:
    """Ollama's template for one turn, and the text that ends an answer in it.

    Raises TemplateError if the chat template refuses the conversation, ValueError if it leaves out
    a part of it.
    """
    turns = [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": _FIRST},
        {"role": "assistant", "content": _ANSWER},
        {"role": "user", "content": _SECOND},
    ]
    chat_format = tokens.load(base).format()
    rendered = chat_format.text(turns, prompt=True)
    system_start, rest = _around(rendered, _SYSTEM)
    system_to_question, rest = _around(rest, _FIRST)
    question_to_answer, rest = _around(rest, _ANSWER)
    answer_to_question, _ = _around(rest, _SECOND)
    # Between an answer and the next question stand the end of the one and the start of the other.
    # A conversation that ends with an answer shows the first of the two alone.
    ending_with_answer = chat_format.text(turns[:3], prompt=False)
    _, answer_end = _around(ending_with_answer, _ANSWER)
    if not answer_to_question.startswith(answer_end):
        raise ValueError("an answer ends in another way where no question follows")
    question_start = answer_to_question[len(answer_end) :]
    if not system_to_question.endswith(question_start):
        raise ValueError("a first question begins in another way than a later one")
    system_end = system_to_question[: len(system_to_question) - len(question_start)]
    system = "{{ if .System }}" + system_start + "{{ .System }}" + system_end + "{{ end }}"
    question = question_start + "{{ .Prompt }}"
    answer = question_to_answer + "{{ .Response }}" + answer_end
    return system + question + answer, answer_end


def _around(rendered: str, mark: str) -> tuple[str, str]:
    """The text before and after `mark`. Raises ValueError unless it occurs exactly once."""
    before, after = rendered.split(mark)
    return before, after

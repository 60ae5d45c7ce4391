"""Shows the answers of models while they are sampled, and holds conversations in the terminal.

The program waits for a slow model as long as tokens come. Ctrl-C ends an answer.
"""

import sys
from dataclasses import replace
from functools import partial

from engine.core.errors import UserError
from engine.core.reply import Reply
from engine.home.run_dir import Home
from engine.home.sanitize import clean_text
from engine.serving.chat_request import OF_PEOPLE, ChatRequest, Heard, Listener, unheard
from mcp_server.access.audit_log import call_with_audit_log
from mcp_server.api import verbs
from mcp_server.screen.terminal import print_error, show

_HELP = "/reset forgets, /system TEXT begins anew with a system prompt, /quit ends (or Ctrl-D)."
_PROMPT = "> "


def is_possible() -> bool:
    """Whether a person can type here and read the answers."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def ask(home: Home, request: ChatRequest, as_json: bool) -> None:
    """Ask the question of `request` and print the reply. On a terminal the answer is printed while
    it is sampled, unless `as_json`."""
    if as_json or not sys.stdout.isatty():
        # `unheard` ignores the pieces of the answer: the whole reply is printed at the end.
        show(_chat(home, request, unheard), as_json)
        return
    stream = _Stream(shows_names=bool(request.compare_to))
    reply = _chat(home, request, stream.hear)
    stream.end()
    show(_without_answer_texts(reply), as_json=False)


def talk(home: Home, request: ChatRequest) -> None:
    """Hold a conversation until the person ends it. Each typed line is the next message, or a
    command such as /reset.

    `request` names the model or models, the system prompt and how answers are sampled.
    """
    # Importing readline gives `input` its line editing, which only this function needs.
    import readline  # noqa: F401, PLC0415

    _print_line(f"{request.model}. {_HELP}")
    first_request = request  # before the first message: /reset and /system go back to it
    answer_was_cut = False  # whether the last answer was cut; an empty line then continues it
    while True:
        line = _typed_line()
        if line is None or line == "/quit":
            return
        if line == "/help":
            _print_line(_HELP)
        elif line == "/reset":
            request, answer_was_cut = first_request, False
            _print_line("forgotten")
        elif line.startswith("/system"):
            first_request = replace(first_request, system=line.removeprefix("/system").strip())
            request, answer_was_cut = first_request, False
            _print_line("begun anew")
        elif line.startswith("/"):
            _print_line(f"{line.split()[0]} is no command. {_HELP}")
        elif line or answer_was_cut:  # any other empty line is ignored
            request, answer_was_cut = _next_turn(home, replace(request, message=line))


def _typed_line() -> str | None:
    """Read the next line that the person types, and return it without spaces around it. Returns
    None at the end of input (Ctrl-D)."""
    while True:
        try:
            return input(_PROMPT).strip()
        except EOFError:
            _print_line("")
            return None
        except KeyboardInterrupt:  # drop the typed line and ask again, as a shell does
            _print_line("")


def _next_turn(home: Home, request: ChatRequest) -> tuple[ChatRequest, bool]:
    """Ask the next question of a conversation and show the answer while it is sampled.

    Returns:
        The request for the question after this one, and whether the answer was cut; an empty line
        then continues the answer. After an error or a Ctrl-C, the returned request is `request`
        without its question, so that the conversation stays as it was.
    """
    unchanged = replace(request, message="")  # the conversation without this question
    reply = _shown_reply(home, request)
    if reply is None:
        return unchanged, False
    _print_calls_and_warnings(reply)
    is_cut = any(answer["finish_reason"] in ("length", "timeout") for answer in reply["answers"])
    if is_cut:
        _print_line("(an empty line goes on)")
    # The system prompt and the messages given at first are part of the conversation now.
    conversation = str(reply.get("conversation", ""))
    if not conversation:  # the conversation is too long to be kept; a warning has said so
        return unchanged, False
    return replace(unchanged, conversation=conversation, system="", messages=()), is_cut


def _shown_reply(home: Home, request: ChatRequest) -> Reply | None:
    """Ask the question of `request`, show the answer while it is sampled, and return the reply.

    Returns None after an error, which is printed, or after a Ctrl-C.
    """
    stream = _Stream(shows_names=bool(request.compare_to))
    try:
        reply = _chat(home, request, stream.hear)
    except UserError as error:
        stream.end()
        print_error(error, as_json=False)
        return None
    except KeyboardInterrupt:
        stream.end()
        _print_line("(stopped; the question is forgotten)")
        return None
    stream.end()
    return reply


def _print_calls_and_warnings(reply: Reply) -> None:
    """Print the tool calls that the model asks for in its answers, each on a line, and the warnings
    of the reply. The tools are not called."""
    for answer in reply["answers"]:
        for call in answer.get("tool_calls", []):
            function = call["function"]
            _print_line(clean_text(f"(calls {function['name']} with {function['arguments']})"))
    for warning in reply["warnings"]:
        _print_line(clean_text(f"! {warning}"))


def _chat(home: Home, request: ChatRequest, listener: Listener) -> Reply:
    """Ask the question of `request` and record the call in the audit log. The call waits as long as
    a person may like to; `listener` gets each piece of an answer."""
    chat = partial(verbs.chat, patience=OF_PEOPLE, listener=listener)
    return call_with_audit_log(home, "chat", chat, request=request)


def _without_answer_texts(reply: Reply) -> Reply:
    """Return a copy of the reply of a chat without the texts of its answers, which were printed
    while they were sampled."""
    answers = [
        {name: value for name, value in answer.items() if name != "answer"}
        for answer in reply["answers"]
    ]
    return {**reply, "answers": answers}


def _print_line(line: str) -> None:
    """Print a line at once, without waiting for more output."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class _Stream:
    """Prints the text of answers while it is sampled.

    Args:
        shows_names: write the name of each model above its answer.
    """

    def __init__(self, shows_names: bool) -> None:
        """Start before the first piece of an answer. With `shows_names` the name of each model is
        written above its answer."""
        self._shows_names = shows_names
        self._model = ""  # the model that answers; "" before the first piece
        self._is_in_line = False  # whether the text so far ends within a line

    def hear(self, piece: Heard) -> None:
        """Print the next piece of an answer, and before it the model's name if another model
        answers now (only if names are shown)."""
        if self._shows_names and piece.model != self._model:
            self.end()
            _print_line(f"{clean_text(piece.model)}:")
        self._model = piece.model
        if piece.text:
            sys.stdout.write(clean_text(piece.text))
            sys.stdout.flush()
            self._is_in_line = not piece.text.endswith("\n")

    def end(self) -> None:
        """End the line of the answer, unless the answer has ended it itself."""
        if self._is_in_line:
            _print_line("")
        self._is_in_line = False

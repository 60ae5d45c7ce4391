"""What `chat` is asked, and how long it may take. Imports nothing heavy: the server's tools do."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from envs.json_types import ChatMessage, ToolSchema

DRAW_SEED = -1


@dataclass(frozen=True)
class ChatRequest:
    """One call of `chat`.

    What the models read is, in this order: the conversation so far, `system`, `messages`, and
    `message` as a message of the user.

    Attributes:
        model: asked first; may be served or not yet.
        compare_to: a second model, asked the same; "" for none.
        messages: in OpenAI's form: earlier turns, tool calls, results of tools.
        tools: OpenAI function schemas; [] for those of the conversation.
        conversation: id in an earlier reply; "" begins one. Without any new message, an answer that
            was cut goes on.
        seed: equal seeds draw equal answers; DRAW_SEED draws one, which the reply names.
        max_tokens: of each answer, and of each continuation.
        temperature: 0 is greedy.
    """

    model: str
    message: str = ""
    system: str = ""
    compare_to: str = ""
    messages: Sequence[ChatMessage] = ()
    tools: Sequence[ToolSchema] = ()
    conversation: str = ""
    seed: int = DRAW_SEED
    max_tokens: int = 512
    temperature: float = 0.0


@dataclass(frozen=True)
class Patience:
    """How long a call goes on, in seconds.

    Attributes:
        call_s: for the whole of it. An answer that is not done then is returned as far as it is.
        start_s: for a deployment that is not ready yet to become so.
        stall_s: without a token, once the model is free; then it counts as failed.
    """

    call_s: float
    start_s: float
    stall_s: float


# Clients of tools give up a call after a minute. The next call goes on where this one ended.
OF_CLIENTS = Patience(call_s=48.0, start_s=40.0, stall_s=48.0)
# A person sees the tokens come, and can end the command.
OF_PEOPLE = Patience(call_s=6 * 3_600.0, start_s=1_800.0, stall_s=300.0)


@dataclass(frozen=True)
class Heard:
    """What has come of an answer that is still being sampled.

    Attributes:
        model: that answers.
        text: new text; "" where a token came that tells nothing yet, or none came for a second.
        tokens: sampled in this call so far.
        is_waiting: the model is still busy with other answers.
    """

    model: str
    text: str
    tokens: int
    is_waiting: bool = False


Listener = Callable[[Heard], None]


def unheard(_: Heard) -> None:
    """A listener for callers who only want the whole answer."""

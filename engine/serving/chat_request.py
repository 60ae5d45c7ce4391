"""The arguments of a call of `chat`, and the times that it may take. Imports nothing heavy, because
the server's tools import it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from envs.json_types import ChatMessage, ToolSchema

DRAW_SEED = -1  # a request's seed: draw a new one


@dataclass(frozen=True)
class ChatRequest:
    """One call of `chat`.

    The models read, in this order: the conversation so far, `system`, `messages`, and `message` as
    a message of the user.

    Attributes:
        model: the model that is asked first; it need not be served yet.
        compare_to: a second model, which is asked the same; "" for none.
        messages: in OpenAI's form: earlier turns, tool calls, results of tools.
        tools: OpenAI function schemas; [] takes those of the conversation.
        conversation: id from an earlier reply; "" begins a new conversation. Without any new
            message, an answer that was cut goes on.
        seed: equal seeds draw equal answers; DRAW_SEED draws a seed, which the reply names.
        max_tokens: the most tokens of each answer, and of each continuation.
        temperature: 0 takes the likeliest token each time.
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
    """How long a call may take, in seconds.

    Attributes:
        call_s: for the whole call. If an answer is not done then, its beginning is returned.
        start_s: for a deployment to become ready.
        stall_s: without a token, once the model has begun with the answer. After that the answer
            counts as failed.
    """

    call_s: float
    start_s: float
    stall_s: float


# Clients of tools give up a call after a minute, so it returns earlier. The next call continues
# the answer.
OF_CLIENTS = Patience(call_s=48.0, start_s=40.0, stall_s=48.0)
# A person sees the tokens as they come, and can end the command.
OF_PEOPLE = Patience(call_s=6 * 3_600.0, start_s=1_800.0, stall_s=300.0)


@dataclass(frozen=True)
class Heard:
    """One piece of an answer that is still being sampled, as a listener hears it.

    Attributes:
        model: the model that answers.
        text: the new text. It is "" if the new token gives no text yet, or if no token came for a
            second.
        tokens: how many tokens this call has sampled so far.
        is_waiting: whether the model is still busy with other answers.
    """

    model: str
    text: str
    tokens: int
    is_waiting: bool = False


Listener = Callable[[Heard], None]


def unheard(_: Heard) -> None:
    """A listener that does nothing, for callers who only want the whole answer."""

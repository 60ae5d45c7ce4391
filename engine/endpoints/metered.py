"""One turn asked of a model behind a URL within the caps of a run, and no second time after an
interruption."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.endpoints.answered import Answered, Turn, hash_of, most_tokens_in
from engine.endpoints.chat_client import ChatClient, to_openai
from engine.endpoints.references import cost_of
from engine.records.lines.endpoint_call import EndpointCall
from envs.json_types import ChatMessage, JsonObject, ToolSchema


@dataclass(frozen=True)
class Request:
    """What is asked: the conversation, what may be called, and `options` of `ChatClient.ask`."""

    messages: Sequence[ChatMessage]
    tools: Sequence[ToolSchema]
    options: JsonObject


def ask_once(client: ChatClient, answered: Answered, place: Turn, request: Request) -> EndpointCall:
    """The model's next turn at `place`, asked now or answered before an interruption.

    Raises OutOfBudget, Refused, EndpointDown or Cancelled.
    """
    body: JsonObject = {
        "messages": [to_openai(message) for message in request.messages],
        "tools": list(request.tools),
        "options": request.options,
    }
    digest = hash_of(body)
    known = answered.find(place, digest)
    if known is not None:
        return known
    endpoint, most_out = client.endpoint, request.options["max_tokens"]
    most_in = most_tokens_in(body)
    most_cost = cost_of(endpoint, most_in, most_out)
    answered.admit(most_cost)
    try:
        turn = client.ask(request.messages, request.tools, request.options)
    except BaseException:
        answered.drop(most_cost)
        raise
    tokens_in = most_in if turn.tokens_in is None else turn.tokens_in
    tokens_out = most_out if turn.tokens_out is None else turn.tokens_out
    model, task, attempt, number = place
    call = EndpointCall(
        model=model,
        task=task,
        attempt=attempt,
        turn=number,
        request=digest,
        message=turn.message,
        invalid_calls=turn.invalid_calls or None,
        is_cut=turn.is_cut,
        tokens_in=tokens_in,
        tokens_out=tokens_out,
        cost=cost_of(endpoint, tokens_in, tokens_out),
        seconds=round(turn.seconds, 3),
        retries=turn.retries,
    )
    answered.keep(call, most_cost)
    return call

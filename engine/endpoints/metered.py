"""Asks a model behind a URL for one turn within the caps of a run. After an interruption of the run
no turn is asked for a second time."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.endpoints.answered import AnswerLedger, Turn, hash_of, most_tokens_in
from engine.endpoints.chat_client import ChatClient, to_openai
from engine.endpoints.references import cost_of
from engine.records.lines.endpoint_call import EndpointCall
from envs.json_types import ChatMessage, JsonObject, ToolSchema


@dataclass(frozen=True)
class Request:
    """What the model is asked: the conversation, the tools that it may call, and the `options` of
    `ChatClient.ask`."""

    messages: Sequence[ChatMessage]
    tools: Sequence[ToolSchema]
    options: JsonObject


def ask_once(
    client: ChatClient, ledger: AnswerLedger, turn_key: Turn, request: Request
) -> EndpointCall:
    """Return the model's next turn. If an earlier attempt of the run asked for it, the stored
    answer is returned; else the model is asked now, and the answer is stored.

    Args:
        client: asks the endpoint.
        ledger: the stored answers of the run, and its caps.
        turn_key: which turn it is: (model, task, attempt, number of the turn).
        request: the conversation and what goes with it.

    Raises OutOfBudget if the caps allow no further request, Refused if the endpoint refuses it,
    EndpointDown if it does not answer, Cancelled if the run was asked to stop.
    """
    body: JsonObject = {
        "messages": [to_openai(message) for message in request.messages],
        "tools": list(request.tools),
        "options": request.options,
    }
    request_hash = hash_of(body)
    stored_call = ledger.find(turn_key, request_hash)
    if stored_call is not None:
        return stored_call
    endpoint, most_tokens_answered = client.endpoint, request.options["max_tokens"]
    most_tokens_sent = most_tokens_in(body)
    most_cost = cost_of(endpoint, most_tokens_sent, most_tokens_answered)
    ledger.admit(most_cost)  # from now on the cost is reserved, until `drop` or `keep`
    try:
        turn = client.ask(request.messages, request.tools, request.options)
    except BaseException:
        ledger.drop(most_cost)
        raise
    # A server that does not count tokens is taken to have used as many as there can be.
    tokens_in = most_tokens_sent if turn.tokens_in is None else turn.tokens_in
    tokens_out = most_tokens_answered if turn.tokens_out is None else turn.tokens_out
    model, task, attempt, turn_number = turn_key
    call = EndpointCall(
        model=model,
        task=task,
        attempt=attempt,
        turn=turn_number,
        request=request_hash,
        message=turn.message,
        invalid_calls=turn.invalid_calls or None,
        is_cut=turn.is_cut,
        tokens_in=tokens_in,
        tokens_out=tokens_out,
        cost=cost_of(endpoint, tokens_in, tokens_out),
        seconds=round(turn.seconds, 3),
        retries=turn.retries,
    )
    ledger.keep(call, most_cost)
    return call

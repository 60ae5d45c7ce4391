"""One turn of a model behind a URL: a line of `endpoint_calls.jsonl`."""

from engine.records.lines.answer import Text
from engine.records.lines.line_record import LineRecord
from envs.json_types import ChatMessage


class EndpointCall(LineRecord):
    """One answer of a model behind a URL, with its cost. A resumed run does not ask it again.

    Attributes:
        model, task, attempt, turn: which turn of which answer; attempt and turn count from 0.
        request: hash of the request; a turn with another request is asked again.
        message: the answer.
        invalid_calls: why tool calls in the answer are invalid.
        is_cut: whether the answer was cut at its token limit.
        tokens_in, tokens_out: tokens of the request and of the answer as the server counts them, or
            our upper bound if it does not count them.
        cost: money, by the prices of config.toml at the submit; 0 if there are no prices.
        seconds: time from the request to the answer, including retries.
        retries: how many times the request was sent again.
    """

    model: str
    task: Text
    attempt: int
    turn: int
    request: str
    message: ChatMessage
    invalid_calls: list[Text] | None = None
    is_cut: bool = False
    tokens_in: int = 0
    tokens_out: int = 0
    cost: float = 0.0
    seconds: float = 0.0
    retries: int = 0

"""One turn of a model behind a URL: a line of `endpoint_calls.jsonl`."""

from engine.records.lines.answer import Text
from engine.records.lines.line_record import LineRecord
from envs.json_types import ChatMessage


class EndpointCall(LineRecord):
    """What was answered, and what it took: a run that goes on asks it no second time.

    Attributes:
        model, task, attempt, turn: which turn of which answer, the last two from 0.
        request: hash of what was sent; another request is asked anew.
        message: the answer.
        invalid_calls: why tool calls in it are invalid.
        is_cut: it was cut at its longest.
        tokens_in, tokens_out: as the server counts them, or our upper bound where it does not.
        cost: money, by the prices of config.toml at the submit; 0 without prices.
        seconds: from the request to the answer, retries included.
        retries: requests that were sent again.
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

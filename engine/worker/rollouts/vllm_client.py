"""Requests to a vLLM server: token ids go in, token ids and log-probabilities come out.

They use HTTP over the server's socket file; engine/machine/processes/vllm_process.py says why it is
no port. Nothing is ever sent or read as text, so no template, tokenizer or default of the server
can change a result.
"""

import json
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from engine.machine.processes.vllm_process import VllmProcess

# A request or a reply in vLLM's form. The parts of a reply that are used are checked when read.
Body = dict[str, Any]

GENERATE = "/inference/v1/generate"
LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"
# A reply may have to wait for its longest completion, and for requests that came before it.
READ_S = 1800.0
CONNECT_S = 30.0  # how long connecting, or sending a request, may take
# No connection is kept open, because the server closes idle ones after some seconds, and a request
# that is sent at that moment would be lost.
LIMITS = httpx.Limits(max_connections=256, max_keepalive_connections=0)
# The server writes -9999 for the logarithm of zero; nothing this low was ever sampled.
NO_LOGPROB = -9998.0


class VllmError(Exception):
    """The server refused a request, ended, or gave an unexpected answer."""


@dataclass(frozen=True)
class Answer:
    """A completion in the server's reply. `logprobs` holds NaN for a missing one; `finished` is
    False if the completion was cut off by its length."""

    ids: list[int]
    logprobs: list[float]
    finished: bool


class VllmClient:
    """A client of one vLLM server. Every method raises VllmError if the server refuses or the
    connection breaks."""

    def __init__(self, process: VllmProcess) -> None:
        """Send requests to the server `process`. Errors of the connection quote the last lines of
        its log."""
        self.process = process

    def load(self, name: str, folder: Path) -> None:
        """Make the adapter in `folder` available as the model `name`. Raises VllmError."""
        self._post(LOAD, {"lora_name": name, "lora_path": str(folder)})

    def unload(self, name: str) -> None:
        """Unload the adapter that is available as the model `name`. Raises VllmError."""
        self._post(UNLOAD, {"lora_name": name})

    def sleep(self) -> None:
        """Free the device's memory: weights move to the machine's memory, caches are lost."""
        self._post("/sleep?level=1", body=None)  # level 2 would discard the weights

    def wake(self) -> None:
        """Take the device's memory again after `sleep`."""
        self._post("/wake_up", body=None)

    def ask(self, model: str, ids: list[int], sampling: Body) -> list[Answer]:
        """Return completions of the prompt `ids` by the server's model `model`. `sampling` are
        vLLM's sampling parameters; `n` in it is the number of completions. Raises VllmError."""
        return read_answers(self._post(GENERATE, _request(model, ids, sampling)))

    def prompt_logprobs(self, model: str, ids: list[int]) -> list[float]:
        """Return the log-probability of every id of the prompt but the first, which nothing
        precedes. Raises VllmError."""
        # max_tokens is 1 because vLLM refuses 0. With prompt_logprobs 0 the server rates only the
        # prompt's own tokens, without alternatives.
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        reply = self._post(GENERATE, _request(model, ids, sampling))
        try:
            positions = reply["prompt_logprobs"][1:]  # the first id's is None
            return [
                float(position[str(token)]["logprob"])
                for position, token in zip(positions, ids[1:], strict=True)
            ]
        # KeyError: a part is missing; TypeError: another shape; ValueError: no number, or too few.
        except (KeyError, TypeError, ValueError) as error:
            raise VllmError(
                f"the prompt's log-probabilities are not in the reply: {error}"
            ) from error

    def stream(self, model: str, ids: list[int], sampling: Body) -> Iterator[list[int]]:
        """Yield the ids of one completion as they are sampled, a few at a time. Raises VllmError,
        possibly after some ids have been yielded."""
        body = _request(model, ids, sampling) | {"stream": True}
        with (
            self._errors_explained(),
            self._client() as client,
            client.stream("POST", GENERATE, json=body) as response,
        ):
            if response.status_code != 200:
                response.read()  # httpx does not load the text of a streamed reply by itself
                raise VllmError(_refusal(response))
            for chunk in _streamed_chunks(response):
                # A choice may have no ids (None), such as the last one.
                yield [
                    int(token) for choice in chunk["choices"] for token in choice["token_ids"] or ()
                ]

    @asynccontextmanager
    async def together(self) -> AsyncIterator["Together"]:
        """Context manager that yields a `Together`, with which several prompts can be sent at the
        same time. Its connections are closed on exit."""
        transport = httpx.AsyncHTTPTransport(uds=str(self.process.address), limits=LIMITS)
        async with httpx.AsyncClient(
            transport=transport,
            base_url="http://vllm",
            headers=self._headers(),
            # pool=None lets a prompt wait for a free connection without limit.
            timeout=httpx.Timeout(CONNECT_S, read=READ_S, pool=None),
        ) as client:
            yield Together(self, client)

    def _post(self, path: str, body: Body | None) -> Body:
        """Send a request and return the decoded reply. Raises VllmError."""
        with self._errors_explained(), self._client() as client:
            return _json_object(client.post(path, json=body))

    def _client(self) -> httpx.Client:
        """Make an HTTP client that talks to the server over its socket file and sends its key."""
        return httpx.Client(
            transport=httpx.HTTPTransport(uds=str(self.process.address), limits=LIMITS),
            base_url="http://vllm",
            headers=self._headers(),
            timeout=httpx.Timeout(CONNECT_S, read=READ_S),
        )

    def _headers(self) -> dict[str, str]:
        """Return the HTTP header with the server's key."""
        return {"Authorization": f"Bearer {self.process.key}"}

    @contextmanager
    def _errors_explained(self) -> Iterator[None]:
        """Context manager that turns errors of the connection and replies without JSON into
        VllmError.

        The error's message ends with the last lines of the server's log.
        """
        try:
            yield
        except (httpx.HTTPError, ValueError) as error:  # ValueError: no JSON
            message = f"{type(error).__name__}: {error}"
            raise VllmError(f"{message}; its log ends: {self.process.last_words()}") from error


class Together:
    """Sends requests at the same time; see `VllmClient.together`."""

    def __init__(self, owner: VllmClient, client: httpx.AsyncClient) -> None:
        """Send requests with `client`. `owner` made it, and explains its errors."""
        self._owner = owner
        self._client = client

    async def ask(self, model: str, ids: list[int], sampling: Body) -> list[Answer]:
        """Return completions of the prompt `ids` by the server's model `model`, while other prompts
        may be sent. `sampling` are vLLM's sampling parameters; `n` in it is the number of
        completions. Raises VllmError."""
        with self._owner._errors_explained():
            response = await self._client.post(GENERATE, json=_request(model, ids, sampling))
            return read_answers(_json_object(response))


def read_answers(reply: Body) -> list[Answer]:
    """Return the completions in a reply, in the order of their index. Raises VllmError if the reply
    does not have the expected shape."""
    try:
        choices = sorted(reply["choices"], key=lambda choice: choice["index"])
        return [_read_choice(choice) for choice in choices]
    # KeyError: a part is missing; TypeError: another shape; ValueError: no number, or another id.
    except (KeyError, TypeError, ValueError) as error:
        raise VllmError(f"the reply has another shape than expected: {error!r}") from error


def _streamed_chunks(response: httpx.Response) -> Iterator[Body]:
    """Yield the JSON objects of the streamed reply `response` as they arrive. Raises VllmError if
    the server sends an error among them."""
    for line in response.iter_lines():
        # Server-sent events, with blank lines between them; the last one is "[DONE]".
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            raise VllmError(str(chunk["error"])[:300])
        yield chunk


def _read_choice(choice: Body) -> Answer:
    """Read one choice of a reply.

    Raises:
        KeyError, TypeError, ValueError: the choice does not have the expected shape, or its
            log-probabilities belong to other ids; `read_answers` catches these errors.
    """
    ids = [int(token) for token in choice["token_ids"]]
    reported = choice.get("logprobs") or {}
    positions = reported.get("content") or [None] * len(ids)  # one for each id
    logprobs = [_read_logprob(token, fields) for token, fields in zip(ids, positions, strict=True)]
    return Answer(ids, logprobs, finished=choice["finish_reason"] == "stop")


def _read_logprob(token: int, reported: Body | None) -> float:
    """Return the log-probability that the server reports for the sampled id `token`; NaN if it is
    missing (`reported` is None) or not a usable number. Raises ValueError if it belongs to another
    id."""
    fields: Body = {} if reported is None else reported
    # A server may leave out the id; then it is assumed to be right.
    if fields.get("token_id", token) != token:
        raise ValueError(f"log-probability of id {fields['token_id']} where {token} was sampled")
    logprob = fields.get("logprob")
    if isinstance(logprob, int | float) and NO_LOGPROB < logprob < math.inf:
        return float(logprob)
    return math.nan


def _request(model: str, ids: list[int], sampling: Body) -> Body:
    """Make the body of a request for completions of the prompt `ids` by the model that the server
    knows as `model`. `sampling` are vLLM's sampling parameters."""
    return {"model": model, "token_ids": ids, "sampling_params": sampling}


def _json_object(response: httpx.Response) -> Body:
    """Return the reply in `response` as a JSON object; {} if the server answered with anything
    else, such as plain text. Raises VllmError if the server refused the request (any status but
    200)."""
    if response.status_code != 200:
        raise VllmError(_refusal(response))
    try:
        reply = response.json()
    except ValueError:
        reply = {}  # the server answers requests to load an adapter with a plain sentence
    return reply if isinstance(reply, dict) else {}


def _refusal(response: httpx.Response) -> str:
    """Describe a refused request: the status of `response`, and the first 300 characters of the
    server's error message, or of its text if it has none. Example: "it answered 400: no such
    model"."""
    text = response.text
    try:
        reply = response.json()
    except ValueError:  # no JSON
        reply = None
    if isinstance(reply, dict):
        # {"error": {"message": ...}}, {"error": ...} or {"message": ...}
        error = reply.get("error", reply)
        if isinstance(error, dict):
            error = error.get("message", error)
        text = str(error)
    return f"it answered {response.status_code}: {text[:300]}"

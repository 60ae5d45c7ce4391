"""Answers chat requests with the models of one deployment, whichever sampler they use.

The chat template and the stop rules are those of training, so a greedy answer here equals the
answer in an evaluation.
"""

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from engine.worker.core.trajectory import Completion
from engine.worker.gateway.chat_request import (
    ChatRequest,
    Refused,
    Reply,
    ends_in_partial_stop,
    reply_fields,
    text_before_stop,
    tool_call_as_openai,
    usage,
)
from engine.worker.network.sampler import Sampler, SamplingParams
from engine.worker.rollouts.renderer import Renderer
from engine.worker.serving.token_logprobs import LogprobsRequest, logprobs_reply
from envs.json_types import ChatMessage, JsonObject


class Models(Protocol):
    """A base and its adapters, served under their model names: `OwnModels` (own_models.py) on our
    own sampler, or `VllmModels` (vllm_models.py) on a vLLM server."""

    renderer: Renderer
    limit: int
    """The most tokens of prompt and answer together."""

    @property
    def is_alive(self) -> bool:
        """False once the models can answer no more requests."""
        ...

    def names(self) -> list[str]:
        """Return the names of all models, the base's first."""
        ...

    def add(self, name: str, folder: Path) -> None:
        """Load the adapter in `folder` under the model name `name`. Raises Refused if it cannot be
        served."""
        ...

    def speaking_as(self, name: str) -> AbstractContextManager[Sampler]:
        """Context manager that yields a sampler which answers as the model `name`. Raises Refused
        (404) for an unknown name."""
        ...

    def prompt_logprobs(self, name: str, ids: list[int]) -> list[float]:
        """Return the log-probability in nats of every id but the first under the model `name`.
        Raises Refused: 404 for an unknown name, 500 if the model fails."""
        ...

    def close(self) -> None:
        """Free what the models hold. Nothing can be answered afterwards."""
        ...


class Served:
    """Answers chat requests, each with the model that it names."""

    def __init__(self, models: Models) -> None:
        """Answer with `models`, with their chat template and length limit."""
        self.models = models
        self.renderer = models.renderer
        self.limit = models.limit

    def names(self) -> list[str]:
        """Return the names of all models, the base's first."""
        return self.models.names()

    def add(self, name: str, folder: Path) -> None:
        """Load the adapter in `folder` under the model name `name`. Raises Refused if it cannot be
        served."""
        self.models.add(name, folder)

    def prompt_ids(self, request: ChatRequest) -> list[int]:
        """Return the token ids of the request's prompt, followed by `request.begun_ids`, the
        beginning of the answer if the request gives one.

        Raises:
            Refused: 400, if the chat template refuses the messages, an id is unknown, or the prompt
                leaves no room for a token of the answer.
        """
        try:
            ids = self.renderer.prompt(request.messages, request.tools)
        except Exception as error:  # a template is a program; it may fail in any way
            raise Refused(400, f"The chat template refused the messages: {error}") from error
        vocab = len(self.renderer.tokenizer)  # ids are counted from 0
        if any(token >= vocab for token in request.begun_ids):
            raise Refused(400, "begun_token_ids has ids that this model does not know.")
        ids += request.begun_ids
        if len(ids) + 1 > self.limit:
            raise Refused(400, f"The prompt has {len(ids)} tokens; the model reads {self.limit}.")
        return ids

    def complete(self, request: ChatRequest) -> Reply:
        """Sample `request.n` answers and return them as the choices of OpenAI's chat.completion
        object.

        Raises:
            Refused: 400 if the prompt cannot be used (see `prompt_ids`), 404 for an unknown model.
        """
        ids = self.prompt_ids(request)
        with self.models.speaking_as(request.model) as sampler:
            params = self._within_limit(request.params, len(ids))
            (completions,) = sampler.generate([ids], request.n, params)  # for one prompt
        sampled_tokens = sum(len(completion.ids) for completion in completions)
        choices = [
            self._choice(index, completion, request) for index, completion in enumerate(completions)
        ]
        fields = reply_fields("chat.completion", "chatcmpl", request.model)
        return fields | {"choices": choices, "usage": usage(len(ids), sampled_tokens)}

    def _choice(self, index: int, completion: Completion, request: ChatRequest) -> Reply:
        """Return a sampled answer as choice number `index` of OpenAI's chat.completion object. Its
        text ends before the first stop string; tool calls are parsed if the request has tools."""
        text = self._text_before_stop(completion.ids, request)
        message = self.renderer.assistant_message(text, request.tools)
        finish_reason = "stop" if completion.finished else "length"
        if message.get("tool_calls"):
            message["tool_calls"] = [
                tool_call_as_openai(tool_call) for tool_call in message["tool_calls"]
            ]
            finish_reason = "tool_calls"
        return {"index": index, "message": message, "finish_reason": finish_reason}

    def rate(self, request: LogprobsRequest) -> Reply:
        """Return the log-probabilities of the request's token ids as OpenAI's text_completion
        object, with the likeliest next token if the request wants it.

        Raises:
            Refused: 400 for an id that has no token or a prompt that is too long, 404 for an
                unknown model.
        """
        self._check_ids(request)
        logprobs = self.models.prompt_logprobs(request.model, request.ids)
        continuation = self._likeliest_next(request) if request.wants_next_token else None
        return logprobs_reply(request, logprobs, continuation, self.renderer.token_text)

    def _check_ids(self, request: LogprobsRequest) -> None:
        """Raise Refused (400) for an id without a token, and for more ids than the model can read,
        including the next token if it is wanted."""
        vocab = len(self.renderer.tokenizer)
        beyond = [token for token in request.ids if not 0 <= token < vocab]
        if beyond:
            raise Refused(400, f"{beyond[0]} is no token id: there are {vocab}, from 0.")
        length = len(request.ids) + (1 if request.wants_next_token else 0)
        if length > self.limit:
            raise Refused(400, f"The prompt has {length} tokens; the model reads {self.limit}.")

    def _likeliest_next(self, request: LogprobsRequest) -> tuple[int, float]:
        """Return the id of the likeliest token after the request's ids, and its log-probability in
        nats."""
        with self.models.speaking_as(request.model) as sampler:
            params = SamplingParams(max_tokens=1, temperature=0.0)
            # One prompt with one completion.
            ((completion,),) = sampler.generate([request.ids], 1, params)
        return completion.ids[0], completion.logprobs[0]

    def pieces(self, request: ChatRequest) -> Generator[Reply, None, None]:
        """Yield one answer in pieces while it is sampled, as OpenAI's chat.completion.chunk
        objects:

        1. the role;
        2. an empty delta, once the model is free to answer this request;
        3. the text after `request.begun_ids`, one or more characters per piece;
        4. once the answer is whole, what was held back until then: its reasoning, the rest of its
           text, its tool calls;
        5. the finish reason;
        6. the usage, if the request asks for it.

        With `return_token_ids` there is a piece for each token, even if its text has to wait.
        Raises the errors of `complete`, but only when a piece is asked for.
        """
        ids = self.prompt_ids(request)
        answer = _StreamedAnswer(request)
        yield answer.chunk({"role": "assistant", "content": ""})
        answer.sent_text = self._text_sent_before(request)
        yield from self._sampled_pieces(ids, answer)
        # Sampling has ended, so the beginning of a stop string that was held back is plain text.
        text = self._text_before_stop(answer.ids, request)
        last_deltas = self._unsent_deltas(text, answer.sent_text, request)
        for delta in last_deltas:
            yield answer.chunk(delta)
        yield answer.chunk({}, self._finish_reason(answer.ids, last_deltas, request))
        if request.include_usage:
            sampled_count = len(answer.ids) - len(request.begun_ids)
            yield answer.common_fields | {"choices": [], "usage": usage(len(ids), sampled_count)}

    def _sampled_pieces(
        self, prompt: list[int], answer: "_StreamedAnswer"
    ) -> Generator[Reply, None, None]:
        """Sample the answer. Yields an empty piece once the model is free, and then the text, but
        only the part that later tokens cannot turn into a tool call, a thought or a stop string.
        `prompt` ends with `begun_ids`, the beginning of the answer if the request gives one."""
        request = answer.request
        params = self._params_of_rest(request, len(prompt))
        with self.models.speaking_as(request.model) as sampler:
            yield answer.chunk({})  # the model is free
            for token in sampler.stream(prompt, params):
                answer.ids.append(token)
                new_text = self._sendable_text(answer)
                answer.sent_text += new_text
                if new_text:
                    yield answer.chunk({"content": new_text}, sampled=token)
                elif request.return_token_ids:  # the client wants a piece for every token
                    yield answer.chunk({}, sampled=token)

    def _text_before_stop(self, answer_ids: Sequence[int], request: ChatRequest) -> str:
        """Return the text of an answer's token ids, up to the first stop string of the request."""
        return text_before_stop(self.renderer.completion_text(answer_ids), request.params.stop)

    def _params_of_rest(self, request: ChatRequest, prompt_length: int) -> SamplingParams:
        """Return how the rest of an answer is sampled, if the request gives its beginning
        (`begun_ids`). The seed is shifted, because the random numbers must not repeat those of that
        beginning. `prompt_length` counts the tokens of the prompt and of the beginning."""
        params = self._within_limit(request.params, prompt_length)
        return replace(params, seed=params.seed + len(request.begun_ids))

    def _sendable_text(self, answer: "_StreamedAnswer") -> str:
        """Return the text after `answer.sent_text` that can be sent now, or "" if it must wait for
        more tokens, which could still make it part of a stop string, a tool call or a thought."""
        text = self._text_before_stop(answer.ids, answer.request)
        # U+FFFD at the end stands for a character some of whose bytes are still to come.
        if text.endswith("\ufffd") or ends_in_partial_stop(text, answer.request.params.stop):
            return ""
        certain = self.renderer.certain_text(text, answer.request.tools)
        # Further tokens can shorten or change the certain text for a while.
        if not _continues(certain, answer.sent_text):
            return ""
        return certain[len(answer.sent_text) :]

    def _finish_reason(
        self, answer_ids: Sequence[int], last_deltas: Sequence[Reply], request: ChatRequest
    ) -> str:
        """Return why a streamed answer ended: "stop", "length" or "tool_calls", as OpenAI names it.

        Args:
            answer_ids: the ids of the whole answer.
            last_deltas: the deltas that were sent after its last token.
        """
        if any("tool_calls" in delta for delta in last_deltas):
            return "tool_calls"
        has_stop_id = bool(answer_ids) and answer_ids[-1] in self.renderer.stop_ids
        was_cut = not has_stop_id and not self._has_stop_string(answer_ids, request.params)
        return "length" if was_cut else "stop"

    def _text_sent_before(self, request: ChatRequest) -> str:
        """Return what an earlier request has sent of the text of `request.begun_ids`, the tokens
        that the answer begins with; "" if there are none."""
        # U+FFFD at the end stands for a character with missing bytes, which was not sent.
        begun_text = self.renderer.completion_text(request.begun_ids).rstrip("\ufffd")
        begun_text = text_before_stop(begun_text, request.params.stop)
        return self.renderer.certain_text(begun_text, request.tools)

    def _unsent_deltas(self, text: str, sent_text: str, request: ChatRequest) -> list[Reply]:
        """Return what is still to be sent after the answer's last token, as deltas of OpenAI's
        stream: its reasoning, the rest of its content and its tool calls.

        Args:
            text: the whole answer as the model wrote it.
            sent_text: the content that was already sent.
        """
        message: ChatMessage = {"content": text}
        # Plain text needs no parsing. Otherwise part of it may be a call or a thought.
        if self.renderer.certain_text(text, request.tools) != text:
            message = self.renderer.assistant_message(text, request.tools)
        deltas: list[Reply] = []
        if message.get("reasoning_content"):
            deltas.append({"reasoning_content": message["reasoning_content"]})
        if _continues(message["content"], sent_text):
            deltas.append({"content": message["content"][len(sent_text) :]})
        if message.get("tool_calls"):
            deltas.append({"tool_calls": _numbered_calls(message["tool_calls"])})
        return deltas

    def _has_stop_string(self, ids: Sequence[int], params: SamplingParams) -> bool:
        """Tell whether the text of `ids` contains one of the stop strings."""
        text = self.renderer.completion_text(ids)
        return any(stop_string in text for stop_string in params.stop)

    def _within_limit(self, params: SamplingParams, prompt_length: int) -> SamplingParams:
        """Return the parameters with `max_tokens` lowered, if necessary, so that a prompt of
        `prompt_length` tokens and its answer stay within the model's limit."""
        room = self.limit - prompt_length
        return replace(params, max_tokens=min(params.max_tokens, room))


class _StreamedAnswer:
    """The state of an answer while it is streamed.

    Attributes:
        ids: the ids of its tokens so far, including those that the request gave.
        sent_text: the part of its content that was already sent.
        common_fields: the fields that every piece has.
    """

    def __init__(self, request: ChatRequest) -> None:
        """Start with the ids that the request gives as the answer's beginning, and no text sent."""
        self.request = request
        self.ids = list(request.begun_ids)
        self.sent_text = ""
        self.common_fields = reply_fields("chat.completion.chunk", "chatcmpl", request.model)

    def chunk(
        self, delta: Reply, finish_reason: str | None = None, sampled: int | None = None
    ) -> Reply:
        """Make a piece of the stream with this delta.

        `finish_reason` is None until the answer has ended. `sampled` is the id of the token for
        which the piece is sent, or None; the piece contains it if the request wants token ids.
        """
        choice: Reply = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        if sampled is not None and self.request.return_token_ids:
            choice["token_ids"] = [sampled]
        return self.common_fields | {"choices": [choice]}


def _numbered_calls(tool_calls: Sequence[JsonObject]) -> list[JsonObject]:
    """Return tool calls in OpenAI's form for a stream, in which each has its number as `index`."""
    return [
        tool_call_as_openai(tool_call) | {"index": index}
        for index, tool_call in enumerate(tool_calls)
    ]


def _continues(text: str, sent_text: str) -> bool:
    """Tell whether `text` begins with the text that was sent and is longer. It may begin otherwise,
    because a later token can change how the end of a text is read."""
    return text.startswith(sent_text) and len(text) > len(sent_text)

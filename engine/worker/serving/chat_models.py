"""Chat requests to answers, whatever samples them: the models of one deployment.

The template and the stop rules are those of training, so a greedy answer here is the one an
evaluation saw.
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
    """What serves a base and its adapters under their model names: `OwnModels` (own_models.py) on
    our own sampler, or `VllmModels` (vllm_models.py) on a vLLM server."""

    renderer: Renderer
    limit: int
    """Tokens of prompt and answer together."""

    @property
    def is_alive(self) -> bool:
        """False once nothing can be answered any more."""
        ...

    def names(self) -> list[str]: ...

    def add(self, name: str, folder: Path) -> None:
        """Load the adapter in `folder` under the model name `name`. Raises Refused."""
        ...

    def speaking_as(self, name: str) -> AbstractContextManager[Sampler]:
        """A context that yields a sampler which answers as the model called `name`. Raises Refused
        (404) for an unknown name."""
        ...

    def prompt_logprobs(self, name: str, ids: list[int]) -> list[float]:
        """The log-probability in nats of every id but the first under the model called `name`.
        Raises Refused: 404 for an unknown name, 500 when the model fails."""
        ...

    def close(self) -> None: ...


class Served:
    """Answers chat requests with the model each of them names."""

    def __init__(self, models: Models) -> None:
        self.models = models
        self.renderer = models.renderer
        self.limit = models.limit

    def names(self) -> list[str]:
        """The names of all models, the base's first."""
        return self.models.names()

    def add(self, name: str, folder: Path) -> None:
        """Load the adapter in `folder` under the model name `name`. Raises Refused."""
        self.models.add(name, folder)

    def prompt_ids(self, request: ChatRequest) -> list[int]:
        """The token ids of the request's prompt, followed by `request.begun_ids`, the ids of the
        answer's beginning if the request gives one.

        Raises:
            Refused: 400, when the chat template refuses the messages, or the prompt leaves no room
                for a token of the answer.
        """
        try:
            ids = self.renderer.prompt(request.messages, request.tools)
        except Exception as error:  # a template is a program; it may fail in any way
            raise Refused(400, f"The chat template refused the messages: {error}") from error
        if any(token >= len(self.renderer.tokenizer) for token in request.begun_ids):
            raise Refused(400, "begun_token_ids has ids that this model does not know.")
        ids += request.begun_ids
        if len(ids) + 1 > self.limit:
            raise Refused(400, f"The prompt has {len(ids)} tokens; the model reads {self.limit}.")
        return ids

    def complete(self, request: ChatRequest) -> Reply:
        """Sample `request.n` answers and return them as the choices of OpenAI's chat.completion
        object.

        Raises:
            Refused: 400, as in `prompt_ids`, or 404 for an unknown model.
        """
        ids = self.prompt_ids(request)
        with self.models.speaking_as(request.model) as sampler:
            params = self._within_limit(request.params, len(ids))
            (completions,) = sampler.generate([ids], request.n, params)  # of the only prompt
        sampled_tokens = sum(len(completion.ids) for completion in completions)
        choices = [
            self._choice(index, completion, request) for index, completion in enumerate(completions)
        ]
        fields = reply_fields("chat.completion", "chatcmpl", request.model)
        return fields | {"choices": choices, "usage": usage(len(ids), sampled_tokens)}

    def _choice(self, index: int, completion: Completion, request: ChatRequest) -> Reply:
        """A sampled answer as a choice of OpenAI's chat.completion object, with number `index`.
        Text ends before the first stop string; tool calls are parsed if the request has tools."""
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
        """The log-probabilities of the request's token ids, as OpenAI's text_completion object,
        with the likeliest token after them if the request wants it.

        Raises:
            Refused: 400 for an id that has no token or a prompt that is too long, 404 for an
                unknown model.
        """
        self._check_ids(request)
        logprobs = self.models.prompt_logprobs(request.model, request.ids)
        continuation = self._likeliest_next(request) if request.wants_next_token else None
        return logprobs_reply(request, logprobs, continuation, self.renderer.token_text)

    def _check_ids(self, request: LogprobsRequest) -> None:
        """Raises Refused (400) for an id that no token has, and for more ids than the model
        reads, the next token included if it is wanted."""
        vocab = len(self.renderer.tokenizer)
        beyond = [token for token in request.ids if not 0 <= token < vocab]
        if beyond:
            raise Refused(400, f"{beyond[0]} is no token id: there are {vocab}, from 0.")
        length = len(request.ids) + (1 if request.wants_next_token else 0)
        if length > self.limit:
            raise Refused(400, f"The prompt has {length} tokens; the model reads {self.limit}.")

    def _likeliest_next(self, request: LogprobsRequest) -> tuple[int, float]:
        """Return the likeliest token after the request's ids, with its log-probability."""
        with self.models.speaking_as(request.model) as sampler:
            params = SamplingParams(max_tokens=1, temperature=0.0)
            # One completion of one prompt.
            ((completion,),) = sampler.generate([request.ids], 1, params)
        return completion.ids[0], completion.logprobs[0]

    def pieces(self, request: ChatRequest) -> Generator[Reply, None, None]:
        """Yield one answer in pieces as it is sampled, as OpenAI's chat.completion.chunk objects:

        1. the role;
        2. an empty delta, once the model is free to answer this request;
        3. the text, one or more characters each, from where the ids in `request.begun_ids` end;
        4. once the answer is whole, what was held back until then: its reasoning, the rest of its
           text, its tool calls;
        5. the finish reason;
        6. the usage, if the request asks for it.

        With `return_token_ids` there is a piece for each token, also where its text has to wait.
        Raises Refused as `complete` does, but only when a piece is asked for.
        """
        ids = self.prompt_ids(request)
        answer = _StreamedAnswer(request)
        yield answer.chunk({"role": "assistant", "content": ""})
        answer.sent_text = self._sent_before(request)
        yield from self._sampled_pieces(ids, answer)
        # Sampling has ended, so the beginning of a stop string that was held back is plain text.
        text = self._text_before_stop(answer.ids, request)
        rest = self._rest(text, answer.sent_text, request)
        for delta in rest:
            yield answer.chunk(delta)
        yield answer.chunk({}, self._finish_reason(answer.ids, rest, request))
        if request.include_usage:
            sampled_count = len(answer.ids) - len(request.begun_ids)
            yield answer.common_fields | {"choices": [], "usage": usage(len(ids), sampled_count)}

    def _sampled_pieces(
        self, prompt: list[int], answer: "_StreamedAnswer"
    ) -> Generator[Reply, None, None]:
        """Sample the answer. Yields an empty piece once the model is free, and then the text, but
        only the part that later tokens cannot turn into a tool call, a thought or a stop string.
        `prompt` ends with `begun_ids`, the ids of the answer's beginning if the request gives one.
        """
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
                elif request.return_token_ids:  # then every token has a piece
                    yield answer.chunk({}, sampled=token)

    def _text_before_stop(self, answer_ids: Sequence[int], request: ChatRequest) -> str:
        """The text of an answer up to the first stop string of the request."""
        return text_before_stop(self.renderer.completion_text(answer_ids), request.params.stop)

    def _params_of_rest(self, request: ChatRequest, prompt_length: int) -> SamplingParams:
        """How the rest of an answer is sampled. Its random numbers must not repeat those of the
        beginning that the request gives, so the seed is moved on. `prompt_length` is the number of
        tokens of the prompt and of that beginning."""
        params = self._within_limit(request.params, prompt_length)
        return replace(params, seed=params.seed + len(request.begun_ids))

    def _sendable_text(self, answer: "_StreamedAnswer") -> str:
        """The text after `answer.sent_text` that can be sent now; "" if it must wait for more
        tokens, which could still make it part of a stop string, a tool call or a thought."""
        text = self._text_before_stop(answer.ids, answer.request)
        # A character of which some bytes are still to come decodes to U+FFFD: wait for it.
        if text.endswith("\ufffd") or ends_in_partial_stop(text, answer.request.params.stop):
            return ""
        certain = self.renderer.certain_text(text, answer.request.tools)
        # The certain text may for a time be shorter than what was sent, or differ from it.
        if not _continues(certain, answer.sent_text):
            return ""
        return certain[len(answer.sent_text) :]

    def _finish_reason(
        self, answer_ids: Sequence[int], last_deltas: Sequence[Reply], request: ChatRequest
    ) -> str:
        """Why a streamed answer ended, in OpenAI's words; `last_deltas` is what was sent after its
        last token."""
        if any("tool_calls" in delta for delta in last_deltas):
            return "tool_calls"
        has_stop_id = bool(answer_ids) and answer_ids[-1] in self.renderer.stop_ids
        was_cut = not has_stop_id and not self._has_stop_string(answer_ids, request.params)
        return "length" if was_cut else "stop"

    def _sent_before(self, request: ChatRequest) -> str:
        """What an earlier request has sent of the text of `request.begun_ids`, the tokens that the
        answer begins with; "" if there are none."""
        # U+FFFD at the end: a character of which some bytes were missing, and which was not sent.
        begun_text = self.renderer.completion_text(request.begun_ids).rstrip("\ufffd")
        begun_text = text_before_stop(begun_text, request.params.stop)
        return self.renderer.certain_text(begun_text, request.tools)

    def _rest(self, text: str, sent_text: str, request: ChatRequest) -> list[Reply]:
        """What is still to be sent after the answer's last token, as deltas of OpenAI's stream: its
        reasoning, the rest of its content and its tool calls.

        Args:
            text: the whole answer as the model wrote it.
            sent_text: the content that was sent already.
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
        """Whether the text of `ids` contains one of the stop strings."""
        text = self.renderer.completion_text(ids)
        return any(stop_string in text for stop_string in params.stop)

    def _within_limit(self, params: SamplingParams, prompt_length: int) -> SamplingParams:
        """The parameters with `max_tokens` lowered, if need be, so that prompt and answer stay
        within the model's limit."""
        room = self.limit - prompt_length
        return replace(params, max_tokens=min(params.max_tokens, room))


class _StreamedAnswer:
    """An answer while it is streamed, and the pieces it is sent in.

    Attributes:
        ids: of its tokens so far, those included that the request has begun.
        sent_text: the part of its content that was sent.
        common_fields: what every piece has.
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
        """A piece of the stream, with this delta. `finish_reason` is None until the answer has
        ended. `sampled` is the id of the token for which the piece is sent (None: for no token);
        the piece holds it if the request wants token ids."""
        choice: Reply = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        if sampled is not None and self.request.return_token_ids:
            choice["token_ids"] = [sampled]
        return self.common_fields | {"choices": [choice]}


def _numbered_calls(tool_calls: Sequence[JsonObject]) -> list[JsonObject]:
    """Tool calls in OpenAI's form for a stream, in which each has its number as `index`."""
    return [
        tool_call_as_openai(tool_call) | {"index": index}
        for index, tool_call in enumerate(tool_calls)
    ]


def _continues(text: str, sent_text: str) -> bool:
    """Whether `text` begins with the text that was sent and is longer. It may begin otherwise,
    because a later token can change how the end of a text is read."""
    return text.startswith(sent_text) and len(text) > len(sent_text)

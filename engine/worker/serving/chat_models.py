"""Chat requests to answers, whatever samples them: the models of one deployment.

The template and the stop rules are those of training, so a greedy answer here is the one an
evaluation saw.
"""

import time
import uuid
from collections.abc import Generator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from engine.worker.network.sampler import Sampler, SamplingParams
from engine.worker.rollouts.renderer import Renderer
from engine.worker.serving.chat_request import (
    ChatRequest,
    Refused,
    Reply,
    ends_in_partial_stop,
    text_before_stop,
    tool_call_as_openai,
    usage,
)
from engine.worker.serving.token_logprobs import LogprobsRequest, logprobs_reply
from envs.json_types import ChatMessage


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
        """The token ids of the request's prompt, and after them those of the answer's beginning
        where that is given.

        Raises:
            Refused: 400, when the chat template refuses the messages, or the prompt leaves no room
                for a token of the answer.
        """
        try:
            ids = self.renderer.prompt(request.messages, request.tools)
        except Exception as error:  # a template is a program; it may fail in any way
            raise Refused(400, f"The chat template refused the messages: {error}") from error
        if any(each >= len(self.renderer.tokenizer) for each in request.begun):
            raise Refused(400, "begun_token_ids has ids that this model does not know.")
        ids += request.begun
        if len(ids) + 1 > self.limit:
            raise Refused(400, f"The prompt has {len(ids)} tokens; the model reads {self.limit}.")
        return ids

    def complete(self, request: ChatRequest) -> Reply:
        """Sample `request.n` answers and return them as the choices of OpenAI's chat.completion
        object. Text ends before the first stop string; tool calls are parsed if the request has
        tools.

        Raises:
            Refused: 400, as in `prompt_ids`, or 404 for an unknown model.
        """
        ids = self.prompt_ids(request)
        with self.models.speaking_as(request.model) as sampler:
            params = self._within_limit(request.params, len(ids))
            (completions,) = sampler.generate([ids], request.n, params)  # of the only prompt
        choices = []
        for index, completion in enumerate(completions):
            text = text_before_stop(self.renderer.completion_text(completion.ids), params.stop)
            message = self.renderer.assistant_message(text, request.tools)
            finish_reason = "stop" if completion.finished else "length"
            if message.get("tool_calls"):
                message["tool_calls"] = [
                    tool_call_as_openai(tool_call) for tool_call in message["tool_calls"]
                ]
                finish_reason = "tool_calls"
            choices.append({"index": index, "message": message, "finish_reason": finish_reason})
        sampled_tokens = sum(len(completion.ids) for completion in completions)
        return {
            "id": f"chatcmpl-{uuid.uuid4().hex[:24]}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": request.model,
            "choices": choices,
            "usage": usage(len(ids), sampled_tokens),
        }

    def rate(self, request: LogprobsRequest) -> Reply:
        """The log-probabilities of the request's token ids, as OpenAI's text_completion object.

        Raises:
            Refused: 400 for an id that has no token or a prompt that is too long, 404 for an
                unknown model.
        """
        vocab = len(self.renderer.tokenizer)
        beyond = [token for token in request.ids if not 0 <= token < vocab]
        if beyond:
            raise Refused(400, f"{beyond[0]} is no token id: there are {vocab}, from 0.")
        length = len(request.ids) + request.continues
        if length > self.limit:
            raise Refused(400, f"The prompt has {length} tokens; the model reads {self.limit}.")
        logprobs = self.models.prompt_logprobs(request.model, request.ids)
        continuation = None
        if request.continues:
            with self.models.speaking_as(request.model) as sampler:
                params = SamplingParams(max_tokens=1, temperature=0.0)
                ((completion,),) = sampler.generate([request.ids], 1, params)
            continuation = completion.ids[0], completion.logprobs[0]
        return logprobs_reply(request, logprobs, continuation, self.renderer.token_text)

    def pieces(self, request: ChatRequest) -> Generator[Reply, None, None]:
        """Yield the answer in pieces as it is sampled, as OpenAI's chat.completion.chunk objects:

        1. the role;
        2. an empty delta, once the model is free to answer this request;
        3. the text, one or more characters each;
        4. with tools, once the answer is whole, what may hold calls: reasoning, the rest of the
           text, the calls;
        5. the finish reason;
        6. the usage, if the request asks for it.

        Only one answer is sampled. Of an answer that the request has begun, only the rest is sent.
        With `return_token_ids` there is a piece for each token, also where its text has to wait.

        Raises:
            Refused: 400 or 404, as in `complete`, but only once pieces are taken.
        """
        ids = self.prompt_ids(request)
        common_fields = {
            "id": f"chatcmpl-{uuid.uuid4().hex[:24]}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": request.model,
        }

        def chunk(
            delta: Reply, finish_reason: str | None = None, sampled: tuple[int, ...] | None = None
        ) -> Reply:
            choice: Reply = {"index": 0, "delta": delta, "finish_reason": finish_reason}
            if sampled is not None and request.return_token_ids:
                choice["token_ids"] = list(sampled)
            return common_fields | {"choices": [choice]}

        yield chunk({"role": "assistant", "content": ""})
        answer_ids = list(request.begun)
        sent_text = self._sent_before(request)
        # Other draws than those of the beginning, which had the same seed.
        params = self._within_limit(request.params, len(ids))
        params = replace(params, seed=params.seed + len(request.begun))
        with self.models.speaking_as(request.model) as sampler:
            yield chunk({})
            for token in sampler.stream(ids, params):
                answer_ids.append(token)
                text = text_before_stop(self.renderer.completion_text(answer_ids), params.stop)
                # A character of which some bytes are still to come decodes to U+FFFD: wait for it.
                must_wait = text.endswith("\ufffd") or ends_in_partial_stop(text, params.stop)
                certain = self.renderer.certain_text(text, request.tools)
                if _continues(certain, sent_text) and not must_wait:
                    yield chunk({"content": certain[len(sent_text) :]}, sampled=(token,))
                    sent_text = certain
                elif request.return_token_ids:
                    yield chunk({}, sampled=(token,))
        # Sampling has ended, so the beginning of a stop string that was held back is plain text.
        text = text_before_stop(self.renderer.completion_text(answer_ids), params.stop)
        rest = self._rest(text, sent_text, request)
        for delta in rest:
            yield chunk(delta)
        has_stop_id = bool(answer_ids) and answer_ids[-1] in self.renderer.stop_ids
        was_cut = not has_stop_id and not self._has_stop_string(answer_ids, params)
        finish_reason = "length" if was_cut else "stop"
        if any("tool_calls" in delta for delta in rest):
            finish_reason = "tool_calls"
        yield chunk({}, finish_reason)
        if request.include_usage:
            sampled_count = len(answer_ids) - len(request.begun)
            yield common_fields | {"choices": [], "usage": usage(len(ids), sampled_count)}

    def _sent_before(self, request: ChatRequest) -> str:
        """The text of the answer's beginning that was sent when it was sampled."""
        begun_text = self.renderer.completion_text(request.begun).rstrip("\ufffd")
        begun_text = text_before_stop(begun_text, request.params.stop)
        return self.renderer.certain_text(begun_text, request.tools)

    def _rest(self, text: str, sent_text: str, request: ChatRequest) -> list[Reply]:
        """The deltas that are still to be sent once the answer is whole: its reasoning, the rest of
        its content and its tool calls.

        Args:
            text: the whole answer as the model wrote it.
            sent_text: the content that was sent already.
        """
        message: ChatMessage = {"content": text}
        # If not all of the text is certain to be content, it may hold a call or a thought.
        if self.renderer.certain_text(text, request.tools) != text:
            message = self.renderer.assistant_message(text, request.tools)
        deltas: list[Reply] = []
        if message.get("reasoning_content"):
            deltas.append({"reasoning_content": message["reasoning_content"]})
        if _continues(message["content"], sent_text):
            deltas.append({"content": message["content"][len(sent_text) :]})
        calls = [
            tool_call_as_openai(call) | {"index": index}
            for index, call in enumerate(message.get("tool_calls", []))
        ]
        if calls:
            deltas.append({"tool_calls": calls})
        return deltas

    def _has_stop_string(self, ids: list[int], params: SamplingParams) -> bool:
        """Whether the text of `ids` contains one of the stop strings."""
        text = self.renderer.completion_text(ids)
        return any(stop_string in text for stop_string in params.stop)

    def _within_limit(self, params: SamplingParams, prompt_length: int) -> SamplingParams:
        """The parameters with `max_tokens` lowered, if need be, so that prompt and answer stay
        within the model's limit."""
        room = self.limit - prompt_length
        return replace(params, max_tokens=min(params.max_tokens, room))


def _continues(text: str, sent_text: str) -> bool:
    """Whether `text` is longer than what was sent and begins with it. It may not begin with it,
    because a later token can change the end of a text."""
    return text.startswith(sent_text) and len(text) > len(sent_text)

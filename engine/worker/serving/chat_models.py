"""Chat requests to answers, whatever samples them: the models of one deployment.

The template and the stop rules are those of training, so a greedy answer here is the one an
evaluation saw.
"""

import time
import uuid
from collections.abc import Iterator
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
    as_openai,
    cut,
    held_back,
    usage,
)


class Models(Protocol):
    """A base and its adapters under their model names: engine/worker/serving/own_models.py on our
    own sampler, engine/worker/serving/vllm_models.py on a vLLM server."""

    renderer: Renderer
    limit: int
    """Tokens of prompt and answer together."""

    @property
    def is_alive(self) -> bool:
        """False once nothing can be answered any more."""
        ...

    def names(self) -> list[str]: ...

    def add(self, name: str, folder: Path) -> None:
        """Load an adapter under a model name. Raises Refused."""
        ...

    def speaking_as(self, name: str) -> AbstractContextManager[Sampler]:
        """A sampler that is the model called `name` inside. Raises Refused (404)."""
        ...

    def close(self) -> None: ...


class Served:
    """Answers chat requests with the model each of them names."""

    def __init__(self, models: Models) -> None:
        self.models = models
        self.renderer = models.renderer
        self.limit = models.limit

    def names(self) -> list[str]:
        return self.models.names()

    def add(self, name: str, folder: Path) -> None:
        """See `Models.add`."""
        self.models.add(name, folder)

    def prompt_ids(self, request: ChatRequest) -> list[int]:
        try:
            ids = self.renderer.prompt(request.messages, request.tools)
        except Exception as error:
            raise Refused(400, f"The chat template refused the messages: {error}") from error
        if len(ids) + 1 > self.limit:
            raise Refused(400, f"The prompt has {len(ids)} tokens; the model reads {self.limit}.")
        return ids

    def complete(self, request: ChatRequest) -> Reply:
        """The whole answer, OpenAI's chat.completion object."""
        ids = self.prompt_ids(request)
        with self.models.speaking_as(request.model) as sampler:
            params = self._bounded(request.params, len(ids))
            (completions,) = sampler.generate([ids], request.n, params)
        choices = []
        for index, completion in enumerate(completions):
            text = cut(self.renderer.completion_text(completion.ids), params.stop)
            message = self.renderer.assistant_message(text, tools=bool(request.tools))
            reason = "stop" if completion.finished else "length"
            if message.get("tool_calls"):
                message["tool_calls"] = [as_openai(call) for call in message["tool_calls"]]
                reason = "tool_calls"
            choices.append({"index": index, "message": message, "finish_reason": reason})
        sampled = sum(len(c.ids) for c in completions)
        return {
            "id": f"chatcmpl-{uuid.uuid4().hex[:24]}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": request.model,
            "choices": choices,
            "usage": usage(len(ids), sampled),
        }

    def pieces(self, request: ChatRequest) -> Iterator[Reply]:
        """The answer as OpenAI's chat.completion.chunk objects, one or more characters each."""
        ids = self.prompt_ids(request)
        head = {
            "id": f"chatcmpl-{uuid.uuid4().hex[:24]}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": request.model,
        }

        def chunk(delta: Reply, reason: str | None = None) -> Reply:
            choice = {"index": 0, "delta": delta, "finish_reason": reason}
            return head | {"choices": [choice]}

        yield chunk({"role": "assistant", "content": ""})
        said: list[int] = []
        sent = ""
        with self.models.speaking_as(request.model) as sampler:
            params = self._bounded(request.params, len(ids))
            for token in sampler.stream(ids, params):
                said.append(token)
                text = cut(self.renderer.completion_text(said), params.stop)
                # A character whose bytes are not all there yet decodes to U+FFFD: wait for it.
                if text.startswith(sent) and not text.endswith("\ufffd") and len(text) > len(sent):
                    if held_back(text, params.stop):
                        continue
                    yield chunk({"content": text[len(sent) :]})
                    sent = text
        text = cut(self.renderer.completion_text(said), params.stop)
        if text.startswith(sent) and len(text) > len(sent):
            yield chunk({"content": text[len(sent) :]})
        ended = bool(said) and (said[-1] in self.renderer.stop_ids or self._stopped(said, params))
        yield chunk({}, "stop" if ended else "length")
        if request.include_usage:
            yield head | {"choices": [], "usage": usage(len(ids), len(said))}

    def _stopped(self, ids: list[int], params: SamplingParams) -> bool:
        text = self.renderer.completion_text(ids)
        return any(stop in text for stop in params.stop)

    def _bounded(self, params: SamplingParams, prompt: int) -> SamplingParams:
        return replace(params, max_tokens=min(params.max_tokens, self.limit - prompt))

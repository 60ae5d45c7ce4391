"""A base model and its adapters, answering chat requests on our own sampler.

The template and the stop rules are those of training, so a greedy answer here is the one an
evaluation saw. An adapter that changes nothing is refused: serving the base under a tuned model's
name is the worst kind of success.
"""

import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel

from engine.worker.chat_request import (
    ChatRequest,
    Refused,
    as_openai,
    cut,
    held_back,
    usage,
)
from engine.worker.checkpoint import require_base
from engine.worker.failures import WorkerFailure
from engine.worker.policy import load_base, pick_device, read_adapter, set_adapter_state
from engine.worker.renderer import Renderer
from engine.worker.sampler import SamplingParams
from engine.worker.workbench import make_sampler, set_threads

SAME_LOGITS = 1e-6


class Served:
    """A base model and its adapters; one request at a time goes through the model.

    Args:
        base_path: the base model's folder.
        base_name: the model name the base answers to.
        thinking: whether prompts open a think block.
        base_weights: SHA-256 of the base's weight files; adapters made for others are refused.
    """

    def __init__(
        self,
        base_path: Path,
        base_name: str,
        device: str,
        *,
        thinking: bool,
        base_weights: dict[str, str] | None = None,
    ) -> None:
        set_threads()
        self.base_weights = base_weights or {}
        self.base = load_base(base_path, pick_device(device), "auto")
        self.base_name = base_name
        self.renderer = Renderer(self.base.tokenizer, self.base.stop_ids, thinking=thinking)
        self.sampler = make_sampler(self.base, self.renderer)
        self.base.model.eval()
        self.model: PeftModel | None = None
        self.adapters: dict[str, str] = {}
        self._slots: dict[str, str] = {}  # model name -> the name PEFT knows the adapter by
        self.lock = threading.Lock()
        self.limit = int(getattr(self.base.model.config, "max_position_embeddings", 4096))

    def names(self) -> list[str]:
        return [self.base_name, *self.adapters]

    def add(self, name: str, folder: Path) -> None:
        """Load an adapter under a model name; loading the same one again does nothing.

        Raises:
            Refused: 409 when it changes nothing, 400 when it does not fit the base.
        """
        with self.lock:
            if self.adapters.get(name) == str(folder):
                return
            slot = f"a{len(self.adapters)}_{uuid.uuid4().hex[:6]}"
            try:
                require_base(folder, self.base_weights)
                state = read_adapter(folder)
                config = LoraConfig.from_pretrained(str(folder))
                if self.model is None:
                    self.model = PeftModel(self.base.model, config, adapter_name=slot)
                else:
                    self.model.add_adapter(slot, config)
                set_adapter_state(self.model, state, slot)
            except WorkerFailure as error:
                self._drop(slot)
                raise Refused(400, f"{error.message} {error.evidence}".strip()) from error
            except (OSError, ValueError) as error:
                self._drop(slot)
                raise Refused(400, f"The adapter cannot be loaded: {error}") from error
            self.base.model.eval()
            if self._difference(slot) <= SAME_LOGITS:
                self._drop(slot)
                raise Refused(409, f"The adapter of {name} gives the same logits as the base.")
            old = self._slots.get(name)
            self._slots[name] = slot
            self.adapters[name] = str(folder)
            if old:
                self._drop(old)

    def _drop(self, slot: str) -> None:
        if self.model is not None and slot in self.model.peft_config:
            self.model.delete_adapter(slot)
            if not self.model.peft_config:
                self.model.unload()
                self.model = None

    @torch.no_grad()
    def _difference(self, slot: str) -> float:
        """Largest change of a logit on a fixed prompt."""
        ids = self.renderer.prompt([{"role": "user", "content": "What is 12 + 30? Say hello."}])
        batch = torch.tensor([ids], device=self.base.model.device)
        if self.model is None:
            return 0.0
        self.model.set_adapter(slot)
        tuned = self.base.model(input_ids=batch).logits.float()
        with self.model.disable_adapter():
            plain = self.base.model(input_ids=batch).logits.float()
        return float((tuned - plain).abs().max())

    @contextmanager
    def speaking_as(self, name: str) -> Iterator[None]:
        """Inside, the model is the one called `name`; nobody else may use it meanwhile."""
        with self.lock:
            if name == self.base_name:
                if self.model is None:
                    yield
                else:
                    with self.model.disable_adapter():
                        yield
            elif name in self.adapters and self.model is not None:
                self.model.set_adapter(self._slots[name])
                self.model.requires_grad_(False)
                yield
            else:
                raise Refused(404, f"No model {name!r} here; there are {', '.join(self.names())}.")

    def prompt_ids(self, request: ChatRequest) -> list[int]:
        try:
            ids = self.renderer.prompt(request.messages, request.tools)
        except Exception as error:
            raise Refused(400, f"The chat template refused the messages: {error}") from error
        if len(ids) + 1 > self.limit:
            raise Refused(400, f"The prompt has {len(ids)} tokens; the model reads {self.limit}.")
        return ids

    def complete(self, request: ChatRequest) -> dict[str, Any]:
        """The whole answer, OpenAI's chat.completion object."""
        ids = self.prompt_ids(request)
        with self.speaking_as(request.model):
            params = self._bounded(request.params, len(ids))
            (completions,) = self.sampler.generate([ids], request.n, params)
        choices = []
        for index, completion in enumerate(completions):
            text = cut(self.renderer.completion_text(completion.ids), params.stop)
            message = self.renderer.assistant_message(text, tools=bool(request.tools))
            reason = "stop" if completion.finished else "length"
            if message.get("tool_calls"):
                message["tool_calls"] = [as_openai(call) for call in message["tool_calls"]]
                reason = "tool_calls"
            choices.append({"index": index, "message": message, "finish_reason": reason})
        said = sum(len(c.ids) for c in completions)
        return {
            "id": f"chatcmpl-{uuid.uuid4().hex[:24]}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": request.model,
            "choices": choices,
            "usage": usage(len(ids), said),
        }

    def pieces(self, request: ChatRequest) -> Iterator[dict[str, Any]]:
        """The answer as OpenAI's chat.completion.chunk objects, one or more characters each."""
        ids = self.prompt_ids(request)
        head = {
            "id": f"chatcmpl-{uuid.uuid4().hex[:24]}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": request.model,
        }

        def chunk(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
            choice = {"index": 0, "delta": delta, "finish_reason": reason}
            return head | {"choices": [choice]}

        yield chunk({"role": "assistant", "content": ""})
        said: list[int] = []
        sent = ""
        with self.speaking_as(request.model):
            params = self._bounded(request.params, len(ids))
            for token in self.sampler.stream(ids, params):
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

    def _stopped(self, said: list[int], params: SamplingParams) -> bool:
        text = self.renderer.completion_text(said)
        return any(stop in text for stop in params.stop)

    def _bounded(self, params: SamplingParams, prompt: int) -> SamplingParams:
        return replace(params, max_tokens=min(params.max_tokens, self.limit - prompt))

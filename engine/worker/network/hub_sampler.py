"""Batched sampling with a key-value cache, on any model that transformers can load.

Prompts are padded on the left and read once each, however many completions are asked of them; rows
that have ended leave the batch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from inspect import signature
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from engine.worker.core.trajectory import Completion
from engine.worker.network.sampler import (
    Done,
    Row,
    SamplerNeeds,
    SamplingParams,
    completions,
    draw,
    new_rows,
    uniforms,
)


class HubSampler:
    """See the module and `Sampler`."""

    name = "torch"

    def __init__(
        self,
        model: PreTrainedModel,
        needs: SamplerNeeds,
        vocab: int,
        with_adapter: Callable[[Any], AbstractContextManager[None]],
    ) -> None:
        """Sample from `model`.

        Args:
            needs: what every sampler needs.
            vocab: ids at or above it are never sampled (padded vocabularies hold ids without a
                token).
            with_adapter: opens a context in which the model has exactly the given adapter (None:
                none).
        """
        self.model = model
        self.needs = needs
        self.vocab = vocab
        self.with_adapter = with_adapter
        self._adapter: Any = None
        self._accepted_arguments = signature(model.forward).parameters

    def load(self, adapter: Any) -> None:
        self._adapter = adapter

    def release_memory(self) -> None:
        """Nothing to release between calls."""

    def close(self) -> None:
        """Nothing to release."""

    def generate(
        self,
        prompts: Sequence[list[int]],
        n: int,
        params: SamplingParams,
        done: Done | None = None,
    ) -> list[list[Completion]]:
        """`n` completions of each prompt, in the order of `prompts`; see `Sampler.generate`.
        Prompts of similar length go through the model together, so that little is padded."""
        rows = new_rows(len(prompts), n, params.seed)
        by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        prompts_at_once = max(1, self.needs.max_rows // n)
        for start in range(0, len(by_length), prompts_at_once):
            chunk = by_length[start : start + prompts_at_once]
            chunk_rows = [row for i in chunk for row in rows[i]]
            for _ in self._steps([prompts[i] for i in chunk], chunk_rows, params, done):
                pass
        return completions(rows)

    def stream(self, prompt: list[int], params: SamplingParams) -> Iterator[int]:
        row = new_rows(prompt_count=1, n=1, seed=params.seed)[0][0]
        for _ in self._steps([prompt], [row], params, done=None):
            yield row.ids[-1]

    def _steps(
        self,
        prompts: list[list[int]],
        alive: list[Row],
        params: SamplingParams,
        done: Done | None,
    ) -> Iterator[None]:
        """Sample the rows `alive` token by token with the loaded adapter, yielding after each
        token. Afterwards the model is in the mode, training or evaluation, that it was in before.

        Args:
            alive: equally many rows for each prompt, those of the first prompt first.
            done: called for each row that ends; None for nothing.
        """
        was_training = self.model.training
        try:
            with self.with_adapter(self._adapter):
                self.model.eval()
                yield from self._decode(prompts, alive, params, done)
        finally:
            self.model.train(was_training)

    @torch.no_grad()
    def _decode(
        self,
        prompts: list[list[int]],
        alive: list[Row],
        params: SamplingParams,
        done: Done | None,
    ) -> Iterator[None]:
        """Sample the rows token by token until each has ended, yielding after each token. Rows that
        have ended leave the batch.

        Args:
            alive: equally many rows for each prompt, those of the first prompt first.
            done: called for each row that ends; None for nothing.
        """
        device = self.model.device
        ending = self.needs.ending(params)
        ids, mask = self._padded(prompts)
        cache = DynamicCache(config=self.model.config)
        positions = (mask.cumsum(1) - 1).clamp(min=0)  # from 0 at the first real token
        logits = self._forward(ids, mask, positions, cache)  # [prompts, vocab]
        # Each prompt was read once; from here on every row has a copy.
        n = len(alive) // len(prompts)
        if n > 1:
            copies = torch.arange(len(prompts), device=device).repeat_interleave(n)
            _take_rows(cache, copies)
        logits = logits.repeat_interleave(n, 0)
        mask = mask.repeat_interleave(n, 0)
        position = positions[:, -1:].repeat_interleave(n, 0)
        keys = torch.tensor([row.key for row in alive], device=device)
        for step in range(params.max_tokens):
            random_numbers = uniforms(keys, torch.tensor(step, device=device))
            token, logprob = draw(logits, params, random_numbers)
            going_on = []  # indices in `alive`
            drawn = zip(alive, token.tolist(), logprob.tolist(), strict=True)
            for i, (row, token_id, token_logprob) in enumerate(drawn):
                if not ending.take(row, token_id, token_logprob):
                    going_on.append(i)
                elif done is not None:
                    done(row.prompt, row.member, row.completion)
            yield
            if not going_on:
                return
            position = position + 1
            mask = torch.cat([mask, mask.new_ones(mask.shape[0], 1)], 1)
            if len(going_on) < len(alive):
                index = torch.tensor(going_on, device=device)
                _take_rows(cache, index)
                mask, position, token = mask[index], position[index], token[index]
                keys = keys[index]
                alive = [alive[i] for i in going_on]
            logits = self._forward(token[:, None], mask, position, cache)

    def _padded(self, prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """The prompts padded on the left. Returns (ids, mask), both [prompts, longest] int64 on the
        device; the mask is 0 for padding."""
        longest = max(map(len, prompts))
        ids = torch.full((len(prompts), longest), self.needs.pad_id, dtype=torch.long)
        mask = torch.zeros(len(prompts), longest, dtype=torch.long)
        for i, prompt in enumerate(prompts):
            ids[i, longest - len(prompt) :] = torch.tensor(prompt)
            mask[i, longest - len(prompt) :] = 1
        return ids.to(self.model.device), mask.to(self.model.device)

    def _forward(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        cache: DynamicCache,
    ) -> torch.Tensor:
        """Run the tokens `ids` through the model after those in the cache, and add them to it.
        Returns the logits after the last one, [rows, vocab] float32.

        Args:
            ids, positions: [rows, new tokens].
            mask: [rows, all tokens so far], 0 for padding.
        """
        # Not every family takes these.
        optional = {"position_ids": positions, "logits_to_keep": 1}
        accepted = {k: v for k, v in optional.items() if k in self._accepted_arguments}
        out = self.model(
            input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **accepted
        )
        return out.logits[:, -1, : self.vocab].float()


def _take_rows(cache: DynamicCache, index: torch.Tensor) -> None:
    """Keep the rows `index` of the cache, in that order; a row may be taken several times.

    What transformers calls reordering is the one such operation that every kind of layer has: keys
    and values, and the states of convolutions and linear attention.
    """
    cache.reorder_cache(index)  # pyright: ignore[reportArgumentType] - any int64 tensor will do

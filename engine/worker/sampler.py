"""Batched sampling with a key-value cache, on whatever model transformers can load.

Prompts are padded on the left and read once each, however many completions are asked of them;
rows that have ended leave the batch. Log-probabilities are of the distribution sampled from:
after temperature and top-p, in float32. Seeds make a batch repeatable on the same machine.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel

from engine.worker.trajectory import Completion


@dataclass(frozen=True)
class SamplingParams:
    """How to sample. `temperature` 0 is greedy, and its log-probabilities are those at 1."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int = 0


@dataclass
class _Rows:
    """The completions under way; `alive` maps a row of the batch to its completion."""

    ids: list[list[int]]
    logprobs: list[list[float]]
    finished: list[bool]
    alive: list[int]


class TorchSampler:
    """Samples from `model` as it is when called: adapters on or off, its weights of the moment.

    Args:
        model: a causal LM, in eval mode while sampling.
        pad_id: any id; padded positions are masked.
        stop_ids: ids that end a completion.
        decode: ids to text, used for stop strings only.
        vocab: ids at or above it are never sampled (padded vocabularies hold ids without a token).
        max_rows: completions under way at once.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        pad_id: int,
        stop_ids: Sequence[int],
        decode: Callable[[list[int]], str],
        vocab: int,
        max_rows: int = 256,
    ) -> None:
        self.model = model
        self.pad_id = pad_id
        self.stop_ids = frozenset(stop_ids)
        self.decode = decode
        self.vocab = vocab
        self.max_rows = max_rows

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[list[int]], n: int, params: SamplingParams
    ) -> list[list[Completion]]:
        """`n` completions for each prompt, in the order given. Prompts: lists of ids, not empty."""
        was_training = self.model.training
        self.model.eval()
        try:
            order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
            out: list[list[Completion]] = [[] for _ in prompts]
            size = max(1, self.max_rows // n)
            for number, start in enumerate(range(0, len(order), size)):
                chunk = order[start : start + size]
                seed = (params.seed * 1_000_003 + number) % 2**63
                rows = self._decode([prompts[i] for i in chunk], n, params, seed)
                for position, index in enumerate(chunk):
                    out[index] = rows[position * n : (position + 1) * n]
            return out
        finally:
            self.model.train(was_training)

    @torch.no_grad()
    def stream(self, prompt: list[int], params: SamplingParams) -> Iterator[int]:
        """Ids of one completion as they are sampled, the end token included."""
        rows = _Rows([[]], [[]], [False], [0])
        for _ in self._steps([prompt], 1, params, params.seed, rows):
            yield rows.ids[0][-1]

    def _decode(
        self, prompts: list[list[int]], n: int, params: SamplingParams, seed: int
    ) -> list[Completion]:
        total = len(prompts) * n
        rows = _Rows(
            [[] for _ in range(total)],
            [[] for _ in range(total)],
            [False] * total,
            list(range(total)),
        )
        for _ in self._steps(prompts, n, params, seed, rows):
            pass
        return [
            Completion(ids, logprobs, finished)
            for ids, logprobs, finished in zip(rows.ids, rows.logprobs, rows.finished, strict=True)
        ]

    def _steps(
        self, prompts: list[list[int]], n: int, params: SamplingParams, seed: int, rows: _Rows
    ) -> Iterator[None]:
        """Fill `rows` one token at a time, yielding after each."""
        device = self.model.device
        generator = torch.Generator(device=device).manual_seed(seed)
        longest = max(map(len, prompts))
        ids = torch.full((len(prompts), longest), self.pad_id, dtype=torch.long)
        mask = torch.zeros(len(prompts), longest, dtype=torch.long)
        for i, prompt in enumerate(prompts):
            ids[i, longest - len(prompt) :] = torch.tensor(prompt)
            mask[i, longest - len(prompt) :] = 1
        ids, mask = ids.to(device), mask.to(device)
        cache = DynamicCache(config=self.model.config)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = self._forward(ids, mask, positions, cache)  # [prompts, vocab]
        if n > 1:
            cache.batch_repeat_interleave(n)
        logits = logits.repeat_interleave(n, 0)
        mask = mask.repeat_interleave(n, 0)
        position = positions[:, -1:].repeat_interleave(n, 0)
        for step in range(params.max_tokens):
            token, logprob = self._draw(logits, params, generator)
            keep = self._record(rows, token.tolist(), logprob.tolist(), params)
            yield
            if not keep or step + 1 == params.max_tokens:
                return
            position = position + 1
            mask = torch.cat([mask, mask.new_ones(mask.shape[0], 1)], 1)
            if len(keep) < len(rows.alive):
                index = torch.tensor(keep, device=device)
                cache.batch_select_indices(index)
                mask, position, token = mask[index], position[index], token[index]
                rows.alive = [rows.alive[i] for i in keep]
            logits = self._forward(token[:, None], mask, position, cache)

    def _forward(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        cache: DynamicCache,
    ) -> torch.Tensor:
        """Logits of the last position, float32, [rows, vocab]."""
        out = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1, : self.vocab].float()

    def _draw(
        self, logits: torch.Tensor, params: SamplingParams, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One id per row and its log-probability, both [rows]."""
        if params.temperature == 0:
            logprobs = logits.log_softmax(-1)
            token = logits.argmax(-1)
        else:
            logprobs = (logits / params.temperature).log_softmax(-1)
            if params.top_p < 1:
                logprobs = _keep_nucleus(logprobs, params.top_p)
            token = torch.multinomial(logprobs.exp(), 1, generator=generator)[:, 0]
        return token, logprobs.gather(1, token[:, None])[:, 0]

    def _record(
        self, rows: _Rows, tokens: list[int], logprobs: list[float], params: SamplingParams
    ) -> list[int]:
        """Append the step's tokens; returns the batch rows that go on."""
        keep = []
        for at, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            row = rows.alive[at]
            rows.ids[row].append(token)
            rows.logprobs[row].append(logprob)
            if token in self.stop_ids or self._stopped(rows.ids[row], params.stop):
                rows.finished[row] = True
            else:
                keep.append(at)
        return keep

    def _stopped(self, ids: list[int], stop: tuple[str, ...]) -> bool:
        if not stop:
            return False
        # A stop string may be split over tokens: look at the text of the last few.
        tail = self.decode(ids[-(max(map(len, stop)) + 4) :])
        return any(s in tail for s in stop)


def _keep_nucleus(logprobs: torch.Tensor, top_p: float) -> torch.Tensor:
    """Renormalised over the smallest set of tokens whose probability reaches `top_p`
    (nucleus sampling, arXiv 1904.09751). [rows, vocab] to the same."""
    ordered, index = logprobs.sort(descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    ordered = ordered.masked_fill(before >= top_p, float("-inf"))
    return torch.empty_like(logprobs).scatter_(1, index, ordered).log_softmax(-1)

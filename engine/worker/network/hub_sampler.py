"""Batched sampling with a key-value cache, on any model that transformers can load.

Prompts are padded on the left and read once each, even if several completions of them are asked
for. Rows that have ended leave the batch, and waiting prompts take their places, so that a long
answer delays no other. For that the cache of prompts that were just read is joined to the cache of
the rows under way: both end in the same column (token position), and the shorter one is padded on
the left.

On a GPU steps are captured as CUDA graphs (hub_cache.py). A captured step keeps its sizes, so rows
that have ended stay in the batch until there are enough of them.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel

from engine.worker.core import pulse
from engine.worker.core.trajectory import Completion
from engine.worker.network.hub_cache import (
    Capture,
    FixedSteps,
    append_rows,
    is_joinable,
    new_cache,
    resize,
    select_rows,
)
from engine.worker.network.sampler import (
    Ending,
    OnCompletion,
    Row,
    SamplerNeeds,
    SamplingParams,
    completions,
    draw,
    new_rows,
    uniforms,
)

# Waiting prompts are read once this share of the places is free.
REFILL_SHARE = 0.25
# While steps are captured, rows that have ended leave once they are this share of all.
LEAVING_SHARE = 0.25
# Columns that no row sees are dropped once they are this share of all.
UNSEEN_SHARE = 0.25


@dataclass
class _WaitingPrompt:
    """A prompt that has not been read yet, and its completions to sample."""

    ids: list[int]
    rows: list[Row]


@dataclass
class _Batch:
    """Rows that are sampled together. A column is a place in all their sequences.

    Attributes:
        mask: [rows, columns], 0 where a row has padding.
        positions: [rows, 1], of each row's last token in the cache.
        tokens: [rows], drawn last and not in the cache yet.
        keys: [rows], which decide the random numbers.
        ended: indices of rows that have ended and are still in the batch.
        fixed: the steps under way that keep their sizes. Until they end, they have the cache, and
            mask and positions are out of date.
    """

    rows: list[Row]
    cache: DynamicCache
    mask: torch.Tensor
    positions: torch.Tensor
    tokens: torch.Tensor
    keys: torch.Tensor
    ended: set[int] = field(default_factory=set)
    fixed: FixedSteps | None = None

    @property
    def alive(self) -> int:
        """The number of rows that go on."""
        return len(self.rows) - len(self.ended)

    def end_fixed_steps(self) -> None:
        """End the steps under way that keep their sizes, if there are any."""
        if self.fixed is not None:
            self.mask, self.positions = self.fixed.end()
            self.fixed = None

    def drop_ended(self) -> None:
        """Drop the rows that have ended."""
        if self.ended:
            kept = [index for index in range(len(self.rows)) if index not in self.ended]
            self.end_fixed_steps()
            self._keep_rows(kept)
            self.ended = set()

    def _keep_rows(self, kept: Sequence[int]) -> None:
        """Keep only the rows with the indices `kept`, in that order, and drop all others."""
        index = torch.tensor(kept, device=self.mask.device)
        select_rows(self.cache, index)
        self.rows = [self.rows[row_index] for row_index in kept]
        self.mask, self.positions = self.mask[index], self.positions[index]
        self.tokens, self.keys = self.tokens[index], self.keys[index]
        if is_joinable(self.cache):  # else it has layers that `_resize` does not know
            self._drop_unseen_columns()

    def _drop_unseen_columns(self) -> None:
        """Drop the columns (token positions) on the left that are padding in every row, once they
        are more than the share UNSEEN_SHARE of all columns."""
        # Padding is on the left, so the row that sees most columns sees the last ones.
        unseen = self.mask.shape[1] - int(self.mask.sum(1).max())
        if unseen > UNSEEN_SHARE * self.mask.shape[1]:
            resize(self.cache, self.mask.shape[1] - unseen)
            self.mask = self.mask[:, unseen:]

    def join(self, fresh: "_Batch") -> None:
        """Append the rows of the batch `fresh`, which must not be used afterwards. First both
        batches are padded on the left to the same number of columns (token positions)."""
        self.drop_ended()
        self.end_fixed_steps()
        columns = max(self.mask.shape[1], fresh.mask.shape[1])
        self._pad_to(columns)
        fresh._pad_to(columns)
        append_rows(self.cache, fresh.cache)
        self.rows = self.rows + fresh.rows
        self.mask = torch.cat([self.mask, fresh.mask])
        self.positions = torch.cat([self.positions, fresh.positions])
        self.tokens = torch.cat([self.tokens, fresh.tokens])
        self.keys = torch.cat([self.keys, fresh.keys])

    def _pad_to(self, columns: int) -> None:
        """Pad cache and mask on the left to this number of columns (token positions), which is at
        least the present one. The mask hides the new columns."""
        resize(self.cache, columns)
        self.mask = F.pad(self.mask, (columns - self.mask.shape[1], 0))


class HubSampler:
    """The sampler on a transformers model; see the module and the protocol `Sampler`."""

    name = "torch"
    samples_elsewhere = samples_beside_training = False

    def __init__(
        self,
        model: PreTrainedModel,
        needs: SamplerNeeds,
        vocab: int,
        with_adapter: Callable[[Any], AbstractContextManager[None]],
        before_pass: Callable[[], None] = lambda: None,
        *,
        capture: Capture | None = None,
    ) -> None:
        """Sample from `model`; until `load` is called, from the base without an adapter.

        Args:
            needs: the ids that pad rows and end completions, the decoder of ids to text, and the
                most rows at once.
            vocab: ids from this number on are never sampled (padded vocabularies hold ids without a
                token).
            with_adapter: opens a context in which the given adapter is the model's only active one
                (None: no adapter is).
            before_pass: called before each pass through the model. One that is captured is no
                longer announced.
            capture: captures a step that is then repeated; None: every step is computed by itself.
        """
        self.model = model
        self.needs = needs
        self.vocab = vocab
        self.with_adapter = with_adapter
        self.before_pass = before_pass
        self._adapter: Any = None
        self.prompts_at_once = needs.max_rows  # the most prompts read in one pass
        # Not every family's `forward` takes positions, or an argument to compute fewer logits.
        self._accepted_arguments = signature(model.forward).parameters
        # Without positions a model counts them itself, by sizes that do not change here.
        self.capture = capture if "position_ids" in self._accepted_arguments else None
        self.why_not_captured = ""  # what ruled it out, once a step has shown that

    def load(self, adapter: Any) -> None:
        """Sample with `adapter` from the next call on; with None, from the base alone."""
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
        done: OnCompletion | None = None,
    ) -> list[list[Completion]]:
        """Sample `n` completions of each prompt (a list of token ids) by `params`, and return them
        in the order of `prompts`. As soon as a completion has ended, `done` is called with (prompt
        index, number of the completion among the prompt's, completion). Short prompts are read
        first, so that little is padded."""
        rows = new_rows(len(prompts), n, params)  # `_rounds` fills them in place
        for _ in self._rounds(prompts, rows, params, done):
            pass
        return completions(rows)

    def stream(self, prompt: list[int], params: SamplingParams) -> Iterator[int]:
        """Sample one completion of the prompt; yields each of its token ids once it is drawn, the
        end token included."""
        rows = new_rows(prompt_count=1, n=1, params=params)
        row = rows[0][0]
        # With one prompt and one row, each round draws exactly one token.
        for _ in self._rounds([prompt], rows, params, on_completion=None):
            yield row.ids[-1]

    def _rounds(
        self,
        prompts: Sequence[list[int]],
        rows: list[list[Row]],
        params: SamplingParams,
        on_completion: OnCompletion | None,
    ) -> Iterator[None]:
        """Sample with the loaded adapter until every row has ended, yielding after each round. In a
        round either waiting prompts are read, or every row takes one token. Afterwards the model is
        again in its former mode (training or evaluation).

        Args:
            rows: for each prompt its rows, which are filled in place.
            on_completion: called for each row that ends; None if nobody is to be told.
        """
        shortest_first = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        waiting = deque(
            _WaitingPrompt(prompts[index], rows[index]) for index in shortest_first if rows[index]
        )
        was_training = self.model.training
        try:
            with self.with_adapter(self._adapter):
                self.model.eval()
                yield from self._sample(waiting, params, on_completion)
        finally:
            self.model.train(was_training)

    @torch.no_grad()
    def _sample(
        self,
        waiting: deque[_WaitingPrompt],
        params: SamplingParams,
        on_completion: OnCompletion | None,
    ) -> Iterator[None]:
        """Sample until no prompt waits and no row is left, yielding after each round (see
        `_rounds`). `waiting` holds the prompts that are not read yet."""
        ending = self.needs.ending(params)
        batch: _Batch | None = None
        while waiting or batch is not None:
            if self._should_read(waiting, batch):
                rows_alive = batch.alive if batch is not None else 0
                fresh, logits = self._read(self._take_waiting(waiting, rows_alive))
                batch = _join_batches(batch, _draw_tokens(fresh, logits, ending, on_completion))
            elif batch is not None:
                batch = _draw_tokens(batch, self._step(batch), ending, on_completion)
            pulse.beat()  # a sign of life: this process is not stuck
            yield

    def _should_read(self, waiting: deque[_WaitingPrompt], batch: _Batch | None) -> bool:
        """Whether to read waiting prompts now. Reading interrupts the rows under way, so prompts
        wait until the share REFILL_SHARE of all places is free, and until the rows of the first
        prompt fit. If rows cannot be added to this kind of cache, prompts wait until no row is left
        (`batch` is None then)."""
        if not waiting:
            return False
        if batch is None:
            return True
        free_rows = self.needs.max_rows - batch.alive
        enough_rows = max(REFILL_SHARE * self.needs.max_rows, len(waiting[0].rows))
        return free_rows >= enough_rows and is_joinable(batch.cache)

    def _take_waiting(
        self, waiting: deque[_WaitingPrompt], rows_alive: int
    ) -> list[_WaitingPrompt]:
        """Remove the next prompts to read from the front of `waiting` and return them: at least
        one, at most `prompts_at_once`, and no more than have rows that fit beside the `rows_alive`
        rows under way."""
        next_prompts = [waiting.popleft()]
        free_rows = self.needs.max_rows - rows_alive - len(next_prompts[0].rows)
        while (
            waiting
            and len(waiting[0].rows) <= free_rows
            and len(next_prompts) < self.prompts_at_once
        ):
            next_prompts.append(waiting.popleft())
            free_rows -= len(next_prompts[-1].rows)
        return next_prompts

    def _read(self, prompts: Sequence[_WaitingPrompt]) -> tuple[_Batch, torch.Tensor]:
        """Run each prompt through the model once. Returns (a batch of the prompts' rows, which have
        drawn nothing yet; the logits after each row's prompt, [rows, vocab] float32)."""
        device = self.model.device
        ids, mask = self._padded([prompt.ids for prompt in prompts])
        cache = new_cache(self.model.config)
        positions = _positions(mask)
        logits = self._forward(ids, mask, positions, cache)
        rows = [row for prompt in prompts for row in prompt.rows]
        prompt_of_row = _prompt_of_row(prompts, device)
        if len(rows) > len(prompts):  # repeat the prompts that have several rows
            select_rows(cache, prompt_of_row)
        batch = _Batch(
            rows,
            cache,
            mask=mask[prompt_of_row],
            positions=positions[prompt_of_row, -1:],
            tokens=ids[prompt_of_row, -1],  # the prompt's last, until the row has drawn one
            keys=torch.tensor([row.key for row in rows], device=device),
        )
        return batch, logits[prompt_of_row]

    def _step(self, batch: _Batch) -> torch.Tensor:
        """Run each row's last drawn token through the model, which adds it to the cache. Returns
        the logits after these tokens, [rows, vocab] float32."""
        if self.capture is not None and is_joinable(batch.cache):
            return self._fixed_step(batch, self.capture)
        batch.positions = batch.positions + 1
        batch.mask = F.pad(batch.mask, (0, 1), value=1)  # one more column on the right, visible
        return self._forward(batch.tokens[:, None], batch.mask, batch.positions, batch.cache)

    def _fixed_step(self, batch: _Batch, capture: Capture) -> torch.Tensor:
        """The same as `_step`, by steps that keep their sizes and are captured. If that turns out
        to be impossible, later steps are computed as they come."""
        if batch.fixed is not None and batch.fixed.are_over:
            batch.end_fixed_steps()
        if batch.fixed is None:
            batch.fixed = FixedSteps(
                self._forward, capture, batch.cache, batch.mask, batch.positions
            )
            batch.fixed.stop_rows(sorted(batch.ended))
        logits = batch.fixed.step(batch.tokens)
        if batch.fixed.why_not:
            self.capture, self.why_not_captured = None, batch.fixed.why_not
            batch.end_fixed_steps()
        return logits

    def _padded(self, prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Pad the prompts on the left to one length.

        Returns (ids, mask), both [prompts, longest] int64 on the device; the mask is 0 for padding.
        """
        longest = max(map(len, prompts))
        ids = torch.full((len(prompts), longest), self.needs.pad_id, dtype=torch.long)
        mask = torch.zeros(len(prompts), longest, dtype=torch.long)
        for number, prompt in enumerate(prompts):
            first_column = longest - len(prompt)
            ids[number, first_column:] = torch.tensor(prompt)
            mask[number, first_column:] = 1
        return ids.to(self.model.device), mask.to(self.model.device)

    def _forward(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        cache: DynamicCache,
    ) -> torch.Tensor:
        """Run the tokens `ids` through the model after those in the cache, and add them to the
        cache. Returns the logits after the last token, [rows, vocab] float32.

        Args:
            ids, positions: [rows, new tokens].
            mask: [rows, all tokens so far], 0 for padding.
        """
        # Not every family's `forward` takes these two.
        optional = {"position_ids": positions, "logits_to_keep": 1}  # 1: those of the last token
        accepted = {
            name: value for name, value in optional.items() if name in self._accepted_arguments
        }
        self.before_pass()
        out = self.model(
            input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **accepted
        )
        return out.logits[:, -1, : self.vocab].float()


def _join_batches(batch: _Batch | None, fresh: _Batch | None) -> _Batch | None:
    """Put the rows of both batches into one batch and return that. None stands for a batch without
    rows; the result is None if both are None."""
    if batch is None:
        return fresh
    if fresh is not None:
        batch.join(fresh)
    return batch


def _positions(mask: torch.Tensor) -> torch.Tensor:
    """Compute the position of each token in its row, [rows, tokens] int64, from the attention mask
    of rows that are padded in front. The first real token has position 0; so has padding."""
    return (mask.cumsum(1) - 1).clamp(min=0)


def _prompt_of_row(prompts: Sequence[_WaitingPrompt], device: torch.device) -> torch.Tensor:
    """Return for each row of the prompts, in order, the index of its prompt in `prompts`: [rows]
    int64. For two prompts with two rows and one row that is [0, 0, 1]."""
    indices = [index for index, prompt in enumerate(prompts) for _ in prompt.rows]
    return torch.tensor(indices, device=device)


def _draw_tokens(
    batch: _Batch, logits: torch.Tensor, ending: Ending, on_completion: OnCompletion | None
) -> _Batch | None:
    """Draw a token for each row from its logits [rows, vocab] and append it. Returns the batch, or
    None if all its rows have ended. Rows that have ended leave it, while steps are captured only
    once there are enough of them. `on_completion` is called for each row that ends."""
    # A token's random number follows from its row's key and from how many were drawn before it.
    drawn_before = torch.tensor([len(row.ids) for row in batch.rows], device=logits.device)
    random_numbers = uniforms(batch.keys, drawn_before)
    batch.tokens, logprobs = draw(logits, ending.params, random_numbers)
    ended_now = _append_tokens(batch, logprobs, ending, on_completion)
    batch.ended.update(ended_now)
    if not batch.alive:
        return None
    if batch.fixed is None or len(batch.ended) >= LEAVING_SHARE * len(batch.rows):
        batch.drop_ended()
    elif ended_now:
        batch.fixed.stop_rows(ended_now)
    return batch


def _append_tokens(
    batch: _Batch, logprobs: torch.Tensor, ending: Ending, on_completion: OnCompletion | None
) -> list[int]:
    """Append to each row of the batch that goes on the token that it has drawn (`batch.tokens`),
    with its log-probability.

    Returns the indices of the rows that end with this token, for which `on_completion` is called.
    """
    ended_now = []
    drawn_tokens = zip(batch.rows, batch.tokens.tolist(), logprobs.tolist(), strict=True)
    for index, (row, token, logprob) in enumerate(drawn_tokens):
        if index in batch.ended or not ending.append_token(row, token, logprob):
            continue
        ended_now.append(index)
        if on_completion is not None:
            on_completion(row.prompt, row.member, row.completion)
    return ended_now

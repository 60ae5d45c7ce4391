"""What all samplers offer and share: how to sample, how a token is drawn, when a completion ends.

A token is drawn by inverting the cumulative distribution at one uniform number that depends on
(seed, prompt, member, position) alone, so a completion is the same whatever else is in the batch.
Log-probabilities are those of the distribution sampled from: after temperature, min-p, top-k and
top-p, in this order (as vLLM applies them), in float32.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.nn import functional as F

from engine.worker.core.limits import AnswerLimits, SamplingSettings
from engine.worker.core.trajectory import Completion

# Called as (prompt index, member, completion) as soon as each completion has ended.
OnCompletion = Callable[[int, int, Completion], None]

# Large vocabularies are summed in blocks of this size, so that no sum has many terms in a row.
BLOCK = 128
# The largest number that `uniforms` gives.
LARGEST_UNIFORM = 1 - 2.0**-52
# How many of the likeliest tokens are tried first to find a nucleus, and the factor by which that
# number grows.
FIRST_LIKELIEST = 64
LIKELIEST_FACTOR = 8


@dataclass(frozen=True)
class SamplingParams:
    """How to sample.

    Attributes:
        max_tokens: the most tokens of one completion.
        temperature: 0 takes the likeliest token each time (greedy); log-probabilities are then
            those at temperature 1.
        top_p: probability of the nucleus that tokens are drawn from; 1 draws from all tokens.
        stop: texts that end a completion.
        seed: equal seeds draw the same tokens.
        top_k: how many of the likeliest tokens may be drawn; 0 for all.
        min_p: least probability of a token that may be drawn, as a share of the likeliest token's
            probability; 0 for all.
        places: set if only a part of a batch is sampled here, one completion for each prompt: for
            each prompt the (number of the prompt, number of the completion) in the whole batch,
            which decide its random numbers. () counts both from 0.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int = 0
    top_k: int = 0
    min_p: float = 0.0
    places: tuple[tuple[int, int], ...] = ()

    @classmethod
    def greedy(cls, limits: AnswerLimits, seed: int) -> "SamplingParams":
        """Make parameters that take the likeliest token each time, with the most tokens and the
        stop strings of `limits`. `seed` is stored, but has no effect."""
        return cls(
            limits.max_tokens, temperature=0.0, top_p=1.0, stop=tuple(limits.stop), seed=seed
        )

    @classmethod
    def drawn(cls, settings: SamplingSettings, seed: int) -> "SamplingParams":
        """Make parameters that draw tokens at random, with the temperature, top_p, top_k and min_p
        of the settings. Equal seeds draw the same tokens."""
        return cls(
            settings.max_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            stop=tuple(settings.stop),
            seed=seed,
            top_k=settings.top_k,
            min_p=settings.min_p,
        )


class Sampler(Protocol):
    """Samples from a base model with one adapter on it, or none.

    Attributes:
        samples_elsewhere: whether it samples in other processes, which keep the weights that were
            last loaded.
        samples_beside_training: whether it may sample while this process trains. That holds for
            samplers in other processes and for our own forward on a CPU. With any other, two
            threads would share PEFT's switch between adapters, or a GPU while its kernels are being
            recorded as a CUDA graph.
    """

    name: str

    @property
    def samples_elsewhere(self) -> bool:
        """Whether it samples in other processes, with the weights that were last loaded."""
        ...

    @property
    def samples_beside_training(self) -> bool:
        """Whether it may sample in one thread while another thread of this process trains."""
        ...

    def load(self, adapter: Any) -> None:
        """Sample from the next call on with `adapter` as it is now; None means the base alone."""
        ...

    def generate(
        self,
        prompts: Sequence[list[int]],
        n: int,
        params: SamplingParams,
        done: OnCompletion | None = None,
    ) -> list[list[Completion]]:
        """Sample `n` completions for each prompt (a list of token ids), and return them in the
        order of the prompts.

        As soon as a completion has ended, `done` is called in this thread, with (prompt index,
        number of the completion among the prompt's, completion).
        """
        ...

    def stream(self, prompt: list[int], params: SamplingParams) -> Iterator[int]:
        """Sample one completion of the prompt (token ids); yields each of its ids once it is drawn,
        the end token included."""
        ...

    def release_memory(self) -> None:
        """Release memory that is not needed until the next call."""
        ...

    def close(self) -> None:
        """Release everything; the sampler is not used afterwards."""
        ...


@dataclass(frozen=True)
class SamplerNeeds:
    """What a sampler has to know beside the weights.

    Attributes:
        pad_id: the id that fills rows up; any will do, because padded positions are masked.
        stop_ids: ids that end a completion.
        decode: turns ids into text; used for stop strings only.
        max_rows: the most completions sampled at once.
    """

    pad_id: int
    stop_ids: Sequence[int]
    decode: Callable[[list[int]], str]
    max_rows: int = 256

    def ending(self, params: SamplingParams) -> "Ending":
        """Make the rule that decides when a completion sampled with `params` is over: after one of
        this model's stop ids, a stop string or the most tokens of `params`."""
        return Ending(frozenset(self.stop_ids), self.decode, params)


@dataclass
class Row:
    """A completion that is being sampled.

    Attributes:
        prompt: number of its prompt.
        member: its number among the completions of that prompt.
        key: decides its random numbers, see `uniforms`.
        finished: True if a stop id or a stop string ended it, False if it was cut or goes on.
    """

    prompt: int
    member: int
    key: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: bool = False

    @property
    def completion(self) -> Completion:
        """What has been sampled so far, as a completion. It shares the row's lists, so it grows
        with them."""
        return Completion(self.ids, self.logprobs, self.finished)


@dataclass(frozen=True)
class Ending:
    """The rule that ends a completion: after an id of `stop_ids`, a stop string, or
    `max_tokens`."""

    stop_ids: frozenset[int]
    decode: Callable[[list[int]], str]
    params: SamplingParams

    def append_token(self, row: Row, token: int, logprob: float) -> bool:
        """Append a token and its log-probability to `row`. Returns True if the row ends with this
        token: by a stop id, a stop string or `max_tokens`. `row.finished` becomes True for the
        first two only."""
        row.ids.append(token)
        row.logprobs.append(logprob)
        row.finished = token in self.stop_ids or self._has_stop_text(row.ids)
        return row.finished or len(row.ids) >= self.params.max_tokens

    def _has_stop_text(self, ids: list[int]) -> bool:
        """Whether one of the stop strings occurs in the text of the last few `ids`. False if there
        are no stop strings."""
        if not self.params.stop:
            return False
        # A stop string may be spread over several tokens, at most one for each of its characters.
        # Four more, because a character of several bytes may be split over tokens.
        token_count = max(map(len, self.params.stop)) + 4
        tail = self.decode(ids[-token_count:])
        return any(stop in tail for stop in self.params.stop)


def new_rows(prompt_count: int, n: int, params: SamplingParams) -> list[list[Row]]:
    """Make `n` empty rows for each prompt, each with the key of its random numbers. If
    `params.places` is set, the prompts are a part of a larger batch: make one row for each prompt,
    whose key follows from its place in the whole batch."""
    seed = params.seed
    if params.places:  # (number of the prompt, number of the completion) in the whole batch
        keys = [row_key(seed, prompt, member) for prompt, member in params.places]
        return [[Row(prompt, member=0, key=key)] for prompt, key in enumerate(keys)]
    return [
        [Row(prompt, member, key=row_key(seed, prompt, member)) for member in range(n)]
        for prompt in range(prompt_count)
    ]


def completions(rows: Sequence[Sequence[Row]]) -> list[list[Completion]]:
    """Turn the rows of each prompt into completions, in the same order."""
    return [[row.completion for row in members] for members in rows]


def draw(
    logits: torch.Tensor, params: SamplingParams, random_numbers: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one id per row. Returns (ids, their log-probabilities), both [rows]. The
    log-probabilities are those of the distribution that is drawn from, after all of `params`; if
    the likeliest ids are taken (greedy), those at temperature 1.

    Args:
        logits: [rows, vocab] float32; overwritten.
        params: only temperature, top_p, top_k and min_p are read here.
        random_numbers: [rows], from `uniforms`; None takes the likeliest id.
    """
    if params.temperature == 0 or random_numbers is None:
        ids = logits.argmax(-1)
        return ids, _values_at(ids, logits.log_softmax(-1))
    if params.temperature != 1:
        logits.mul_(1 / params.temperature)
    logprobs = logits.log_softmax(-1)
    if params.min_p:
        logprobs = without_unlikely(logprobs, params.min_p)
    if params.top_k or params.top_p < 1:
        return _draw_likely(logprobs, params, random_numbers)
    # Without min_p no token has been excluded, so the logits give the same probabilities.
    probabilities = logprobs.exp() if params.min_p else logits.softmax(-1)
    ids = pick(probabilities, random_numbers)
    return ids, _values_at(ids, logprobs)


def _draw_likely(
    logprobs: torch.Tensor, params: SamplingParams, random_numbers: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one id per row among the tokens that `params.top_k` and `params.top_p` leave, from
    log-probabilities [rows, vocab] and a random number per row [rows]. Returns (ids, their
    log-probabilities renormalised over the tokens that are left), both [rows]."""
    logprobs, ids = likeliest(logprobs, params.top_k, params.top_p)
    index = pick(logprobs.exp(), random_numbers)  # a column of `ids`
    return _values_at(index, ids), _values_at(index, logprobs)


def _values_at(index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Pick one value from each row of `values` [rows, n]: the one in column `index[row]`, with
    `index` [rows] int64. Returns [rows]."""
    return values.gather(1, index[:, None])[:, 0]


def without_unlikely(logprobs: torch.Tensor, min_p: float) -> torch.Tensor:
    """Exclude the tokens whose probability is below `min_p` times the likeliest token's, and
    renormalise the rest (min-p sampling, arXiv 2407.01082).

    Takes and returns log-probabilities [rows, vocab]; those of excluded tokens become -inf.
    """
    lowest_logprob = logprobs.amax(-1, keepdim=True) + math.log(min_p)
    return logprobs.masked_fill(logprobs < lowest_logprob, float("-inf")).log_softmax(-1)


def likeliest(
    logprobs: torch.Tensor, top_k: int, top_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reduce each row to its `top_k` likeliest tokens (0: all), renormalise, and reduce those to
    their nucleus: the smallest set of likeliest tokens whose probabilities add up to `top_p`. If
    `top_p` is 1, all stay.

    Args:
        logprobs: [rows, vocab].

    Returns ([rows, k], [rows, k]): log-probabilities from the likeliest down, -inf outside the
    nucleus, and the ids of the tokens.
    """
    if not top_k:
        return nucleus(logprobs, top_p)
    logprobs, ids = logprobs.topk(min(top_k, logprobs.shape[-1]), -1)
    logprobs = logprobs.log_softmax(-1)  # they add up to 1 again
    if top_p == 1:
        return logprobs, ids
    # `nucleus` returns column numbers of `logprobs`. These are ids only for a whole vocabulary;
    # here they are places in `ids`.
    logprobs, columns = nucleus(logprobs, top_p)
    return logprobs, ids.gather(1, columns)


def nucleus(logprobs: torch.Tensor, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Reduce each row to its nucleus and renormalise. The nucleus is the smallest set of likeliest
    tokens whose probabilities add up to `top_p` (nucleus sampling, arXiv 1904.09751).

    Args:
        logprobs: [rows, vocab].

    Returns ([rows, k], [rows, k]): log-probabilities from the likeliest down, -inf outside the
    nucleus, and the ids of the tokens.
    """
    top_logprobs, ids, sums = _enough_likeliest(logprobs, top_p)
    # A token belongs to the set if the likelier ones alone do not reach top_p.
    sum_before = F.pad(sums[:, :-1], (1, 0))
    return top_logprobs.masked_fill_(sum_before >= top_p, float("-inf")).log_softmax(-1), ids


def _enough_likeliest(
    logprobs: torch.Tensor, top_p: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the k likeliest tokens of each row, with one k for all rows, large enough that their
    probabilities add up to `top_p` in every row (or all tokens).

    Takes log-probabilities [rows, vocab]. Returns three tensors [rows, k], from the likeliest token
    down: log-probabilities, ids, and the sums of the probabilities up to each token (float64).
    """
    vocab = logprobs.shape[-1]
    # On a CPU a few of the likeliest tokens are tried first, and more if they do not reach top_p.
    # On a GPU all are sorted at once: waiting to learn whether a few suffice would take as long.
    count = FIRST_LIKELIEST if logprobs.device.type == "cpu" else vocab
    while True:
        top_logprobs, ids = logprobs.topk(min(count, vocab), -1)
        sums = top_logprobs.exp().cumsum(-1, dtype=torch.float64)
        if count >= vocab or bool((sums[:, -1] >= top_p).all()):
            return top_logprobs, ids, sums
        count *= LIKELIEST_FACTOR


def pick(probabilities: torch.Tensor, random_numbers: torch.Tensor) -> torch.Tensor:
    """Draw an id from each row: the first id at which the cumulative sum of the row exceeds the
    row's random number times the row's total. Returns [rows]. An id of probability zero is never
    drawn. Sums are float64.

    Args:
        probabilities: [rows, vocab] float32; their sum need not be one.
        random_numbers: [rows] float64 in [0, 1 - 2^-52], so that such a number times a sum is less
            than the sum.
    """
    if probabilities.shape[1] > 4 * BLOCK:  # one sum over so many terms would be less exact
        return _pick_by_blocks(probabilities, random_numbers)
    sums = probabilities.cumsum(-1, dtype=torch.float64)
    target = random_numbers[:, None] * sums[:, -1:]
    return torch.searchsorted(sums, target, right=True)[:, 0]


def _pick_by_blocks(probabilities: torch.Tensor, random_numbers: torch.Tensor) -> torch.Tensor:
    """Draw an id from each row of `probabilities` [rows, vocab] by its random number, as `pick`
    does; returns [rows]. The row is summed in blocks of BLOCK ids first. Their sums show which
    block the id is in, so that only this block is summed id by id."""
    rows, vocab = probabilities.shape
    if vocab % BLOCK:
        probabilities = F.pad(probabilities, (0, BLOCK - vocab % BLOCK))
    blocks = probabilities.view(rows, -1, BLOCK)
    # [rows, blocks + 1]: the sum before each block, and last that of all.
    sums_before = F.pad(blocks.sum(-1, dtype=torch.float64), (1, 0)).cumsum_(-1)
    target = random_numbers[:, None] * sums_before[:, -1:]
    # The last block before which the sum is not above the target.
    block = torch.searchsorted(sums_before, target, right=True).sub_(1)
    target -= sums_before.gather(1, block)  # now relative to the sum before the block
    id_in_block = _pick_in_block(blocks, block, target)
    return block.mul_(BLOCK).add_(id_in_block)[:, 0]


def _pick_in_block(
    blocks: torch.Tensor, number: torch.Tensor, target: torch.Tensor
) -> torch.Tensor:
    """Find the place of the drawn id within its block, [rows, 1].

    Args:
        blocks: [rows, blocks, BLOCK], the probabilities.
        number: [rows, 1] int64, the number of the block that each row's id is in.
        target: [rows, 1]; the drawn id is the first at which the sum within the block exceeds the
            target. Overwritten.
    """
    probabilities = blocks.take_along_dim(number[..., None], 1)[:, 0]
    sums = probabilities.cumsum(-1, dtype=torch.float64)
    # Sums are rounded, so the target may lie outside the block: bring it back.
    target.clamp_min_(0).clamp_max_(sums[:, -1:] * LARGEST_UNIFORM)
    return torch.searchsorted(sums, target, right=True)


# Constants of splitmix64 (Steele, Lea, Flood, OOPSLA 2014), which turns a counter into 64 random
# bits.
_SPLITMIX_STEP = 0x9E3779B97F4A7C15
_SPLITMIX_FACTOR_1 = 0xBF58476D1CE4E5B9
_SPLITMIX_FACTOR_2 = 0x94D049BB133111EB
_MASK_64_BITS = 2**64 - 1


def row_key(seed: int, prompt: int, member: int) -> int:
    """Mix the key that decides all random numbers of a row (see `uniforms`): 63 bits, made of seed,
    prompt number and member (the number among the prompt's completions) by splitmix64."""
    key = 0
    for number in (seed, prompt, member):
        key = (key + _SPLITMIX_STEP + number) & _MASK_64_BITS
        key = ((key ^ (key >> 30)) * _SPLITMIX_FACTOR_1) & _MASK_64_BITS
        key = ((key ^ (key >> 27)) * _SPLITMIX_FACTOR_2) & _MASK_64_BITS
        key ^= key >> 31
    return key >> 1  # fits a signed int64 tensor


def uniforms(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Compute a random number for each key and position, float64 in [0, 1 - 2^-52]. The same key
    and position always give the same number.

    Args:
        keys: int64, of rows (see `row_key`).
        positions: int64, numbers of tokens from 0; must broadcast with `keys`.
    """
    # splitmix64, with the key as its seed and the position as its counter.
    bits = keys + (positions + 1) * _as_int64(_SPLITMIX_STEP)
    bits = (bits ^ _shifted_right(bits, 30)) * _as_int64(_SPLITMIX_FACTOR_1)
    bits = (bits ^ _shifted_right(bits, 27)) * _as_int64(_SPLITMIX_FACTOR_2)
    bits = bits ^ _shifted_right(bits, 31)
    # The upper 52 of the 64 bits, because a float64 holds 52 bits exactly.
    return _shifted_right(bits, 12).double() * 2.0**-52


def _as_int64(constant: int) -> int:
    """Return the signed number that has the same 64 bits as the unsigned `constant`: int64 tensors
    take no larger constants."""
    return constant - 2**64 if constant >= 2**63 else constant


def _shifted_right(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Shift int64 numbers to the right by `count` bits. Zeros come in from the left, where `>>`
    alone brings in copies of the sign bit."""
    return (bits >> count) & (2 ** (64 - count) - 1)

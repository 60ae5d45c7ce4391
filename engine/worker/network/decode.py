"""The fast sampler: our own forward, prompts read once per group, rows packed into blocks.

Up to `max_rows` completions are sampled at once. Whenever enough of them have ended, the remaining
ones are moved together and waiting prompts take the free places, so a long completion delays no
other.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from engine.worker.core.trajectory import Completion
from engine.worker.network.adapter import FlatAdapter
from engine.worker.network.cache import Cache, Prompts
from engine.worker.network.decode_forward import Forward
from engine.worker.network.decoder import Decoder
from engine.worker.network.sampler import (
    Done,
    Ending,
    Row,
    SamplerNeeds,
    SamplingParams,
    completions,
    draw,
    new_rows,
    uniforms,
)

# Waiting prompts are read once this share of the places is free.
REFILL = 0.25
# Rows are moved together once a step would then cost at most this share of what it costs now.
PAYS = 0.75
# What one more block costs a step, in rows.
BLOCK_COST = 0.2


@dataclass(frozen=True)
class _Waiting:
    """A prompt that has not been read yet, and its completions to sample."""

    ids: list[int]
    rows: list[Row]


class DecoderSampler:
    """See the module and `Sampler`.

    Args:
        decoder: the base model.
        needs: what every sampler needs.
        vocab: ids at or above it are never sampled (padded vocabularies hold ids without a token).
        graphs: whether steps are captured as CUDA graphs; by default where the device is a GPU.
    """

    name = "torch"

    def __init__(
        self,
        decoder: Decoder,
        needs: SamplerNeeds,
        vocab: int,
        *,
        graphs: bool | None = None,
    ) -> None:
        self.decoder = decoder
        self.needs = needs
        self.vocab = vocab
        self.max_rows = needs.max_rows
        self.graphs = decoder.device.type == "cuda" if graphs is None else graphs
        self._adapter: FlatAdapter | None = None
        self._forward: Forward | None = None
        self._made_for: tuple[FlatAdapter | None, int] = (None, 0)  # adapter and its version

    def load(self, adapter: FlatAdapter | None) -> None:
        self._adapter = adapter

    def release_memory(self) -> None:
        """Drop the weights laid out for decoding; a step of training would make them stale
        anyway."""
        self._forward = None

    def close(self) -> None:
        """Nothing to release."""

    def generate(
        self,
        prompts: Sequence[list[int]],
        n: int,
        params: SamplingParams,
        done: Done | None = None,
    ) -> list[list[Completion]]:
        """`n` completions of each prompt, in the order of `prompts`. `done` is called with (prompt
        index, member, completion) as soon as each has ended."""
        rows = new_rows(len(prompts), n, params.seed)
        for _ in self._play(prompts, rows, params, done):
            pass
        return completions(rows)

    def stream(self, prompt: list[int], params: SamplingParams) -> Iterator[int]:
        ((row,),) = rows = new_rows(1, 1, params.seed)
        for _ in self._play([prompt], rows, params, None):
            yield row.ids[-1]

    def _play(
        self,
        prompts: Sequence[list[int]],
        rows: list[list[Row]],
        params: SamplingParams,
        done: Done | None,
    ) -> Iterator[None]:
        """Sample until all rows have ended, yielding after each round of `_rounds`. `rows` holds
        for each prompt its rows, which are filled in place."""
        if not prompts or not rows[0]:
            return iter(())
        # Twice, because the position of a row that has ended still grows while others go on.
        longest = max(map(len, prompts)) + 2 * params.max_tokens
        ending = self.needs.ending(params)
        queue = _queue(prompts, rows, self.max_rows)
        return self._rounds(queue, self._current(longest), ending, done)

    def _current(self, length: int) -> Forward:
        """The forward pass with the adapter as it is now, for at least `length` positions.

        The one of the last call is used again while adapter, version and length allow it.
        """
        version = self._adapter.version if self._adapter is not None else 0
        wanted_for = (self._adapter, version)
        if self._forward is None or self._made_for != wanted_for or self._forward.length < length:
            # Outside inference mode: merged weights and tables are kept, and training uses them.
            weights = self.decoder.weights(self._adapter)
            self._forward = None  # frees what it holds before the next is made
            self._forward = Forward(self.decoder, weights, self.vocab, length)
            self._made_for = wanted_for
        return self._forward

    @torch.inference_mode()
    def _rounds(
        self, waiting: deque[_Waiting], forward: Forward, ending: Ending, done: Done | None
    ) -> Iterator[None]:
        """Sample until no prompt waits and no row is alive, yielding after each round.

        In a round either waiting prompts join, if enough places are free, or every row takes one
        token.
        """
        batch = _Batch(forward, ending, done, graphs=self.graphs)
        while waiting or batch.alive:
            free = self.max_rows - batch.alive
            # Reading prompts interrupts the rows under way, so it is done for many at once.
            if waiting and (
                not batch.alive or free >= max(REFILL * self.max_rows, _rows_of_next(waiting))
            ):
                joining = []
                while waiting and _rows_of_next(waiting) <= free:
                    joining.append(waiting.popleft())
                    free -= len(joining[-1].rows)
                batch.join(joining)
            else:
                batch.tidy()
                batch.step()
            yield


def _rows_of_next(waiting: deque[_Waiting]) -> int:
    return len(waiting[0].rows)


def _queue(prompts: Sequence[list[int]], rows: list[list[Row]], most: int) -> deque[_Waiting]:
    """The waiting prompts in the order in which they will be read, from the shortest to the
    longest.

    Equal prompts become one entry, so that they are read once. An entry with more than `most` rows
    is split.
    """
    rows_of_prompt: dict[tuple[int, ...], list[Row]] = {}
    for ids, members in zip(prompts, rows, strict=True):
        rows_of_prompt.setdefault(tuple(ids), []).extend(members)
    queue = deque[_Waiting]()
    for ids in sorted(rows_of_prompt, key=len):
        members = rows_of_prompt[ids]
        for start in range(0, len(members), most):
            queue.append(_Waiting(list(ids), members[start : start + most]))
    return queue


class _Batch:
    """The rows being sampled, in blocks of `width` places; None stands where a row has ended.

    Args:
        forward: the model as it is now.
        ending: decides when a row is over.
        done: called for each row that ends; None for nothing.
        graphs: whether steps are captured as CUDA graphs.
    """

    def __init__(
        self, forward: Forward, ending: Ending, done: Done | None, *, graphs: bool
    ) -> None:
        self.forward = forward
        self.ending = ending
        self.done = done
        self.graphs = graphs
        self.device = forward.decoder.device
        self.rows: list[Row | None] = []
        self.width = 1
        self.alive = 0
        self.cache: Cache | None = None
        self._ended = False  # since the rows were last moved together

    def join(self, waiting: Sequence[_Waiting]) -> None:
        """Read the prompts, draw the first token of each of their rows, and add the rows that go on
        after it to the batch."""
        prompts, logits = self.forward.read([w.ids for w in waiting])
        rows = [row for w in waiting for row in w.rows]
        source = torch.tensor(
            [i for i, w in enumerate(waiting) for _ in w.rows], device=self.device
        )
        random_numbers = None  # greedy
        if self.ending.params.temperature:
            keys = torch.tensor([row.key for row in rows], device=self.device)
            random_numbers = uniforms(keys, torch.zeros_like(keys))
        drawn = draw(logits.index_select(0, source), self.ending.params, random_numbers)
        # By identity: two rows may hold equal tokens.
        going_on = {id(row) for row in self._give_tokens(rows, *drawn)}
        groups = [[row for row in w.rows if id(row) in going_on] for w in waiting]
        if going_on:
            self._arrange(prompts, groups)

    def tidy(self) -> None:
        """If rows have ended, and moving the others into fewer or narrower blocks makes a step cost
        at most the share PAYS of what it costs now, move them."""
        if not self._ended:
            return
        self._ended = False
        groups = [[row for row in block if row is not None] for block in self._blocks()]
        width = _best_width([len(g) for g in groups])
        present_cost = _cost(len(self.rows), self.width)
        if _cost(_slots([len(g) for g in groups], width), width) <= PAYS * present_cost:
            self._arrange(None, [])

    def step(self) -> None:
        """Draw one more token for every row. Rows that end with it leave their places."""
        cache = self.cache
        assert cache is not None
        if cache.widen():
            self._prepare(cache)
        cache.open_column()
        token, logprob = self._compute() if self._graph is None else self._graph()
        self._token.copy_(token)
        cache.advance()
        self._give_tokens(self.rows, token, logprob)

    def _prepare(self, cache: Cache) -> None:
        """Prepare the steps until the window is full again: compute their random numbers and, with
        graphs, capture the step."""
        self._graph: _Graph | None = None  # and its memory, before the next one is captured
        self._chance = None
        if self.ending.params.temperature:
            columns = torch.arange(cache.window, device=self.device)
            # The token fed at a row's first column is its token 0, so the one drawn there is 1.
            self._chance = uniforms(self._keys[:, None], columns - cache.first[:, None] + 1)
        # Without graphs no bound method is stored in its place: this object would refer to itself
        # and hold the weights until cycles are next collected.
        self._graph = _Graph(self._compute) if self.graphs else None

    def _compute(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute one step: a token and its log-probability for every place, both [rows]. Places
        whose row has ended get some token, which is ignored."""
        cache = self.cache
        assert cache is not None
        logits = self.forward.step(self._token, cache.positions, cache.attend)
        random_numbers = None  # greedy
        if self._chance is not None:
            random_numbers = self._chance.index_select(1, cache.column)[:, 0]
        return draw(logits, self.ending.params, random_numbers)

    def _give_tokens(
        self, rows: Sequence[Row | None], token: torch.Tensor, logprob: torch.Tensor
    ) -> list[Row]:
        """Append to each row its token, and return the rows that go on.

        For a row that ends with it, `done` is called. If `rows` is `self.rows`, its place becomes
        None; rows that join have no places yet.

        Args:
            rows: None stands where a row has ended before.
            token, logprob: [rows], the tokens and their log-probabilities.
        """
        going_on = []
        for position, (row, token_id, token_logprob) in enumerate(
            zip(rows, token.tolist(), logprob.tolist(), strict=True)
        ):
            if row is None:
                continue
            if not self.ending.take(row, token_id, token_logprob):
                going_on.append(row)
                continue
            if rows is self.rows:
                self.rows[position] = None
                self.alive -= 1
                self._ended = True
            if self.done is not None:
                self.done(row.prompt, row.member, row.completion)
        return going_on

    def _blocks(self) -> list[list[Row | None]]:
        """The places of the batch, block by block."""
        return [
            self.rows[start : start + self.width] for start in range(0, len(self.rows), self.width)
        ]

    def _arrange(self, fresh: Prompts | None, groups: Sequence[Sequence[Row]]) -> None:
        """Form new blocks, of the width that is cheapest: first of the rows under way, then of the
        rows that join. Moves the cache along.

        Args:
            fresh: prompts that were just read; None if none were.
            groups: for each of them, its rows that go on.
        """
        places = {id(row): position for position, row in enumerate(self.rows) if row is not None}
        old = [[row for row in block if row is not None] for block in self._blocks()]
        width = _best_width([len(g) for g in [*old, *groups]])
        blocks: list[list[Row | None]] = []
        kept: list[tuple[int, list[int]]] = []
        joining: list[int] = []
        for number, group in enumerate(old):
            for part in _parts(group, width):
                position = [places[id(row)] for row in part]
                # A short block is filled up: any row of the cache will do for an empty place.
                kept.append((number, position + position[:1] * (width - len(position))))
                blocks.append([*part, *[None] * (width - len(part))])
        for number, group in enumerate(groups):
            for part in _parts(group, width):
                joining.append(number)
                blocks.append([*part, *[None] * (width - len(part))])
        if self.cache is not None and kept:
            self.cache = self.cache.rearranged(kept, fresh, joining, width)
        else:
            assert fresh is not None
            self.cache = Cache.for_new_rows(self.forward.shape, fresh, joining, width)
        self.width = width
        self.rows = [row for block in blocks for row in block]
        self.alive = sum(row is not None for row in self.rows)
        self._ended = False
        self._token = torch.tensor(
            [row.ids[-1] if row is not None else 0 for row in self.rows], device=self.device
        )
        self._keys = torch.tensor(
            [row.key if row is not None else 0 for row in self.rows], device=self.device
        )


def _parts(group: Sequence[Row], width: int) -> list[list[Row]]:
    """The rows in blocks of at most `width`."""
    return [list(group[start : start + width]) for start in range(0, len(group), width)]


def _slots(sizes: Sequence[int], width: int) -> int:
    """How many places groups of these sizes take in blocks of `width`: each is rounded up."""
    return sum(-(-size // width) * width for size in sizes)


def _cost(slots: int, width: int) -> float:
    """What a step costs with so many places in blocks of `width`, in rows (see BLOCK_COST)."""
    return slots * (1 + BLOCK_COST / width)


def _best_width(sizes: Sequence[int]) -> int:
    """The width of blocks at which a step over groups of these sizes costs least."""
    # A group of each size in one to four blocks; more parts would be narrower than worthwhile.
    candidates = {-(-size // parts) for size in set(sizes) if size for parts in (1, 2, 3, 4)} | {1}
    return min(sorted(candidates), key=lambda width: _cost(_slots(sizes, width), width))


class _Graph:
    """A step captured as a CUDA graph. A call replays it on the tensors that it read when
    captured."""

    def __init__(self, step: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> None:
        # The warm-up runs on a stream of its own, as torch asks before a capture.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()  # libraries set themselves up outside the capture
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = step()

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.graph.replay()
        return self.out

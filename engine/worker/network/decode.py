"""The fast sampler: our own forward, prompts read once per group, rows packed into blocks.

Up to `max_rows` completions are sampled at once. Whenever enough of them have ended, the remaining
ones are moved together and waiting prompts take the free places, so a long completion delays no
other.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from engine.worker.core import pulse, switched_off
from engine.worker.core.trajectory import Completion
from engine.worker.network.adapter import FlatAdapter
from engine.worker.network.cache import Cache, Prompts, StayingBlock
from engine.worker.network.decode_forward import Forward
from engine.worker.network.decoder import Decoder
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
# Rows are moved together once a step would then cost at most this share of what it costs now.
MAX_COST_SHARE = 0.75
# What one more block adds to the cost of a step, in rows.
BLOCK_COST = 0.2


@dataclass(frozen=True)
class _WaitingPrompt:
    """A prompt that has not been read yet, and its completions to sample."""

    ids: list[int]
    rows: list[Row]


class DecoderSampler:
    """The sampler on our own forward; see the module and the protocol `Sampler`."""

    name = "torch"
    samples_elsewhere = False

    @property
    def samples_beside_training(self) -> bool:
        """Whether sampling may run beside training in this process. On a GPU it may not: a CUDA
        graph cannot be captured while another thread uses the GPU."""
        return self.decoder.device.type == "cpu"

    def __init__(
        self,
        decoder: Decoder,
        needs: SamplerNeeds,
        vocab: int,
        *,
        graphs: bool | None = None,
    ) -> None:
        """Sample from `decoder`; until `load` is called, from the base without an adapter.

        Args:
            needs: the ids that end completions, the decoder of ids to text, and the most rows at
                once.
            vocab: ids from this number on are never sampled (padded vocabularies hold ids without a
                token).
            graphs: whether steps are captured as CUDA graphs; None: on a GPU, unless that is
                switched off.
        """
        self.decoder = decoder
        self.needs = needs
        self.vocab = vocab
        self.max_rows = needs.max_rows
        if graphs is None:
            graphs = decoder.device.type == "cuda" and not switched_off.is_off("decode_graph")
        self.graphs = graphs
        self._adapter: FlatAdapter | None = None
        self._forward: Forward | None = None
        # The adapter that `_forward` was made with, and its version.
        self._forward_adapter: tuple[FlatAdapter | None, int] = (None, 0)

    def load(self, adapter: FlatAdapter | None) -> None:
        """Sample with `adapter` from the next call on; with None, from the base alone."""
        self._adapter = adapter

    def release_memory(self) -> None:
        """Drop the copy of the weights that is laid out for decoding. The next call makes a new
        one, which an optimizer step in between would require anyway."""
        self._forward = None

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
        index, number of the completion among the prompt's, completion)."""
        rows = new_rows(len(prompts), n, params)  # `_sample` fills them in place
        for _ in self._sample(prompts, rows, params, done):
            pass
        return completions(rows)

    def stream(self, prompt: list[int], params: SamplingParams) -> Iterator[int]:
        """Sample one completion of the prompt; yields each of its token ids once it is drawn, the
        end token included."""
        rows = new_rows(prompt_count=1, n=1, params=params)
        row = rows[0][0]
        # With one prompt and one row, each round draws exactly one token.
        for _ in self._sample([prompt], rows, params, on_completion=None):
            yield row.ids[-1]

    def _sample(
        self,
        prompts: Sequence[list[int]],
        rows: list[list[Row]],
        params: SamplingParams,
        on_completion: OnCompletion | None,
    ) -> Iterator[None]:
        """Sample until all rows have ended, yielding after each round: a round reads prompts, or
        draws one token per row. `rows` holds the rows of each prompt, which are filled in place.
        `on_completion` is called for each row that ends."""
        if not prompts or not rows[0]:  # no completion is asked for
            return iter(())
        # The positions that a row may reach. Twice max_tokens, because the position of a row that
        # has ended still grows while the other rows go on.
        length = max(map(len, prompts)) + 2 * params.max_tokens
        ending = self.needs.ending(params)
        queue = _queue_shortest_first(prompts, rows, self.max_rows)
        return self._rounds(queue, self._current_forward(length), ending, on_completion)

    def _current_forward(self, length: int) -> Forward:
        """Return a forward pass for sampling with the adapter as it is now, for rows of up to
        `length` positions. That of the last call is returned again if it has this version of the
        adapter and enough positions."""
        version = self._adapter.version if self._adapter is not None else 0
        current_adapter = (self._adapter, version)
        if (
            self._forward is None
            or self._forward_adapter != current_adapter
            or self._forward.length < length
        ):
            # The layers are made here and not in `_rounds`, which runs in inference mode: training
            # uses the merged weights and the tables of positions too, and torch refuses to train
            # with tensors that were made in inference mode.
            weights = self.decoder.weights(self._adapter)
            self._forward = None  # frees what it holds before the next is made
            self._forward = Forward(self.decoder, weights, self.vocab, length)
            self._forward_adapter = current_adapter
        return self._forward

    @torch.inference_mode()
    def _rounds(
        self,
        waiting: deque[_WaitingPrompt],
        forward: Forward,
        ending: Ending,
        on_completion: OnCompletion | None,
    ) -> Iterator[None]:
        """Sample until no prompt waits and no row is alive, yielding after each round.

        In a round, either waiting prompts are read and their rows join the batch, or every row
        takes one token. `forward` is the model, `ending` decides when a row is over, and
        `on_completion` is called for each row that is.
        """
        batch = _Batch(forward, ending, on_completion, graphs=self.graphs)
        while waiting or batch.alive:
            if self._should_read(waiting, batch.alive):
                batch.join(_take_fitting(waiting, self.max_rows - batch.alive))
            else:
                batch.regroup_if_cheaper()
                batch.step()
            pulse.beat()  # a sign of life: this process is not stuck
            yield

    def _should_read(self, waiting: deque[_WaitingPrompt], alive: int) -> bool:
        """Whether to read waiting prompts now; `alive` is the number of rows being sampled. Reading
        interrupts these rows, so prompts wait until the share REFILL_SHARE of all places is free,
        and until all rows of the first prompt fit."""
        if not waiting:
            return False
        if not alive:
            return True
        free = self.max_rows - alive
        first_fits = free >= len(waiting[0].rows)
        return first_fits and free >= REFILL_SHARE * self.max_rows


def _take_fitting(waiting: deque[_WaitingPrompt], free: int) -> list[_WaitingPrompt]:
    """Remove prompts from the front of the queue and return them, as long as all rows of the next
    prompt fit into the places that are left of `free`."""
    fitting = []
    while waiting and len(waiting[0].rows) <= free:
        prompt = waiting.popleft()
        fitting.append(prompt)
        free -= len(prompt.rows)
    return fitting


def _queue_shortest_first(
    prompts: Sequence[list[int]], rows: list[list[Row]], max_rows: int
) -> deque[_WaitingPrompt]:
    """Queue the prompts in the order in which they will be read: from the shortest to the longest.

    Equal prompts become one entry, so that they are read once. An entry with more than `max_rows`
    rows is split, so that each part fits into an empty batch. `rows` holds the rows of each prompt.
    """
    rows_of_prompt: dict[tuple[int, ...], list[Row]] = {}
    for ids, members in zip(prompts, rows, strict=True):
        rows_of_prompt.setdefault(tuple(ids), []).extend(members)
    queue = deque[_WaitingPrompt]()
    for ids in sorted(rows_of_prompt, key=len):
        members = rows_of_prompt[ids]
        for rows_of_entry in _split_rows(members, max_rows):
            queue.append(_WaitingPrompt(list(ids), rows_of_entry))
    return queue


class _Batch:
    """The rows being sampled, in blocks of `width` places; None stands where a row has ended."""

    def __init__(
        self, forward: Forward, ending: Ending, on_completion: OnCompletion | None, *, graphs: bool
    ) -> None:
        """Begin with no rows.

        Args:
            forward: the model's forward pass, with the weights as they are now.
            ending: decides when a row is over; also holds the sampling parameters.
            on_completion: called for each row that ends; None if nobody is to be told.
            graphs: whether steps are captured as CUDA graphs.
        """
        self.forward = forward
        self.ending = ending
        self.on_completion = on_completion
        self.graphs = graphs
        self.device = forward.decoder.device
        self.rows: list[Row | None] = []  # block by block; None: an empty place
        self.width = 1  # places of a block; all rows of a block have the same prompt
        self.alive = 0  # rows that have not ended
        self.cache: Cache | None = None
        self._some_ended = False  # whether a row has ended since the last `_set_rows`

    def join(self, waiting: Sequence[_WaitingPrompt]) -> None:
        """Read the prompts `waiting`, draw the first token of each of their rows, and add to the
        batch the rows that do not end with this token."""
        prompts, logits = self.forward.read([prompt.ids for prompt in waiting])
        rows = [row for prompt in waiting for row in prompt.rows]
        prompt_of_row = [number for number, prompt in enumerate(waiting) for _ in prompt.rows]
        logits = logits.index_select(0, torch.tensor(prompt_of_row, device=self.device))
        tokens, logprobs = draw(logits, self.ending.params, self._first_random_numbers(rows))
        # By identity: two rows may hold equal tokens.
        unfinished = {id(row) for row in self._append_tokens(rows, tokens, logprobs)}
        if not unfinished:
            return
        fresh_groups = []  # for each prompt its rows that go on
        for prompt in waiting:
            fresh_groups.append([row for row in prompt.rows if id(row) in unfinished])
        self._arrange(prompts, fresh_groups)

    def _first_random_numbers(self, rows: Sequence[Row]) -> torch.Tensor | None:
        """The random number of the first token of each row, [rows]; None if sampling is greedy."""
        if not self.ending.params.temperature:
            return None
        keys = torch.tensor([row.key for row in rows], device=self.device)
        return uniforms(keys, torch.zeros_like(keys))

    def regroup_if_cheaper(self) -> None:
        """Move the rows that have not ended into fewer or narrower blocks (places for rows of one
        prompt), if a step then costs at most MAX_COST_SHARE of what it costs now. This is only
        tried after a row has ended."""
        if not self._some_ended:
            return
        self._some_ended = False
        sizes = [len(group) for group in self._alive_by_block()]
        width = _best_width(sizes)
        new_cost = _step_cost(_place_count(sizes, width), width)
        if new_cost <= MAX_COST_SHARE * _step_cost(len(self.rows), self.width):
            self._arrange(fresh=None, fresh_groups=[])

    def step(self) -> None:
        """Draw one more token for every row. A row that ends with this token gives up its place."""
        cache = self.cache
        assert cache is not None  # `join` has made it
        if cache.widen():  # its tensors are new ones, for which the next steps are prepared
            self._prepare(cache)
        cache.open_column()  # the column that this step writes
        if self._graph is None:
            tokens, logprobs = self._compute_step()
        else:
            tokens, logprobs = self._graph.replay()
        self._last_token.copy_(tokens)
        cache.advance()
        self._append_tokens(self.rows, tokens, logprobs)

    def _prepare(self, cache: Cache) -> None:
        """Prepare for the steps that will fill the cache's window: compute their random numbers
        and, if steps run as CUDA graphs, capture one."""
        self._graph: _Graph | None = None  # frees its memory before the next one is captured
        self._random_numbers = None  # [rows, window]; None if greedy
        if self.ending.params.temperature:
            columns = torch.arange(cache.window, device=self.device)
            # In its first column a row reads its token 0 and draws token 1.
            token_numbers = columns - cache.starts_on_device[:, None] + 1
            self._random_numbers = uniforms(self._keys[:, None], token_numbers)
        # Without graphs `_graph` stays None, and `step` calls `_compute_step`. If `_graph` held
        # that bound method instead, this object would refer to itself and keep the weights alive
        # until cycles are next collected; `_Graph` calls the method without keeping it.
        if self.graphs:
            self._graph = _Graph(self._compute_step)

    def _compute_step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute one step: a token and its log-probability for every place, both [rows]. Places
        whose row has ended get some token, which is ignored."""
        cache = self.cache
        assert cache is not None
        logits = self.forward.step(self._last_token, cache.positions, cache.attend)
        random_numbers = None  # greedy
        if self._random_numbers is not None:
            # By a tensor and not a number: each replay of a captured step takes another column.
            random_numbers = self._random_numbers.index_select(1, cache.next_column)[:, 0]
        return draw(logits, self.ending.params, random_numbers)

    def _append_tokens(
        self, rows: Sequence[Row | None], tokens: torch.Tensor, logprobs: torch.Tensor
    ) -> list[Row]:
        """Append its token to each row, and return the rows that go on.

        For a row that ends with its token, `on_completion` is called. If `rows` is `self.rows`, the
        row also gives up its place; rows that join have no places yet.

        Args:
            rows: None stands where a row has ended before.
            tokens, logprobs: [rows], the tokens and their log-probabilities.
        """
        unfinished = []
        for position, (row, token_id, token_logprob) in enumerate(
            zip(rows, tokens.tolist(), logprobs.tolist(), strict=True)
        ):
            if row is None:
                continue
            ends = self.ending.append_token(row, token_id, token_logprob)
            if not ends:
                unfinished.append(row)
                continue
            if rows is self.rows:
                self._empty_place(position)
            if self.on_completion is not None:
                self.on_completion(row.prompt, row.member, row.completion)
        return unfinished

    def _empty_place(self, position: int) -> None:
        """Take the row at this place out of the batch, because it has ended."""
        self.rows[position] = None
        self.alive -= 1
        self._some_ended = True

    def _alive_by_block(self) -> list[list[Row]]:
        """Return the rows that have not ended, one list for each block (`width` places of one
        prompt); a list is empty if all rows of its block have ended."""
        starts = range(0, len(self.rows), self.width)
        blocks = [self.rows[start : start + self.width] for start in starts]
        return [[row for row in block if row is not None] for block in blocks]

    def _arrange(self, fresh: Prompts | None, fresh_groups: Sequence[Sequence[Row]]) -> None:
        """Form new blocks, first of the rows under way, then of the rows that join, and make a
        cache for these blocks. A block is `width` places for rows of one prompt; some places may
        stay empty.

        Args:
            fresh: prompts that were just read; None if none were.
            fresh_groups: for each fresh prompt, its rows that go on.
        """
        old_groups = self._alive_by_block()
        groups = [*old_groups, *fresh_groups]
        width = _best_width([len(group) for group in groups])
        # For each block that joins, the number of its prompt.
        fresh_blocks = [
            prompt_number
            for prompt_number, group in enumerate(fresh_groups)
            for _ in _split_rows(group, width)
        ]
        staying_blocks = self._staying_blocks(old_groups, width)
        if self.cache is not None and staying_blocks:
            self.cache = self.cache.rearranged(staying_blocks, fresh, fresh_blocks, width)
        else:
            assert fresh is not None  # there are rows to arrange, and none were under way
            self.cache = Cache.for_new_rows(self.forward.shape, fresh, fresh_blocks, width)
        self._set_rows(_places_of(groups, width), width)

    def _staying_blocks(self, groups: Sequence[Sequence[Row]], width: int) -> list[StayingBlock]:
        """Describe the new blocks of the rows that stay, as `Cache.rearranged` takes them: for each
        new block, the number of its old block and the old places of its rows. A block is `width`
        places for rows of one prompt.

        Args:
            groups: for each old block its rows that have not ended.
            width: places of a new block.
        """
        place_of_row = {id(row): place for place, row in enumerate(self.rows) if row is not None}
        blocks = []
        for old_block, group in enumerate(groups):
            for rows_of_block in _split_rows(group, width):
                places = [place_of_row[id(row)] for row in rows_of_block]
                # The cache has no empty places: it holds the block's first row there once more.
                places += places[:1] * (width - len(rows_of_block))
                blocks.append(StayingBlock(old_block, places))
        return blocks

    def _set_rows(self, rows: list[Row | None], width: int) -> None:
        """Put `rows` into the places of the batch, block by block (`width` rows of one prompt);
        None leaves a place empty. Also put on the device what a step reads of each row: its last
        token and the key of its random numbers, both 0 for an empty place."""
        self.width = width
        self.rows = rows
        self.alive = sum(row is not None for row in rows)
        self._some_ended = False
        last_tokens = [row.ids[-1] if row is not None else 0 for row in rows]
        self._last_token = torch.tensor(last_tokens, device=self.device)
        keys = [row.key if row is not None else 0 for row in rows]
        self._keys = torch.tensor(keys, device=self.device)


def _split_rows(group: Sequence[Row], width: int) -> list[list[Row]]:
    """Cut the rows of a group, in order, into parts of at most `width` rows."""
    return [list(group[start : start + width]) for start in range(0, len(group), width)]


def _places_of(groups: Sequence[Sequence[Row]], width: int) -> list[Row | None]:
    """Put the rows of the groups into blocks of `width` places, each block of one group. Returns
    the places of all blocks in one list; None stands in the places that a group leaves empty."""
    places: list[Row | None] = []
    for group in groups:
        for rows_of_block in _split_rows(group, width):
            places += [*rows_of_block, *[None] * (width - len(rows_of_block))]
    return places


def _place_count(sizes: Sequence[int], width: int) -> int:
    """Count the places that groups of these sizes (numbers of rows) take in blocks of `width`
    places; each size is rounded up to whole blocks."""
    return sum(math.ceil(size / width) * width for size in sizes)


def _step_cost(place_count: int, width: int) -> float:
    """Estimate the cost of a decode step, in multiples of the cost of one row.

    A place costs as much as a row, whether a row stands in it or not. On top of that each block of
    `width` places costs BLOCK_COST, of which there are `place_count / width`.
    """
    return place_count * (1 + BLOCK_COST / width)


def _best_width(sizes: Sequence[int]) -> int:
    """Find the width of blocks at which a step costs least (see `_step_cost`). Each of `sizes` is
    the number of rows of one prompt; rows of different prompts never share a block. A size is 0 if
    all rows of the prompt have ended."""
    candidates = {1}
    for size in set(sizes) - {0}:
        # The group in one to four blocks; more would be too narrow to be worthwhile.
        candidates |= {math.ceil(size / blocks) for blocks in (1, 2, 3, 4)}

    def cost(width: int) -> float:
        """Estimate the cost of a step in blocks of this width."""
        return _step_cost(_place_count(sizes, width), width)

    # Sorted, so that of equal costs the narrowest width is taken.
    return min(sorted(candidates), key=cost)


class _Graph:
    """A step captured as a CUDA graph."""

    def __init__(self, step: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Run `step` once and then capture it. A replay reads the same tensors as `step`, with the
        numbers they hold by then, and overwrites the tensors that `step` returned."""
        # The warm-up runs on a stream of its own, as torch asks before a capture.
        warm_up = torch.cuda.Stream()
        warm_up.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm_up):
            step()  # libraries set themselves up outside the capture
        torch.cuda.current_stream().wait_stream(warm_up)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = step()

    def replay(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the captured step once more. Returns the two tensors that `step` returned when it was
        captured (tokens and their log-probabilities), with new values in them."""
        self.graph.replay()
        return self.out

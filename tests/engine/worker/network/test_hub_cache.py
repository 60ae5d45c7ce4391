"""The cache of rows that transformers samples: a token is written beside those before it."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from cached_families import CACHES, cached
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from engine.worker.network import hub_cache
from engine.worker.network.hub_cache import SPARE_COLUMNS, new_cache, resize, select_rows

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]

ROWS, HEADS, DIM = 3, 2, 4
# Attention to all columns and to the last 15, with states of convolutions beside it or without.
ATTENTION = ("qwen2", "gemma3-text", "falcon-h1")


class Copied(TorchDispatchMode):
    """Counts the numbers that are written into tensors with rows, heads, columns and dimensions of
    more than one column."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if str(func).startswith(("aten.cat", "aten.copy_", "aten.clone", "aten.index_select")):
            tensor = args[0] if str(func).startswith("aten.copy_") else result
            self.numbers += tensor.numel() if tensor.ndim == 4 and tensor.shape[2] > 1 else 0
        return result


def states(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of new tokens."""
    keys, values = torch.randn(
        2, ROWS, HEADS, tokens, DIM, generator=torch.Generator().manual_seed(seed)
    )
    return keys, values


def attends(cache: DynamicCache) -> list[int]:
    """The layers that hold keys and values."""
    return [number for number, layer in enumerate(cache.layers) if hasattr(layer, "keys")]


def feed(cache: DynamicCache, lengths: Sequence[int], seed: int = 0) -> list[Any]:
    """What each pass of so many tokens sees of each layer, and is told for its mask."""
    seen: list[Any] = []
    for number, tokens in enumerate(lengths):
        for index in attends(cache):
            seen.append(cache.get_mask_sizes(tokens, index))
            keys, values = cache.update(*states(tokens, seed + 100 * number + index), index)
            seen += [keys.clone(), values.clone(), cache.get_seq_length(index)]
    return seen


@pytest.mark.parametrize("name", ATTENTION)
def test_a_layer_holds_what_transformers_own_layer_holds(name: str) -> None:
    """Over more tokens than there are spare columns, with rows and columns changed on the way."""
    config = cached(name).config
    ours, theirs = new_cache(config), DynamicCache(config=config)
    assert attends(ours) == attends(theirs) != []
    for seed, lengths in enumerate(([6, *[1] * 9], [1] * (SPARE_COLUMNS + 5), [2, 1, 1])):
        for a, b in zip(feed(ours, lengths, seed), feed(theirs, lengths, seed), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
        for cache in (ours, theirs):
            select_rows(cache, torch.tensor([2, 0, 2]))
            resize(cache, cache.get_seq_length(attends(cache)[0]) - 2)


def test_a_token_is_written_without_copying_those_before_it() -> None:
    config = cached("gemma3-text").config
    copied = []
    for cache in (new_cache(config), DynamicCache(config=config)):
        feed(cache, [40, 1])
        with Copied() as counted:
            for number in range(10):
                for index in attends(cache):
                    cache.update(*states(1, number), index)
        copied.append(counted.numbers)
    ours, theirs = copied
    # Ten tokens, keys and values, of a layer with all columns and of one with the last 15 or 16.
    assert theirs == sum(2 * ROWS * HEADS * DIM * (42 + number + 16) for number in range(10))
    assert ours == 0


def test_columns_are_allocated_once_for_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = new_cache(cached("qwen2").config)
    made: list[int] = []
    first = hub_cache._Room.__init__

    def counted(room: Any, held: torch.Tensor, spare: int, *, cleared: bool) -> None:
        made.append(spare)
        first(room, held, spare, cleared=cleared)

    monkeypatch.setattr(hub_cache._Room, "__init__", counted)
    feed(cache, [7, *[1] * (2 * SPARE_COLUMNS)])
    assert made == [SPARE_COLUMNS] * 2 * 2 * len(attends(cache))  # keys and values, twice


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("before", [5, 40])
def test_fixed_steps_leave_what_growing_ones_leave(name: str, before: int) -> None:
    config = cached(name).config
    ours, theirs = new_cache(config), DynamicCache(config=config)
    for cache in (ours, theirs):
        feed(cache, [before])
    next_column = torch.tensor([before])
    counters = [next_column, *hub_cache._fix(ours, next_column, spare=20)]
    assert all(ours.layers[index].is_compileable for index in attends(ours))
    for number in range(12):
        for index in attends(ours):
            held = min(before, theirs.layers[index].keys.shape[2])
            columns, offset = ours.get_mask_sizes(1, index)
            keys, _ = ours.update(*states(1, number), index)
            theirs.update(*states(1, number), index)
            assert keys.shape[2] == columns and offset + columns == before + 20
            assert int(ours.get_seq_length(index)) == before + number
            assert held <= columns
        for counter in counters:
            counter += 1
    hub_cache._unfix(ours, steps=12)
    for a, b in zip(feed(ours, [1, 1], 9), feed(theirs, [1, 1], 9), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("name", CACHES)
def test_rows_can_join_the_caches_of_these_families(name: str) -> None:
    assert hub_cache.is_joinable(new_cache(cached(name).config))

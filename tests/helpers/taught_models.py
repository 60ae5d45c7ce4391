"""Tiny models that have learned to say what some conversations say, in the form of a family's
official template: a tool is really called, in the family's own dialect, and a reply follows.

Their tokenizers have the family's markers and pieces of these conversations, so that a call is a
dozen tokens; what they say is right only by chance.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from official_templates import STOPS, source, tokenizer_of
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from engine.worker.rollouts.renderer import Rendered, Renderer

# (messages, tools)
Conversation = tuple[list[dict[str, Any]], list[dict[str, Any]]]

torch.set_num_threads(1)  # on models this small two threads mostly wait for each other
STEPS, ROWS_OF_STEP, LEARNING_RATE = 60, 6, 1e-2
WIDTH = 32


def save(name: str, conversations: Sequence[Conversation], folder: Path) -> Path:
    """Write a model of two layers that was taught these conversations, and its tokenizer."""
    plain = tokenizer_of(name, source(name))
    texts = [str(plain.decode(row.ids)) for row in _rows(name, plain, conversations)]
    tokenizer = tokenizer_of(name, source(name), texts)
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=WIDTH // 2,
        max_position_embeddings=8192,
        eos_token_id=_ends(name, tokenizer),
        initializer_range=0.1,
    )
    model = Qwen3ForCausalLM(config)
    _teach(model, [_labelled(row) for row in _rows(name, tokenizer, conversations)])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _ends(name: str, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(stop) for stop in STOPS[name]]


def _rows(
    name: str, tokenizer: PreTrainedTokenizerFast, conversations: Sequence[Conversation]
) -> Iterator[Rendered]:
    renderer = Renderer(tokenizer, _ends(name, tokenizer))
    for messages, tools in conversations:
        yield from renderer.rows(messages, tools, "assistant")


def _labelled(row: Rendered) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, labels) up to the last trained token; labels are -100 where nothing is learned."""
    end = len(row.ids) - row.loss_mask[::-1].index(1)
    ids, mask = torch.tensor(row.ids[:end]), torch.tensor(row.loss_mask[:end])
    return ids, ids.masked_fill(mask == 0, -100)


def _teach(model: Qwen3ForCausalLM, rows: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    chance = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    for step in range(STEPS):
        picked = [rows[i] for i in torch.randint(len(rows), (ROWS_OF_STEP,), generator=chance)]
        ids = torch.nn.utils.rnn.pad_sequence([ids for ids, _ in picked], batch_first=True)
        labels = torch.nn.utils.rnn.pad_sequence(
            [labels for _, labels in picked], batch_first=True, padding_value=-100
        )
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - step / STEPS)
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()

"""Puts sequences of token ids into padded microbatches of tensors.

Rows are padded on the right. Attention is causal, so a row never sees its padding, and no attention
mask is needed. Position ids then start at 0 in every row without further work.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.worker.core import switched_off
from engine.worker.core.trajectory import Trajectory
from engine.worker.core.transfer import to_device


@dataclass(frozen=True)
class Row:
    """One sequence of token ids.

    Attributes:
        ids: all ids, prompt and answer.
        loss_mask: 1 for each id that is trained, else 0; the first is 0.
        prefix_len: how many ids at the beginning are a prompt that other rows begin with too; 0 if
            the row shares none.
    """

    ids: Sequence[int]
    loss_mask: Sequence[int]
    prefix_len: int = 0


@dataclass(frozen=True)
class Batch:
    """Padded rows.

    Attributes:
        ids: [rows, length] int64.
        source: [tokens] int64, the position that predicts each trained token, which is the one
            before it; an index into the flattened [rows * length].
        labels: [tokens] int64, the trained tokens themselves, row by row.
        row: [tokens] int64, the row each trained token belongs to.
    """

    ids: torch.Tensor
    source: torch.Tensor
    labels: torch.Tensor
    row: torch.Tensor

    def to(self, device: torch.device) -> "Batch":
        """Return the same batch with its tensors on `device`."""
        tensors = (self.ids, self.source, self.labels, self.row)
        return Batch(*(to_device(tensor, device) for tensor in tensors))


def collate(rows: Sequence[Row], pad: int) -> Batch:
    """Pad `rows` on the right with the id `pad` to the length of the longest row, and list their
    trained tokens.

    Raises:
        ValueError: if a row's first token is marked as trained, because nothing predicts that
            token.
    """
    ids = _padded(rows, pad)
    length = ids.shape[1]
    predictor_places, labels, row_numbers = [], [], []
    for row_number, row in enumerate(rows):
        if row.loss_mask[0]:
            fault = "its first token is marked as trained, nothing predicts it"
            raise ValueError(f"row {row_number}: {fault}")
        for position, is_trained in enumerate(row.loss_mask):
            if is_trained:
                # The token before predicts this one; its place is counted in the flattened ids.
                predictor_places.append(row_number * length + position - 1)
                labels.append(row.ids[position])
                row_numbers.append(row_number)
    return Batch(ids, _int64(predictor_places), _int64(labels), _int64(row_numbers))


def _padded(rows: Sequence[Row], pad: int) -> torch.Tensor:
    """Return the ids of the rows as an int64 tensor [rows, length of the longest row]. Shorter rows
    are filled up on the right with the id `pad`."""
    length = max(len(row.ids) for row in rows)
    ids = torch.full((len(rows), length), pad, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, : len(row.ids)] = _int64(row.ids)
    return ids


def _int64(values: Sequence[int]) -> torch.Tensor:
    """Convert the values to an int64 tensor; an empty list would otherwise give float32."""
    return torch.tensor(values, dtype=torch.long)


def microbatches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Divide rows of these lengths into microbatches whose padded size (rows x longest) is at most
    `budget` tokens; a longer row gets one of its own. Rows of similar length go together, the
    longest first, so that little is padded.

    Returns for each microbatch the indices of its rows.
    """
    batches: list[list[int]] = []
    padded_length = 0  # of the last microbatch: its first row is its longest
    longest_first = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    for index in longest_first:
        if batches and padded_length * (len(batches[-1]) + 1) <= budget:
            batches[-1].append(index)
        else:
            batches.append([index])
            padded_length = lengths[index]
    return batches


def rows_of(trajectories: Sequence[Trajectory]) -> list[Row]:
    """Convert trajectories to rows of token ids. Prompts are not trained; `prefix_len` is the
    length of a row's prompt, so that the members of a group (answers to one task) can share it."""
    rows = []
    for trajectory in trajectories:
        prompt_length = len(trajectory.prompt_ids)
        ids = trajectory.prompt_ids + trajectory.ids
        loss_mask = [0] * prompt_length + trajectory.loss_mask
        rows.append(Row(ids, loss_mask, prefix_len=shared_prefix(prompt_length)))
    return rows


def shared_prefix(prompt_length: int) -> int:
    """Return how many ids at the beginning of a row are treated as shared with other rows: its
    whole prompt of `prompt_length` ids, or 0 if sharing prompts is switched off on this device."""
    return 0 if switched_off.is_off("shared_prompt") else prompt_length

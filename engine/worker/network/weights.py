"""A decoder's weights straight from a folder's safetensors files."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from engine.worker.network.decoder import Decoder, Rope


def read(
    folder: Path, config: Any, rope: Rope, dtype: torch.dtype, device: torch.device
) -> Decoder:
    """Load the decoder in `folder` from its safetensors files, one tensor at a time.

    Args:
        config: the model's configuration.
        rope: the rotary positions, as transformers made them for the same configuration.
        dtype, device: what the weights are converted to, and where they go.

    Raises:
        KeyError: when a weight has another name than transformers gives it.
    """
    with ExitStack() as stack:
        file_of_weight: dict[str, Any] = {}
        for file in sorted(folder.glob("*.safetensors")):
            opened = stack.enter_context(safe_open(file, framework="pt"))
            file_of_weight |= dict.fromkeys(opened.keys(), opened)

        def take(name: str) -> torch.Tensor | None:
            # None if no file has a weight of this name.
            if name not in file_of_weight:
                return None
            return file_of_weight[name].get_tensor(name).to(device, dtype)

        return Decoder(config, take, rope)

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
    """The decoder in `folder`, read one tensor at a time.

    Args:
        config: of the model.
        rope: as transformers made it for the same configuration.
        dtype, device: of the decoder.

    Raises:
        KeyError: when a weight has another name than transformers gives it.
    """
    with ExitStack() as stack:
        file_of_weight: dict[str, Any] = {}
        for file in sorted(folder.glob("*.safetensors")):
            opened = stack.enter_context(safe_open(file, framework="pt"))
            file_of_weight |= dict.fromkeys(opened.keys(), opened)

        def take(name: str) -> torch.Tensor | None:
            if name not in file_of_weight:
                return None
            return file_of_weight[name].get_tensor(name).to(device, dtype)

        return Decoder(config, take, rope)

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
    """The decoder in `folder`, a tensor at a time.

    Args:
        rope: as transformers made it for the same configuration.

    Raises:
        KeyError: when a weight has another name than transformers gives it.
    """
    with ExitStack() as stack:
        places: dict[str, Any] = {}
        for file in sorted(folder.glob("*.safetensors")):
            opened = stack.enter_context(safe_open(file, framework="pt"))
            places |= dict.fromkeys(opened.keys(), opened)

        def take(name: str) -> torch.Tensor | None:
            if name not in places:
                return None
            return places[name].get_tensor(name).to(device, dtype)

        return Decoder(config, take, rope)

"""Learning-rate schedules, and the optimizer whose learning rate they set."""

import math
from collections.abc import Callable, Sequence

import torch

from engine.records.settings import CommonSettings
from engine.worker.core.failures import WorkerFailure
from engine.worker.network.adapter import Adapter
from engine.worker.update.optimizer import AdamW


def rate(step: int, total: int, settings: CommonSettings) -> float:
    """Return the learning rate of optimizer step number `step` (1 to `total`).

    Over the first share `warmup_ratio` of the steps it rises linearly to `learning_rate`. Then it
    stays there, or falls, linearly or along half a cosine (arXiv 1608.03983), as `lr_schedule`
    says. A falling rate would reach 0 one step after the last, so the last step still learns.
    """
    peak = settings.learning_rate
    warmup_steps = math.ceil(settings.warmup_ratio * total)
    if step <= warmup_steps:
        return peak * step / warmup_steps
    # The share of the steps after the warm-up that are done before this one.
    done_share = (step - 1 - warmup_steps) / max(1, total - warmup_steps)
    match settings.lr_schedule:
        case "constant":
            return peak
        case "linear":
            return peak * (1 - done_share)
        case "cosine":
            return peak * 0.5 * (1 + math.cos(math.pi * done_share))


def make_optimizer(parameters: Sequence[torch.nn.Parameter], settings: CommonSettings) -> AdamW:
    """Make an AdamW optimizer with the learning rate and weight decay of the settings."""
    return AdamW(parameters, settings.learning_rate, settings.weight_decay)


def apply_step(
    optimizer: AdamW,
    adapter: Adapter,
    learning_rate: float,
    max_grad_norm: float,
    read: Callable[[torch.Tensor], float] = float,
) -> float:
    """Clip the adapter's gradients, do an optimizer step with this learning rate, and clear the
    gradients. `max_grad_norm` is the largest norm of all gradients together; 0 turns clipping off.
    Returns the norm before clipping, which is copied from the device by calling `read`.

    Raises:
        WorkerFailure: kind nonfinite, if a gradient is NaN or infinite; no weight is changed then.
    """
    # An infinite limit clips nothing; the norm is needed all the same.
    limit = max_grad_norm if max_grad_norm > 0 else math.inf
    norm = read(torch.nn.utils.clip_grad_norm_(adapter.parameters(), limit))
    if not math.isfinite(norm):
        raise WorkerFailure(
            "nonfinite", "The gradient became NaN or infinite.", evidence=f"gradient norm {norm}"
        )
    optimizer.learning_rate = learning_rate
    optimizer.step()
    adapter.clear_gradients()
    return norm

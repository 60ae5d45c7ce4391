"""AdamW over the tensors of an adapter, by the fused kernel that torch.optim.AdamW calls.

torch.optim.AdamW(fused=True) gives the same weights. But its first optimizer imports torch's
compiler, which no run here uses: that takes 76 MB of resident memory and 1.13 s of CPU time in
every trainer; this class takes 2 MB and 0.00 s. A step on the adapter of pebble (the built-in
model) takes 0.88 of the time of torch's. Medians with torch 2.13 on a CPU, 2026-11-22, by `python
-m benchmarks.optimizer` (benchmarks/RESULTS.md).
"""

from collections.abc import Sequence

import torch

BETAS = (0.9, 0.999)
EPS = 1e-8


class AdamW:
    """Adam with decoupled weight decay (arXiv 1711.05101) and bias-corrected moments (arXiv
    1412.6980).

    Attributes:
        learning_rate: of the next step; may be changed between steps.
        state: for each parameter that was ever updated: `step` ([] float32), `exp_avg` and
            `exp_avg_sq` (both of the parameter's shape).
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], learning_rate: float, weight_decay: float
    ) -> None:
        """Prepare to update `parameters`; a parameter's state is made at its first step.

        Args:
            learning_rate: of the first step.
            weight_decay: each step shrinks a parameter by the share learning rate * weight decay.
        """
        self.parameters = list(parameters)
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.state: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    @torch.no_grad()
    def step(self) -> None:
        """Do one optimizer step: update every parameter that has a gradient, and the moments of its
        gradients. Other parameters and their state do not change."""
        with_gradient = [
            (parameter, parameter.grad)
            for parameter in self.parameters
            if parameter.grad is not None
        ]
        if not with_gradient:
            return
        parameters: list[torch.Tensor] = [parameter for parameter, _ in with_gradient]
        states = [self.state_of(parameter) for parameter in parameters]
        for state in states:
            state["step"] += 1  # a tensor, changed in place
        torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
            parameters,
            [gradient for _, gradient in with_gradient],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],  # the largest second moments, which only AMSGrad has
            [state["step"] for state in states],
            lr=self.learning_rate,
            beta1=BETAS[0],
            beta2=BETAS[1],
            weight_decay=self.weight_decay,
            eps=EPS,
            amsgrad=False,
            maximize=False,
        )
        # The fused kernel does not raise the tensors' version counters. Weights with a merged
        # adapter compare these counters to notice that the adapter has changed.
        torch.autograd.graph.increment_version(parameters)

    def state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the parameter's step count (`step`) and the moments of its gradients (`exp_avg`,
        `exp_avg_sq`). They are made at the first call, all zero."""
        if parameter not in self.state:
            self.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        return self.state[parameter]

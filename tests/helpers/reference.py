"""The engine's numbers once more: float64, one row, one head and one token at a time, written from
the formulas and sharing no code with the engine. Slow, and meant to be read."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
PREFIX = "base_model.model."


class Plain:
    """A dense decoder with rotary positions of the plain kind, with or without a LoRA on it.

    Args:
        model: of transformers; its weights are copied.
    """

    def __init__(self, model: Any) -> None:
        config = model.config
        self.config = config
        self.weights: Tensors = {
            name: tensor.detach().double().clone() for name, tensor in model.state_dict().items()
        }
        self.heads: int = config.num_attention_heads
        self.kv: int = config.num_key_value_heads
        self.dim: int = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.theta = float(config.rope_parameters["rope_theta"])
        # Granite's constants; the usual ones everywhere else.
        self.embedding = float(getattr(config, "embedding_multiplier", 1.0))
        self.residual = float(getattr(config, "residual_multiplier", 1.0))
        self.attention = float(getattr(config, "attention_multiplier", self.dim**-0.5))
        self.divisor = float(getattr(config, "logits_scaling", 1.0))

    def logits(
        self, ids: Sequence[int], lora: Tensors | None = None, scale: float = 0.0
    ) -> torch.Tensor:
        """[length, vocab] for one row that stands alone."""
        weights = self.weights

        def linear(x: torch.Tensor, name: str) -> torch.Tensor:
            y = x @ weights[f"{name}.weight"].T
            if f"{name}.bias" in weights:
                y = y + weights[f"{name}.bias"]
            if lora is not None and f"{PREFIX}{name}.lora_A.weight" in lora:
                a, b = (lora[f"{PREFIX}{name}.lora_{f}.weight"] for f in "AB")
                y = y + scale * ((x @ a.T) @ b.T)
            return y

        x = weights["model.embed_tokens.weight"][torch.tensor(ids)] * self.embedding
        for number in range(self.config.num_hidden_layers):
            at = f"model.layers.{number}."
            # OLMo 2 and EXAONE 4 normalise what attention and MLP give, not what they read.
            follow = self.config.model_type in ("olmo2", "exaone4")
            y = x if follow else self._norm(x, at + "input_layernorm")
            turned = bool((getattr(self.config, "no_rope_layers", None) or {number: 1})[number])
            heads = self._attention(y, at + "self_attn.", linear, turned=turned)
            given = linear(heads, at + "self_attn.o_proj")
            if follow:
                given = self._norm(given, at + "post_attention_layernorm")
            x = x + self.residual * given
            y = x if follow else self._norm(x, at + "post_attention_layernorm")
            if at + "mlp.gate_up_proj.weight" in weights:
                gate, up = linear(y, at + "mlp.gate_up_proj").chunk(2, -1)
            else:
                gate, up = linear(y, at + "mlp.gate_proj"), linear(y, at + "mlp.up_proj")
            product = gate / (1 + torch.exp(-gate)) * up
            given = linear(product, at + "mlp.down_proj")
            if follow:
                given = self._norm(given, at + "post_feedforward_layernorm")
            x = x + self.residual * given
        return self._norm(x, "model.norm") @ weights["lm_head.weight"].T / self.divisor

    def logprobs(
        self,
        ids: Sequence[int],
        mask: Sequence[int],
        lora: Tensors | None = None,
        scale: float = 0.0,
        *,
        vocab: int,
        temperature: float = 1.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """([trained tokens], [trained tokens]): log-probabilities and entropies."""
        logits = self.logits(ids, lora, scale)[:, :vocab] / temperature
        values, entropies = [], []
        for at, trained in enumerate(mask):
            if trained:
                z = logits[at - 1]
                logs = z - torch.log(torch.exp(z - z.max()).sum()) - z.max()
                values.append(logs[ids[at]])
                entropies.append(-(torch.exp(logs) * logs).sum())
        return torch.stack(values), torch.stack(entropies)

    def _attention(self, x: torch.Tensor, at: str, linear: Any, *, turned: bool) -> torch.Tensor:
        if at + "qkv_proj.weight" in self.weights:
            sizes = [self.heads * self.dim, self.kv * self.dim, self.kv * self.dim]
            q, k, v = linear(x, at + "qkv_proj").split(sizes, -1)
        else:
            q, k, v = (linear(x, at + name) for name in ("q_proj", "k_proj", "v_proj"))
        # OLMo 2 normalises all queries of a token together, the others each head by itself.
        whole = self.config.model_type == "olmo2"
        if whole:
            q, k = self._norm(q, at + "q_norm"), self._norm(k, at + "k_norm")
        length = len(x)
        future = torch.ones(length, length).triu(1).bool()
        out = []
        for head in range(self.heads):
            group = head // (self.heads // self.kv)
            query = q[:, head * self.dim : (head + 1) * self.dim]
            key = k[:, group * self.dim : (group + 1) * self.dim]
            value = v[:, group * self.dim : (group + 1) * self.dim]
            if at + "q_norm.weight" in self.weights and not whole:
                query, key = self._norm(query, at + "q_norm"), self._norm(key, at + "k_norm")
            if turned:
                query, key = self._rotate(query), self._rotate(key)
            scores = query @ key.T * self.attention
            out.append(scores.masked_fill(future, -math.inf).softmax(-1) @ value)
        return torch.cat(out, -1)

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Pair (i, i + dim/2) of position p turned by p * theta^(-2i / dim)."""
        half = self.dim // 2
        steps = torch.arange(len(x), dtype=torch.float64)[:, None]
        angle = steps * self.theta ** (-2 * torch.arange(half, dtype=torch.float64) / self.dim)
        first, second = x[:, :half], x[:, half:]
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        mean = (x * x).mean(-1, keepdim=True)
        return x / torch.sqrt(mean + self.config.rms_norm_eps) * self.weights[f"{name}.weight"]


def leaves(state: Tensors) -> Tensors:
    """An adapter's state as float64 leaves that gather gradients."""
    return {name: tensor.double().clone().requires_grad_() for name, tensor in state.items()}


def gradients(leaf: Tensors) -> Tensors:
    return {
        name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        for name, tensor in leaf.items()
    }


def apart(ours: Tensors, theirs: Tensors) -> float:
    """The largest relative distance over an adapter's tensors; a tensor that should be zero must
    be."""
    assert ours.keys() == theirs.keys()
    worst = 0.0
    for name, wanted in theirs.items():
        size = float(wanted.double().norm())
        distance = float((ours[name].double() - wanted.double()).norm())
        worst = max(worst, distance / size if size else distance)
    return worst


def advantages(kind: str, rewards: Sequence[float]) -> list[float]:
    count = len(rewards)
    mean = sum(rewards) / count
    if kind == "group_center":
        return [r - mean for r in rewards]
    if kind == "rloo":
        return [
            r - sum(other for j, other in enumerate(rewards) if j != i) / (count - 1)
            for i, r in enumerate(rewards)
        ]
    assert kind == "group_norm"
    deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (count - 1))
    return [(r - mean) / (deviation + 1e-4) for r in rewards]


@dataclass
class Played:
    """One scored trajectory: [trained tokens] each but the advantage."""

    policy: torch.Tensor  # with gradient
    old: torch.Tensor
    sampled: torch.Tensor
    reference: torch.Tensor
    advantage: float


def policy_loss(
    kind: str,
    batch: Sequence[Played],
    *,
    clip_low: float,
    clip_high: float,
    tis_cap: float,
    kl_coef: float,
    max_tokens: int,
) -> torch.Tensor:
    """What GRPO and its kin minimise, over every scored trajectory of a batch."""
    tokens_in_batch = sum(len(p.policy) for p in batch)
    loss = torch.zeros((), dtype=torch.float64)
    for p in batch:
        length = len(p.policy)
        whole = torch.exp(sum(p.policy[t] - p.old[t] for t in range(length)) / length)
        for t in range(length):
            own = torch.exp(p.policy[t] - p.old[t])
            weight = min(math.exp(float(p.old[t] - p.sampled[t])), tis_cap)
            if kind == "cispo":
                bounded = min(own.item(), 1 + clip_high)  # a number: no gradient through it
                gain = bounded * p.advantage * p.policy[t]
            else:
                ratio = whole if kind == "gspo" else own
                bounded = min(max(ratio, 1 - clip_low + 0 * ratio), 1 + clip_high + 0 * ratio)
                gain = min(ratio * p.advantage, bounded * p.advantage)
            d = p.reference[t] - p.policy[t]
            divergence = own * (torch.exp(d) - d - 1)
            share = {
                "grpo": 1 / (len(batch) * length),
                "gspo": 1 / (len(batch) * length),
                "dr_grpo": 1 / (len(batch) * max_tokens),
                "dapo": 1 / tokens_in_batch,
                "cispo": 1 / tokens_in_batch,
            }[kind]
            loss = loss + share * (kl_coef * divergence - weight * gain)
    return loss


def cross_entropy(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """SFT's loss: the mean over all supervised tokens of the batch."""
    total = sum(len(row) for row in rows)
    return -sum((row[t] for row in rows for t in range(len(row))), torch.zeros(())) / total


class AdamW:
    """arXiv 1711.05101, one tensor at a time, with the gradient's norm clipped before."""

    def __init__(self, weights: Tensors, *, weight_decay: float, max_grad_norm: float) -> None:
        self.weights = {name: tensor.double().clone() for name, tensor in weights.items()}
        self.first = {name: torch.zeros_like(t) for name, t in self.weights.items()}
        self.second = {name: torch.zeros_like(t) for name, t in self.weights.items()}
        self.decay, self.limit, self.steps = weight_decay, max_grad_norm, 0

    def step(self, gradient: Tensors, rate: float) -> None:
        self.steps += 1
        norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradient.values()))
        scale = min(1.0, self.limit / norm) if self.limit else 1.0
        for name, weight in self.weights.items():
            g = gradient[name].double() * scale
            self.first[name] = 0.9 * self.first[name] + 0.1 * g
            self.second[name] = 0.999 * self.second[name] + 0.001 * g * g
            mean = self.first[name] / (1 - 0.9**self.steps)
            square = self.second[name] / (1 - 0.999**self.steps)
            weight -= rate * self.decay * weight
            weight -= rate * mean / (square.sqrt() + 1e-8)

"""Models our own forward does not know run through transformers, and their numbers are its own."""

from typing import Any

import pytest
import torch
from tiny_decoders import SHAPE, VOCAB, spec, stir
from transformers import AutoConfig, AutoModelForCausalLM

from engine.worker.core.batch import Row
from engine.worker.network.hub_network import HubNetwork
from engine.worker.network.shape import unsupported

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]

TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT2: dict[str, Any] = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128}
# What stands between the last hidden state and the logits differs from one to the next.
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt_neox": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "phi": {"partial_rotary_factor": 0.5},  # a head with a bias
    "phi3": {"sliding_window": 8},
    "gemma": {"head_dim": 8, "tie_word_embeddings": True},
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 5.0, "sliding_window": 8},
    "cohere": {"logit_scale": 0.2, "tie_word_embeddings": True},
    "granitemoe": {"logits_scaling": 3.0, "embedding_multiplier": 2.0},
    "olmo3": {"sliding_window": 8},
    "stablelm": {},
    "mistral": {"sliding_window": 4},
}
ROWS = [
    Row([3, 5, 7, 9, 11, 13, 15, 17], [0, 0, 1, 1, 0, 1, 1, 1], 2),
    Row([3, 5, 20, 21], [0, 0, 1, 1], 2),
    Row([30, 31, 32, 33, 34], [0, 1, 1, 1, 1]),
]


def model_of(family: str) -> Any:
    facts = SHAPE | FAMILIES[family] | TOKENS
    torch.manual_seed(4)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **facts))
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_gradients_are_those_of_the_models_own_logits(family: str) -> None:
    model = model_of(family)
    assert unsupported(model.config)
    network = HubNetwork(model, VOCAB - 3, "asked for")
    adapter = stir(network.new_adapter(spec(), 1), size=0.03)
    batch = network.collate(ROWS)
    values, entropies = network.logprobs(
        batch, adapter, inverse_temperature=0.5, entropies=True, training=True
    )
    values.sum().backward()
    found = {k: g.clone() for k, g in adapter.gradients().items()}
    adapter.clear_gradients()
    wanted, spread = [], []
    with network.with_adapter(adapter):
        model.eval()
        for row in ROWS:
            logits = model(torch.tensor([row.ids])).logits[0, :, : VOCAB - 3].double() * 0.5
            logs = logits.log_softmax(-1)
            for at, trained in enumerate(row.loss_mask):
                if trained:
                    wanted.append(logs[at - 1, row.ids[at]])
                    spread.append(-(logs[at - 1].exp() * logs[at - 1]).sum())
        torch.stack(wanted).sum().backward()
    torch.testing.assert_close(values.double(), torch.stack(wanted), rtol=0, atol=2e-5)
    torch.testing.assert_close(entropies.double(), torch.stack(spread), rtol=0, atol=2e-5)
    for name, slope in adapter.gradients().items():
        assert (found[name] - slope).norm() <= 1e-4 * slope.norm() + 1e-9, name


@pytest.mark.parametrize(
    "name", ["activation_checkpointing_enable", "gradient_checkpointing_enable"]
)
def test_activations_are_recomputed_by_whichever_name_transformers_has(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5.16 to 5.22 have the second alone, 6 will have the first alone."""
    model = model_of("gpt2")
    network = HubNetwork(model, VOCAB - 3, "asked for")
    adapter = network.new_adapter(spec(), 1)
    newer = hasattr(model, "activation_checkpointing_enable")
    enable = getattr(model, f"{'activation' if newer else 'gradient'}_checkpointing_enable")
    asked: list[object] = []

    class OfOneName:
        """The model, as a version of transformers that has one of the two."""

        def __getattr__(self, attribute: str) -> Any:
            if attribute in {"activation_checkpointing_enable", "gradient_checkpointing_enable"}:
                if attribute != name:
                    raise AttributeError(attribute)
                return lambda options: (asked.append(options), enable(options))
            return getattr(model, attribute)

    monkeypatch.setattr(network, "model", OfOneName())
    for _ in range(2):
        values, _ = network.logprobs(
            network.collate(ROWS), adapter, checkpointing=True, training=True
        )
        values.sum().backward()
    assert asked == [{"use_reentrant": False}]  # once
    assert all(each.grad is not None for each in adapter.parameters())


def test_adapted_layers_of_16_bits_keep_their_inputs_in_16_bits() -> None:
    """PEFT alone would keep each input once more in float32."""
    network = HubNetwork(model_of("mistral").bfloat16(), VOCAB - 3, "asked for")
    adapter = stir(network.new_adapter(spec(), 1), size=0.03)
    network.new_adapter(spec(), 2)  # a second one on the same layers
    layer = next(m for n, m in network.peft.named_modules() if n.endswith("q_proj"))
    kept: list[torch.Tensor] = []
    x = torch.randn(5, SHAPE["hidden_size"], dtype=torch.bfloat16, requires_grad=True)
    factors = {id(parameter) for parameter in network.peft.parameters()}
    with (
        network.with_adapter(adapter),
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
    ):
        y = layer(x)
    y.sum().backward()
    assert y.dtype == torch.bfloat16 and kept
    assert {t.dtype for t in kept if id(t) not in factors} == {torch.bfloat16}
    gradients = adapter.gradients()
    assert {g.dtype for g in gradients.values()} == {torch.float32}
    assert any(g.any() for g in gradients.values())


def test_16_bits_have_the_numbers_of_float32_within_rounding() -> None:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        network = HubNetwork(model_of("mistral").to(dtype), VOCAB - 3, "asked for")
        adapter = stir(network.new_adapter(spec(), 1), size=0.03)
        values, _ = network.logprobs(network.collate(ROWS), adapter, training=True)
        values.sum().backward()
        found.append((values.detach(), adapter.gradients()))
    (exact, slopes), (rounded, rounded_slopes) = found
    assert (rounded - exact).norm() < 0.05 * exact.norm()
    for name, slope in slopes.items():
        assert (rounded_slopes[name] - slope).norm() < 0.2 * slope.norm() + 1e-2

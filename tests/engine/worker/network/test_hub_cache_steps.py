"""Steps through transformers that are captured and repeated: the same tokens, and the host is not
asked. A tape takes the place of a CUDA graph."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from cached_families import CACHES, answers_of, cached
from taped_step import TapedStep
from tiny_decoders import VOCAB, tiny
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from engine.worker.core import switched_off
from engine.worker.network import hub_cache, hub_network
from engine.worker.network.adapter import LoraSpec
from engine.worker.network.hub_cache import Capture
from engine.worker.network.hub_network import HubNetwork
from engine.worker.network.hub_sampler import HubSampler
from engine.worker.network.sampler import Ending, SamplerNeeds, SamplingParams, new_rows

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]

STEPS = 8  # that share their tensors, so that an answer takes several such windows
LENGTHS = [30, 3, 17, 1, 21, 5, 9, 25, 2]
PROMPTS = [[3 + (7 * n + i) % 30 for i in range(2 + 5 * n % 11)] for n in range(len(LENGTHS))]
NEEDS = SamplerNeeds(0, [], lambda ids: "", max_rows=4)


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_cache, "FIXED_STEPS", STEPS)


@pytest.fixture
def uneven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer has its length."""
    monkeypatch.setattr(Ending, "append_token", answers_of(LENGTHS))


def sampler_of(model: Any, capture: Capture | None, max_rows: int = NEEDS.max_rows) -> HubSampler:
    needs = SamplerNeeds(0, [], lambda ids: "", max_rows)
    return HubSampler(model, needs, VOCAB, lambda adapter: nullcontext(), capture=capture)


def sampled(sampler: HubSampler) -> tuple[list[list[int]], torch.Tensor]:
    """The ids of every answer, and the log-probabilities of all."""
    groups = sampler.generate(PROMPTS, 1, SamplingParams(max(LENGTHS), 1.0, seed=2))
    answers = [answer for (answer,) in groups]
    logprobs = [logprob for answer in answers for logprob in answer.logprobs]
    return [answer.ids for answer in answers], torch.tensor(logprobs)


def count_passes(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Keeps (rows, new tokens) of each pass that Python makes from now on."""
    passes: list[tuple[int, int]] = []
    forward = model.forward

    def counted(**given: Any) -> Any:
        passes.append(tuple(given["input_ids"].shape))
        return forward(**given)

    monkeypatch.setattr(model, "forward", counted)
    return passes


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.usefixtures("uneven")
def test_captured_steps_draw_the_same_tokens_by_a_seed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows end, others join, windows fill and are passed, and the host computes few steps."""
    model = cached(name)
    plain, captured = sampler_of(model, None), sampler_of(model, TapedStep)
    passes = count_passes(model, monkeypatch)
    ids, logprobs = sampled(plain)
    computed = len(passes)
    passes.clear()
    ids_by_tape, logprobs_by_tape = sampled(captured)
    assert ids_by_tape == ids
    torch.testing.assert_close(logprobs_by_tape, logprobs, rtol=0, atol=1e-4)
    assert captured.capture is TapedStep and not captured.why_not_captured
    assert len(passes) < 0.7 * computed
    assert max(rows for rows, _ in passes) <= NEEDS.max_rows


def test_a_window_of_steps_is_computed_once_and_captured_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = cached("gemma3-text")
    sampler = sampler_of(model, TapedStep)
    passes = count_passes(model, monkeypatch)
    windows = 3
    sampler.generate([[5, 6, 7], [8]], 2, SamplingParams(1 + STEPS * windows, 1.0, seed=2))
    # The prompts, and of each window one step as it is and one on tape.
    assert passes == [(2, 3)] + [(4, 1)] * 2 * windows


class Launches(TorchDispatchMode):
    """Counts the operations that are launched; views launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def test_a_repeated_step_launches_as_much_for_every_model() -> None:
    """What is left is drawing the tokens and moving on by one column."""

    class Replayed(TapedStep):
        """A graph is one launch, which a tape would take apart."""

        def __call__(self) -> torch.Tensor:
            return self.out

    params = SamplingParams(40, 1.0, seed=2)
    repeated, computed = set(), []
    for name in CACHES:
        model = cached(name)
        for capture in (Replayed, None):
            rows = new_rows(4, 1, params)
            rounds = sampler_of(model, capture)._rounds([[5, 6, 7]] * 4, rows, params, None)
            for _ in range(3):  # the prompts, a step as it is, one on tape
                next(rounds)
            with Launches() as launches:
                next(rounds)
            rounds.close()
            repeated.add(launches.count) if capture else computed.append(launches.count)
    assert len(repeated) == 1
    assert min(computed) > 4 * max(repeated)  # of models of two layers


@pytest.mark.usefixtures("uneven")
def test_rows_that_have_ended_leave_once_they_are_a_quarter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = cached("qwen2")
    sampler = sampler_of(model, TapedStep, max_rows=8)
    passes = count_passes(model, monkeypatch)
    monkeypatch.setattr(Ending, "append_token", answers_of([6, 7, 20, 20, 20, 20, 20, 20]))
    groups = sampler.generate([[5]] * 8, 1, SamplingParams(20, 1.0, seed=2))
    assert [len(answer.ids) for (answer,) in groups] == [6, 7, *[20] * 6]
    # With eight rows while one has ended, then with six.
    assert [rows for rows, _ in passes] == [8, 8, 8, *[6] * 4]


def test_a_row_that_has_ended_takes_no_position_beyond_the_models_last() -> None:
    """The model knows as many positions as the longest row has. A row with a longer prompt ends
    earlier, while others go on."""
    facts = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40, "vocab_size": VOCAB}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(4)
    config = AutoConfig.for_model("gpt2", **facts, **tokens)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    answers = []
    for capture in (None, TapedStep):
        sampler = sampler_of(model, capture, max_rows=5)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Ending, "append_token", answers_of([38, 38, 38, 38, 4]))
            prompts = [*[[5, 6]] * 4, [7] * 36]
            groups = sampler.generate(prompts, 1, SamplingParams(38, 1.0, seed=2))
        answers.append([answer.ids for (answer,) in groups])
    assert answers[0] == answers[1]


WAITING: dict[str, Callable[[torch.Tensor], object]] = {
    "a number": lambda logits: logits.sum().item(),
    "a choice": lambda logits: bool((logits > 0).all()),
    "a mask": lambda logits: logits[logits > 0],
    "how many": lambda logits: (logits > 0).nonzero(),
    "which": lambda logits: (logits > 0).unique(),
}


@pytest.mark.parametrize("what", WAITING)
@pytest.mark.usefixtures("uneven")
def test_a_step_that_waits_for_numbers_of_the_device_is_not_captured(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("qwen3")
    plain, waits = sampler_of(model, None), sampler_of(model, TapedStep)
    wanted, _ = sampled(plain)
    forward = model.forward

    def waiting(*ids: Any, **given: Any) -> Any:
        out = forward(*ids, **given)
        WAITING[what](out.logits)
        return out

    monkeypatch.setattr(model, "forward", waiting)
    found, _ = sampled(waits)
    assert found == wanted
    assert waits.capture is None and "the host waits" in waits.why_not_captured


@pytest.mark.usefixtures("uneven")
def test_a_step_that_cannot_be_captured_is_computed() -> None:
    def refuse(step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    model = tiny("qwen3")
    sampler = sampler_of(model, refuse)
    found, _ = sampled(sampler)
    assert found == sampled(sampler_of(model, None))[0]
    assert sampler.capture is None
    assert sampler.why_not_captured.startswith("RuntimeError: CUDA error: operation not permitted")


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], HubNetwork]:
    """Makes a network that captures as if it were on a GPU."""

    def make(capture: Any) -> HubNetwork:
        monkeypatch.setattr(hub_network, "CudaGraph", capture)
        network = HubNetwork(tiny("qwen3"), VOCAB, "asked for")
        monkeypatch.setattr(network, "_may_capture", lambda: True)
        return network

    return make


def test_a_model_is_checked_with_captured_steps_and_an_adapter_samples_by_them(
    on_a_gpu: Callable[[Any], HubNetwork],
) -> None:
    network = on_a_gpu(TapedStep)
    adapter = network.new_adapter(LoraSpec(4, 8, 0.0, ("all-linear",)), seed=1)
    adapter.load({name: 0.1 + tensor for name, tensor in adapter.state().items()})
    sampler = network.sampler(NEEDS)
    assert isinstance(sampler, HubSampler) and sampler.capture is TapedStep
    assert network.capture_why == ""
    sampler.load(adapter)
    plain = HubSampler(network.model, NEEDS, VOCAB, network.with_adapter)
    plain.load(adapter)
    params = SamplingParams(20, 1.0, seed=2)
    found = [[one.ids for one in group] for group in sampler.generate(PROMPTS, 2, params)]
    assert found == [[one.ids for one in group] for group in plain.generate(PROMPTS, 2, params)]


def test_captured_steps_that_give_other_numbers_are_not_used(
    on_a_gpu: Callable[[Any], HubNetwork],
) -> None:
    class Stuck(TapedStep):
        """Gives the first step's logits in each."""

        def __call__(self) -> torch.Tensor:
            return self.out

    network = on_a_gpu(Stuck)
    sampler = network.sampler(NEEDS)
    assert isinstance(sampler, HubSampler) and sampler.capture is None
    assert network.capture_why.startswith("log-probabilities differ by ")
    assert network.sampler(NEEDS).capture is None  # type: ignore[attr-defined]


def test_steps_are_captured_on_a_gpu_unless_that_is_switched_off_or_layers_are_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = HubNetwork(tiny("qwen3"), VOCAB, "asked for")
    assert not network._may_capture()
    monkeypatch.setattr(HubNetwork, "device", torch.device("cuda"))
    assert network._may_capture()
    with switched_off.without("transformers_graph"):
        assert not network._may_capture()
    parameter = next(network.model.parameters())
    parameter.device_mesh = "of two ranks"  # type: ignore[attr-defined]
    assert not network._may_capture()

"""vLLM as a sampler: its log-probabilities are ours, seeds hold, versions never mix."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
import torch
from loops import PEBBLE

from engine.machine.processes.vllm_process import Plan, VllmProcess
from engine.worker.core.trajectory import Completion
from engine.worker.network.policy import Base
from engine.worker.network.sampler import SamplingParams
from engine.worker.rollouts.renderer import Renderer
from engine.worker.rollouts.vllm_sampler import VllmSampler

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

CLOSE = 1e-4  # nats; measured: 2e-5 at most


@pytest.fixture(scope="module")
def sampler(
    vllm_python: Path, pebble: Base, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmSampler]:
    folder = tmp_path_factory.mktemp("vllm")
    plan = Plan(vllm_python, PEBBLE, "cpu", "float32", 1024, lora_rank=16)
    made = VllmSampler(
        VllmProcess(plan, folder / "vllm.log"),
        folder=folder / "adapters",
        stop_ids=pebble.stop_ids,
        vocab=pebble.vocab,
        model_vocab=282,
    )
    try:
        made.process.wait_ready()
        yield made
    finally:
        made.close()


@pytest.fixture
def prompts(pebble: Base) -> list[list[int]]:
    chance, renderer = random.Random(5), Renderer(pebble.tokenizer, pebble.stop_ids)
    asked = [f"What is {chance.randint(10, 99)} + {chance.randint(10, 99)}?" for _ in range(12)]
    return [renderer.prompt([{"role": "user", "content": text}]) for text in asked]


@torch.no_grad()
def scored(
    model: torch.nn.Module, prompt: list[int], ids: list[int], temperature: float, vocab: int
) -> torch.Tensor:
    """Log-probabilities of `ids` after `prompt` under the distribution that was sampled from."""
    logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1, :vocab]
    logprobs = (logits.float() / (temperature or 1.0)).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(ids)[:, None])[:, 0]


def gaps(
    model: torch.nn.Module,
    prompts: Sequence[list[int]],
    found: Sequence[Sequence[Completion]],
    temperature: float = 1.0,
    vocab: int = 282,
) -> torch.Tensor:
    parts = [
        (scored(model, prompt, one.ids, temperature, vocab) - torch.tensor(one.logprobs)).abs()
        for prompt, members in zip(prompts, found, strict=True)
        for one in members
    ]
    return torch.cat(parts)


def ids_of(found: Sequence[Sequence[Completion]]) -> list[list[list[int]]]:
    return [[one.ids for one in members] for members in found]


@torch.no_grad()
def is_greedy(model: torch.nn.Module, prompt: list[int], ids: list[int]) -> bool:
    """Whether every id is the likeliest after those before it."""
    logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return logits.argmax(-1).tolist() == ids


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_log_probabilities_are_those_sampled_from_end_token_included(
    sampler, prompts, pebble, offline, temperature
):
    sampler.load(None)
    n = 8 if temperature else 1
    found = sampler.generate(prompts, n, SamplingParams(24, temperature, seed=3))
    ended = [one for members in found for one in members if one.finished]
    assert ended and all(one.ids[-1] in pebble.stop_ids for one in ended)
    assert gaps(offline(), prompts, found, temperature).max() < CLOSE
    assert sampler.missing_logprobs == 0


def test_an_adapter_we_saved_answers_in_vllm_as_it_does_in_training(
    sampler, prompts, make_adapter, offline, tmp_path
):
    wide, narrow = make_adapter(1), make_adapter(2, 4, ("q_proj", "down_proj"), size=0.3)
    for adapter, name in ((wide, "wide"), (narrow, "narrow")):
        sampler.load(adapter)
        found = sampler.generate(prompts, 4, SamplingParams(24, seed=1))
        assert gaps(offline(adapter, tmp_path / name), prompts, found).max() < CLOSE
        assert gaps(offline(), prompts, found).mean() > 0.01  # it is not the base that answers


def test_a_new_version_answers_a_long_cached_prompt_as_the_new_policy(
    sampler, pebble, make_adapter, fill, offline, tmp_path
):
    renderer = Renderer(pebble.tokenizer, pebble.stop_ids)
    words = " ".join(f"{a} plus {a + 1}" for a in range(10, 90))
    prompt = renderer.prompt([{"role": "user", "content": words}])
    assert len(prompt) > 600
    adapter = make_adapter(3)
    said = []
    for version in (3, 4, 5):
        fill(adapter, version, size=0.15)
        sampler.load(adapter)
        for _ in range(2):  # the second time the prompt's keys and values come from the cache
            ((one,),) = sampler.generate([prompt], 1, SamplingParams(24, 0.0))
            policy = offline(adapter, tmp_path / f"{version}-{len(said)}")
            assert is_greedy(policy, prompt, one.ids)
            assert one.finished or len(one.ids) == 24
            said.append(one.ids)
    assert said[0] == said[1] and len({tuple(ids) for ids in said}) == 3


def test_a_seed_gives_the_same_completions_whatever_runs_beside_them(sampler, prompts):
    sampler.load(None)
    params = SamplingParams(24, 1.0, seed=7)
    alone = sampler.generate(prompts[:2], 6, params)
    together = sampler.generate(prompts, 6, params)
    assert ids_of(together[:2]) == ids_of(alone)
    assert ids_of(sampler.generate(prompts[:2], 6, SamplingParams(24, 1.0, seed=8))) != ids_of(
        alone
    )
    assert len({tuple(one.ids) for members in together for one in members}) > 20


def test_more_seeded_prompts_than_one_pass_reads_do_not_end_the_engine(sampler, prompts):
    many = [prompt + [index % 90 + 3] * 30 for index in range(20) for prompt in prompts]
    found = sampler.generate(many, 1, SamplingParams(2, 1.0, seed=1))
    assert len(found) == 240 and all(one.ids for members in found for one in members)


def test_ids_without_a_token_are_never_sampled_and_share_no_probability(
    sampler, prompts, pebble, offline
):
    narrow = VllmSampler(
        sampler.process,
        folder=sampler.process.log.parent / "unused",
        stop_ids=pebble.stop_ids,
        vocab=60,
        model_vocab=282,
    )
    found = narrow.generate(prompts, 4, SamplingParams(12, 1.0, seed=2))
    assert max(token for members in found for one in members for token in one.ids) < 60
    assert gaps(offline(), prompts, found, vocab=60).max() < CLOSE


def test_a_stop_text_ends_a_completion_with_the_token_that_completes_it(sampler, pebble):
    renderer = Renderer(pebble.tokenizer, pebble.stop_ids)
    prompt = renderer.prompt([{"role": "user", "content": "Write planet backwards."}])
    sampler.load(None)
    ((whole,),) = sampler.generate([prompt], 1, SamplingParams(24, 0.0))
    text = renderer.completion_text(whole.ids)
    stop = text[1:3]
    ((cut,),) = sampler.generate([prompt], 1, SamplingParams(24, 0.0, stop=(stop,)))
    assert renderer.completion_text(cut.ids) == text[: text.index(stop) + 2]
    assert cut.finished and cut.ids == whole.ids[: len(cut.ids)]
    assert len(cut.logprobs) == len(cut.ids)


def test_a_stream_says_what_the_whole_answer_says(sampler, prompts):
    ((whole,),) = sampler.generate(prompts[:1], 1, SamplingParams(24, 0.0))
    assert list(sampler.stream(prompts[0], SamplingParams(24, 0.0))) == whole.ids


def test_the_server_listens_on_no_port_that_others_reach(sampler):
    sampler.load(None)
    keeper = psutil.Process(sampler.process._keeper.pid)
    for process in [keeper, *keeper.children(recursive=True)]:
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                assert connection.laddr.ip in ("127.0.0.1", "::1"), connection
    server = keeper.children()[0]
    assert [c for c in server.net_connections("inet") if c.status == psutil.CONN_LISTEN] == []


def test_a_process_that_is_killed_takes_vllm_with_it(vllm_python, tmp_path):
    plan = Plan(vllm_python, PEBBLE, "cpu", "float32", 256, lora_rank=8)
    process = VllmProcess(plan, tmp_path / "vllm.log")
    try:
        process.wait_ready()
        keeper = psutil.Process(process._keeper.pid)
        living = keeper.children(recursive=True)
        assert len(living) >= 3  # server, engine, worker
        living[0].kill()  # the engine and its worker are orphans now
        assert not psutil.wait_procs([keeper, *living], timeout=20)[1]
    finally:
        process.stop()

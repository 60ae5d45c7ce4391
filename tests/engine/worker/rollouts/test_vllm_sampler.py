"""Sampling over a vLLM server's protocol, against a stand-in that speaks it over a real socket.

What vLLM itself does with it is asked in tests/vllm (make vllm).
"""

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.machine.processes.vllm_process import Plan, VllmProcess
from engine.worker.core.failures import WorkerFailure
from engine.worker.core.trajectory import Completion
from engine.worker.network.sampler import SamplingParams
from engine.worker.rollouts import vllm_sampler
from engine.worker.rollouts.vllm_sampler import VllmSampler, prompt_seed

pytestmark = pytest.mark.timeout(30)

FAKE = Path(__file__).parents[2] / "fake_vllm.py"


class Shift:
    """An adapter as far as a sampler asks: something with a version that can be saved."""

    def __init__(self, shift: int) -> None:
        self.version = 0
        self.shift = shift


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., VllmSampler]]:
    def save(adapter: Shift, folder: Path, base_ref: str) -> None:
        (folder / "shift").write_text(str(adapter.shift))

    monkeypatch.setattr(vllm_sampler, "save_adapter", save)
    made: list[VllmSampler] = []

    def run(vocab: int = 100, **plan: Any) -> VllmSampler:
        known = {"device": "cpu", "dtype": "float32", "max_length": 64} | plan
        process = VllmProcess(
            Plan(Path("/v"), Path("/m"), **known),
            tmp_path / "vllm.log",
            [sys.executable, str(FAKE), ""],
        )
        made.append(
            VllmSampler(
                process, folder=tmp_path / "adapters", stop_ids=[99], vocab=vocab, model_vocab=104
            )
        )
        return made[-1]

    yield run
    for sampler in made:
        sampler.close()


def seen(sampler: VllmSampler) -> dict[str, Any]:
    """What the server was asked, and what it holds."""
    transport = httpx.HTTPTransport(uds=str(sampler.process.address))
    with httpx.Client(transport=transport, base_url="http://vllm") as client:
        return client.get("/asked").json()


def test_ids_go_in_and_ids_with_their_log_probabilities_come_out(make):
    sampler = make()
    found = sampler.generate([[1, 5], [2, 97]], 2, SamplingParams(3))
    assert [[c.ids for c in members] for members in found] == [
        [[6, 7, 8], [7, 8, 9]],
        [[98, 99], [99]],  # the id that ends a turn belongs to it
    ]
    assert found[0][0].logprobs == [-0.06, -0.07, -0.08]
    assert [[c.finished for c in members] for members in found] == [[False] * 2, [True] * 2]
    assert sampler.missing_logprobs == 0


def test_a_request_says_all_of_the_sampling_and_nothing_of_the_servers_defaults(make):
    sampler = make()
    sampler.generate([[1, 5]], 4, SamplingParams(3, 0.7, 0.9, ("END",), seed=3))
    (asked,) = seen(sampler)["asked"]
    assert asked["model"] == "base" and asked["token_ids"] == [1, 5]
    assert asked["sampling_params"] == {
        "n": 4,
        "max_tokens": 3,
        "temperature": 0.7,
        "top_p": 0.9,
        "logprobs": 0,
        "stop_token_ids": [99],
        "detokenize": True,
        "seed": prompt_seed(3, 0),
        "stop": ["END"],
        "logit_bias": {"100": -100.0, "101": -100.0, "102": -100.0, "103": -100.0},
    }


def test_a_request_says_what_top_k_and_min_p_leave(make):
    sampler = make()
    sampler.generate([[1, 5]], 1, SamplingParams(3, top_k=20, min_p=0.1))
    sampler.generate([[1, 5]], 1, SamplingParams(3, 0.0, top_k=20, min_p=0.1))
    sampled, greedy = (asked["sampling_params"] for asked in seen(sampler)["asked"])
    assert (sampled["top_k"], sampled["min_p"]) == (20, 0.1)
    assert "top_k" not in greedy and "min_p" not in greedy


def test_greedy_sampling_needs_no_seed_and_a_whole_vocabulary_no_bias(make):
    sampler = make(vocab=104)
    sampler.generate([[1, 5]], 1, SamplingParams(3, 0.0, 0.5))
    (asked,) = seen(sampler)["asked"]
    params = asked["sampling_params"]
    assert "seed" not in params and "logit_bias" not in params and params["top_p"] == 1.0


def test_seeds_differ_between_prompts_and_steps_and_leave_room_for_members(make):
    seeds = {prompt_seed(step, index) for step in range(50) for index in range(50)}
    assert len(seeds) == 2500 and max(seeds) < 2**56
    assert prompt_seed(3, 1) == prompt_seed(3, 1)


def test_each_completion_is_handed_on_when_its_prompt_is_answered(make):
    handed: list[tuple[int, int, list[int]]] = []

    def done(index: int, member: int, completion: Completion) -> None:
        handed.append((index, member, completion.ids))

    make().generate([[1, 5], [2, 6]], 2, SamplingParams(1), done)
    assert sorted(handed) == [(0, 0, [6]), (0, 1, [7]), (1, 0, [7]), (1, 1, [8])]


def test_many_prompts_are_asked_at_once_and_come_back_in_order(make):
    prompts = [[1, index % 50 + 1] for index in range(300)]
    found = make().generate(prompts, 1, SamplingParams(1))
    assert [members[0].ids[0] for members in found] == [index % 50 + 2 for index in range(300)]


def test_the_sampler_speaks_as_the_adapter_it_was_given_last(make):
    sampler, adapter = make(), Shift(10)
    sampler.load(adapter)
    assert sampler.generate([[1, 5]], 1, SamplingParams(2))[0][0].ids == [16, 27]
    adapter.shift, adapter.version = 20, 1
    sampler.load(adapter)
    assert sampler.generate([[1, 5]], 1, SamplingParams(2))[0][0].ids == [26, 47]
    sampler.load(None)
    assert sampler.generate([[1, 5]], 1, SamplingParams(2))[0][0].ids == [6, 7]


def test_every_version_has_its_own_name_and_folder_and_the_old_one_goes_last(make, tmp_path):
    sampler, adapter = make(), Shift(1)
    for version in (1, 2, 3):
        adapter.version = version
        sampler.load(adapter)
    asked = seen(sampler)["asked"]
    loads = [a for a in asked if a["path"].endswith("/load_lora_adapter")]
    assert len({a["lora_name"] for a in loads}) == len({a["lora_path"] for a in loads}) == 3
    assert [a["path"].split("/")[-1].split("_")[0] for a in asked] == [
        "load",
        "load",
        "unload",
        "load",
        "unload",
    ]
    assert [p.name for p in (tmp_path / "adapters").iterdir()] == ["version-3"]
    assert list(seen(sampler)["adapters"]) == ["version-3"]


def test_what_is_loaded_already_is_not_loaded_again(make):
    sampler, adapter = make(), Shift(1)
    sampler.load(None)
    sampler.load(adapter)
    sampler.load(adapter)
    assert len(seen(sampler)["asked"]) == 1


def test_an_id_without_a_log_probability_is_counted_and_is_no_number(make):
    sampler = make()
    ((completion,),) = sampler.generate([[7, 5]], 1, SamplingParams(2))
    assert math.isnan(completion.logprobs[0]) and completion.logprobs[1] == -0.07
    assert sampler.missing_logprobs == 1


def test_a_log_probability_of_another_id_is_refused(make):
    with pytest.raises(WorkerFailure, match="vLLM") as failure:
        make().generate([[8, 5]], 1, SamplingParams(2))
    assert "log-probability of id 7 where 6 was sampled" in failure.value.evidence


def test_a_prompt_that_fills_the_context_leaves_nothing_to_say(make):
    sampler = make()
    ((full,), (nearly,)) = sampler.generate([[1] * 64, [1] * 62], 1, SamplingParams(9))
    assert full == Completion([], [], False)
    assert len(nearly.ids) == 2 and not nearly.finished


def test_a_stream_gives_ids_as_they_come(make):
    assert list(make().stream([1, 96], SamplingParams(9))) == [97, 98, 99]


def test_a_server_that_dies_ends_the_run_with_its_last_words(make, tmp_path):
    sampler = make()
    with pytest.raises(WorkerFailure) as failure:
        sampler.generate([[1, 2], [13, 2], [1, 3]], 1, SamplingParams(2))
    assert failure.value.kind == "infra"
    assert "RuntimeError: thirteen was asked" in failure.value.evidence
    assert str(tmp_path / "vllm.log") in str(failure.value.advice)


def test_a_refusal_is_told_in_the_servers_words(make):
    sampler, adapter = make(), Shift(1)
    sampler.load(adapter)
    sampler.client.unload("version-1")
    with pytest.raises(WorkerFailure) as failure:
        sampler.generate([[1, 2]], 1, SamplingParams(2))
    assert "404: no model version-1" in failure.value.evidence


def test_memory_that_ran_out_is_told_as_that(tmp_path):
    class Process:
        log = tmp_path / "log"

        def last_words(self) -> str:
            return "ValueError: No available memory for the cache blocks."

    found = vllm_sampler.server_failure("it ended", Process())  # type: ignore[arg-type]
    assert found.kind == "oom" and "max_length" in found.advice.text


def test_a_sampler_that_rests_wakes_when_it_is_asked(make):
    sampler = make(device="cuda", sleeps=True)
    sampler.generate([[1, 5]], 1, SamplingParams(1))
    sampler.release_memory()
    assert seen(sampler)["asleep"]
    assert sampler.generate([[1, 5]], 1, SamplingParams(1))[0][0].ids == [6]
    assert not seen(sampler)["asleep"]


def test_on_a_cpu_there_is_nothing_to_rest(make):
    sampler = make()
    sampler.generate([[1, 5]], 1, SamplingParams(1))
    sampler.release_memory()
    assert not seen(sampler)["asleep"]


def test_log_probabilities_of_a_prompt_follow_the_adapter(make, tmp_path):
    sampler = make()
    sampler.load(Shift(2))
    client = sampler.client
    assert client.prompt_logprobs("base", [4, 5, 6]) == [-0.05, -0.06]
    assert client.prompt_logprobs("version-1", [4, 5, 6]) == [-2.05, -2.06]


def test_nothing_is_left_when_it_is_closed(make, tmp_path):
    sampler = make()
    sampler.load(Shift(1))
    folder = sampler.process.folder
    sampler.close()
    assert not folder.exists() and not (tmp_path / "adapters").exists()
    assert not sampler.process.is_alive


def test_what_torch_holds_of_a_gpu_is_given_back_before_the_server_wakes_up(
    make: Callable[..., VllmSampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = make(device="cuda", memory=0.5, sleeps=True)
    order: list[str] = []
    monkeypatch.setattr(vllm_sampler, "release_memory", lambda: order.append("released"))
    monkeypatch.setattr(sampler.client, "wake", lambda: order.append("woken"))
    sampler.release_memory()
    sampler.load(None)
    assert order == ["released", "woken"]
    sampler.load(None)
    assert len(order) == 2  # it is awake

"""A deployment's base and adapters on a vLLM server; the server is a stand-in on a real socket."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from loops import PEBBLE
from peft import LoraConfig
from safetensors.torch import save_file

from engine.core.files import write_json
from engine.machine.processes.vllm_process import Plan
from engine.worker.core.failures import WorkerFailure
from engine.worker.gateway.chat_request import Refused, parse_chat
from engine.worker.network.sampler import SamplingParams
from engine.worker.serving.chat_models import Served
from engine.worker.serving.vllm_models import VllmModels, serving_plan

pytestmark = pytest.mark.timeout(60)

FAKE = Path(__file__).parents[2] / "fake_vllm.py"


def adapter(folder: Path, alpha: int, rank: int = 4, value: float = 0.1) -> Path:
    """A PEFT folder; the stand-in adds its alpha to every id."""
    folder.mkdir()
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=["q_proj"], task_type="CAUSAL_LM")
    config.save_pretrained(str(folder))
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({key: torch.full((rank, 192), value)}, folder / "adapter_model.safetensors")
    return folder


def plan(**values: Any) -> Plan:
    known: dict[str, Any] = {"max_length": 256, "lora_rank": 64, "adapters": 4} | values
    return Plan(Path("/v"), PEBBLE, "cpu", "float32", **known)


@pytest.fixture
def models(tmp_path: Path) -> Iterator[VllmModels]:
    made = VllmModels(
        plan(),
        "pebble",
        folder=tmp_path / "adapters",
        log=tmp_path / "vllm.log",
        thinking=False,
        base_weights={"model.safetensors": "a" * 64},
        argv=(sys.executable, str(FAKE), ""),
    )
    yield made
    made.close()


@pytest.fixture
def held(models: VllmModels) -> Callable[[], dict[str, int]]:
    """What adapters the server holds."""

    def look() -> dict[str, int]:
        transport = httpx.HTTPTransport(uds=str(models.process.address))
        with httpx.Client(transport=transport, base_url="http://vllm") as client:
            return client.get("/asked").json()["adapters"]

    return look


def next_id(models: VllmModels, name: str) -> int:
    with models.speaking_as(name) as sampler:
        ((one,),) = sampler.generate([[1, 5]], 1, SamplingParams(1, 0.0))
    return one.ids[0]


def test_base_and_adapters_answer_under_their_names(models, tmp_path):
    models.add("a@best", adapter(tmp_path / "a", 10))
    models.add("b@best", adapter(tmp_path / "b", 20))
    assert models.names() == ["pebble", "a@best", "b@best"] and models.is_alive
    assert [next_id(models, name) for name in models.names()] == [6, 16, 26]
    with pytest.raises(Refused) as refusal, models.speaking_as("c"):
        pass
    assert refusal.value.status == 404 and "pebble, a@best" in refusal.value.message


def test_an_adapter_is_copied_and_every_load_has_a_name_of_its_own(models, held, tmp_path):
    first = adapter(tmp_path / "first", 10)
    models.add("run", first)
    models.add("run", first)  # the same again does nothing
    (one,) = held()
    models.add("run", adapter(tmp_path / "second", 20))
    (two,) = held()
    assert one != two and next_id(models, "run") == 26
    assert [path.name for path in (tmp_path / "adapters").iterdir()] == [two]


def test_an_adapter_that_changes_nothing_is_refused_and_forgotten(models, held, tmp_path):
    with pytest.raises(Refused) as refusal:
        models.add("idle", adapter(tmp_path / "idle", 0))
    assert refusal.value.status == 409 and "same logits" in refusal.value.message
    assert held() == {} and models.names() == ["pebble"]


def test_what_does_not_fit_is_refused_with_the_reason(models, held, tmp_path):
    with pytest.raises(Refused, match=r"rank 128.*up to 64.*stop the deployment of pebble"):
        models.add("wide", adapter(tmp_path / "wide", 10, rank=128))
    with pytest.raises(Refused, match="NaN"):
        models.add("broken", adapter(tmp_path / "broken", 10, value=float("nan")))
    foreign = adapter(tmp_path / "foreign", 10)
    write_json(foreign / "MANIFEST.json", {"base_weights": {"model.safetensors": "b" * 64}})
    with pytest.raises(Refused, match="other weights"):
        models.add("foreign", foreign)
    assert held() == {}


def test_chat_requests_are_answered_with_ids_alone(models, tmp_path):
    models.add("a", adapter(tmp_path / "a", 1))
    served = Served(models)
    body = {"model": "a", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    asked = parse_chat(body | {"temperature": 0})
    answer = served.complete(asked)
    # The template ends in a line break, id 198; the stand-in goes on in steps of 2.
    expected = models.renderer.completion_text([99])
    assert answer["choices"][0]["message"]["content"] == expected
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 1
    pieces = [p["choices"][0]["delta"].get("content", "") for p in served.pieces(asked)]
    assert "".join(pieces) == expected
    assert json.dumps(answer)


def test_a_server_that_does_not_start_fails_in_its_words(tmp_path):
    with pytest.raises(WorkerFailure) as failure:
        VllmModels(
            plan(),
            "pebble",
            folder=tmp_path / "adapters",
            log=tmp_path / "vllm.log",
            thinking=False,
            argv=(sys.executable, str(FAKE), "fail"),
        )
    assert "no such dtype" in failure.value.evidence


def test_a_deployment_has_room_for_several_adapters_of_common_ranks():
    small = serving_plan(Path("/v"), PEBBLE, "cpu", rank=0, share=0.4, length=0)
    assert (small.lora_rank, small.adapters, small.dtype) == (64, 4, "float32")
    assert small.max_length == 1024  # pebble's context
    gpu = serving_plan(Path("/v"), PEBBLE, "cuda:0", rank=200, share=0.4, length=64)
    assert (gpu.device, gpu.dtype, gpu.lora_rank, gpu.memory) == ("cuda", "bfloat16", 200, 0.4)

"""A deployment on vLLM: base and adapters at once, each answering as it does offline."""

import json
import threading
import time
from typing import Any

import httpx
import pytest
import torch
from run_configs import train_config

from engine.core.errors import UserError
from engine.core.files import read_json, write_json
from engine.home.rows import NewRun
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.machine.processes import deployments
from engine.models import catalog
from engine.serving import service
from engine.serving.chat import chat
from engine.serving.chat_request import ChatRequest
from engine.worker.network.adapter import save_adapter
from engine.worker.rollouts.renderer import Renderer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

QUESTIONS = ("What is 27 + 82?", "Write planet backwards.", "Which is larger, 31 or 13?")


@pytest.fixture
def tuned(home: Home, make_adapter) -> dict[str, Any]:
    """A finished run with an adapter at steps 1 and 2, one that does nothing at step 3; adapters
    by model reference."""
    adapters = {step: make_adapter(10 + step, size=0.2) for step in (1, 2, 3)}
    adapters[3].load({name: 0 * tensor for name, tensor in adapters[3].state().items()})

    def prepare(run_id: str) -> None:
        run = home.run(run_id)
        run.create()
        base = {"ref": "pebble", "path": str(catalog.BUILTIN["pebble"])}
        write_json(run.config, train_config(run_id, base=base))
        for step, adapter in adapters.items():
            run.checkpoint(step).mkdir(parents=True)
            save_adapter(adapter, run.checkpoint(step), "pebble")
            write_json(run.checkpoint(step) / "MANIFEST.json", {"step": step})

    with Store(home) as store:
        new = NewRun("sums-sft", "train", "sft", "sums@0123456789ab", "pebble")
        run_id = store.insert_run(new, prepare).run_id
        for state, before in (("preparing", "queued"), ("running", "preparing")):
            store.set_state(run_id, state, only_from={before})
        store.set_state(run_id, "done", only_from={"running"}, verdict="better")
    return {f"{run_id}@step{step}": adapter for step, adapter in adapters.items()}


def until_ready(call):
    """A start takes longer than one call waits; it says so and is called again."""
    deadline = time.monotonic() + 500
    while True:
        try:
            return call()
        except UserError as error:
            if not error.retryable or time.monotonic() > deadline:
                raise


@torch.no_grad()
def said_offline(pebble, model: torch.nn.Module, question: str) -> str:
    renderer = Renderer(pebble.tokenizer, pebble.stop_ids)
    prompt = renderer.prompt([{"role": "user", "content": question}])
    ids: list[int] = []
    while len(ids) < 48 and (not ids or ids[-1] not in pebble.stop_ids):
        ids.append(int(model(input_ids=torch.tensor([prompt + ids])).logits[0, -1].argmax()))
    return renderer.completion_text(ids)


def test_one_deployment_serves_base_and_two_adapters_as_they_are_offline(
    home, tuned, pebble, offline, tmp_path, vllm_python
):
    home.config_file.write_text('serve_with = "vllm"\n')
    one, two, idle = tuned
    models = {"pebble": offline()}
    for name in (one, two):
        models[name] = offline(tuned[name], tmp_path / name)
    try:
        found = until_ready(lambda: service.deploy(home, one))
        assert until_ready(lambda: service.deploy(home, two))["base_url"] == found["base_url"]
        assert until_ready(lambda: service.deploy(home, "pebble"))["models"] == ["pebble", one, two]
        folder = home.deployment(found["deployment_id"])
        assert read_json(folder.config)["serve_with"] == "vllm"

        answers: dict[tuple[str, str], str] = {}

        def ask(model: str, question: str) -> None:
            reply = chat(home, ChatRequest(model, question, max_tokens=48))
            answers[model, question] = reply["answers"][0]["answer"]

        asked = [(model, question) for model in models for question in QUESTIONS]
        threads = [threading.Thread(target=ask, args=pair) for pair in asked]
        for thread in threads:  # base and adapters are asked at the same time
            thread.start()
        for thread in threads:
            thread.join()
        for model, question in asked:
            assert answers[model, question] == said_offline(pebble, models[model], question)
        sheets = {tuple(answers[model, question] for question in QUESTIONS) for model in models}
        assert len(sheets) == 3  # no two of them say the same

        with pytest.raises(UserError, match="same logits as the base"):
            service.deploy(home, idle)
        nothing_else_is_reachable(found["base_url"], folder.key.read_text().strip())
        (living,) = deployments.living(home)
    finally:
        for row in deployments.living(home):
            deployments.stop(home, row, "the test is over")
    assert deployments.living(home) == [] and not folder.adapters.exists()
    assert living.state == "ready"


def nothing_else_is_reachable(base_url: str, key: str) -> None:
    root = base_url.removesuffix("/v1")
    with httpx.Client(base_url=root, trust_env=False) as client:
        for path in (
            "/v1/load_lora_adapter",
            "/inference/v1/generate",
            "/sleep",
            "/collective_rpc",
        ):
            said = client.post(path, json={}, headers={"Authorization": f"Bearer {key}"})
            assert said.status_code == 404, path
        body = {"model": "pebble", "messages": [{"role": "user", "content": "Hi"}]}
        assert client.post("/v1/chat/completions", json=body).status_code == 401
        headers = {"Authorization": f"Bearer {key}"}
        asked = body | {"stream": True, "temperature": 0, "max_tokens": 8}
        streamed = client.post("/v1/chat/completions", json=asked, headers=headers)
        pieces = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: {")]
        text = "".join(
            json.loads(piece)["choices"][0]["delta"].get("content", "") for piece in pieces
        )
        asked.pop("stream")
        whole = client.post("/v1/chat/completions", json=asked, headers=headers).json()
        assert text == whole["choices"][0]["message"]["content"] != ""

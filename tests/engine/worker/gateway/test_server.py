"""The servers of rollouts beside each other: a key opens its own rollout, while it lasts."""

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from loops import PEBBLE
from transformers import AutoTokenizer

from engine.worker.core.trajectory import Completion, Trajectory
from engine.worker.gateway.batcher import Batcher
from engine.worker.gateway.server import Loop, RolloutServer
from engine.worker.gateway.session import Rules, Session
from engine.worker.network.sampler import SamplingParams
from engine.worker.rollouts.renderer import Renderer

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]

PARAMS = SamplingParams(max_tokens=8)
BODY = {"messages": [{"role": "user", "content": "Say x."}]}


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    tokenizer = AutoTokenizer.from_pretrained(Path(PEBBLE))
    return Renderer(tokenizer, [tokenizer.eos_token_id])


class Rollout:
    """A session behind HTTP; `answer` fulfils what waits."""

    def __init__(self, loop: Loop, renderer: Renderer, key: str) -> None:
        self.session = Session(Trajectory(key, [], []), Rules(renderer, PARAMS, 256, 8))
        self.batcher = Batcher(PARAMS, lambda: 1)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.key = key
        app = RolloutServer(self.session, self.batcher, key).app()
        self.stop = loop.serve(app, self.listener)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}/v1"

    def post(self, key: str | None = None, **body: object) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key or self.key}"}
        return httpx.post(
            f"{self.url}/chat/completions", json={**BODY, **body}, headers=headers, timeout=20
        )

    def answer(self, ids: list[int]) -> None:
        (question,) = self.batcher.take(20)
        question.future.set_result(Completion(ids, [-0.5] * len(ids), True))


def test_a29_the_key_of_another_rollout_and_a_key_afterwards_open_nothing(renderer: Renderer):
    with Loop() as loop, ThreadPoolExecutor() as threads:
        first, second = (Rollout(loop, renderer, key) for key in ("hs-one", "hs-two"))
        assert first.post(key="hs-two").status_code == 401
        assert second.post(key="hs-one").status_code == 401
        reply = threads.submit(first.post)
        first.answer([*renderer.encode("well"), min(renderer.stop_ids)])
        assert reply.result().json()["choices"][0]["message"]["content"] == "well"
        assert (first.session.trajectory.turns, second.session.trajectory.turns) == (1, 0)
        first.session.close()
        assert first.post().status_code == 401
        assert first.session.trajectory.turns == 1


def test_what_is_sampled_after_the_end_is_not_recorded(renderer: Renderer):
    with Loop() as loop, ThreadPoolExecutor() as threads:
        rollout = Rollout(loop, renderer, "hs-one")
        whole, streamed = threads.submit(rollout.post), threads.submit(rollout.post, stream=True)
        questions = rollout.batcher.take(20)
        while len(questions) < 2:
            questions += rollout.batcher.take(20)
        rollout.session.close()
        for question in questions:
            question.future.set_result(Completion([1], [-0.5], True))
        assert whole.result().status_code == 401
        assert "no longer valid" in streamed.result().text
        assert rollout.session.trajectory.ids == []


def test_questions_that_nobody_will_sample_are_answered_at_the_end(renderer: Renderer):
    with Loop() as loop, ThreadPoolExecutor() as threads:
        rollout = Rollout(loop, renderer, "hs-one")
        reply = threads.submit(rollout.post)
        while not rollout.batcher._pending:  # until the question has arrived
            asyncio.run(asyncio.sleep(0))
        rollout.batcher.close(RuntimeError("over"))
        assert reply.result().status_code == 401
        assert rollout.post().status_code == 401


def test_other_routes_and_other_keys_are_refused(renderer: Renderer):
    with Loop() as loop:
        rollout = Rollout(loop, renderer, "hs-one")
        headers = {"x-api-key": "hs-one"}
        models = httpx.get(f"{rollout.url}/models", headers=headers).json()
        assert [model["id"] for model in models["data"]] == ["policy"]
        assert httpx.get(f"{rollout.url}/models").status_code == 401
        assert httpx.get(f"{rollout.url}/admin", headers=headers).status_code == 404
        large = httpx.post(
            f"{rollout.url}/messages", content=b"x" * (5 << 20), headers=headers, timeout=20
        )
        assert large.status_code == 413
        broken = httpx.post(f"{rollout.url}/responses", content=b"{", headers=headers)
        assert broken.status_code == 400

"""vLLM's routes answered by a thread of the test, on the model that it is told to serve.

Log-probabilities are those of transformers with the adapter merged in float64, so they are right
unless a fault is planted: `wrong`, `fails`, `does not wake`, `keeps the old adapter`, `ignores
adapters`, `slow`.
"""

import json
import socketserver
import tempfile
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from engine.machine.processes.vllm_process import BASE, Plan, ServerDied


class ThreadedVllm:
    """Stands in for `VllmProcess`."""

    def __init__(self, plan: Plan, log: Path, fault: str = "") -> None:
        self.plan, self.log, self.fault = plan, log, fault
        self.key, self.ready_s, self.is_alive = "key", 1.0, True
        self.folder = Path(tempfile.mkdtemp(prefix="threaded-"))
        self.address = self.folder / "socket"
        self.asleep = False
        self.weights: dict[str, dict[str, torch.Tensor]] = {}
        if fault == "fails":
            return
        self.model = AutoModelForCausalLM.from_pretrained(plan.model, dtype=torch.float32)
        self.lock = threading.Lock()
        self.weights[BASE] = {name: p.detach().clone() for name, p in self._parameters()}
        self.server = _Server(str(self.address), _handler_of(self))
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def _parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(n, p) for n, p in self.model.named_parameters() if "proj" in n]

    def wait_ready(self, patience_s: float = 0, on_wait: Callable[[], None] = lambda: None) -> None:
        on_wait()
        if self.fault == "fails":
            raise ServerDied("vLLM ended before it was ready: ValueError: no kernel for sm_90")

    def last_words(self) -> str:
        return "RuntimeError: planted"

    def stop(self) -> None:
        self.is_alive = False
        if self.fault != "fails":
            self.server.shutdown()
            self.server.server_close()

    def load(self, name: str, folder: Path) -> None:
        """Merge an adapter into a copy of the base's weights."""
        earlier = [known for known in self.weights if known != BASE]
        if self.fault == "keeps the old adapter" and earlier:
            self.weights[name] = self.weights[earlier[-1]]
            return
        merged = dict(self.weights[BASE])
        if self.fault != "ignores adapters":
            config = json.loads((folder / "adapter_config.json").read_text())
            state = load_file(folder / "adapter_model.safetensors")
            for key in (key for key in state if "lora_A" in key):
                module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                a, b = state[key].double(), state[key.replace("lora_A", "lora_B")].double()
                change = config["lora_alpha"] / config["r"] * (b @ a)
                merged[f"{module}.weight"] = (merged[f"{module}.weight"].double() + change).float()
        self.weights[name] = merged

    @torch.no_grad()
    def complete(self, name: str, prompt: list[int], sampling: dict[str, Any]) -> list[Any]:
        for parameter_name, parameter in self._parameters():
            parameter.copy_(self.weights[name][parameter_name])
        generator = torch.Generator().manual_seed(sampling.get("seed", 0) % 2**60)
        rows = torch.tensor([prompt] * sampling["n"])
        logprobs = []
        for _ in range(sampling["max_tokens"]):
            if self.fault == "slow":
                until = time.perf_counter() + 0.02
                while time.perf_counter() < until:
                    pass
            spread = self.model(rows).logits[:, -1].log_softmax(-1)
            token = torch.multinomial(spread.exp(), 1, generator=generator)
            logprobs.append(spread.gather(1, token) + (0.01 if self.fault == "wrong" else 0))
            rows = torch.cat([rows, token], dim=1)
        return [
            _choice(index, row[len(prompt) :].tolist(), sampling["stop_token_ids"], values)
            for index, (row, values) in enumerate(zip(rows, torch.cat(logprobs, 1), strict=True))
        ]


def _choice(index: int, ids: list[int], stop: list[int], logprobs: torch.Tensor) -> dict[str, Any]:
    end = next((place + 1 for place, token in enumerate(ids) if token in stop), len(ids))
    content = [{"token_id": t, "logprob": float(p)} for t, p in zip(ids, logprobs, strict=True)]
    finished = ids[end - 1] in stop
    return {
        "index": index,
        "finish_reason": "stop" if finished else "length",
        "token_ids": ids[:end],
        "logprobs": {"content": content[:end]},
    }


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 512


def _handler_of(owner: ThreadedVllm) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
            status, reply = 200, {}
            with owner.lock:
                if self.path.startswith("/sleep"):
                    owner.asleep = True
                elif self.path == "/wake_up" and owner.fault == "does not wake":
                    status, reply = 500, {"error": "cannot allocate memory"}
                elif self.path == "/wake_up":
                    owner.asleep = False
                elif self.path == "/v1/load_lora_adapter":
                    owner.load(body["lora_name"], Path(body["lora_path"]))
                elif self.path == "/v1/unload_lora_adapter":
                    del owner.weights[body["lora_name"]]
                elif owner.asleep:
                    status, reply = 500, {"error": "it sleeps"}
                else:
                    sampling = body["sampling_params"]
                    choices = owner.complete(body["model"], body["token_ids"], sampling)
                    reply = {"choices": choices}
            data = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def address_string(self) -> str:
            return "socket"

        def log_message(self, *_: object) -> None:
            pass

    return Handler

"""Stands in for vLLM's server in tests: the same routes on the same kind of socket, no torch.

Its "model" is arithmetic: after `p` the next ids are p+1, p+2, ... until STOP, which ends a
completion; every adapter adds a number to each id: what its folder's `shift` file holds, else its
alpha. Log-probabilities
are minus a hundredth of the id. `behave` is a file beside the socket's log, see `main`.
"""

import json
import os
import socketserver
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

STOP = 99
asked: list[dict] = []
adapters: dict[str, int] = {}
asleep = False


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 512


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def reply(self, status: int, body: object) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def address_string(self) -> str:
        return "socket"

    def do_GET(self) -> None:
        if self.path == "/health":
            self.reply(200, "")
        elif self.path == "/asked":
            self.reply(200, {"asked": asked, "adapters": adapters, "asleep": asleep})

    def do_POST(self) -> None:
        global asleep
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size) or b"{}")
        if self.path.startswith("/sleep"):
            asleep = True
            return self.reply(200, "")
        if self.path == "/wake_up":
            asleep = False
            return self.reply(200, "")
        if self.headers["Authorization"] != f"Bearer {os.environ['VLLM_API_KEY']}":
            return self.reply(401, {"error": "Unauthorized"})
        asked.append({"path": self.path, **body})
        if self.path == "/v1/load_lora_adapter":
            folder = Path(body["lora_path"])
            if body["lora_name"] in adapters:
                message = f"The lora adapter '{body['lora_name']}' has already been loaded."
                return self.reply(400, {"error": {"message": message}})
            if (folder / "shift").exists():
                shift = int((folder / "shift").read_text())
            else:
                shift = json.loads((folder / "adapter_config.json").read_text())["lora_alpha"]
            adapters[body["lora_name"]] = shift
            return self.reply(200, f"Success: LoRA adapter '{body['lora_name']}' added.")
        if self.path == "/v1/unload_lora_adapter":
            del adapters[body["lora_name"]]
            return self.reply(200, "Success")
        if asleep:
            return self.reply(500, {"error": {"message": "the engine sleeps"}})
        if body["token_ids"][0] == 13:
            print("(Worker pid=1) ERROR [worker.py:1] RuntimeError: thirteen was asked", flush=True)
            os._exit(1)
        if body["model"] != "base" and body["model"] not in adapters:
            return self.reply(404, {"error": {"message": f"no model {body['model']}"}})
        self.generate(body)

    def generate(self, body: dict) -> None:
        params, shift = body["sampling_params"], adapters.get(body["model"], 0)
        choices = []
        for member in range(params.get("n", 1)):
            ids, token = [], body["token_ids"][-1] + member
            while len(ids) < params["max_tokens"] and STOP not in ids:
                token += 1 + shift
                ids.append(min(token, STOP))
            content = [{"token_id": t, "logprob": -t / 100} for t in ids]
            if body["token_ids"][0] == 7:  # a model that gives no number once
                content[0]["logprob"] = None
            if body["token_ids"][0] == 8:  # or speaks of another id than it sampled
                content[0]["token_id"] += 1
            reason = "stop" if ids[-1] == STOP else "length"
            choices.insert(
                0,
                {
                    "index": member,
                    "finish_reason": reason,
                    "token_ids": ids,
                    "logprobs": {"content": content},
                },
            )
        if not body.get("stream"):
            places = [None] + [
                {str(t): {"logprob": -t / 100 - shift}} for t in body["token_ids"][1:]
            ]
            wanted = "prompt_logprobs" in params
            return self.reply(
                200, {"choices": choices, "prompt_logprobs": places if wanted else None}
            )
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        for token in choices[0]["token_ids"]:
            piece = {"choices": [{"index": 0, "token_ids": [token]}]}
            self.wfile.write(f"data: {json.dumps(piece)}\n\n".encode())
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    behave, address = sys.argv[1], sys.argv[2]
    if behave == "fail":
        print("(APIServer pid=9) ERROR 01-01 [core.py:7] ValueError: no such dtype", flush=True)
        print("nanobind: leaked 3 instances!", flush=True)
        sys.exit(1)
    if behave == "slow":
        time.sleep(60)
    if behave == "family":  # a child in a session of its own, as engines start them
        subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True
        )
    print("started with", sorted(os.environ), flush=True)
    Server(address, Handler).serve_forever()


if __name__ == "__main__":
    main()

"""Stands in for `engine.worker.serving.openai_server` in tests: the same folder and routes, no
torch.

Answers with the model's name and the question; one that asks for no stream gets the text of the
file `grade` in the home. `behave` is a file in the home: "fail" (does not become ready), "crash"
(ends without a word), "slow" (takes ten minutes to load), "same" (refuses adapters as changing
nothing), "stubborn" (ignores requests to stop), "busy" (has a request in progress), "leaving" (ends
when it is given an adapter).
"""

import json
import os
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from engine.core.files import read_json, write_json
from engine.home.run_dir import DeployDir, Home


def main() -> int:
    folder = DeployDir(Path(sys.argv[1]))
    config, key = read_json(folder.config), folder.key.read_text().strip()
    told = Home.locate().root / "behave"
    behave = told.read_text() if told.exists() else ""
    print("server starts", flush=True)
    if behave == "fail":
        write_json(folder.failed, {"message": "the weights are damaged"})
        return 3
    if behave == "crash":
        return 1
    if behave == "slow":
        threading.Event().wait(600)
    if behave == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    names = [config["base_name"], *(adapter["name"] for adapter in config["adapters"])]

    class Handler(BaseHTTPRequestHandler):
        def reply(self, status: int, body: dict) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def refuse(self, status: int, message: str) -> None:
            self.reply(status, {"error": {"message": message}})

        def do_GET(self) -> None:
            self.reply(200, {"status": "ok", "active": int(behave == "busy")})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.headers["Authorization"] != f"Bearer {key}":
                self.refuse(401, "A bearer token is needed.")
            elif self.path == "/admin/stop":
                self.reply(200, {"stopping": True})
                if behave != "stubborn":
                    threading.Thread(target=server.shutdown).start()
            elif self.path == "/admin/adapters":
                if behave == "leaving":
                    os._exit(0)
                if behave == "same":
                    self.refuse(409, "the same logits as the base")
                    return
                if body["name"] not in names:
                    names.append(body["name"])
                    announce()
                self.reply(200, {"models": names})
            elif self.path == "/v1/chat/completions":
                self.chat(body)

        def chat(self, body: dict) -> None:
            if body["model"] not in names:
                self.refuse(404, "no such model")
            elif body["max_tokens"] > 4096:
                self.refuse(400, "max_tokens is too large")
            elif body["messages"][-1]["content"] == "die":
                os._exit(1)
            elif not body.get("stream"):
                grade = (Home.locate().root / "grade").read_text()
                message = {"role": "assistant", "content": grade}
                usage = {"prompt_tokens": 10, "completion_tokens": 5}
                self.reply(200, {"choices": [{"message": message}], "usage": usage})
            else:
                self.stream(body)

        def stream(self, body: dict) -> None:
            """Five tokens, the last of which calls the first tool where there is one."""
            question = " ".join(message["content"] for message in body["messages"])
            begun = len(body.get("begun_token_ids", []))
            text = f"{body['model']} heard {question}" if not begun else f" and after {begun} more"
            size = -(-len(text) // 4)
            deltas = [{"content": text[start : start + size]} for start in range(0, size * 4, size)]
            reason = "length" if body["max_tokens"] == 1 else "stop"
            last = {}
            if body.get("tools"):
                function = {"name": body["tools"][0]["function"]["name"], "arguments": "{}"}
                call = {"index": 0, "id": "call_0", "type": "function", "function": function}
                last, reason = {"tool_calls": [call]}, "tool_calls"
            self.send_response(200)
            self.end_headers()
            self.event({"delta": {"role": "assistant", "content": ""}})
            self.event({"delta": {}})
            for number, delta in enumerate([*deltas, last]):
                self.event({"delta": delta, "token_ids": [number]})
            self.event({"delta": {}, "finish_reason": reason})
            usage = {"prompt_tokens": 3, "completion_tokens": 5}
            self.wfile.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

        def event(self, choice: dict) -> None:
            self.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    port = server.server_address[1]

    def announce() -> None:
        url = f"http://127.0.0.1:{port}/v1"
        write_json(folder.ready, {"url": url, "port": port, "models": names})

    announce()
    server.serve_forever()
    folder.ready.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())

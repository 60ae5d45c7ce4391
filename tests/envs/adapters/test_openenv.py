"""Servers of OpenEnv start beside the environment and are played in words, a session a rollout."""

STAND_IN = {
    # The shape of the package's client, over plain HTTP in place of a WebSocket.
    "openenv/core/generic_client.py": """
        import itertools, json, types, urllib.request

        numbers = itertools.count()

        class GenericEnvClient:
            def __init__(self, base_url):
                self.url, self.session = base_url, next(numbers)

            def sync(self):
                return self

            def connect(self):
                pass

            def close(self):
                pass

            def reset(self, **arguments):
                return self.post("reset", arguments)

            def step(self, action):
                return self.post("step", action)

            def post(self, path, body):
                data = json.dumps({"session": self.session, **body}).encode()
                with urllib.request.urlopen(f"{self.url}/{path}", data) as reply:
                    return types.SimpleNamespace(**json.load(reply))
        """,
}
SERVER = """
    import json, os
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    secrets = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer({"status": "healthy"})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/reset":
                secrets[body["session"]] = body["seed"]
                shown = f"Name {body['seed']}{body.get('end', '')}"
                self.answer({"observation": {"text": shown}, "reward": None, "done": False})
                return
            right = body["guess"].strip() == str(secrets[body["session"]])
            seen = {"text": "right" if right else "wrong"}
            self.answer({"observation": seen, "reward": float(right), "done": right})

        def answer(self, value):
            data = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
    """
TOML = """
    [adapter]
    kind = "openenv"
    server = ["python3", "server.py"]
    action = "guess"
    observation = "text"
    instructions = "A game."
    size = 8
    seed = 3

    [adapter.reset]
    end = "!"
    """


def test_a_server_is_played_in_words(packages, write_folder, start):
    process = start(write_folder(TOML, {"server.py": SERVER}), python=packages(STAND_IN))
    rows = process.tasks()
    assert process.describe()["kind"] == "multi" and len(rows) == 8
    assert rows[0]["prompt"][0]["content"] == "A game.\n\nName 3!"
    episode, other = process.start(rows[0]), process.start(rows[1])
    assert episode.step({"role": "assistant", "content": "4"})[0]["content"] == "wrong"
    assert other.step({"role": "assistant", "content": "4"}) is None
    assert episode.step({"role": "assistant", "content": "3"}) is None
    assert [each.score()["reward"] for each in (episode, other)] == [1.0, 1.0]


def test_an_action_may_be_the_json_that_the_model_writes(packages, write_folder, start):
    toml = TOML.replace('action = "guess"', "json_action = true")
    process = start(write_folder(toml, {"server.py": SERVER}), python=packages(STAND_IN))
    episode = process.start(process.tasks()[0])
    said = episode.step({"role": "assistant", "content": "3"})
    assert "That is no JSON object" in said[0]["content"]
    assert episode.step({"role": "assistant", "content": '{"guess": "3"}'}) is None
    score = episode.score()
    assert (score["reward"], score["metrics"]) == (1.0, {"invalid_actions": 1.0})


def test_a_server_that_does_not_start_is_named(packages, write_folder, start):
    folder = write_folder(TOML, {"server.py": "raise SystemExit(5)"})
    process = start(folder, python=packages(STAND_IN))
    said = process.score({"id": "a", "prompt": [], "answer": None}, "6")["error"]
    assert "the server left with exit status 5" in said

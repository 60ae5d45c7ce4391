"""Folders of environments in every foreign format, each with the attacks in the place where its
format runs foreign code: an evaluator, a taskset, a game, a tool server, a task app, a program.

The packages that the formats need are stand-ins that lie in the folder: what an attack may do hangs
on the box of the process, not on the package. Standard library only.
"""

import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
ATTACKS = "attack_program.py"  # what environment.py is called in these folders
ROWS = json.dumps({"prompt": [{"role": "user", "content": "a"}], "question": "a", "answer": "a"})

# Where foreign code is a program of its own it has no `envs`, from which the attacks import names.
PROGRAM = """
import sys, types
names = {"Score": object, "SingleTurnEnv": object, "Task": object}
sys.modules["envs"] = types.SimpleNamespace(**names)
sys.modules["envs.rewards"] = types.SimpleNamespace(code=None)
"""
ATTACKED = """
import json
import attack_program

class NoSuchAttack(BaseException):
    pass

def attacked(text):
    order = json.loads(text)
    if order["attack"] == "prove":  # that this code runs, by what no box would say
        raise RuntimeError("proof " + str(order["with"]["number"] * 3))
    if order["attack"] not in attack_program.ATTACKS:
        raise NoSuchAttack(order["attack"])
    attack_program.ATTACKS[order["attack"]](**order["with"])
"""
# One server in Python for both formats that are played over HTTP. What stopped an attack is the
# text of an error 500.
SERVER = (
    PROGRAM
    + ATTACKED
    + """
import os
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200, {"healthy": True})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            attacked(body["env"]["seed"] if "env" in body else body["message"])
        except BaseException as error:
            self.answer(500, f"{type(error).__name__}: {error}")
        else:
            self.answer(200, {"metrics": {"outcome_reward": 1.0}})

    def answer(self, status, value):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

HTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""
)
PLAIN_SERVER = """
import os
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

HTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""
OPENENV_CLIENT = """
import json, types, urllib.error, urllib.request
try:
    from here import attacked
except ImportError:
    attacked = None

class GenericEnvClient:
    def __init__(self, base_url):
        self.url = base_url
    def sync(self):
        return self
    connect = close = lambda self: None
    def reset(self, **_):
        return types.SimpleNamespace(observation={}, reward=None, done=False)
    def step(self, action):
        if attacked is not None:
            attacked(action["message"])
        else:
            try:
                urllib.request.urlopen(self.url + "/step", json.dumps(action).encode()).close()
            except urllib.error.HTTPError as error:
                raise RuntimeError(error.read().decode()) from None
        return types.SimpleNamespace(observation={}, reward=1.0, done=True)
"""
OPENENV = '[adapter]\nkind = "openenv"\nserver = ["python3", "server.py"]\nsize = 1\n'


@dataclass(frozen=True)
class Foreign:
    """The folder of an environment in one format.

    Attributes:
        toml: its environment.toml.
        files: its further files by path; the attacks and the data are added.
        played: how an attack is given to it: as an answer that is scored ("score"), as the message
            of a turn ("turn"), as the argument of a tool ("tool"), or as the seed of the task that
            a program plays ("program").
    """

    toml: str
    files: Mapping[str, str] = field(default_factory=dict)
    played: str = "score"

    def write(self, folder: Path) -> None:
        """Write the folder."""
        files = {"environment.toml": self.toml, "here.py": ATTACKED, "datasets/train.jsonl": ROWS}
        for name, text in {**files, **self.files}.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(textwrap.dedent(text))
        (folder / ATTACKS).write_text((HERE / "environment.py").read_text())


GAME = """
    import {package}
    from here import attacked

    class Game:
        action_space = type("Text", (), {{}})()

        def __init__(self, *_, **__):
            pass

        def init(self, prompt):
            return prompt, {{}}

        def reset(self, seed):
            return "attack", {{}}

        def step(self, text):
            attacked(text)
            {result}

        def close(self):
            pass

    {package}.GAMES["game"] = Game
    """
GYM = """
    GAMES = {}

    def make(name, **arguments):
        return GAMES[name](**arguments)
    """
TASKSET = """
    import verifiers.v1 as vf
    from here import attacked

    class OneTask(vf.Task):
        @vf.reward(weight=1.0)
        async def attack(self, trace):
            attacked(trace.last_reply)
            return 1.0

    class OneTaskset(vf.Taskset):
        task_class = OneTask

        def load(self):
            yield OneTask(vf.TaskData(prompt="attack"))

    __all__ = ["OneTaskset"]
    """
FREESOLO = """
    from dataclasses import dataclass, field

    @dataclass(frozen=True)
    class Example:
        id: str = ""
        output: object = None
        record: dict = field(default_factory=dict)

    @dataclass(frozen=True)
    class Result:
        score: float
        error: object = None
        metrics: tuple = ()
        def resolved_success(self):
            return True

    def stable_example_id(number):
        return str(number)

    def task_example_from_record(record):
        return Example(record=record)
    """
FLASH = """
    from freesolo.datasets.records import Result
    from freesolo.environments import EnvironmentSingleTurn
    from here import attacked

    class Mine(EnvironmentSingleTurn):
        dataset = [{"input": "attack"}]

        def start_episode(self, example, prompt):
            return [{"role": "user", "content": "attack"}]

        def normalize_response_text(self, example, text):
            return text

        def score_response(self, example, text):
            attacked(text)
            return Result(1.0)

    def load_environment():
        return Mine()
    """
FREESOLO_BASES = """
    class EnvironmentSingleTurn:
        pass

    class EnvironmentMultiTurn:
        pass
    """
TOOLS = (
    PROGRAM
    + ATTACKED
    + """
out = sys.stdout
sys.stdout = sys.stderr
for line in sys.stdin:
    asked = json.loads(line)
    method, params = asked.get("method"), asked.get("params", {})
    if "id" not in asked:
        continue
    if method == "initialize":
        answer = {"result": {"protocolVersion": params["protocolVersion"]}}
    elif method == "tools/list":
        answer = {"result": {"tools": [{"name": "attack", "inputSchema": {"type": "object"}}]}}
    else:
        text = "worked"
        try:
            attacked(params["arguments"]["text"])
        except BaseException as error:
            text = f"stopped: {type(error).__name__}: {error}"
        answer = {"result": {"content": [{"type": "text", "text": text}]}}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer}), file=out, flush=True)
"""
)
AGENT = (
    PROGRAM
    + ATTACKED
    + """
import os
with open(os.environ["HONESMITH_TASK"]) as file:
    seed = json.load(file)["metadata"]["seed"]
try:
    attacked(seed)
except BaseException as error:
    sys.exit(f"{type(error).__name__}: {error}")
print(1.0)
"""
)


def foreign_formats(verifiers: Mapping[str, str]) -> dict[str, Foreign]:
    """Every format by name. `verifiers` are the files of the stand-in for that package."""
    reasoning_gym = {
        "reasoning_gym/__init__.py": "",
        "reasoning_gym/factory.py": """
            from here import attacked

            DATASETS = {"twice": None}

            def create_dataset(name, size, seed):
                return [{"question": "attack", "answer": "", "metadata": {}}]

            def get_score_answer_fn(name):
                def score(answer, entry):
                    attacked(answer)
                    return 1.0
                return score
            """,
        "reasoning_gym/sums/twice.py": "",
    }
    evaluator = """
        from here import attacked

        def evaluate(metadata, trajectory):
            attacked(trajectory["output"])
            return {"reward": 1.0}
        """
    # Here the client attacks nothing, so that its server does.
    plain_client = OPENENV_CLIENT.replace("from here", "from nowhere")
    return {
        "openenv": Foreign(
            OPENENV,
            {"server.py": PLAIN_SERVER, "openenv/core/generic_client.py": OPENENV_CLIENT},
            "turn",
        ),
        "openenv, its server": Foreign(
            OPENENV,
            {"server.py": SERVER, "openenv/core/generic_client.py": plain_client},
            "turn",
        ),
        "synth": Foreign(
            '[adapter]\nkind = "synth"\nserver = ["python3", "server.py"]\nsize = 1\n',
            {"server.py": SERVER},
            "program",
        ),
        "mcp": Foreign(
            '[adapter]\nkind = "mcp"\nserver = ["python3", "server.py"]\n',
            {"server.py": TOOLS},
            "tool",
        ),
        "reasoning-gym": Foreign(
            '[adapter]\nkind = "reasoning-gym"\nfamily = "twice"\nsize = 1\n', reasoning_gym
        ),
        "verifiers": Foreign(
            '[adapter]\nkind = "verifiers"\ntaskset = "mine"\n', {**verifiers, "mine.py": TASKSET}
        ),
        "rllm": Foreign('[adapter]\nkind = "rllm"\nevaluator = "e.py"\n', {"e.py": evaluator}),
        "skyrl-gym": Foreign(
            '[adapter]\nkind = "skyrl-gym"\nmodule = "game.py"\nenv = "game"\n',
            {
                "skyrl_gym/__init__.py": GYM,
                "omegaconf.py": "class OmegaConf:\n    create = staticmethod(dict)\n",
                "game.py": GAME.format(
                    package="skyrl_gym",
                    result='return {"observations": [], "reward": 1.0, "done": True}',
                ),
            },
            "turn",
        ),
        "gymnasium": Foreign(
            '[adapter]\nkind = "gymnasium"\nmodule = "game.py"\nenv = "game"\nsize = 1\n',
            {
                "gymnasium/__init__.py": GYM,
                "game.py": GAME.format(
                    package="gymnasium", result='return "", 1.0, True, False, {}'
                ),
            },
            "turn",
        ),
        "flash": Foreign(
            '[adapter]\nkind = "flash"\n',
            {
                "freesolo/__init__.py": "",
                "freesolo/datasets/records.py": FREESOLO,
                "freesolo/environments/__init__.py": FREESOLO_BASES,
                "freesolo/environments/types.py": "",
                "environment.py": FLASH,
            },
        ),
        "a command": Foreign(
            'command = ["python3", "agent.py"]\n\n[rollout]\nreward = "stdout"\n',
            {"agent.py": AGENT},
            "program",
        ),
    }

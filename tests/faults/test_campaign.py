"""F1, F3, F4, F6, F25: 500 kills at random moments over one home, and every promise after each.

Torch trainers, supervisors, both at once, and servers in the middle of a submit. The moments come
from a seed: HONESMITH_SEED and HONESMITH_KILLS choose others, and the summary says which it was.
"""

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from invariants import Witness, assert_same_curve, curve, processes_of, until
from raw_server import Server
from stand_ins import stand_in
from steady_trainer import STEP_S, expected

from engine.core.files import last_line
from engine.home.rows import TERMINAL
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.machine.processes import launcher
from engine.runs import lifecycle
from engine.runs.submit.requests import TrainRequest
from tests.engine.conftest import add_env

KILLS = int(os.environ.get("HONESMITH_KILLS") or 500)
SEED = int(os.environ.get("HONESMITH_SEED") or 20261122)
ROUNDS = 10
SHARES = {"torch": 0.22, "server": 0.2}  # of the kills; the rest is trainers without torch
STEADY = {"steps": 40, "save_every": 4}
SERVED = {"steps": 4, "save_every": 2}
TORCH: dict[str, Any] = {
    "steps": 24,
    "batch_size": 2,
    "eval_rows": 2,
    "skill_rows": 4,
    "eval_every": 12,
    "save_every": 3,
    "keep_checkpoints": 2,
    "learning_rate": 1e-3,
    "lora_rank": 4,
}
TARGETS = ("trainer", "supervisor", "both")


class Campaign:
    """One home, what was promised in it, and how often something in it was killed."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.env = add_env(home, "sums")
        self.witness = Witness(home)
        self.killed: Counter[str] = Counter()
        self.requests = 0
        self.torch_curve: list[dict[str, Any]] = []

    # -- one run, killed again and again ---------------------------------------------------

    def submit(self, kind: str) -> RunDir:
        self.requests += 1
        request = f"request-{self.requests}"
        asked = self.asked(kind)
        run = self.home.run(
            lifecycle.submit(self.home, TrainRequest(request_id=request, **asked))["run_id"]
        )
        self.witness.acked[request] = run.id
        return run

    def asked(self, kind: str) -> dict[str, Any]:
        settings = {"torch": TORCH, "steady": STEADY, "server": SERVED}[kind]
        algorithm = "sft" if kind == "torch" else "grpo"
        note = "torch" if kind == "torch" else ""
        return {"env_id": self.env, "algorithm": algorithm, "settings": settings, "note": note}

    def kill_runs(self, kind: str, kills: int, chance: random.Random) -> None:
        """Runs of one kind, until so many of their processes were killed; the last one ends."""
        wanted = self.killed[kind] + kills
        while self.killed[kind] < wanted:
            self.torment(self.submit(kind), kind, wanted, chance)

    def torment(self, run: RunDir, kind: str, wanted: int, chance: random.Random) -> None:
        """One run to its end, killed and carried on until `wanted` of its kind were."""
        while self.state(run) != "done":
            if self.killed[kind] < wanted:
                self.wait_a_while(run, kind, chance)
                self.killed[kind] += self.kill(run, chance.choice(TARGETS))
            until(lambda: not launcher.is_alive(run), "nothing of it lives", 120)
            self.witness.settled(run)
            self.carry_on(run)
        until(lambda: not launcher.is_alive(run), "the last supervisor is gone")
        self.witness.settled(run)
        whole = self.torch_curve if kind == "torch" else expected(STEADY["steps"])
        assert_same_curve(curve(run), whole)

    def wait_a_while(self, run: RunDir, kind: str, chance: random.Random) -> None:
        """A random moment: while it starts, or some steps further on."""
        if kind != "torch":
            time.sleep(chance.uniform(0, 0.5 + STEADY["steps"] * STEP_S))
            return
        if chance.random() < 0.4:
            time.sleep(chance.uniform(0, 3.0))
            return
        goal = step_of(run) + chance.randint(1, 8)
        until(lambda: step_of(run) >= goal or not launcher.is_alive(run), "it steps", 120)
        time.sleep(chance.uniform(0, 0.05))

    def kill(self, run: RunDir, target: str) -> int:
        """SIGKILL to those processes of the run; 1 when one of them was there."""
        hit = 0
        for pid in processes_of(run):
            supervisor = b"engine.supervisor" in command(pid)
            if target == "both" or supervisor == (target == "supervisor"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    hit = 1
        return hit

    def carry_on(self, run: RunDir) -> None:
        """What an agent does: look, and resume what will not go on by itself."""
        launcher.reap(self.home)
        if self.state(run) == "failed":
            lifecycle.submit(self.home, TrainRequest(resume=run.id))

    def state(self, run: RunDir) -> str:
        with Store(self.home) as store:
            return store.get_run(run.id).state

    # -- servers ---------------------------------------------------------------------------

    def kill_servers(self, kills: int, chance: random.Random) -> None:
        """Real servers over stdio, killed at a random moment around a submit. A client that got
        no answer asks the next server again, under the same request id."""
        asked, request, patience = self.asked("server"), "", 2.0
        for _ in range(kills):
            if not request:
                self.requests += 1
                request = f"request-{self.requests}"
            began = time.monotonic()
            answer = self.ask_and_kill(asked | {"request_id": request}, chance.uniform(0, patience))
            self.killed["server"] += 1
            if answer:
                self.witness.acked[request] = answer
                request = ""
                patience = min(6.0, 1.3 * (time.monotonic() - began))
            else:
                patience = min(6.0, patience + 0.2)
            self.witness.look()
        if request:  # the last one gets its answer from a process that lives
            said = lifecycle.submit(self.home, TrainRequest(request_id=request, **asked))
            self.witness.acked[request] = said["run_id"]

    def ask_and_kill(self, arguments: dict[str, Any], after_s: float) -> str:
        """The run id the server answered with before it was killed, "" without an answer."""
        server = Server(self.home)
        server.call(1, "submit_train", **arguments)
        time.sleep(after_s)
        server.process.kill()
        reply = server.answers().get(1)
        if reply is None:
            return ""
        assert not reply.get("isError"), reply
        return reply["structuredContent"]["run_id"]

    def drain(self) -> None:
        """Until every run has ended and nothing of any lives."""

        def quiet() -> bool:
            launcher.reap(self.home)
            with Store(self.home) as store:
                rows = store.list_runs(limit=10_000)
            return all(row.state in TERMINAL for row in rows) and not any(
                launcher.is_alive(self.home.run(row.run_id)) for row in rows
            )

        until(quiet, "every run has ended", 200)
        self.witness.over()


def step_of(run: RunDir) -> int:
    return int((last_line(run.metrics) or {}).get("step") or 0)


def command(pid: int) -> bytes:
    try:
        return Path("/proc", str(pid), "cmdline").read_bytes()
    except OSError:
        return b""


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    yield Campaign(Home.locate(tmp_path_factory.mktemp("campaign") / "home"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", range(ROUNDS))
def test_f1_f3_f4_whatever_is_killed_nothing_promised_is_lost(
    campaign, number, monkeypatch, record_property
):
    script = Path(__file__).parents[1] / "helpers" / "steady_trainer.py"
    stand_in(monkeypatch, trainer=script)
    monkeypatch.setenv("HONESMITH_HOME", str(campaign.home.root))
    if not campaign.torch_curve:
        run = campaign.submit("torch")
        until(lambda: campaign.state(run) in TERMINAL, "the undisturbed run ends", 120)
        assert campaign.state(run) == "done"
        campaign.torch_curve = curve(run)
    chance = random.Random(f"{SEED}-{number}")
    kills = KILLS // ROUNDS + (number < KILLS % ROUNDS)
    torch, servers = (round(kills * SHARES[kind]) for kind in ("torch", "server"))
    began = time.monotonic()
    campaign.kill_servers(servers, chance)
    campaign.kill_runs("steady", kills - torch - servers, chance)
    campaign.kill_runs("torch", torch, chance)
    campaign.drain()
    record_property(
        "said",
        f"kill campaign, round {number + 1} of {ROUNDS}, seed {SEED}: {kills} kills in "
        f"{time.monotonic() - began:.0f} s, so far {dict(campaign.killed)}, "
        f"{campaign.witness.looks} looks, {len(campaign.witness.acked)} runs",
    )

"""Whatever is killed at any moment, here or over there, a run on another machine loses nothing.

`HONESMITH_KILLS` is how often each place is hit, `HONESMITH_KILL_SEED` decides when and where.
"""

import contextlib
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from invariants import assert_same_curve, curve, verify_newest
from steady_trainer import expected

from engine.core.files import read_object, write_json
from engine.home.rows import TERMINAL
from engine.home.run_dir import RunDir
from engine.machine.processes import launcher

pytestmark = [pytest.mark.machines, pytest.mark.timeout(2400)]
SEED = os.environ.get("HONESMITH_KILL_SEED", "20261129")
KILLS = int(os.environ.get("HONESMITH_KILLS", "0"))  # 0: as many as each test names
STEPS, SAVE_EVERY = 400, 10
_Kill = Callable[[RunDir], bool]  # returns whether there was something to kill


@pytest.fixture
def fake_python(tmp_path: Path) -> Path:
    """An interpreter for the other side whose trainers show every step that is lost or doubled."""
    trainer = Path(__file__).parents[2] / "helpers" / "steady_trainer.py"
    programs = json.dumps({"trainer": str(trainer)})
    script = tmp_path / "python-there"
    script.write_text(
        f"#!/bin/sh\nexport HONESMITH_TEST_PROGRAMS='{programs}' HONESMITH_STOP_GRACE_S=0.2\n"
        f'exec {sys.executable} "$@"\n'
    )
    script.chmod(0o700)
    return script


class Campaign:
    """Runs at one place, one after the other, in which something is killed again and again.

    Args:
        place: the fixture of the place: `Box`, `Cluster` or `Pool`.
        far_root: the folder that is named by every process of ours over there.
        ways: name -> what to kill; each is as likely as the others.
        pause_s: the longest time between two kills.
    """

    def __init__(
        self, place: Any, far_root: Path, ways: Mapping[str, _Kill], pause_s: float
    ) -> None:
        self.place, self.bench, self.home = place, place.bench, place.home
        self.far_root, self.pause_s = far_root, pause_s
        self.ways = {"everything here": self.kill_here, "the run there": self.kill_there, **ways}
        self.chance = random.Random(f"{SEED} {place.compute}")
        self.killed: Counter[str] = Counter()
        self.hit_at: dict[str, int] = {}  # run -> the newest checkpoint there at the last loss

    def run(self, kills: int) -> None:
        """Kill that often, and hold every run against one that was never disturbed."""
        while self.killed.total() < kills:
            run = self.start()
            while self.killed.total() < kills and self.bench.row(run).state not in TERMINAL:
                time.sleep(self.chance.uniform(0, self.pause_s))
                way = self.chance.choice(list(self.ways))
                while self.bench.row(run).state not in TERMINAL:
                    if self.ways[way](run):
                        self.killed[way] += 1
                        break
                    time.sleep(0.05)  # not yet there, or hit a moment ago
            row = self.place.until_ended(run)
            assert row.state == "done", f"{row} after {self.killed}, seed {SEED}"
            assert_same_curve(curve(run), expected(STEPS))
            assert run.checkpoint_steps()[-1] == STEPS
            verify_newest(run)
        self.bench.until(lambda: not self.processes(), "nothing of it lives", 60)
        assert kills < 30 or self.killed.keys() == self.ways.keys(), "each way was tried"

    def start(self) -> RunDir:
        """Queue a run of `STEPS` steps, and start it."""
        run = self.place.queue()
        config = read_object(run.config)
        config["settings"] |= {"steps": STEPS, "save_every": SAVE_EVERY}
        write_json(run.config, config)
        launcher.start_queued(self.home)
        return run

    def kill_here(self, run: RunDir) -> bool:
        """Kill the supervisor of this side and what brings the files; the next look goes on."""
        record = self.record(run)
        if record is None or record.get("attempt") != self.bench.row(run).attempt:
            return False
        if not self.kill(record["supervisor_pid"], record["trainer_pid"]):
            return False
        self.bench.until(lambda: not launcher.is_alive(run), "nothing of it lives here")
        launcher.reap(self.home)
        return True

    def kill_there(self, run: RunDir) -> bool:
        """Kill supervisor and trainer over there, unless nothing was saved since the last time: a
        run that is lost again and again without a new checkpoint is given up."""
        if not self.is_ahead(run):
            return False
        record = self.record(self.place.far_run(run))
        if record is None:
            return False
        ours = {process.pid for process in self.processes()}  # an id may be another's by now
        return self.kill(*ours & {record["supervisor_pid"], record["trainer_pid"]})

    def is_ahead(self, run: RunDir) -> bool:
        """Whether this side has a newer checkpoint than the other had at the last loss there."""
        newest = max(run.checkpoint_steps(), default=0)
        if not run.far("placement").exists() or newest <= self.hit_at.get(run.id, 0):
            return False
        self.hit_at[run.id] = max(self.place.far_run(run).checkpoint_steps(), default=newest)
        return True

    @staticmethod
    def record(run: RunDir) -> dict[str, Any] | None:
        """What is noted of the processes of a run; None if there is nothing."""
        try:
            return read_object(run.started_record)
        except (OSError, ValueError):
            return None

    def kill(self, *pids: int) -> bool:
        """Kill processes; returns whether one of them lived."""
        lived = False
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                self.bench.kill(pid)
                lived = True
        return lived

    def processes(self) -> list[psutil.Process]:
        """Every process of a run, here and there."""
        roots = (str(self.far_root), str(self.home.runs))
        living = []
        for process in psutil.process_iter(["cmdline", "status"]):
            words = " ".join(process.info["cmdline"] or [])
            is_over = process.info["status"] == psutil.STATUS_ZOMBIE
            if not is_over and any(root in words for root in roots):
                living.append(process)
        return living


def kills_of(number: int) -> int:
    """How often a place is hit."""
    return KILLS or number


def test_over_ssh_sshd_connections_and_both_sides_may_die_at_any_moment(
    box, monkeypatch, record_property
):
    """40 kills."""
    monkeypatch.setenv("HONESMITH_STOP_GRACE_S", "0.2")

    def kill_sshd(run: RunDir) -> bool:
        """Kill the daemon and every session; another one listens after a while."""
        daemon = box.sshd.process
        sessions = psutil.Process(daemon.pid).children(recursive=True)
        for process in (daemon, *sessions):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        daemon.wait(10)
        time.sleep(campaign.chance.uniform(0, 1.0))
        box.sshd.start()
        return True

    def kill_connection(run: RunDir) -> bool:
        """Kill the ssh program of this side."""
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name() == "ssh" and "box" in process.cmdline():
                    process.kill()
                    return True
        return False

    ways = {"sshd": kill_sshd, "the connection": kill_connection}
    campaign = Campaign(box, box.far_root, ways, pause_s=1.5)
    campaign.run(kills_of(40))
    record_property("said", f"ssh, seed {SEED}: {dict(campaign.killed)}")


def test_on_slurm_controller_node_daemon_and_job_may_die_at_any_moment(
    cluster, monkeypatch, record_property
):
    """30 kills."""

    def kill_daemon(name: str) -> _Kill:
        def kill(run: RunDir) -> bool:
            cluster.slurm.kill(name)
            time.sleep(campaign.chance.uniform(0, 2.0))
            cluster.slurm.start(name)
            return True

        return kill

    ways = {name: kill_daemon(name) for name in ("slurmctld", "slurmd")}
    campaign = Campaign(cluster, cluster.root, ways, pause_s=3.0)
    campaign.run(kills_of(30))
    record_property("said", f"slurm, seed {SEED}: {dict(campaign.killed)}")


def test_on_ray_head_nodes_daemons_and_drivers_may_die_at_any_moment(
    pool, monkeypatch, record_property
):
    """30 kills."""

    def kill_node(node: str, program: str = "") -> _Kill:
        def kill(run: RunDir) -> bool:
            """Kill a node, or its daemon; all is mended after a while."""
            if not campaign.is_ahead(run):
                return False
            pool.ray.kill(node, program)
            time.sleep(campaign.chance.uniform(0, 2.0))
            pool.ray.mend()
            return True

        return kill

    ways = {
        "the head": kill_node("head"),
        "the worker": kill_node("worker"),
        "the worker's raylet": kill_node("worker", "raylet"),
    }
    campaign = Campaign(pool, pool.root, ways, pause_s=3.0)
    campaign.run(kills_of(30))
    record_property("said", f"ray, seed {SEED}: {dict(campaign.killed)}")

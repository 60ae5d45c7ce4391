"""Stands in for `engine.worker` where trainers are killed by the hundred: no torch, the same files.

A state of 32 bytes goes from step to step by a hash, and each step's loss follows from it, so a
step that was lost, doubled or started from the wrong state shows in the curve (`expected`). A run
whose note is "torch" becomes the real trainer in this very process.
"""

import hashlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

STEP_S = 0.03


def expected(steps: int) -> list[dict[str, Any]]:
    """The curve of a run that was never disturbed."""
    state, found = _first(), [{"step": 0, "heldout_success": 0.25}]
    for step in range(1, steps + 1):
        state = _next(state, step)
        found.append({"step": step, "loss": _loss(state)})
    return found


def _first() -> str:
    return hashlib.sha256(b"steady").hexdigest()


def _next(state: str, step: int) -> str:
    return hashlib.sha256(f"{state} {step}".encode()).hexdigest()


def _loss(state: str) -> float:
    return int(state[:8], 16) / 2**32


def main() -> int:
    from engine.core.files import Appender, read_json, write_json
    from engine.home.run_dir import RunDir
    from engine.home.store import Store

    run = RunDir(Path(sys.argv[1]))
    config = read_json(run.config)
    if config.get("note") == "torch":
        os.execv(sys.executable, [sys.executable, "-P", "-m", "engine.worker", str(run.path)])
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    threading.Thread(target=_lifeline, daemon=True).start()
    with Store(run.home) as store:
        store.set_state(run.id, "running", only_from={"preparing"}, started=time.time())
    total, save_every = config["settings"]["steps"], config["settings"]["save_every"]
    for left in run.checkpoints.glob(".step_*"):
        shutil.rmtree(left)
    latest = run.latest_checkpoint()
    done, state = 0, _first()
    if latest:
        kept = read_json(latest / "state.json")
        done, state = kept["step"], kept["state"]
    _rewind(run.metrics, done if latest else -1)
    with Appender(run.events) as events, Appender(run.metrics) as metrics:
        events.append({"time": time.time(), "event": "started", "total_steps": total})
        if not latest:
            metrics.append({"step": 0, "time": time.time(), "heldout_success": 0.25})
        for step in range(done + 1, total + 1):
            if stop.wait(STEP_S):
                if step > 1:
                    _save(run, step - 1, state)
                return 4
            state = _next(state, step)
            metrics.append({"step": step, "time": time.time(), "loss": _loss(state)})
            if step % save_every == 0 or step == total:
                _save(run, step, state)
                events.append({"time": time.time(), "event": "checkpoint", "step": step})
        events.append({"time": time.time(), "event": "finished"})
    write_json(run.result, {"verdict": "better", "summary": "it got better"})
    return 0


def _rewind(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n") and json.loads(line)["step"] <= step:
            kept.append(line)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_bytes(b"".join(kept))
    os.replace(aside, path)


def _save(run: Any, step: int, state: str) -> None:
    final = run.checkpoint(step)
    if (final / "MANIFEST.json").exists():
        return
    aside = final.with_name(f".{final.name}.{os.getpid()}")
    aside.mkdir()
    data = json.dumps({"step": step, "state": state}).encode()
    (aside / "state.json").write_bytes(data)
    facts = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest = {"run": run.id, "step": step, "files": {"state.json": facts}}
    (aside / "MANIFEST.json").write_text(json.dumps(manifest))
    os.replace(aside, final)


def _lifeline() -> None:
    os.read(int(os.environ["HONESMITH_LIFELINE_FD"]), 1)
    os._exit(9)


if __name__ == "__main__":
    sys.exit(main())

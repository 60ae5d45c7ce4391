"""Stands in for `engine.worker` in tests: the same contract on the run folder, without torch.

What it shall do is in `fake_trainer` of the run's config, else in its settings: `steps`,
`save_every`, `behave` (see below) and `hold_at`, a step before which it waits (file `holds`) until
the file `go` is in the run folder. With `beats` it gives signs of life: "always", or "until_hold",
after which it hangs in `hang_here` whatever it is told.
With `bad_place` its machine fails at step 3 if the run's folder lies below a folder of that name.
A file `hold` in the home holds every trainer before its first step; `evidence.json` there holds by
run id what their verdicts rest on.
"""

import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from engine.core.files import Appender, read_json, write_json
from engine.home.run_dir import RunDir
from engine.home.store import Store
from engine.machine.pace.heartbeat import Heartbeat, Work, write_heartbeat


def main() -> int:
    run = RunDir(Path(sys.argv[1]))
    config = read_json(run.config)
    settings = config["settings"] | config.get("fake_trainer", {})
    behave = settings.get("behave", "")
    stop = threading.Event()
    ignore = behave == "ignore_sigterm" or settings.get("beats") == "until_hold"
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if ignore else lambda *_: stop.set())
    threading.Thread(target=_lifeline, daemon=True).start()
    (run.path / "holds").unlink(missing_ok=True)
    print("trainer starts", flush=True)
    if behave == "fail":
        write_json(run.failure, {"kind": "data", "message": "row 3 is empty", "hint": "fill it"})
        return 3
    if behave == "odd_exit":
        print("something odd happened", flush=True)
        return 7
    if behave == "leave_daemon":
        code = (
            "import time, os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
        )
        pid_file = run.path / "daemon.pid"
        subprocess.Popen([sys.executable, "-c", code, str(pid_file)], start_new_session=True)
        while not (pid_file.exists() and pid_file.read_text()):
            time.sleep(0.01)
    with Store(run.home) as store:
        store.set_state(run.id, "running", only_from={"preparing"}, started=time.time())
    return _train(run, settings, stop, write_result=behave != "no_result")


def _train(run: RunDir, settings: dict, stop: threading.Event, write_result: bool) -> int:
    while (run.home.root / "hold").exists() and not stop.is_set():
        time.sleep(0.01)
    total, hold_at = settings.get("steps", 3), settings.get("hold_at")
    latest = run.latest_checkpoint()
    first = int(latest.name.removeprefix("step_")) + 1 if latest else 1
    with Appender(run.events) as events, Appender(run.metrics) as metrics:
        events.append({"time": time.time(), "event": "started", "total_steps": total})
        if first == 1:
            metrics.append({"step": 0, "time": time.time(), "heldout_success": 0.25})
        for step in range(first, total + 1):
            if step == 3 and settings.get("bad_place") in run.path.parts:
                failure = {"kind": "infra", "message": "the device fell off the bus", "hint": ""}
                write_json(run.failure, failure)
                return 3
            if step == hold_at:
                (run.path / "holds").touch()
            beat(run, settings, step, total)
            while step == hold_at and not (run.path / "go").exists() and not stop.is_set():
                if settings.get("beats") == "until_hold":
                    hang_here()
                beat(run, settings, step, total)
                time.sleep(0.01)
            if stop.is_set():
                _save(run, step - 1)
                return 4
            metrics.append({"step": step, "time": time.time(), "loss": 1.0 / step})
            if step % settings.get("save_every", 1) == 0:
                _save(run, step)
                events.append({"time": time.time(), "event": "checkpoint", "step": step})
            if step == settings.get("evaluate_at"):
                line = {"event": "evaluated", "step": step, "heldout_success": 0.5}
                events.append({"time": time.time(), **line})
            if step == settings.get("alert_at"):
                line = {"event": "alert", "id": "flat", "message": "the reward is flat"}
                events.append({"time": time.time(), "step": step, **line})
        events.append({"time": time.time(), "event": "finished"})
    if run.latest_checkpoint() is not None and not run.best.is_symlink():
        run.best.symlink_to(run.latest_checkpoint().name)
    if write_result:
        result = {"verdict": "better", "summary": "it got better"}
        evidence = run.home.root / "evidence.json"
        if evidence.exists():
            result["evidence"] = read_json(evidence).get(run.id, {})
        write_json(run.result, result)
    return 0


def beat(run: RunDir, settings: dict, step: int, total: int) -> None:
    """A heartbeat of a trainer that takes `step_s` seconds for each step."""
    if "beats" not in settings:
        return
    done, step_s = step - 1, settings.get("step_s", 0.01)
    work = {"training": Work(total, done, done * step_s, done * step_s**2, 0.01)}
    attempt = int(os.environ["HONESMITH_ATTEMPT"])
    heartbeat = Heartbeat(attempt, time.time(), "training", work=work)
    descriptor = os.open(run.heartbeat, os.O_WRONLY | os.O_CREAT, 0o600)
    write_heartbeat(descriptor, heartbeat)
    os.close(descriptor)


def hang_here() -> None:
    """Ends only when it is killed."""
    while True:
        time.sleep(0.01)


def _save(run: RunDir, step: int) -> None:
    folder = run.checkpoint(step)
    if step < 1 or folder.exists():
        return
    aside = folder.with_name(f".{folder.name}")
    aside.mkdir(exist_ok=True)  # what a killed attempt left
    write_json(aside / "MANIFEST.json", {"step": step})
    aside.rename(folder)


def _lifeline() -> None:
    os.read(int(os.environ["HONESMITH_LIFELINE_FD"]), 1)
    os._exit(9)


if __name__ == "__main__":
    sys.exit(main())

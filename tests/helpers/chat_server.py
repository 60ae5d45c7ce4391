"""A deployment as its own process: the OpenAI-compatible server over pebble, with a key."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from engine.core.files import read_json, write_json
from engine.home.run_dir import DeployDir, Home
from engine.models import catalog

KEY = {"Authorization": "Bearer sesame"}
START_S = 50  # importing torch on busy cores


@contextmanager
def chat_server(home: Home) -> Iterator[tuple[DeployDir, str]]:
    """(its folder, its base URL ending in /v1); told to end afterwards."""
    folder = home.deployment("d1")
    folder.path.mkdir(parents=True)
    folder.key.write_text("sesame")
    base = str(catalog.BUILTIN["pebble"])
    write_json(folder.config, {"base_path": base, "base_name": "pebble", "adapters": [], "port": 0})
    env = os.environ | {"GOMP_SPINCOUNT": "10000"}
    argv = [sys.executable, "-P", "-m", "engine.worker.serving.openai_server", str(folder.path)]
    process = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_S
        while not folder.ready.exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        yield folder, str(read_json(folder.ready)["url"])
    finally:
        process.terminate()
        process.wait(20)

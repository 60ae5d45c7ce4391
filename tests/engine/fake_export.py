"""Stands in for `engine.worker.serving.merge` in tests: copies the base in the place of a merge."""

import json
import shutil
import sys
from pathlib import Path

config = json.loads(Path(sys.argv[1]).read_text())
if "broken" in config["out"]:
    sys.exit("the adapter is damaged")
if config["gguf"]:
    Path(config["out"]).mkdir()
    (Path(config["out"]) / config["gguf"]).write_bytes(b"GGUF")
else:
    shutil.copytree(config["base_path"], config["out"])

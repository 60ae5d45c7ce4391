"""The cold start benchmark itself, on servers that answer at once."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parent.parent.parent / "benchmarks" / "cold_start.py"
SPEC = importlib.util.spec_from_file_location("cold_start", PATH)
cold_start = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(cold_start)

ANSWERS = """
import json, sys, time
asked = json.loads(sys.stdin.readline())
time.sleep({delay})
print(json.dumps({{"jsonrpc": "2.0", "id": asked["id"], "result": {{}}}}), flush=True)
sys.stdin.read()
"""


def server(tmp_path, delay):
    script = tmp_path / f"server_{delay}.py"
    script.write_text(ANSWERS.format(delay=delay))
    return [sys.executable, "-S", "-E", str(script)]


def test_both_eras_are_measured_and_a_slower_server_shows(tmp_path, monkeypatch):
    monkeypatch.setattr(cold_start, "MINIMAL", ANSWERS.format(delay=0.0))
    report = cold_start.measure(server(tmp_path, 0.3), 1, limit_s=4.0)
    for era in ("legacy", "modern"):
        assert report[era]["ours_ms"] > 300 and report[era]["ratio"] > 1.0
    assert report["ratio"] == max(report["legacy"]["ratio"], report["modern"]["ratio"])
    assert json.loads(json.dumps(report)) == report


def test_a_server_that_says_nothing_is_an_error_with_its_words(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text("import sys; sys.exit('no such module')")
    with pytest.raises(RuntimeError, match="no such module"):
        cold_start.first_reply([sys.executable, str(script)], "legacy", {}, 4.0)


def test_the_ratio_is_the_median_over_rounds():
    ours, minimal = [[2.0, 1.0], [3.0, 1.0], [40.0, 1.0]], [[1.0, 0.5], [2.0, 0.5], [2.0, 0.5]]
    report = cold_start.era_report(ours, minimal)
    assert report["ratio"] == 2.0 and report["ours_ms"] == 3000.0 and report["cpu_ratio"] == 2.0

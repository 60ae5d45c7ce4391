"""How long a server takes to answer its first request, beside a minimal one on the same SDK.

Each round starts both servers in both protocol eras, one after the other in alternating order, and
measures from the start of the process to the complete reply over stdio: `initialize` for the
legacy era, `server/discover` for the modern one. Prints one JSON line with medians in milliseconds
and their ratio; the ratio of the fastest rounds and of processor time stand beside it, for machines
that do something else meanwhile.

    python benchmarks/cold_start.py --rounds 11
    python benchmarks/cold_start.py -- honesmith serve
"""

import argparse
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.processes import cpu_seconds

ROOT = Path(__file__).resolve().parent.parent
MINIMAL = '''
from mcp.server import MCPServer

mcp = MCPServer("minimal")


@mcp.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


mcp.run()
'''
ME = {"name": "cold-start", "version": "1"}
META = "io.modelcontextprotocol"
FIRST_REQUEST: dict[str, dict[str, Any]] = {
    "legacy": {
        "method": "initialize",
        "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": ME},
    },
    "modern": {
        "method": "server/discover",
        "params": {
            "_meta": {
                f"{META}/protocolVersion": "2026-07-28",
                f"{META}/clientInfo": ME,
                f"{META}/clientCapabilities": {},
            }
        },
    },
}


def first_reply(command: list[str], era: str, env: dict[str, str], limit_s: float) -> list[float]:
    """[wall, processor] seconds from the start of the process to its first reply.

    Raises RuntimeError with what the server said when no good reply comes in time.
    """
    request = json.dumps({"jsonrpc": "2.0", "id": 1, **FIRST_REQUEST[era]}) + "\n"
    with tempfile.TemporaryFile() as errors:
        began = time.perf_counter()
        server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, cwd=ROOT, env=env
        )
        assert server.stdin is not None and server.stdout is not None
        try:
            server.stdin.write(request.encode())
            server.stdin.flush()
            line = read_line(server.stdout.fileno(), began + limit_s)
            wall = time.perf_counter() - began
            processor = cpu_seconds(server.pid)
            if "result" not in json.loads(line or b"{}"):
                errors.seek(0)
                message = errors.read()[-2000:].decode("utf-8", "replace")
                raise RuntimeError(f"{' '.join(command)} ({era}): {line.decode()[:500]} {message}")
        finally:
            server.stdin.close()
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
            server.stdout.close()
    return [wall, processor]


def read_line(fd: int, deadline: float) -> bytes:
    """One line from a pipe, or what came of it before the deadline or the end."""
    data = b""
    while not data.endswith(b"\n"):
        ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.perf_counter()))
        chunk = os.read(fd, 65536) if ready else b""
        if not chunk:
            break
        data += chunk
    return data


def measure(command: list[str], rounds: int, limit_s: float) -> dict[str, Any]:
    """Interleaved rounds of both servers in both eras, after one that only warms caches."""
    took: dict[tuple[str, str], list[list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "minimal.py")
        script.write_text(MINIMAL)
        env = os.environ | {"HONESMITH_HOME": str(Path(folder, "home"))}
        servers = {"minimal": [sys.executable, str(script)], "ours": command}
        for turn in range(rounds + 1):
            order = list(servers) if turn % 2 else list(servers)[::-1]
            for era in FIRST_REQUEST:
                for name in order:
                    times = first_reply(servers[name], era, env, limit_s)
                    if turn:
                        took.setdefault((name, era), []).append(times)
    eras = {era: era_report(took["ours", era], took["minimal", era]) for era in FIRST_REQUEST}
    return {
        "benchmark": "cold_start",
        "rounds": rounds,
        "command": " ".join(command),
        **eras,
        "ratio": max(report["ratio"] for report in eras.values()),
    }


def era_report(ours: list[list[float]], minimal: list[list[float]]) -> dict[str, float]:
    """Medians of one era; the ratio is the median over rounds, which a busy moment moves least."""
    ratios = [a[0] / b[0] for a, b in zip(ours, minimal, strict=True)]
    fastest = [min(times[0] for times in side) for side in (ours, minimal)]
    processor = [statistics.median(times[1] for times in side) for side in (ours, minimal)]
    return {
        "ours_ms": round(1000 * statistics.median(times[0] for times in ours), 1),
        "minimal_ms": round(1000 * statistics.median(times[0] for times in minimal), 1),
        "ratio": round(statistics.median(ratios), 3),
        "min_ratio": round(fastest[0] / fastest[1], 3),
        "ours_cpu_ms": round(1000 * processor[0], 1),
        "minimal_cpu_ms": round(1000 * processor[1], 1),
        "cpu_ratio": round(processor[0] / processor[1], 3) if processor[1] else 0.0,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Cold start of the server, side by side.")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--limit-s", type=float, default=60.0, help="longest wait for one reply")
    parser.add_argument("--max-ratio", type=float, help="exit status 1 above this ratio")
    parser.add_argument("command", nargs="*", help="how to start the server, after --")
    asked = parser.parse_args()
    if asked.rounds < 1:
        parser.error("--rounds must be at least 1")
    command = asked.command or [sys.executable, "-m", "mcp_server.cli", "serve"]
    report = measure(command, asked.rounds, asked.limit_s)
    print(json.dumps(report))
    return int(asked.max_ratio is not None and report["ratio"] > asked.max_ratio)


if __name__ == "__main__":
    sys.exit(main())

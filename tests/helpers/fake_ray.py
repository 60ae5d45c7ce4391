"""The Jobs API of Ray 2.60 on loopback, in the shapes that a real one answered with.

It runs entrypoints as Ray does: a shell in a session of its own, with the token of the cluster
among the variables. What a real cluster loses is planted by hand: `lose`, `forget`.
"""

import json
import os
import signal
import subprocess
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_WAITING = (
    "Job has not started yet. It may be waiting for resources (CPUs, GPUs, memory, custom "
    "resources) to become available."
)
_TRACEBACK = (
    "Traceback (most recent call last):\n"
    '  File "/ray/dashboard/modules/job/job_head.py", line 419, in submit_job\n'
    "    raise RuntimeError(...)\n"
)


@dataclass
class _Job:
    facts: dict[str, Any]
    process: subprocess.Popen[bytes] | None = None


@dataclass
class FakeRay:
    """A cluster of one node with room for everything but what `missing` names.

    Attributes:
        token: that every call must bring; "" for an open cluster.
        missing: names of resources that no node has: a job that asks for one waits.
        calls: what was asked: method and path.
    """

    token: str = ""
    missing: set[str] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)
    jobs: dict[str, _Job] = field(default_factory=dict)

    def __post_init__(self) -> None:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                length = int(self.headers.get("content-length") or 0)
                body = json.loads(self.rfile.read(length)) if length else {}
                authorization = self.headers.get("authorization")
                status, content = fake.answer(self.command, self.path, body, authorization)
                data = (content if isinstance(content, str) else json.dumps(content)).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_DELETE = _answer

            def log_message(self, *arguments: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Answer no more, and end what was started."""
        self._server.shutdown()
        self._server.server_close()
        for job in self.jobs.values():
            if job.process is not None and job.process.poll() is None:
                os.killpg(job.process.pid, signal.SIGKILL)
                job.process.wait()

    def answer(self, method: str, path: str, body: Any, authorization: str | None) -> Any:
        """The status and the content of an answer."""
        self.calls.append(f"{method} {path}")
        if self.token and authorization is None:
            return 401, "Unauthorized: Missing authentication token"
        if self.token and authorization != f"Bearer {self.token}":
            return 403, "Forbidden: Invalid authentication token"
        if path == "/api/version":
            return 200, {"version": "4", "ray_version": "2.60.0", "session_name": "session_x"}
        if path == "/nodes?view=summary":
            node = {"state": "ALIVE", "resourcesTotal": {"CPU": 2.0, "memory": 1e9}}
            return 200, {"result": True, "data": {"summary": [{"raylet": node}]}}
        if path == "/api/jobs/":
            if method == "POST":
                return self._submit(body)
            return 200, [self._seen(job) for job in self.jobs.values()]
        name, _, verb = path.removeprefix("/api/jobs/").partition("/")
        job = self.jobs.get(name)
        if job is None:
            return 404, f"Job {name} does not exist"
        facts = self._seen(job)
        is_ended = facts["status"] in ("STOPPED", "SUCCEEDED", "FAILED")
        if verb == "stop":
            if job.process is not None and not is_ended:
                job.process.terminate()
                facts["status"] = "STOPPED"
            return 200, {"stopped": not is_ended}  # also of one that waits, which goes on waiting
        if method == "DELETE":
            if not is_ended:
                return 500, _TRACEBACK + f"RuntimeError: Attempted to delete job '{name}'"
            del self.jobs[name]
            return 200, {"deleted": True}
        return 200, facts

    def _submit(self, body: Any) -> Any:
        name = body["submission_id"]
        if name in self.jobs:
            error = f"ValueError: Job with submission_id {name} already exists."
            return 500, _TRACEBACK + error
        facts = {
            "type": "SUBMISSION",
            "job_id": None,
            "submission_id": name,
            "driver_info": None,
            "status": "PENDING",
            "entrypoint": body["entrypoint"],
            "message": _WAITING,
            "error_type": None,
            "metadata": body.get("metadata"),
            "runtime_env": None,
            "driver_exit_code": None,
        }
        self.jobs[name] = _Job(facts)
        if not self.missing & set(body.get("entrypoint_resources") or {}):
            self.jobs[name].process = subprocess.Popen(
                body["entrypoint"],
                shell=True,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "RAY_AUTH_TOKEN": self.token, "RAY_ADDRESS": "127.0.0.1:6379"},
            )
        return 200, {"job_id": name, "submission_id": name}

    def _seen(self, job: _Job) -> dict[str, Any]:
        """A job as it is now."""
        facts = job.facts
        if job.process is not None and facts["status"] in ("PENDING", "RUNNING"):
            code = job.process.poll()
            facts |= {"status": "RUNNING", "message": "Job is currently running."}
            if code == 0:
                facts |= {"status": "SUCCEEDED", "message": "Job finished successfully."}
            elif code is not None:
                message = f"Job entrypoint command failed with exit code {code}. No logs available."
                facts |= {"status": "FAILED", "message": message}
                facts |= {"error_type": "JOB_ENTRYPOINT_COMMAND_ERROR"}
            facts["driver_exit_code"] = code
        return facts

    def lose(self, name: str, error: str = "JOB_SUPERVISOR_ACTOR_DIED") -> None:
        """Say of a job what is said where its node was lost."""
        message = "Job supervisor actor died: The actor died because its node has died."
        self.jobs[name].facts |= {"status": "FAILED", "message": message, "error_type": error}

    def forget(self) -> None:
        """Know nothing of what was, as a head that was started anew."""
        self.jobs.clear()

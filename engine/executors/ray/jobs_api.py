"""The Jobs API of a Ray cluster over HTTP: called, and its answers read.

Ray answers a second job of one id, and much else that a caller did wrong, with 500 and a traceback:
what became of a call is asked of the job itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from engine.core.files import JsonObject
from engine.executors.ssh import FarError, HostLost, HostRefused
from engine.home.sanitize import one_line

Status = Literal["PENDING", "RUNNING", "STOPPED", "SUCCEEDED", "FAILED"]
ENDED = ("STOPPED", "SUCCEEDED", "FAILED")
_TIMEOUT = httpx.Timeout(30.0, connect=8.0)
_MOST_BYTES = 32 << 20  # of an answer


@dataclass(frozen=True)
class Job:
    """A job as Ray shows it.

    Attributes:
        error: Ray's word for why it failed, such as "JOB_SUPERVISOR_ACTOR_DIED"; "" for none.
        message: one line about it, in Ray's words.
        exit_code: of the program that it started; None while it runs, and if that is not known.
    """

    id: str
    status: str
    message: str = ""
    error: str = ""
    exit_code: int | None = None

    @property
    def is_ended(self) -> bool:
        """Whether the job is over, well or badly."""
        return self.status in ENDED


class JobsApi:
    """The API of one cluster. Every call raises HostLost if the cluster is not reached or gives no
    answer of Ray's form, and HostRefused if it does not take the token."""

    def __init__(self, address: str, token: str, token_env: str) -> None:
        """Prepare a client; the first call connects.

        Args:
            address: the URL of the cluster's dashboard.
            token: the token that Ray asks for; "" for none.
            token_env: the environment variable that it is from, for errors; "" for none.
        """
        self.address, self._token_env = address.rstrip("/"), token_env
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # Nothing of this machine's settings may send the token elsewhere: no proxy, no redirect.
        self._client = httpx.Client(
            base_url=self.address, headers=headers, timeout=_TIMEOUT, trust_env=False
        )

    def close(self) -> None:
        """End the connections to the API."""
        self._client.close()

    def submit(
        self, job: str, entrypoint: str, metadata: Mapping[str, str], resources: JsonObject
    ) -> None:
        """Submit a job, unless there is one with this id. Raises FarError if Ray refuses it.

        Args:
            job: the job's id, which the caller chooses.
            entrypoint: the command; it is shown to everybody who may look at the cluster.
            metadata: texts that Ray keeps with the job.
            resources: what it asks for: `entrypoint_num_gpus` and the like.
        """
        body = {"submission_id": job, "entrypoint": entrypoint, "metadata": dict(metadata)}
        answer = self._ask("POST", "/api/jobs/", {**body, **resources})
        # Ray answers a second job with the same id with an error too: that one is not refused.
        if answer.status_code != httpx.codes.OK and self.find(job) is None:
            raise FarError("RAY_REFUSED", f"Ray does not take the job: {_last_line(answer.text)}")

    def find(self, job: str) -> Job | None:
        """Return the job with this id; None if Ray knows none."""
        answer = self._ask("GET", f"/api/jobs/{job}")
        if answer.status_code == httpx.codes.NOT_FOUND:
            return None
        return _job_from(self._json(answer, dict))

    def owned(self, prefix: str) -> list[Job]:
        """List every job whose id begins with `prefix`."""
        listed = self._json(self._ask("GET", "/api/jobs/"), list)
        jobs = [_job_from(facts) for facts in listed if isinstance(facts, dict)]
        return [job for job in jobs if job.id.startswith(prefix)]

    def stop(self, job: str) -> None:
        """Have Ray end the job with this id, for which it gives three seconds. One that has ended
        stays as it is."""
        self._ask("POST", f"/api/jobs/{job}/stop")

    def delete(self, job: str) -> None:
        """Have Ray forget the ended job with this id; one that lives stays."""
        self._ask("DELETE", f"/api/jobs/{job}")

    def nodes(self) -> list[Mapping[str, float]]:
        """Return what each living node has in all, whether it is in use or not, such as {"CPU":
        8.0, "GPU": 1.0}. Ray changes the spelling of resources that a cluster has named itself."""
        facts = self._json(self._ask("GET", "/nodes?view=summary"), dict)
        data = facts.get("data")
        summary = data.get("summary") if isinstance(data, dict) else None
        # A raylet is the process of Ray on a node.
        raylets = [node.get("raylet") for node in summary or [] if isinstance(node, dict)]
        totals = [
            raylet.get("resourcesTotal")
            for raylet in raylets
            if isinstance(raylet, dict) and raylet.get("state") == "ALIVE"
        ]
        return [total if isinstance(total, dict) else {} for total in totals]

    def version(self) -> str:
        """Return the version of Ray. Raises HostLost also if another program than Ray answers."""
        facts = self._json(self._ask("GET", "/api/version"), dict)
        if "ray_version" not in facts:
            raise HostLost(f"{self.address} is no Jobs API of Ray")
        return one_line(str(facts["ray_version"]), 40)

    def is_open(self) -> bool:
        """Tell whether the API answers without a token; False if it does not answer at all."""
        try:
            answer = httpx.get(f"{self.address}/api/jobs/", timeout=_TIMEOUT, trust_env=False)
        except httpx.HTTPError:
            return False
        return answer.status_code == httpx.codes.OK

    def _ask(self, method: str, path: str, body: JsonObject | None = None) -> httpx.Response:
        """Send a request, with `body` as JSON, and return the whole answer, whatever its status is.

        Raises HostLost if there is no answer or one that is too long, HostRefused if the token is
        not taken.
        """
        try:
            with self._client.stream(method, path, json=body) as answer:
                data = b""
                for part in answer.iter_bytes():
                    data += part
                    if len(data) > _MOST_BYTES:
                        raise HostLost(f"{self.address} answers without an end")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            why = str(error) or type(error).__name__
            raise HostLost(f"{self.address} does not answer: {why}") from error
        if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise HostRefused(
                f"{self.address} does not take the token of {self._token_env or 'no variable'}",
                f"Put the cluster's token into the variable {self._token_env}."
                if self._token_env
                else "Name the variable with the cluster's token: token_env of the host.",
            )
        return httpx.Response(answer.status_code, content=data)

    def _json(self, answer: httpx.Response, kind: type) -> Any:
        """Return the JSON value in an answer. Raises HostLost if the answer is an error, or its
        value is not of the type `kind` (dict or list)."""
        if answer.status_code != httpx.codes.OK:
            last_line = _last_line(answer.text)
            raise HostLost(f"{self.address} answers {answer.status_code}: {last_line}")
        try:
            content = answer.json()
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, kind):
            raise HostLost(f"{self.address} answers in no form of Ray's")
        return content


def _job_from(facts: JsonObject) -> Job:
    """Make a `Job` from the object with which Ray describes one; missing values become empty."""
    code = facts.get("driver_exit_code")
    return Job(
        id=str(facts.get("submission_id") or ""),
        status=str(facts.get("status")),
        message=_last_line(str(facts.get("message") or "")),
        error=one_line(str(facts.get("error_type") or ""), 60),
        exit_code=code if isinstance(code, int) else None,
    )


def _last_line(text: str) -> str:
    """Return the last line of a text that is not blank, shortened; in a traceback that is the
    error. Returns "" for a blank text."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return one_line(lines[-1], 300) if lines else ""

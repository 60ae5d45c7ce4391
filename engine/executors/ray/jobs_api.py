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
        exit_code: of the program that it started; None while it runs, and where that is not known.
    """

    id: str
    status: str
    message: str = ""
    error: str = ""
    exit_code: int | None = None

    @property
    def is_ended(self) -> bool:
        """Whether Ray does nothing more for it."""
        return self.status in ENDED


class JobsApi:
    """The API of one cluster. Every call raises HostLost where it is not reached or does not
    answer, and HostRefused where it does not take the token."""

    def __init__(self, address: str, token: str, token_env: str) -> None:
        """Nothing is connected to yet.

        Args:
            token: that Ray asks for; "" for none.
            token_env: the variable that it is from, for messages.
        """
        self.address, self._token_env = address.rstrip("/"), token_env
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # Nothing of this machine's settings may send the token elsewhere: no proxy, no redirect.
        self._client = httpx.Client(
            base_url=self.address, headers=headers, timeout=_TIMEOUT, trust_env=False
        )

    def close(self) -> None:
        """End its connections."""
        self._client.close()

    def submit(
        self, job: str, entrypoint: str, metadata: Mapping[str, str], resources: JsonObject
    ) -> None:
        """Submit a job, unless there is one of this id. Raises FarError where Ray refuses it.

        Args:
            job: its id.
            entrypoint: the command; it is shown to everybody who may look at the cluster.
            resources: `entrypoint_num_gpus` and the like.
        """
        body = {"submission_id": job, "entrypoint": entrypoint, "metadata": dict(metadata)}
        answer = self._ask("POST", "/api/jobs/", {**body, **resources})
        if answer.status_code != httpx.codes.OK and self.find(job) is None:
            raise FarError("RAY_REFUSED", f"Ray does not take the job: {_last_line(answer.text)}")

    def find(self, job: str) -> Job | None:
        """A job; None where Ray knows none of this id."""
        answer = self._ask("GET", f"/api/jobs/{job}")
        if answer.status_code == httpx.codes.NOT_FOUND:
            return None
        return _read(self._object(answer, dict))

    def owned(self, prefix: str) -> list[Job]:
        """Every job whose id begins with `prefix`."""
        listed = self._object(self._ask("GET", "/api/jobs/"), list)
        jobs = [_read(each) for each in listed if isinstance(each, dict)]
        return [job for job in jobs if job.id.startswith(prefix)]

    def stop(self, job: str) -> None:
        """Have Ray end a job, which gives it three seconds; one that has ended stays as it is."""
        self._ask("POST", f"/api/jobs/{job}/stop")

    def delete(self, job: str) -> None:
        """Have Ray forget an ended job; one that lives stays."""
        self._ask("DELETE", f"/api/jobs/{job}")

    def nodes(self) -> list[Mapping[str, float]]:
        """What each living node has in all, such as {"CPU": 8.0, "GPU": 1.0}; names of resources
        that a cluster made up itself come in another spelling."""
        facts = self._object(self._ask("GET", "/nodes?view=summary"), dict)
        data = facts.get("data")
        summary = data.get("summary") if isinstance(data, dict) else None
        rays = [node.get("raylet") for node in summary or [] if isinstance(node, dict)]
        alive = [each for each in rays if isinstance(each, dict) and each.get("state") == "ALIVE"]
        totals = [each.get("resourcesTotal") for each in alive]
        return [total if isinstance(total, dict) else {} for total in totals]

    def version(self) -> str:
        """The version of Ray. Raises HostLost also for what is no Ray."""
        facts = self._object(self._ask("GET", "/api/version"), dict)
        if "ray_version" not in facts:
            raise HostLost(f"{self.address} is no Jobs API of Ray")
        return one_line(str(facts["ray_version"]), 40)

    def is_open(self) -> bool:
        """Whether the API answers those who have no token."""
        try:
            answer = httpx.get(f"{self.address}/api/jobs/", timeout=_TIMEOUT, trust_env=False)
        except httpx.HTTPError:
            return False
        return answer.status_code == httpx.codes.OK

    def _ask(self, method: str, path: str, body: JsonObject | None = None) -> httpx.Response:
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

    def _object(self, answer: httpx.Response, kind: type) -> Any:
        """What an answer holds. Raises HostLost where it is no answer of Ray's."""
        if answer.status_code != httpx.codes.OK:
            last = _last_line(answer.text)
            raise HostLost(f"{self.address} answers {answer.status_code}: {last}")
        try:
            content = answer.json()
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, kind):
            raise HostLost(f"{self.address} answers in no form of Ray's")
        return content


def _read(facts: JsonObject) -> Job:
    """A job from what Ray says of it."""
    code = facts.get("driver_exit_code")
    return Job(
        id=str(facts.get("submission_id") or ""),
        status=str(facts.get("status")),
        message=_last_line(str(facts.get("message") or "")),
        error=one_line(str(facts.get("error_type") or ""), 60),
        exit_code=code if isinstance(code, int) else None,
    )


def _last_line(text: str) -> str:
    """The last line that says something, which in a traceback is the error."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return one_line(lines[-1], 300) if lines else ""

"""The API of a SkyPilot server over HTTP: called, and its answers read.

Nearly every call is a request that the server carries out later: the call answers with its id, and
what came of it is asked for by that id. What became of a launch is asked by the cluster's name, so
nothing has to be kept of it here.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from engine.core.files import JsonObject
from engine.executors.sky.pickled import Address, address_of
from engine.executors.ssh import FarError, HostLost, HostRefused
from engine.home.sanitize import one_line

API_VERSION = "62"  # of the API that was read, SkyPilot 0.14.1; servers from 0.11 on take it
_VERSION = "0.14.1"
_TIMEOUT = httpx.Timeout(60.0, connect=8.0)
_RESULT_S = 120.0  # that a short request may take
_DOWN_S = 600.0  # that giving a cluster back may take
_MOST_BYTES = 16 << 20  # of an answer
_MOST_LOG = 4 << 20
_MOST_LISTED = 10_000
_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{8,64}")
_RUNNING = ("PENDING", "WAITING", "RUNNING")
_LAUNCH = "sky.launch"
_JOB_FAILED = ("FAILED", "FAILED_SETUP", "FAILED_DRIVER", "CANCELLED")


@dataclass(frozen=True)
class Cluster:
    """A cluster as the server shows it.

    Attributes:
        status: INIT, UP, STOPPED, AUTOSTOPPING or PENDING.
        launched: when, in seconds since the epoch; 0 where the server does not say.
        address: of its machine; None while it has none.
        cloud: where it is, such as "RunPod" or "Kubernetes".
        resources: what it is, in the server's words.
        why: what the server says of a cluster that is not up; "" for nothing.
    """

    name: str
    status: str
    launched: float = 0.0
    address: Address | None = None
    cloud: str = ""
    resources: str = ""
    why: str = ""

    @property
    def is_up(self) -> bool:
        """Whether its machine can be reached."""
        return self.status == "UP"


@dataclass(frozen=True)
class Request:
    """A request of ours that the server carries out or has carried out.

    Attributes:
        message: what it is doing, or why it failed; "" where that is not known.
    """

    id: str
    name: str
    status: str
    created: float = 0.0
    message: str = ""

    @property
    def is_open(self) -> bool:
        """Whether the server has not finished it."""
        return self.status in _RUNNING


class SkyApi:
    """The API of one server. Every call raises HostLost where it is not reached or does not answer
    as one, HostRefused where it does not take the token."""

    def __init__(self, address: str, token: str, token_name: str, user: str) -> None:
        """Nothing is connected to yet.

        Args:
            token: of a service account; "" for none.
            token_name: where it is from, for messages.
            user: what a server without accounts knows this home by: 8 hexadecimal digits.
        """
        self.address, self._token_name, self._user = address.rstrip("/"), token_name, user
        headers = {"X-SkyPilot-API-Version": API_VERSION, "X-SkyPilot-Version": _VERSION}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        # Nothing of this machine's settings may send the token elsewhere: no proxy, no redirect.
        self._client = httpx.Client(
            base_url=self.address, headers=headers, timeout=_TIMEOUT, trust_env=False
        )

    def close(self) -> None:
        """End its connections."""
        self._client.close()

    def version(self) -> str:
        """The version of the server. Raises HostLost also for what is no SkyPilot."""
        facts = self._content(self._ask("GET", "/api/health"), dict)
        if facts.get("status") == "needs_auth":
            raise self._not_taken()
        if "api_version" not in facts:
            raise HostLost(f"{self.address} is no API server of SkyPilot")
        return one_line(str(facts.get("version", "?")), 40)

    def is_open(self) -> bool:
        """Whether the server carries out what those without a token ask."""
        try:
            answer = httpx.get(f"{self.address}/api/status", timeout=_TIMEOUT, trust_env=False)
        except httpx.HTTPError:
            return False
        return answer.status_code == httpx.codes.OK

    def offers(self, accelerator: str, clouds: Sequence[str]) -> list[Sequence[Any]]:
        """What the server's catalogue lists for an accelerator: each a row of cloud, kind of
        machine, accelerator, count, CPUs, device memory, memory, price, price of spot, region."""
        body = {
            "name_filter": f"^{re.escape(accelerator)}$",
            "clouds": list(clouds) or None,
            "all_regions": True,
            "case_sensitive": False,
        }
        found = self._result(self._post("/list_accelerators", body), dict)
        rows = [row for each in found.values() if isinstance(each, list) for row in each]
        return [row for row in rows[:_MOST_LISTED] if isinstance(row, list) and len(row) >= 10]

    def launch(self, name: str, task: JsonObject) -> None:
        """Ask for a cluster with one job. One of this name that is there, or is coming, is kept:
        SkyPilot makes no second."""
        # JSON is YAML too, which the server reads a task as.
        self._post(
            "/launch",
            {
                "task": json.dumps(task),
                "cluster_name": name,
                "retry_until_up": False,
                "include_credentials": False,
                "override_skypilot_config": NOTHING_UPLOADED,
            },
        )

    def dry_run(self, name: str, task: JsonObject) -> None:
        """Have the server plan a cluster and launch nothing. Raises FarError where it cannot."""
        body = {"task": json.dumps(task), "cluster_name": name, "dryrun": True}
        body["override_skypilot_config"] = NOTHING_UPLOADED
        self._result(self._post("/launch", body), object)

    def find(self, name: str, *, is_asked_anew: bool = False) -> Cluster | None:
        """A cluster; None where the server has none of this name. With `is_asked_anew` it first
        asks the place where it rented it."""
        found = [each for each in self._clusters([name], is_asked_anew) if each.name == name]
        return found[0] if found else None

    def owned(self, prefix: str) -> list[Cluster]:
        """Every cluster whose name begins with `prefix`."""
        return [each for each in self._clusters(None, False) if each.name.startswith(prefix)]

    def _clusters(self, names: Sequence[str] | None, is_asked_anew: bool) -> list[Cluster]:
        body = {
            "cluster_names": names,
            "refresh": "FORCE" if is_asked_anew else "NONE",
            "all_users": True,
            "include_credentials": False,
        }
        try:
            listed = self._result(self._post("/status", body), list)
        except FarError as error:  # the cloud was not reached: nothing is known
            raise HostLost(f"{self.address} cannot say: {error.message}") from error
        return [_read(each) for each in listed[:_MOST_LISTED] if isinstance(each, dict)]

    def launches(self, name: str) -> list[Request]:
        """Every request to launch a cluster of this name, the newest first."""
        params = {"cluster_name": name, "all_status": "true", "limit": "50"}
        listed = self._content(self._ask("GET", "/api/status", params=params), list)
        requests = [_request(each) for each in listed if isinstance(each, dict)]
        of_name = [each for each in requests if each.name == _LAUNCH]
        return sorted(of_name, key=lambda each: each.created, reverse=True)

    def why_failed(self, request: Request) -> str:
        """Why a request failed, in the server's words."""
        try:
            self._result(request.id, object)
        except FarError as error:
            return error.message
        return ""

    def log(self, name: str) -> str:
        """What the cluster's first job has printed so far."""
        body = self._body({"cluster_name": name, "job_id": 1, "follow": False, "tail": 200})
        answer = self._ask("POST", "/logs", body, most=_MOST_LOG)
        if answer.status_code != httpx.codes.OK:
            raise HostLost(f"{self.address} answers {answer.status_code}: {_words(answer.text)}")
        return answer.text

    def why_not_ready(self, name: str) -> str:
        """Why the cluster's job has ended without having begun, such as packages that could not be
        installed; "" where it has not."""
        body = {"cluster_name": name, "all_users": True, "skip_finished": False}
        listed = self._result(self._post("/queue", body), list)
        jobs = [each for each in listed if isinstance(each, dict)]
        if not jobs or any(str(each.get("status")) not in _JOB_FAILED for each in jobs):
            return ""
        lines = [line for line in self.log(name).splitlines() if line.strip()]
        said = one_line(" / ".join(lines[-3:]), 400)
        return f"its set-up ended as {one_line(str(jobs[0].get('status')), 40)}: {said}"

    def down(self, name: str) -> None:
        """Give a cluster back, and what is on its way; one that is not there is fine.

        Raises FarError where the server could not: then it may still be paid for.
        """
        coming = [each.id for each in self.launches(name) if each.is_open]
        if coming:
            self._result(self._post("/api/cancel", {"request_ids": coming}), object)
        if self.find(name) is None:
            return
        self._result(self._post("/down", {"cluster_name": name}), object, limit_s=_DOWN_S)

    def _body(self, values: JsonObject) -> JsonObject:
        """What every request carries, beside its own values."""
        variables = {"SKYPILOT_USER_ID": self._user, "SKYPILOT_USER": "honesmith"}
        variables["SKYPILOT_USAGE_RUN_ID"] = f"honesmith-{self._user}"
        return {"env_vars": variables, "entrypoint": "honesmith", **values}

    def _post(self, path: str, values: JsonObject) -> str:
        """Send a request to be carried out; returns its id."""
        answer = self._ask("POST", path, self._body(values))
        request_id = answer.headers.get("X-Skypilot-Request-ID", "")
        if answer.status_code != httpx.codes.OK:
            text = f"{self.address}{path} answers {answer.status_code}: {_words(answer.text)}"
            if answer.status_code < 500:  # what it was asked is wrong, and stays so
                raise FarError("SKY_REFUSED", text)
            raise HostLost(text)
        if not _REQUEST_ID.fullmatch(request_id):
            raise HostLost(f"{self.address}{path} gives its request no id of SkyPilot's form")
        return request_id

    def _result(self, request_id: str, kind: type, *, limit_s: float = _RESULT_S) -> Any:
        """What came of a request. Raises FarError where it failed."""
        timeout = httpx.Timeout(limit_s, connect=8.0)
        answer = self._ask("GET", "/api/get", params={"request_id": request_id}, timeout=timeout)
        if answer.status_code == httpx.codes.INTERNAL_SERVER_ERROR:
            raise FarError("SKY_REFUSED", _error_of(answer))
        payload = self._content(answer, dict)
        try:
            value = json.loads(str(payload.get("return_value")))
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, kind):
            raise HostLost(f"{self.address} answers in no form of SkyPilot's")
        return value

    def _ask(
        self,
        method: str,
        path: str,
        body: JsonObject | None = None,
        *,
        params: Mapping[str, str] | None = None,
        timeout: httpx.Timeout = _TIMEOUT,
        most: int = _MOST_BYTES,
    ) -> httpx.Response:
        try:
            with self._client.stream(
                method, path, json=body, params=params, timeout=timeout
            ) as answer:
                data = b""
                for part in answer.iter_bytes():
                    data += part
                    if len(data) > most:
                        raise HostLost(f"{self.address} answers without an end")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            why = str(error) or type(error).__name__
            raise HostLost(f"{self.address} does not answer: {why}") from error
        if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise self._not_taken()
        kept = {"X-Skypilot-Request-ID": answer.headers.get("X-Skypilot-Request-ID", "")}
        return httpx.Response(answer.status_code, content=data, headers=kept)

    def _not_taken(self) -> HostRefused:
        name = self._token_name
        return HostRefused(
            f"{self.address} does not take the token of {name or 'no variable'}",
            f"Put the token of a service account of the server into {name}."
            if name
            else "Name the variable with a token of a service account: token_env of the host.",
        )

    def _content(self, answer: httpx.Response, kind: type) -> Any:
        """What an answer holds. Raises HostLost where it is no answer of SkyPilot's."""
        if answer.status_code != httpx.codes.OK:
            said = _words(answer.text)
            raise HostLost(f"{self.address} answers {answer.status_code}: {said}")
        try:
            content = answer.json()
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, kind):
            raise HostLost(f"{self.address} answers in no form of SkyPilot's")
        return content


# No credential of the server goes to a cluster, for each cloud whose upload a client may forbid.
NOTHING_UPLOADED: JsonObject = {
    cloud: {"remote_identity": "NO_UPLOAD"}
    for cloud in ("aws", "gcp", "azure", "kubernetes", "ssh", "oci", "vast", "nebius")
}


def _read(facts: JsonObject) -> Cluster:
    """A cluster from what the server says of it."""
    launched = facts.get("launched_at")
    why = facts.get("init_status_reason") or facts.get("last_event") or ""
    return Cluster(
        name=str(facts.get("name", ""))[:200],
        status=str(facts.get("status", ""))[:20],
        launched=float(launched) if isinstance(launched, int | float) else 0.0,
        address=address_of(facts.get("handle")),
        cloud=one_line(str(facts.get("cloud") or ""), 60),
        resources=one_line(str(facts.get("resources_str") or ""), 120),
        why=one_line(str(why), 300),
    )


def _request(facts: JsonObject) -> Request:
    """A request from what the server says of it."""
    created = facts.get("created_at")
    return Request(
        id=str(facts.get("request_id", ""))[:64],
        name=str(facts.get("name", ""))[:60],
        status=str(facts.get("status", ""))[:20],
        created=float(created) if isinstance(created, int | float) else 0.0,
        message=one_line(str(facts.get("status_msg") or ""), 300),
    )


def _error_of(answer: httpx.Response) -> str:
    """Why a request failed: the server's own message, without the object that it pickles."""
    try:
        error = json.loads(answer.json()["detail"]["error"])
        return one_line(f"{error['type']}: {error['message']}", 800)
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"it failed: {_words(answer.text)}"


def _words(text: str) -> str:
    """The first words of an answer that is no object."""
    return one_line(text[:2000], 300)

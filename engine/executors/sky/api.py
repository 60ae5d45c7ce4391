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
_OFFER_COLUMNS = 10  # of a row of the catalogue that is used
_REQUEST_ID_HEADER = "X-Skypilot-Request-ID"
_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{8,64}")
_RUNNING = ("PENDING", "WAITING", "RUNNING")
_LAUNCH = "sky.launch"
# What is read of a request. Without this list the server adds the body of each request.
_REQUEST_FIELDS = ("request_id", "name", "status", "created_at", "status_msg", "cluster_name")
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
        """Whether its machine is up, so that it can be reached."""
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
        """Whether the server still works on the request, or has not begun."""
        return self.status in _RUNNING


class SkyApi:
    """The API of one server. Every call raises HostLost if the server is not reached or gives no
    answer of SkyPilot's form, HostRefused if it does not take the token."""

    def __init__(self, address: str, token: str, token_name: str, user: str) -> None:
        """Prepare a client; the first call connects.

        Args:
            address: the URL of the server.
            token: the token of a service account; "" for none.
            token_name: the file or variable that the token is from, for errors; "" for none.
            user: the id by which a server without accounts knows this home: 8 hexadecimal digits.
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
        """End the connections to the server."""
        self._client.close()

    def version(self) -> str:
        """Return the version of the server. Raises HostLost also if another program answers."""
        facts = self._content(self._ask("GET", "/api/health"), dict)
        if facts.get("status") == "needs_auth":
            raise self._token_refused()
        if "api_version" not in facts:
            raise HostLost(f"{self.address} is no API server of SkyPilot")
        return one_line(str(facts.get("version", "?")), 40)

    def is_open(self) -> bool:
        """Tell whether the server answers without a token; False if it does not answer at all."""
        try:
            answer = httpx.get(f"{self.address}/api/status", timeout=_TIMEOUT, trust_env=False)
        except httpx.HTTPError:
            return False
        return answer.status_code == httpx.codes.OK

    def offers(self, accelerator: str, clouds: Sequence[str]) -> list[Sequence[Any]]:
        """List the machines with an accelerator, such as "H100", in the server's catalogue.

        Each is a row of at least: cloud, kind of machine, accelerator, count, CPUs, device memory,
        memory, price, price of spot, region. `clouds` limits the list; [] stands for all clouds.
        """
        body = {
            "name_filter": f"^{re.escape(accelerator)}$",
            "clouds": list(clouds) or None,
            "all_regions": True,
            "case_sensitive": False,
        }
        rows_by_name = self._result(self._post("/list_accelerators", body), dict)
        rows = []
        for rows_of_one in rows_by_name.values():
            if isinstance(rows_of_one, list):
                rows += rows_of_one
        return [
            row
            for row in rows[:_MOST_LISTED]
            if isinstance(row, list) and len(row) >= _OFFER_COLUMNS
        ]

    def launch(self, name: str, task: JsonObject) -> None:
        """Ask the server to rent a cluster and to start one job on it. `task` is what SkyPilot is
        told of both. If a cluster of this name exists or is being rented, SkyPilot makes no
        second."""
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
        """Have the server plan a cluster for `task` without renting it. Raises FarError if it
        cannot be rented."""
        body = {"task": json.dumps(task), "cluster_name": name, "dryrun": True}
        body["override_skypilot_config"] = NOTHING_UPLOADED
        self._result(self._post("/launch", body), object)

    def find(self, name: str, *, is_asked_anew: bool = False) -> Cluster | None:
        """Return the cluster of this name; None if the server has none. With `is_asked_anew` the
        server first asks the cloud where it rented it, which takes a while."""
        clusters = self._clusters([name], is_asked_anew=is_asked_anew)
        return next((cluster for cluster in clusters if cluster.name == name), None)

    def owned(self, prefix: str) -> list[Cluster]:
        """List every cluster whose name begins with `prefix`."""
        clusters = self._clusters(None, is_asked_anew=False)
        return [cluster for cluster in clusters if cluster.name.startswith(prefix)]

    def _clusters(self, names: Sequence[str] | None, *, is_asked_anew: bool) -> list[Cluster]:
        """List the server's clusters with these names; all of them for None. With `is_asked_anew`
        the server first asks the clouds. Raises HostLost if a cloud cannot be reached."""
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
        return [_cluster_from(facts) for facts in listed[:_MOST_LISTED] if isinstance(facts, dict)]

    def launches(self, name: str) -> list[Request]:
        """List all requests to launch the cluster of this name that the server still knows,
        finished or not, the newest first."""
        # No limit, because it would count requests of other kinds too, such as those for logs.
        params = {"cluster_name": name, "all_status": "true", "fields": _REQUEST_FIELDS}
        listed = self._content(self._ask("GET", "/api/status", params=params), list)
        # Older servers ignore `cluster_name` and list the requests for other clusters too.
        of_cluster = [
            _request_from(facts)
            for facts in listed
            if isinstance(facts, dict) and facts.get("cluster_name") == name
        ]
        to_launch = [request for request in of_cluster if request.name == _LAUNCH]
        return sorted(to_launch, key=lambda request: request.created, reverse=True)

    def why_failed(self, request: Request) -> str:
        """Return why a request failed, in the server's words; "" if it did not fail."""
        try:
            self._result(request.id, object)
        except FarError as error:
            return error.message
        return ""

    def log(self, name: str) -> str:
        """Return the last lines that the first job of the cluster `name` has printed so far."""
        body = self._body({"cluster_name": name, "job_id": 1, "follow": False, "tail": 200})
        answer = self._ask("POST", "/logs", body, most=_MOST_LOG)
        if answer.status_code != httpx.codes.OK:
            raise HostLost(
                f"{self.address} answers {answer.status_code}: {_first_words(answer.text)}"
            )
        return answer.text

    def why_not_ready(self, name: str) -> str:
        """Say why the job of the cluster `name` has failed before it began, such as packages that
        could not be installed, with its last lines. Returns "" if it has not failed."""
        body = {"cluster_name": name, "all_users": True, "skip_finished": False}
        listed = self._result(self._post("/queue", body), list)
        jobs = [job for job in listed if isinstance(job, dict)]
        have_failed = [str(job.get("status")) in _JOB_FAILED for job in jobs]
        if not jobs or not all(have_failed):
            return ""
        lines = [line for line in self.log(name).splitlines() if line.strip()]
        last_lines = one_line(" / ".join(lines[-3:]), 400)
        status = one_line(str(jobs[0].get("status")), 40)
        return f"its set-up ended as {status}: {last_lines}"

    def down(self, name: str) -> None:
        """Give the cluster `name` back, and cancel requests to rent it that are under way. If there
        is neither, nothing happens.

        Raises FarError if the server cannot; then the cluster may still cost money.
        """
        open_ids = [request.id for request in self.launches(name) if request.is_open]
        if open_ids:
            self._result(self._post("/api/cancel", {"request_ids": open_ids}), object)
        if self.find(name) is None:
            return
        self._result(self._post("/down", {"cluster_name": name}), object, limit_s=_DOWN_S)

    def _body(self, values: JsonObject) -> JsonObject:
        """Return the body of a request: its own `values`, and what every request carries, such as
        who asks."""
        variables = {"SKYPILOT_USER_ID": self._user, "SKYPILOT_USER": "honesmith"}
        variables["SKYPILOT_USAGE_RUN_ID"] = f"honesmith-{self._user}"
        return {"env_vars": variables, "entrypoint": "honesmith", **values}

    def _post(self, path: str, values: JsonObject) -> str:
        """Send a request that the server carries out later, and return its id.

        Raises FarError if the server refuses it, HostLost if it fails or is not reached.
        """
        answer = self._ask("POST", path, self._body(values))
        request_id = answer.headers.get(_REQUEST_ID_HEADER, "")
        if answer.status_code != httpx.codes.OK:
            text = f"{self.address}{path} answers {answer.status_code}: {_first_words(answer.text)}"
            if answer.status_code < 500:  # what it was asked is wrong, and stays so
                raise FarError("SKY_REFUSED", text)
            raise HostLost(text)
        if not _REQUEST_ID.fullmatch(request_id):
            raise HostLost(f"{self.address}{path} gives its request no id of SkyPilot's form")
        return request_id

    def _result(self, request_id: str, kind: type, *, limit_s: float = _RESULT_S) -> Any:
        """Wait for the result of the request with this id, at most `limit_s` seconds, and return
        it. Raises FarError if the request failed, HostLost if the result is not of the type `kind`
        or does not come in time."""
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
        params: Mapping[str, str | Sequence[str]] | None = None,
        timeout: httpx.Timeout = _TIMEOUT,
        most: int = _MOST_BYTES,
    ) -> httpx.Response:
        """Call the API and return the whole answer, whatever its status is.

        Args:
            body: sent as JSON.
            params: the query of the URL; a sequence gives its name several values.
            most: the most bytes that the answer may have.

        Raises HostLost if there is no answer or one that is too long, HostRefused if the token is
        not taken.
        """
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
            raise self._token_refused()
        # The only header that is needed; the others describe the answer as it was transferred.
        headers = {_REQUEST_ID_HEADER: answer.headers.get(_REQUEST_ID_HEADER, "")}
        return httpx.Response(answer.status_code, content=data, headers=headers)

    def _token_refused(self) -> HostRefused:
        """Return the error for a server that does not take the token, or wants one."""
        name = self._token_name
        hint = "Name the variable with a token of a service account: token_env of the host."
        if name:
            hint = f"Put the token of a service account of the server into {name}."
        message = f"{self.address} does not take the token of {name or 'no variable'}"
        return HostRefused(message, hint)

    def _content(self, answer: httpx.Response, kind: type) -> Any:
        """Return the JSON value in an answer. Raises HostLost if the answer is an error, or its
        value is not of the type `kind` (dict or list)."""
        if answer.status_code != httpx.codes.OK:
            text = _first_words(answer.text)
            raise HostLost(f"{self.address} answers {answer.status_code}: {text}")
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


def _cluster_from(facts: JsonObject) -> Cluster:
    """Make a `Cluster` from the object with which the server describes one; missing values become
    empty, long texts are cut."""
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


def _request_from(facts: JsonObject) -> Request:
    """Make a `Request` from the object with which the server describes one; missing values become
    empty, long texts are cut."""
    created = facts.get("created_at")
    return Request(
        id=str(facts.get("request_id", ""))[:64],
        name=str(facts.get("name", ""))[:60],
        status=str(facts.get("status", ""))[:20],
        created=float(created) if isinstance(created, int | float) else 0.0,
        message=one_line(str(facts.get("status_msg") or ""), 300),
    )


def _error_of(answer: httpx.Response) -> str:
    """Return why a request failed, from the server's answer: its type and message, without the
    pickled exception that the answer holds too."""
    try:
        error = json.loads(answer.json()["detail"]["error"])
        return one_line(f"{error['type']}: {error['message']}", 800)
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"it failed: {_first_words(answer.text)}"


def _first_words(text: str) -> str:
    """Return the beginning of an answer that is no object, as one line for an error."""
    return one_line(text[:2000], 300)

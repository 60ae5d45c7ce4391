"""A teacher behind an OpenAI-compatible server: token ids go out, log-probabilities come back.

The request is `/v1/completions` with a prompt of ids, `echo` and `logprobs`, as evaluation
harnesses send it; vLLM and our own deployments answer it. Every server samples at least one token
beyond the prompt, which is thrown away.
"""

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import httpx

from engine.core.hints import Hint
from engine.worker.core.failures import WorkerFailure
from engine.worker.core.trajectory import Trajectory
from envs.json_types import JsonObject

AT_ONCE = 8  # parallel requests
CONNECT_S = 10.0  # how long connecting may take
READ_S = 120.0  # how long one answer may take
ATTEMPTS = 5  # how often a request is sent at most
WAITS_S = (1.0, 2.0, 5.0, 10.0)  # pauses before the second attempt, the third, ...
STOP_CHECK_S = 0.5  # how often it is checked whether the run was asked to stop
RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)  # HTTP statuses after which a retry may help
# A text that tokenizers split in different ways: words, figures, JSON and code, in plain ASCII.
SAMPLE = 'The quick brown fox adds 12 + 30 = 42. {"name": "Ann", "n": [1, 2]} def f(x): return x'


@dataclass(frozen=True)
class Endpoint:
    """Where the teacher answers.

    Attributes:
        url: the address of the server, up to and including `/v1`.
        model: the teacher's name on that server.
        key: the bearer token; "" for none. It is never written anywhere.
    """

    url: str
    model: str
    key: str = ""

    def __str__(self) -> str:
        """The endpoint in words, for messages; without the key."""
        return f"{self.model} at {self.url}"


class _TryAgain(Exception):
    """The teacher did not answer a request, but may if it is sent again; the text says why."""


class EndpointTeacher:
    """A teacher (`Teacher` in teachers.py) that is a model behind a server."""

    def __init__(self, endpoint: Endpoint, check_stop: Callable[[], None]) -> None:
        """Rate with the model of `endpoint`. `check_stop` is called while waiting for answers, and
        may raise `Stopped`."""
        self.endpoint = endpoint
        self.check_stop = check_stop
        headers = {"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}
        self._client = httpx.Client(
            headers=headers,
            timeout=httpx.Timeout(READ_S, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=AT_ONCE),
        )
        self._closed = threading.Event()  # set by `close`; ends the pause before another attempt
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="teacher")

    def logprobs(self, trajectories: Sequence[Trajectory], budget: int) -> list[list[float]]:
        """Return the teacher's log-probabilities, in nats, of the trained tokens of each
        trajectory. `budget` is ignored: the server decides how many tokens it computes at once.

        Raises:
            WorkerFailure: kind infra, if the server does not answer; kind config, if it refuses or
                gives no log-probabilities of the prompt.
        """
        futures = [
            self._pool.submit(self._rate, trajectory.prompt_ids + trajectory.ids)
            for trajectory in trajectories
        ]
        try:
            self._wait(futures)
        finally:
            for future in futures:
                future.cancel()  # stops those that have not begun
        rated = []
        for trajectory, future in zip(trajectories, futures, strict=True):
            logprobs = future.result()[len(trajectory.prompt_ids) :]  # those of the completion
            with_mask = zip(logprobs, trajectory.loss_mask, strict=True)
            rated.append([logprob for logprob, is_trained in with_mask if is_trained])
        return rated

    def _wait(self, futures: Sequence[Future[list[float]]]) -> None:
        """Wait until all futures are done, or until one fails, and raise its error.

        Meanwhile `check_stop` is called at least every `STOP_CHECK_S` seconds; it may raise
        `Stopped`.
        """
        pending = set(futures)
        while pending:
            finished, pending = wait(pending, timeout=STOP_CHECK_S)
            for future in finished:
                future.result()  # raises its error, if it failed
            self.check_stop()

    def is_finest(self, trajectories: Sequence[Trajectory], budget: int) -> bool:
        """Return True: each trajectory is a request of its own, whatever the budget (see
        `Teacher`)."""
        return True

    def close(self) -> None:
        """Abandon the requests under way and close the connections."""
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def check_tokens(
        self, ids: Sequence[int], decode: Callable[[Sequence[int]], str], student: str
    ) -> None:
        """Check that the teacher reads `ids`, the tokens of the text `SAMPLE`, as the student does.

        Args:
            decode: turns ids into text, as the student reads them.
            student: the student's name, for the message.

        Raises:
            WorkerFailure: kind config, if the teacher reads them differently or refuses the
                request; kind infra, if it does not answer.
        """
        tokens = self._ask(list(ids))["tokens"]
        # A server that does not return its tokens (None) cannot be checked.
        for token, text in zip(ids, tokens or [], strict=False):
            expected = decode([token])
            if text in (expected, f"token_id:{token}"):  # some servers write a token's number
                continue
            # Servers write parts of characters differently, so only ASCII is compared.
            if not expected.isascii() or not str(text).isascii():
                continue
            raise WorkerFailure(
                "config",
                f"The teacher {self.endpoint} has another tokenizer than {student}.",
                evidence=f"token {token} is {text!r} there and {expected!r} here",
                hint="A teacher rates the student's own tokens: take a model of the same family.",
            )

    def _rate(self, ids: list[int]) -> list[float]:
        """Return the log-probability of every id; 0 for the first, which nothing precedes."""
        logprobs = self._ask(ids)["token_logprobs"]
        return [0.0, *(float(logprob) for logprob in logprobs[1 : len(ids)])]

    def _ask(self, ids: list[int]) -> JsonObject:
        """Return OpenAI's `logprobs` object of a prompt, with a number for every id but the first.
        Raises WorkerFailure if the server does not give it."""
        body = {
            "model": self.endpoint.model,
            "prompt": ids,
            "max_tokens": 1,  # the token is not wanted, but some servers refuse 0
            "temperature": 0,
            "echo": True,
            "logprobs": 1,
        }
        reply = self._post(body)
        logprobs = _logprobs_in(reply, len(ids))
        if logprobs is None:
            raise WorkerFailure(
                "config",
                f"The teacher {self.endpoint} gives no log-probabilities of a prompt's tokens.",
                evidence=f"/completions with echo and logprobs answered {str(reply)[:200]}",
                hint="Use a server that does, such as vLLM or a deployment of this machine, or a "
                "model here as the teacher.",
            )
        return logprobs

    def _post(self, body: JsonObject) -> Any:
        """Send a completion request, at most `ATTEMPTS` times, and return the decoded reply. Raises
        WorkerFailure if no attempt is answered, or at once if the server refuses the request."""
        problem = ""
        for attempt in range(ATTEMPTS):
            if attempt:  # a pause before every attempt but the first; `close` ends it
                self._closed.wait(WAITS_S[attempt - 1])
            try:
                return self._post_once(body)
            except _TryAgain as failed:
                problem = str(failed)
        raise WorkerFailure(
            "endpoint",
            f"The teacher {self.endpoint} does not answer.",
            evidence=f"after {ATTEMPTS} attempts: {problem}",
            hint=Hint("Start it again, then resume the run."),
        )

    def _post_once(self, body: JsonObject) -> Any:
        """Send a completion request once and return the decoded reply. Raises _TryAgain if a later
        attempt may succeed, WorkerFailure if none will."""
        try:
            response = self._client.post(f"{self.endpoint.url}/completions", json=body)
            if response.status_code == 200:
                return response.json()
        except httpx.TransportError as error:  # no connection, or no answer in time
            raise _TryAgain(f"{type(error).__name__}: {error}") from error
        except ValueError as error:
            raise self._refused(f"no JSON came back: {error}") from error
        problem = f"HTTP {response.status_code}: {response.text[:300]}"
        if response.status_code in RETRIED:
            raise _TryAgain(problem)
        raise self._refused(problem)

    def _refused(self, problem: str) -> WorkerFailure:
        """Return the failure for a request that the server will not answer, however often it is
        sent. `problem` is what the server said, for the evidence."""
        return WorkerFailure(
            "config",
            f"The teacher {self.endpoint} refused to rate a completion.",
            evidence=problem,
            hint="Check teacher, teacher_model and teacher_key_env, or [endpoints] in config.toml; "
            "the server must take a prompt of token ids with echo and logprobs under "
            "/v1/completions, as vLLM does.",
        )


def _logprobs_in(reply: Any, prompt_length: int) -> JsonObject | None:
    """Return the `logprobs` object of a reply to a prompt of `prompt_length` tokens, or None if it
    lacks a number for one of these tokens. The first token needs none, because nothing precedes
    it."""
    try:
        logprobs = reply["choices"][0]["logprobs"]
        # The sampled token may follow those of the prompt.
        numbers = logprobs["token_logprobs"][1:prompt_length]
        is_whole = len(numbers) == prompt_length - 1 and all(map(_is_logprob, numbers))
    except (KeyError, IndexError, TypeError):  # another shape: no log-probabilities in it
        return None
    return logprobs if is_whole else None


def _is_logprob(value: object) -> bool:
    """Tell whether the value is a number other than NaN; minus infinity counts."""
    return isinstance(value, int | float) and not math.isnan(value)

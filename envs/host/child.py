"""The loop of the env process: it loads the environment and answers requests, one at a time.

Requests and replies are JSON lines on separate descriptors; whatever the user's code prints goes to
the log. Standard library only: this runs inside the environment's own virtual environment.
"""

import functools
import inspect
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envs.base import (
    Env,
    Message,
    MultiTurnEnv,
    Score,
    Task,
    compares_groups,
    defines_perturb,
    is_async,
    is_scored,
    kind_of,
)
from envs.config.problem import EnvProblem
from envs.host.loader import error_place, explain, load_folder, read_task_rows
from envs.json_types import ChatMessage, EnvDescription, Reply, Request, ScoreReply, TaskRow
from envs.metering.judge_calls import METER

if TYPE_CHECKING:
    import asyncio

# The most open episodes (rollouts): a client that never closes any must not fill the memory.
MAX_EPISODES = 10_000
ERROR_CHARS = 2000  # how much of Score.error is sent, so that a reply stays small


class BadReturn(Exception):
    """The environment returned something that its contract does not allow."""


def serve(requests: int, replies: int, source: Path) -> None:
    """Load the environment and answer requests until the pipe is closed.

    The first line written is {"ready": the environment's description}. If the environment cannot be
    loaded, it is {"problem": what is wrong} instead, and nothing is served.

    Args:
        requests: file descriptor to read JSON lines from.
        replies: file descriptor to write JSON lines to.
        source: the environment's folder.
    """
    send = _writer(replies)
    try:
        env = load_folder(source)
    except EnvProblem as problem:
        send({"problem": problem.to_dict()})
        return
    send({"ready": _describe(env)})
    host = _Host(env, source, send)
    with os.fdopen(requests, "rb", closefd=False) as lines:
        for line in lines:
            host.handle(json.loads(line))


class _Host:
    """One loaded environment and its open episodes.

    Args:
        env: the loaded environment.
        folder: the environment's folder, to name files in error messages.
        send_reply: writes one reply to the client.
    """

    def __init__(self, env: Env, folder: Path, send_reply: Callable[[Reply], None]) -> None:
        """Store the loaded environment, its folder (to name files in error messages), and the
        function that writes one reply to the client; no episode is open yet."""
        self.env = env
        self.folder = folder
        self.send_reply = send_reply
        self.pid = os.getpid()  # to tell this process from forks that user code makes
        # For each open episode, by its number: the task, and the state that env.start returned.
        self.episodes: dict[int, tuple[Task, Any]] = {}
        self.operations: dict[str, Callable[[Request], Any]] = {
            "score": self.score,
            "score_group": self.score_group,
            "start": self.start,
            "step": self.step,
            "finish": self.finish,
            "drop": self.drop,
            "perturb": self.perturb,
        }

    def handle(self, request: Request) -> None:
        """Answer one request with one reply: {"id", "ok": True, "value"}. The operations `tasks`
        and `scores` send rows before it.

        Whatever the environment's code raises becomes a reply with `ok` False and the error as
        text. A reply also tells what judge calls (of a model that grades) took, if there were any.
        """
        request_id = request["id"]
        judge_allowance = request.get("judge_left") or {}  # {} sets no limit
        METER.allow(judge_allowance.get("calls"), judge_allowance.get("cost"))
        try:
            if request["op"] == "tasks":
                value: Any = self.tasks(request_id)
            elif request["op"] == "scores":
                value = self._loop.run_until_complete(self._scores(request))
            else:
                value = self.operations[request["op"]](request)
            reply = {"id": request_id, "ok": True, "value": value}
        except BaseException as error:  # noqa: BLE001 - user code may raise anything
            reply = {"id": request_id, "ok": False, **self._error_fields(error, request["op"])}
        if os.getpid() != self.pid:  # user code has forked: only the original process may answer
            os._exit(0)
        judge_use = METER.take()
        if judge_use:
            reply["judge"] = judge_use.to_json()
        self.send_reply(reply)

    def _error_fields(self, error: BaseException, operation: str) -> Reply:
        """Return the fields of the reply about an error that `operation` raised: `error`, its text,
        and for an EnvProblem also `problem`."""
        if isinstance(error, EnvProblem):
            return {"problem": error.to_dict(), "error": str(error)}
        # BadReturn is raised in this module, so it has no file and line of user code.
        if isinstance(error, BadReturn):
            return {"error": str(error)}
        file, line = error_place(error, self.folder)
        place = f" ({file}:{line})" if file else ""
        action = f"raised {explain(error)}"
        if isinstance(error, SystemExit):
            action = f"called sys.exit({error.code!r})"
        return {"error": f"{operation}() {action}{place}"}

    def tasks(self, request_id: int) -> int:
        """Send every task as a row of its own; return how many there are."""
        rows = read_task_rows(self.env, self.folder)
        for row in rows:
            self.send_reply({"id": request_id, "row": row})
        return len(rows)

    def score(self, request: Request) -> ScoreReply:
        """Return the score of `request["completion"]`, an answer to the task `request["task"]`.

        Raises BadReturn if the environment is multi-turn, or if its score() returned neither a
        Score nor a number.
        """
        if isinstance(self.env, MultiTurnEnv):
            raise BadReturn("a multi-turn environment is scored at the end of an episode")
        task = Task.from_row(request["task"])
        returned = self.env.score(task, request["completion"])  # type: ignore[attr-defined]
        return _score_reply(self._result_or_awaited(returned))

    def score_group(self, request: Request) -> list[ScoreReply]:
        """Return the scores of `request["completions"]`, answers to the task `request["task"]`,
        scored together.

        Raises BadReturn unless score_group() returned a list with one score per completion.
        """
        task, completions = Task.from_row(request["task"]), list(request["completions"])
        scores = self._result_or_awaited(self.env.score_group(task, completions))  # type: ignore[attr-defined]
        is_list = isinstance(scores, list | tuple)
        if not is_list or len(scores) != len(completions):
            returned = f"{len(scores)} scores" if is_list else repr(scores)
            raise BadReturn(
                f"score_group() returned {returned:.80}; return a list of {len(completions)} Scores"
            )
        return [_score_reply(score) for score in scores]

    async def _scores(self, request: Request) -> int:
        """Await the scores of `request["items"]`, pairs of task and completion, all at once, each
        for at most `request["seconds"]`; return how many there are.

        Each score is sent as a row once it is known: `index` with `value`, or with `error` (and
        `timed_out` if the time was up).
        """
        items = request["items"]
        import asyncio  # noqa: PLC0415 - an environment without async starts sooner without it

        scorings = [
            self._send_score(request, index, task, text) for index, (task, text) in enumerate(items)
        ]
        await asyncio.gather(*scorings)
        return len(items)

    async def _send_score(self, request: Request, index: int, task: TaskRow, text: str) -> None:
        """Await the score of one item of `_scores`, and send it as a row.

        Args:
            request: the request with all items.
            index: the place of the item.
            task, text: the item: a task row and a completion.
        """
        import asyncio  # noqa: PLC0415 - see _scores

        row: Reply = {"index": index}
        try:
            scoring = self.env.score(Task.from_row(task), text)  # type: ignore[attr-defined]
            returned = await asyncio.wait_for(scoring, request["seconds"])
            row["value"] = _score_reply(returned)
        except TimeoutError:
            message = f"score() did not answer within {request['seconds']:g} s"
            row |= {"error": message, "timed_out": True}
        except BaseException as error:  # noqa: BLE001 - user code may raise anything
            row |= self._error_fields(error, "score")
        if os.getpid() == self.pid:  # user code may have forked: only the original may answer
            self.send_reply({"id": request["id"], "row": row})

    @functools.cached_property
    def _loop(self) -> "asyncio.AbstractEventLoop":
        """The event loop for the whole life of the process: what an author opens in it, such as a
        connection, stays open from one score to the next."""
        import asyncio  # noqa: PLC0415 - see _scores

        return asyncio.new_event_loop()

    def _result_or_awaited(self, returned: Any) -> Any:
        """Return the result of the author's function: `returned` itself, or what it gives when it
        is awaited, if the function is async."""
        if not inspect.isawaitable(returned):
            return returned
        return self._loop.run_until_complete(_result_of(returned))

    def perturb(self, request: Request) -> TaskRow | None:
        """Return the task `request["task"]` reworded in the way `request["kind"]` with
        `request["seed"]`; None if the environment leaves it to the built-in rules.

        Raises BadReturn if perturb() returned neither a Task nor None.
        """
        task = Task.from_row(request["task"])
        returned = self.env.perturb(task, request["kind"], request["seed"])
        if returned is None:
            return None
        if not isinstance(returned, Task):
            raise BadReturn(f"perturb() returned {type(returned).__name__}; return a Task or None")
        return returned.to_row()

    def start(self, request: Request) -> None:
        """Begin an episode of `request["task"]` under the number `request["episode"]`.

        Raises BadReturn if too many episodes are open or the environment is single-turn.
        """
        if len(self.episodes) >= MAX_EPISODES:
            raise BadReturn(f"{MAX_EPISODES} rollouts are open at once; close some")
        task = Task.from_row(request["task"])
        state = self._multi_turn_env().start(task)
        self.episodes[request["episode"]] = (task, state)

    def step(self, request: Request) -> list[ChatMessage] | None:
        """Return the environment's reply to `request["message"]`, an assistant message; None if the
        episode is over.

        Raises BadReturn if step() did not return a list of messages.
        """
        _task, state = self.episodes[request["episode"]]
        messages = self._multi_turn_env().step(state, Message.from_dict(request["message"]))
        return None if messages is None else _checked_messages(messages)

    def finish(self, request: Request) -> ScoreReply:
        """Return the score of the episode `request["episode"]` in its present state."""
        task, state = self.episodes[request["episode"]]
        return _score_reply(self._result_or_awaited(self._multi_turn_env().score(task, state)))

    def drop(self, request: Request) -> None:
        """Forget the episode `request["episode"]`; do nothing if it is not open."""
        self.episodes.pop(request["episode"], None)

    def _multi_turn_env(self) -> MultiTurnEnv:
        """Return the environment as a multi-turn one. Raises BadReturn if it is single-turn."""
        if not isinstance(self.env, MultiTurnEnv):
            raise BadReturn("a single-turn environment has no episodes")
        return self.env


def _describe(env: Env) -> EnvDescription:
    """Return the description of an environment that its client receives: its kind, whether it is
    scored, its tools, and a key for each optional ability that it has."""
    description: EnvDescription = {
        "kind": kind_of(env),
        "scored": is_scored(env),
        "tools": list(env.tools),
    }
    if defines_perturb(env):
        description["perturbs"] = True
    if compares_groups(env):
        description["groups"] = True
    if is_async(env):
        description["concurrent"] = True
    return description


async def _result_of(awaitable: Awaitable[Any]) -> Any:
    """Await `awaitable` and return its result. It may be no coroutine, which an event loop needs to
    run it; this function makes one of any awaitable."""
    return await awaitable


def _score_reply(returned: Any) -> ScoreReply:
    """Return what the environment's score() returned, a Score or a bare number, as a dict.

    Raises BadReturn if `returned` is neither, or if a field of the Score has a wrong type. Infinite
    numbers pass here; the client refuses them.
    """
    score = returned
    if not isinstance(returned, Score):  # a bare number is the reward
        score = Score(reward=_checked_number(returned, "score() returned"))
    if not isinstance(score.metrics, Mapping):
        raise BadReturn(f"Score.metrics is a dict of numbers, got {type(score.metrics).__name__}")
    success = _checked_success(score.success)
    reward = _checked_number(score.reward, "Score.reward is")
    metrics = {
        str(name): _checked_number(value, f"the metric {name!r} is")
        for name, value in score.metrics.items()
    }
    error = None if score.error is None else str(score.error)[:ERROR_CHARS]
    reply: ScoreReply = {"reward": reward, "success": success, "metrics": metrics, "error": error}
    if score.reason:
        reply["reason"] = str(score.reason)[:ERROR_CHARS]
    if score.parts:
        reply["parts"] = _checked_parts(score.parts)
    return reply


def _checked_parts(parts: Any) -> dict[str, list[float]]:
    """Return the parts of which a score's reward is made as name -> [weight, value]. Raises
    BadReturn if they are not a dict of pairs of numbers."""
    if not isinstance(parts, Mapping):
        raise BadReturn(f"Score.parts is a dict of (weight, value), got {type(parts).__name__}")
    for name, pair in parts.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise BadReturn(f"the part {name!r} is no (weight, value): {pair!r:.80}")
    return {
        str(name): [_checked_number(number, f"the part {name!r} has") for number in pair]
        for name, pair in parts.items()
    }


def _checked_success(value: Any) -> bool | None:
    """Return `value` as True, False or None. Raises BadReturn if it is none of them."""
    # `in`, not isinstance: numpy's bool is not a Python bool, but equals one. So do 0 and 1.
    if value is not None and value not in (True, False):
        raise BadReturn(f"Score.success is True, False or None, got {value!r:.80}")
    return None if value is None else bool(value)


def _checked_number(value: Any, message_start: str) -> float:
    """Return `value` as a float. Raises BadReturn unless it is a number.

    `message_start` begins the error message, e.g. "score() returned" for "score() returned None; a
    number is needed".
    """
    # Checking for __float__ accepts numbers of numpy and torch. A text is refused even if float()
    # could parse it.
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        kind = "None" if value is None else f"of type {type(value).__name__}"
        raise BadReturn(f"{message_start} {kind}; a number is needed")
    return float(value)


def _checked_messages(messages: Any) -> list[ChatMessage]:
    """Return the messages that step() returned, as a list of dicts.

    Raises BadReturn if `messages` is not a list of messages, is empty, or holds an assistant
    message.
    """
    if isinstance(messages, str | dict | Message):
        raise BadReturn(f"step() returned a {type(messages).__name__}; return a list of Message")
    try:
        parsed = [Message.from_dict(message) for message in messages]
    except (TypeError, ValueError) as error:
        raise BadReturn(f"step() returned no list of messages: {error}") from error
    if not parsed:
        raise BadReturn("step() returned an empty list; return None when the rollout is over")
    if any(message.role == "assistant" for message in parsed):
        raise BadReturn("step() returned an assistant message; only the model writes those")
    return [message.to_dict() for message in parsed]


def _writer(fd: int) -> Callable[[Reply], None]:
    """Return a function that writes one reply as a JSON line to the file descriptor `fd`."""

    def write(message: Reply) -> None:
        """Write the whole message; one system call may write only a part of it."""
        unwritten = memoryview((json.dumps(message) + "\n").encode())
        while unwritten:
            written_count = os.write(fd, unwritten)
            unwritten = unwritten[written_count:]

    return write

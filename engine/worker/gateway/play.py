"""Plays the rollouts of a command: each process of the program plays one task, several at once.

The processes run beside the sampler. What they ask is sampled in batches, in the thread that calls
`play`. A process that hangs, crashes or asks nothing costs only its own rollout.
"""

import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from engine.worker.core import pulse
from engine.worker.core.trajectory import Group, Trajectory
from engine.worker.gateway.batcher import Batcher
from engine.worker.gateway.server import MODEL, Loop, RolloutServer
from engine.worker.gateway.session import Rules, Session
from engine.worker.network.sampler import Sampler, SamplingParams
from engine.worker.rollouts.collect import PlayPrograms, RolloutContext, Times, set_error, set_score
from envs.base import Task
from envs.config.problem import EnvProblem
from envs.config.settings import read_settings
from envs.host.command import CommandRun, Commands, Ending, score_of
from envs.host.pipe import Fault
from envs.host.process import EnvProcess
from envs.json_types import ChatMessage, JsonObject, TaskRow

BEAT_S = 0.5  # time between two signs of life while the programs work
# The longest prompt that programs also get as an environment variable, whose size Linux limits.
PROMPT_CHARS = 30_000


@dataclass
class Programs:
    """Plays rollouts of one environment's command. `collect` calls its method `play`."""

    commands: Commands

    def play(
        self,
        tasks: Sequence[TaskRow],
        groups: list[Group],
        context: RolloutContext,
        sampler: Sampler,
        params: SamplingParams,
    ) -> Times:
        """Play every trajectory of `groups` and score it. Returns the seconds spent on both.

        `tasks` are the tasks of the groups, in the same order. Raises what the sampler raises.
        """
        times = Times()
        rules = Rules(context.renderer, params, context.max_length, context.max_turns)
        with Loop() as loop, _Playground(self.commands, rules, loop) as playground:
            futures = [
                playground.begin(task, trajectory)
                for task, group in zip(tasks, groups, strict=True)
                for trajectory in group.members
            ]
            began = time.monotonic()
            times.sample_s = playground.sample_until_done(futures, sampler)
            for future in futures:
                future.result()  # raises an unexpected error of this code
            times.reward_s = time.monotonic() - began - times.sample_s
        return times


@dataclass
class _Playground:
    """Context manager within which rollouts are played. On exit, all their processes are dead."""

    commands: Commands
    rules: Rules
    loop: Loop
    running: set[CommandRun] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_over: bool = False

    def __post_init__(self) -> None:
        """Create as many threads as rollouts may run at once, by the environment's settings.
        Nothing is played yet."""
        at_once = self.commands.rollout.at_once
        self.threads = ThreadPoolExecutor(at_once, thread_name_prefix="rollout")
        self.batcher = Batcher(self.rules.params, lambda: len(self.running))
        self.futures: list[Future[None]] = []

    def __enter__(self) -> "_Playground":
        """Return this object; the threads start with their first rollout."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        """End the processes that are still running, and wait until they have ended. Some are left
        only after an error, and nobody needs their rollouts then."""
        self.is_over = True
        self.batcher.close(error or RuntimeError("the rollouts are over"))
        with self.lock:
            for run in self.running:
                run.close_lifeline()  # ends the run's processes
        self.threads.shutdown(cancel_futures=True)
        wait(self.futures)

    def begin(self, task: TaskRow, trajectory: Trajectory) -> "Future[None]":
        """Queue one rollout of `task`, which is written into `trajectory`. The future that is
        returned is done once the rollout was scored."""
        future = self.threads.submit(self._play, task, trajectory)
        self.futures.append(future)
        future.add_done_callback(lambda _: self._count_played())
        return future

    def sample_until_done(self, rollouts: "Sequence[Future[None]]", sampler: Sampler) -> float:
        """Sample what the programs ask, in batches, until all rollouts of `rollouts` are over.

        Returns the seconds that the sampler has worked. Raises what the sampler raises.
        """
        seconds = 0.0
        while not all(future.done() for future in rollouts):
            questions = self.batcher.take(BEAT_S)
            pulse.beat()  # a sign of life
            if questions:
                began = time.monotonic()
                self.batcher.sample(sampler, questions)
                seconds += time.monotonic() - began
        return seconds

    def _count_played(self) -> None:
        """Count a finished rollout as progress, and wake the sampling thread."""
        pulse.advance()
        self.batcher.wake()

    def _play(self, task: TaskRow, trajectory: Trajectory) -> None:
        """Play one rollout and score it. Problems of the environment, or of the box that isolates
        the program's process, are recorded in the trajectory. Called in a thread of the pool."""
        session = Session(trajectory, self.rules)
        row = _row_for_program(task, trajectory.prompt)  # the prompt is still the task's own
        try:
            ending = self._run(row, session)
        except (EnvProblem, Fault, OSError) as error:  # the program could not be started in its box
            set_error(
                trajectory, str(error), timed_out=isinstance(error, Fault) and error.timed_out
            )
            return
        sampling_stop_reason = trajectory.stop_reason  # `set_score` overwrites it
        report = _report_for_reward_server(row, trajectory) if trajectory.turns else None
        set_score(trajectory, score_of(self.commands.rollout, ending, report))
        if trajectory.error is None and not trajectory.turns:
            set_error(trajectory, "the command asked the model nothing", timed_out=False)
        elif trajectory.error is None:
            trajectory.stop_reason = sampling_stop_reason

    def _run(self, row: TaskRow, session: Session) -> Ending:
        """Run the environment's command for one task and return how it ended. `row` is the task as
        the program may see it; `session` records what the program asks the model. On return, all
        processes of the command are dead."""
        with closing(self.commands.start()) as run, self._counted_as_running(run):
            key = f"hs-{secrets.token_urlsafe(24)}"
            app = RolloutServer(session, self.batcher, key).app()
            stop = self.loop.serve(app, run.listener)
            try:
                variables = _environment_variables(row, run.base_url, key)
                variables["HONESMITH_ENV"] = _version_in_words(self.commands.source)
                run.begin(row, variables)
                return run.wait()
            finally:
                session.close()
                stop()

    @contextmanager
    def _counted_as_running(self, run: CommandRun) -> Iterator[None]:
        """Context manager within which `run` counts as running: `__exit__` ends its processes, and
        a batch of questions waits for one of it."""
        with self.lock:
            self.running.add(run)
            if self.is_over:  # `__exit__` has already ended all others, and would miss this one
                run.close_lifeline()
        try:
            yield
        finally:
            with self.lock:
                self.running.discard(run)
            self.batcher.wake()  # a batch is complete with fewer questions now


def _version_in_words(source: Path) -> str:
    """Return the id of a version of an environment, "harbor@0123456789ab", from the path of its
    files, `source`, which a version has in a folder of its own."""
    return f"{source.parents[1].name}@{source.parent.name[:12]}"


def _row_for_program(task: TaskRow, prompt: list[ChatMessage]) -> TaskRow:
    """Return the task as its program may see it, without the reference answer (`gold`) and `asked`,
    which only this project's own code uses. `prompt` is that of the task, or the same task in other
    words."""
    fields = {name: value for name, value in task.items() if name not in ("gold", "asked")}
    return fields | {"prompt": prompt}


def _report_for_reward_server(row: TaskRow, trajectory: Trajectory) -> JsonObject:
    """Return the facts of a rollout that are sent to a reward server: the task as its program saw
    it, the first conversation with the model, and its last answer."""
    return {
        "task": row,
        "messages": [*trajectory.prompt, *trajectory.messages],
        "completion": trajectory.completion,
        "turns": trajectory.turns,
    }


def _environment_variables(task: TaskRow, base_url: str, key: str) -> dict[str, str]:
    """Return the environment variables by which a program finds the model, at `base_url` with the
    key `key`, and its task. A value that a variable cannot hold is left out."""
    variables = {
        "OPENAI_BASE_URL": f"{base_url}/v1",
        "OPENAI_API_BASE": f"{base_url}/v1",
        "OPENAI_API_KEY": key,
        "OPENAI_MODEL": MODEL,
        "ANTHROPIC_BASE_URL": base_url,
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_MODEL": MODEL,
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
        "HONESMITH_TASK_ID": task["id"],
        "HONESMITH_PROMPT": Task.from_row(task).prompt_text,
    }
    # A variable cannot hold a zero byte, nor much text. HONESMITH_TASK leads to the whole task.
    return {
        name: value
        for name, value in variables.items()
        if "\0" not in value and len(value) <= PROMPT_CHARS
    }


def programs_of(process: EnvProcess) -> PlayPrograms:
    """Return the function that plays the rollouts of an environment's command, under the limits of
    the environment's process.

    Raises EnvProblem if environment.toml cannot be read, and ValueError if it names no command.
    """
    rollout = read_settings(process.source).rollout
    if rollout is None:
        raise ValueError(f"{process.source} names no command")
    commands = Commands(
        source=process.source,
        rollout=rollout,
        python=process.python,
        limits=process.limits,
        secrets=process.secrets,
        log=process.log,
        sandbox=process.sandbox,
    )
    return Programs(commands).play

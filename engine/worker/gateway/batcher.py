"""Samples the questions of many programs together: any thread may ask, one thread answers."""

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from engine.worker.core.trajectory import Completion
from engine.worker.network.sampler import OnCompletion, Sampler, SamplingParams

# The waiting questions are sampled when no further one has come for LINGER_S seconds, and at the
# latest after LONGEST_LINGER_S.
LINGER_S, LONGEST_LINGER_S = 0.03, 0.2


@dataclass(frozen=True)
class PendingQuestion:
    """A completion that a program waits for.

    Attributes:
        prompt: the token ids of the prompt.
        max_tokens: the longest completion in tokens.
        stop: texts that end the completion.
        future: gets the completion.
    """

    prompt: list[int]
    max_tokens: int
    stop: tuple[str, ...]
    future: "Future[Completion]" = field(default_factory=Future)


class Batcher:
    """Collects the questions of programs and samples them in batches."""

    def __init__(self, params: SamplingParams, waiting_programs: Callable[[], int]) -> None:
        """Make a batcher without questions.

        Args:
            params: how tokens are drawn. A question may only lower the token limit and add stop
                strings.
            waiting_programs: returns how many programs could still ask. A batch with one question
                of each is complete, so nothing more is waited for.
        """
        self._params = params
        self._waiting_programs = waiting_programs
        self._pending: list[PendingQuestion] = []
        self._changed = threading.Condition()
        self._calls = 0  # how often the sampler was called; each call has a seed of its own
        self._closed: BaseException | None = None  # why nothing is sampled any more

    def ask(
        self, prompt: list[int], max_tokens: int, stop: tuple[str, ...]
    ) -> "Future[Completion]":
        """Queue a question: the token ids in `prompt`, to be continued by at most `max_tokens`
        tokens, or until one of the texts in `stop`. The future that is returned gets the
        completion, or is cancelled if the batcher is already closed."""
        question = PendingQuestion(prompt, max_tokens, stop)
        with self._changed:
            if self._closed is None:
                self._pending.append(question)
            else:
                question.future.cancel()
            self._changed.notify()
        return question.future

    def wake(self) -> None:
        """End the wait of `take` in another thread: a program has ended, so the questions that have
        come may be all there will be."""
        with self._changed:
            self._changed.notify()

    def take(self, timeout: float) -> list[PendingQuestion]:
        """Wait for questions and return those that are to be sampled together. Returns [] if none
        came within `timeout` seconds, or if `wake` was called before any came.

        Once there is a question, it waits for further ones: until every program has asked, none has
        come for LINGER_S seconds, or LONGEST_LINGER_S seconds are over.
        """
        with self._changed:
            if not self._pending:
                self._changed.wait(timeout)
            began = time.monotonic()
            while self._pending and len(self._pending) < self._waiting_programs():
                seconds_left = began + LONGEST_LINGER_S - time.monotonic()
                count_before = len(self._pending)
                self._changed.wait(min(LINGER_S, max(0.0, seconds_left)))
                if len(self._pending) == count_before or seconds_left <= 0:
                    break
            batch, self._pending = self._pending, []
        # False for a question that its program no longer waits for.
        return [question for question in batch if question.future.set_running_or_notify_cancel()]

    def sample(self, sampler: Sampler, questions: Sequence[PendingQuestion]) -> None:
        """Sample the questions with `sampler` and give each its completion. Questions with the same
        limits share one call of the sampler. Only the thread that owns the sampler may call
        this."""
        by_limits: dict[tuple[int, tuple[str, ...]], list[PendingQuestion]] = {}
        for question in questions:
            by_limits.setdefault((question.max_tokens, question.stop), []).append(question)
        for (max_tokens, stop), batch in by_limits.items():
            params = replace(self._params, max_tokens=max_tokens, stop=stop, seed=self._next_seed())
            prompts = [question.prompt for question in batch]
            sampler.generate(prompts, n=1, params=params, done=_deliver_to(batch))

    def close(self, reason: BaseException) -> None:
        """Cancel the questions that wait, and every later one. `reason` says why nothing is
        sampled."""
        with self._changed:
            self._closed = reason
            dropped, self._pending = self._pending, []
        for question in dropped:
            question.future.cancel()

    def _next_seed(self) -> int:
        """Return a seed that no other call of this run has. The sampler draws by seed and place in
        the batch, so two calls with the same seed would draw the same tokens."""
        self._calls += 1
        text = f"{self._params.seed} {self._calls}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6])


def _deliver_to(batch: Sequence[PendingQuestion]) -> OnCompletion:
    """Return a callback for the sampler. It gives the completion of prompt `index` to the program
    that asked the question at that place in the batch."""

    def deliver(index: int, _member: int, completion: Completion) -> None:
        """Give the completion of prompt `index` to the program that waits for it."""
        batch[index].future.set_result(completion)

    return deliver

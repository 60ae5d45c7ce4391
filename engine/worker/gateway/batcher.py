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
class Wish:
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
    """Collects wishes (questions of programs) and samples them in batches."""

    def __init__(self, params: SamplingParams, waiting_programs: Callable[[], int]) -> None:
        """Make a batcher without questions.

        Args:
            params: how tokens are drawn. A wish may only lower the token limit and add stop
                strings.
            waiting_programs: returns how many programs could still ask. A batch with one question
                of each is complete, so nothing more is waited for.
        """
        self._params = params
        self._waiting_programs = waiting_programs
        self._wishes: list[Wish] = []
        self._changed = threading.Condition()
        self._calls = 0  # how often the sampler was called; each call has a seed of its own
        self._closed: BaseException | None = None  # why nothing is sampled any more

    def ask(
        self, prompt: list[int], max_tokens: int, stop: tuple[str, ...]
    ) -> "Future[Completion]":
        """Queue a question. The future that is returned gets the completion, or is cancelled if the
        batcher is already closed."""
        wish = Wish(prompt, max_tokens, stop)
        with self._changed:
            if self._closed is None:
                self._wishes.append(wish)
            else:
                wish.future.cancel()
            self._changed.notify()
        return wish.future

    def wake(self) -> None:
        """End the wait of `take`, because a program has ended."""
        with self._changed:
            self._changed.notify()

    def take(self, timeout: float) -> list[Wish]:
        """Wait for questions and return those that are to be sampled together. Returns [] if none
        came within `timeout` seconds, or if `wake` was called before any came."""
        with self._changed:
            if not self._wishes:
                self._changed.wait(timeout)
            began = time.monotonic()
            while self._wishes and len(self._wishes) < self._waiting_programs():
                seconds_left = began + LONGEST_LINGER_S - time.monotonic()
                count_before = len(self._wishes)
                self._changed.wait(min(LINGER_S, max(0.0, seconds_left)))
                if len(self._wishes) == count_before or seconds_left <= 0:
                    break
            batch, self._wishes = self._wishes, []
        return [wish for wish in batch if wish.future.set_running_or_notify_cancel()]

    def sample(self, sampler: Sampler, wishes: Sequence[Wish]) -> None:
        """Sample the wishes and give each its completion. Wishes with the same limits share one
        call of the sampler. Only the thread that owns the sampler may call this."""
        by_limits: dict[tuple[int, tuple[str, ...]], list[Wish]] = {}
        for wish in wishes:
            by_limits.setdefault((wish.max_tokens, wish.stop), []).append(wish)
        for (max_tokens, stop), batch in by_limits.items():
            params = replace(self._params, max_tokens=max_tokens, stop=stop, seed=self._next_seed())
            prompts = [wish.prompt for wish in batch]
            sampler.generate(prompts, n=1, params=params, done=_deliver_to(batch))

    def close(self, reason: BaseException) -> None:
        """Cancel the questions that wait, and every later one. `reason` says why nothing is
        sampled."""
        with self._changed:
            self._closed = reason
            dropped, self._wishes = self._wishes, []
        for wish in dropped:
            wish.future.cancel()

    def _next_seed(self) -> int:
        """Return a seed that no other call of this run has. The sampler draws by seed and place in
        the batch, so two calls with the same seed would draw the same tokens."""
        self._calls += 1
        text = f"{self._params.seed} {self._calls}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6])


def _deliver_to(batch: Sequence[Wish]) -> OnCompletion:
    """Return a callback for the sampler that gives the completion of prompt `index` to the wish at
    that place in the batch."""

    def deliver(index: int, _member: int, completion: Completion) -> None:
        batch[index].future.set_result(completion)

    return deliver

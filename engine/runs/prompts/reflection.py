"""The endpoint that reads answers and writes prompts, within the caps of the run.

gepa calls it with the text of a request and takes the answer's text. It tries again where a call
raises, and goes on with the next round: what went wrong is kept here, for the search to end by.
"""

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from engine.core.files import JsonObject
from engine.endpoints.answered import AnswerLedger, OutOfBudget, Use
from engine.endpoints.chat_client import Cancelled, ChatClient, EndpointDown, Refused
from engine.endpoints.metered import Request, ask_once
from engine.home.run_dir import RunDir
from engine.home.user_config import key_of
from engine.records.run_config import PromptConfig

_BEAT_S = 2.0  # between signs of life


class Reflection:
    """Asks the endpoint of a run; what it was asked before an interruption is not asked again.

    Attributes:
        stopped_by: the cap that allows no further request, with its value; "" as long as none does.
        failure: why the endpoint cannot be asked at all; None if it can.
        answered: what the models behind a URL of this run answered and took.
    """

    def __init__(
        self,
        run: RunDir,
        config: PromptConfig,
        stop: threading.Event,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare to ask the endpoint that the config names.

        Args:
            run: the run, in whose folder all calls are recorded.
            config: the config of the run.
            stop: once set, no further request is sent.
            beat: gives a sign of life; called again and again while a request is under way.
        """
        self.stopped_by = ""
        self.failure: Refused | EndpointDown | None = None
        self.answered = AnswerLedger(run.endpoint_calls, None, config.settings.max_cost)
        key = key_of(run.home.root, config.reflection.key_env)
        self.client = ChatClient(config.reflection, key, stop)
        self._config, self._beat = config, beat
        self._name = f"{config.settings.reflection} (reflection)"
        # Hash of a request's messages -> how often this process has sent it.
        self._times_asked: Counter[str] = Counter()

    def close(self) -> None:
        """Close the connections and the file."""
        self.client.close()
        self.answered.close()

    @property
    def use(self) -> Use:
        """What reflecting took so far, in all attempts of the run."""
        return self.answered.use.get(self._name, Use())

    @property
    def is_over(self) -> bool:
        """Whether a cap or a failure of the endpoint allows no further request. If the limit of
        calls is reached, this is noted in `stopped_by`."""
        call_limit = self._config.settings.max_calls
        if self.use.calls >= call_limit and not self.stopped_by:
            self.stopped_by = f"max_calls = {call_limit}"
        return bool(self.stopped_by) or self.failure is not None

    def __call__(self, prompt: str | list[dict[str, Any]]) -> str:
        """Return the endpoint's answer to `prompt`, which is a text or a list of messages. gepa
        calls this.

        Raises OutOfBudget if a cap is reached, Refused or EndpointDown if the endpoint cannot be
        asked, Cancelled if the run was asked to stop.
        """
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        digest = hashlib.sha256(str(messages).encode("utf-8", "replace")).hexdigest()[:16]
        # (model, task, attempt, turn), the key of a recorded call: what an earlier attempt of the
        # run asked is found by it and not asked again.
        call_key = (self._name, f"reflection {digest}", 0, self._times_asked[digest])
        self._times_asked[digest] += 1
        request = Request(messages, [], self._options)
        try:
            if self.is_over:
                raise OutOfBudget(self.stopped_by)
            with self._beating():
                call = ask_once(self.client, self.answered, call_key, request)
        except OutOfBudget as cap:
            self.stopped_by = self.stopped_by or str(cap)
            raise
        except (Refused, EndpointDown) as failure:
            self.failure = failure
            raise
        except Cancelled:
            raise
        return str(call.message.get("content") or "")

    @contextmanager
    def _beating(self) -> Iterator[None]:
        """Context manager: give signs of life while the block runs. A request has time limits of
        its own, and may take longer than a run may be silent."""
        is_over = threading.Event()

        def beat_until_over() -> None:
            """Give a sign of life every `_BEAT_S` seconds."""
            while not is_over.wait(_BEAT_S):
                self._beat()

        thread = threading.Thread(target=beat_until_over, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    @property
    def _options(self) -> JsonObject:
        """Return the parameters of a request. The temperature is left out, so that of the endpoint
        holds: gepa needs prompts that differ."""
        settings = self._config.settings
        return {"max_tokens": settings.reflection_tokens, "seed": settings.seed}

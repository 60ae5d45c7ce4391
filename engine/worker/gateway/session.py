"""One rollout of a command: its requests, stitched to trajectories.

A request continues a conversation when its rendered prompt begins with every id of that
conversation, prompt and completions, or when its messages begin with those that were sent and
answered before: then only what follows is rendered, and the model reads the ids that it sampled
itself. Any other request begins a trajectory of its own. So no id that was sampled is ever replaced
by another way to write the same text, and what the loss sees is what the sampler saw.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from engine.models.chat_format import TemplateError
from engine.worker.core.failures import WorkerFailure
from engine.worker.core.trajectory import Completion, Trajectory
from engine.worker.gateway.asked import Answered, Asked, same_form
from engine.worker.gateway.chat_request import Refused, tool_call_as_openai
from engine.worker.network.sampler import SamplingParams
from engine.worker.rollouts.collect import append_turn
from engine.worker.rollouts.renderer import Renderer
from envs.json_types import ChatMessage, JsonObject, ToolSchema


@dataclass(frozen=True)
class Rules:
    """What holds for every rollout of a run.

    Attributes:
        params: how tokens are drawn; a request may only lower `max_tokens` and add stop strings.
        max_length: the most ids of prompt and completions together.
        max_turns: the most answers of a rollout.
    """

    renderer: Renderer
    params: SamplingParams
    max_length: int
    max_turns: int


@dataclass
class _Chain:
    """A conversation under way; `messages` are all of it as the program would send them back."""

    trajectory: Trajectory
    messages: list[ChatMessage]

    @property
    def ids(self) -> list[int]:
        """Every id so far."""
        return self.trajectory.prompt_ids + self.trajectory.ids


@dataclass(frozen=True)
class Turn:
    """A question that is about to be sampled.

    Attributes:
        prompt: all ids that the model reads.
        max_tokens, stop: its limits.
        chain: the conversation that it continues; None begins one.
        length: how many ids that conversation had.
    """

    asked: Asked
    prompt: list[int]
    max_tokens: int
    stop: tuple[str, ...]
    chain: _Chain | None
    length: int


class Session:
    """The requests of one rollout. Called from several threads, since a program may ask twice at
    once.

    Attributes:
        trajectory: the rollout; its first conversation is written into it, and those that could
            not be stitched to it become its `branches`.
    """

    def __init__(self, trajectory: Trajectory, rules: Rules) -> None:
        """Begin a rollout: what is asked and answered is written into `trajectory`."""
        self.trajectory = trajectory
        self.rules = rules
        self._chains: list[_Chain] = []
        self._asked = 0  # questions that were let through
        self._lock = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """Let no request through any more; what comes back from the sampler later is dropped."""
        with self._lock:
            self._closed = True

    def prepare(self, asked: Asked) -> Turn:
        """The question as ids.

        Raises Refused: 400 where the chat template refuses the messages, the conversation leaves no
        room for an answer, or the rollout has had all its turns; 401 once it is over.
        """
        with self._lock:
            self._require_open()
            if self._asked >= self.rules.max_turns:
                self.trajectory.stop_reason = "max_turns"
                message = f"The rollout has had its {self.rules.max_turns} turns (max_turns)."
                raise Refused(400, message)
            turn = self._turn(asked)
            self._asked += 1
            return turn

    def _turn(self, asked: Asked) -> Turn:
        """The question with its ids, the limits of its answer, and the conversation that it
        continues. Raises Refused (400) where the messages leave no room for an answer."""
        chain, prompt = self._stitched(asked)
        room = self.rules.max_length - len(prompt)
        if room < 1:
            self.trajectory.stop_reason = "max_context"
            raise Refused(
                400,
                f"The conversation has {len(prompt)} tokens, and max_length is "
                f"{self.rules.max_length} (context_length_exceeded).",
            )
        limits = [room, self.rules.params.max_tokens]
        if asked.max_tokens is not None:
            limits.append(asked.max_tokens)
        stop = tuple(dict.fromkeys((*self.rules.params.stop, *asked.stop)))
        return Turn(asked, prompt, min(limits), stop, chain, len(chain.ids) if chain else 0)

    def _stitched(self, asked: Asked) -> tuple[_Chain | None, list[int]]:
        """(the conversation that the question continues, or None; the ids of the question)."""
        candidates = [chain for chain in self._chains if chain.trajectory.tools == asked.tools]
        candidates.sort(key=lambda chain: len(chain.ids), reverse=True)  # the longest that fits
        rendered = self._rendered(asked.messages, asked.tools)
        for chain in candidates:
            ids = chain.ids
            if len(rendered) > len(ids) and rendered[: len(ids)] == ids:
                return chain, rendered
        for chain in candidates:
            following = self._following(chain, asked)
            if following is not None:
                return chain, chain.ids + following
        return None, rendered

    def _rendered(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema]) -> list[int]:
        """The ids of a whole conversation. Raises Refused (400) where the template refuses it."""
        try:
            return self.rules.renderer.prompt(messages, tools)
        except Exception as error:  # a template is a program; it may fail in any way
            raise Refused(400, f"The chat template refused the messages: {error}") from error

    def _following(self, chain: _Chain, asked: Asked) -> list[int] | None:
        """The ids that follow a conversation where the question repeats its messages and adds some;
        None where it does not."""
        count = len(chain.messages)
        new = asked.messages[count:]
        if not new or asked.messages[:count] != chain.messages:
            return None
        if any(message["role"] == "assistant" for message in new):  # not written by the model
            return None
        trajectory = chain.trajectory
        before = [*trajectory.prompt, *trajectory.messages]
        try:
            return self.rules.renderer.between_turns(
                before, new, asked.tools, last_id=trajectory.ids[-1]
            )
        except (WorkerFailure, TemplateError):
            return None

    def record(self, turn: Turn, completion: Completion) -> Answered:
        """Write a sampled answer into the trajectory that it belongs to, and return it for the
        program. Raises Refused (401) once the rollout is over."""
        with self._lock:
            self._require_open()
            chain = turn.chain
            if chain is None or len(chain.ids) != turn.length:
                # New, or another question continued the same conversation in the meantime.
                chain = self._new_chain(turn)
            else:
                chain.trajectory.add_environment(turn.prompt[turn.length :])
                new = turn.asked.messages[len(chain.messages) :]
                chain.trajectory.messages += new
            return self._appended(chain, turn, completion)

    def _require_open(self) -> None:
        if self._closed:
            raise Refused(401, "This rollout is over; its key is no longer valid.")

    def _new_chain(self, turn: Turn) -> _Chain:
        """A conversation that begins with this question: the rollout's own if it is the first."""
        first = not self._chains
        trajectory = self.trajectory if first else Trajectory(self.trajectory.task_id, [], [])
        trajectory.prompt = turn.asked.messages
        trajectory.prompt_ids = turn.prompt
        trajectory.tools = turn.asked.tools
        if not first:
            self.trajectory.branches.append(trajectory)
        chain = _Chain(trajectory, [])
        self._chains.append(chain)
        return chain

    def _appended(self, chain: _Chain, turn: Turn, completion: Completion) -> Answered:
        """Append a completion to its conversation; returns it for the program."""
        renderer, trajectory = self.rules.renderer, chain.trajectory
        append_turn(trajectory, completion, renderer, turn.stop)
        message = trajectory.messages[-1]
        calls = [tool_call_as_openai(call) for call in message.get("tool_calls") or []]
        text = str(message.get("content") or "")
        chain.messages = [*turn.asked.messages, _as_sent_back(text, calls)]
        finish = "stop" if completion.finished else "length"
        return Answered(
            text=text,
            reasoning=str(message.get("reasoning_content") or ""),
            tool_calls=calls,
            finish="tool_calls" if calls else finish,
            prompt_tokens=len(turn.prompt),
            completion_tokens=len(completion.ids),
        )


def _as_sent_back(text: str, calls: list[JsonObject]) -> ChatMessage:
    """The message by which a program repeats an answer of the model in its next request, in the
    form in which messages are compared."""
    sent: ChatMessage = {"role": "assistant", "content": text}
    if calls:
        sent["tool_calls"] = calls
    return same_form(sent)

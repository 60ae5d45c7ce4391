"""Records one rollout of a command: the program's requests are joined into trajectories.

A request continues a conversation if its rendered prompt begins with every id of that conversation
(prompt and completions), or if its messages begin with those that were sent and answered before. In
the second case only what follows is rendered, after the ids that the model sampled itself. Any
other request begins a trajectory of its own. So no sampled id is ever replaced by another way to
write the same text, and the loss sees what the sampler saw.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from engine.models.chat_format import TemplateError
from engine.worker.core.failures import WorkerFailure
from engine.worker.core.trajectory import Completion, Trajectory
from engine.worker.gateway.asked import Answer, Question, normal_form
from engine.worker.gateway.chat_request import Refused, tool_call_as_openai
from engine.worker.network.sampler import SamplingParams
from engine.worker.rollouts.collect import append_turn
from engine.worker.rollouts.renderer import Renderer
from envs.json_types import ChatMessage, JsonObject, ToolSchema


@dataclass(frozen=True)
class Rules:
    """Settings that hold for every rollout of a run.

    Attributes:
        params: how tokens are drawn; a request may only lower `max_tokens` and add stop strings.
        max_length: the most ids of a prompt and its completions together.
        max_turns: the most answers in a rollout.
    """

    renderer: Renderer
    params: SamplingParams
    max_length: int
    max_turns: int


@dataclass
class _Conversation:
    """A conversation under way. `messages` are all its messages, as the program would send them
    back."""

    trajectory: Trajectory
    messages: list[ChatMessage]

    @property
    def ids(self) -> list[int]:
        """All token ids of the conversation so far."""
        return self.trajectory.prompt_ids + self.trajectory.ids


@dataclass(frozen=True)
class Turn:
    """A question that is about to be sampled.

    Attributes:
        prompt: all token ids that the model reads.
        max_tokens, stop: the limits of the answer.
        conversation: the conversation that the question continues; None if it begins one.
        length: how many ids that conversation has; 0 for a new one.
    """

    question: Question
    prompt: list[int]
    max_tokens: int
    stop: tuple[str, ...]
    conversation: _Conversation | None
    length: int


class Session:
    """The requests of one rollout. Several threads call it, since a program may send requests in
    parallel.

    Attributes:
        trajectory: the rollout. Its first conversation is written into it; conversations that do
            not continue the first become its `branches`.
    """

    def __init__(self, trajectory: Trajectory, rules: Rules) -> None:
        """Begin a rollout under the limits of `rules`; what is asked and answered is written into
        `trajectory`."""
        self.trajectory = trajectory
        self.rules = rules
        self._conversations: list[_Conversation] = []
        self._turn_count = 0  # how many questions were let through
        self._lock = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """Refuse all further requests. Completions that the sampler returns later are dropped."""
        with self._lock:
            self._closed = True

    def prepare(self, question: Question) -> Turn:
        """Turn a question into token ids for the sampler.

        Raises Refused (400) if the chat template refuses the messages, the conversation leaves no
        room for an answer, or the rollout has had all its turns; Refused (401) if the rollout is
        over.
        """
        with self._lock:
            self._require_open()
            if self._turn_count >= self.rules.max_turns:
                self.trajectory.stop_reason = "max_turns"
                message = f"The rollout has had its {self.rules.max_turns} turns (max_turns)."
                raise Refused(400, message)
            turn = self._prepare_turn(question)
            self._turn_count += 1
            return turn

    def _prepare_turn(self, question: Question) -> Turn:
        """Return the question with its ids, the limits of its answer, and the conversation that it
        continues. Raises Refused (400) if the template refuses the messages or they leave no room
        for an answer."""
        conversation, prompt = self._continued_conversation(question)
        room = self.rules.max_length - len(prompt)
        if room < 1:
            self.trajectory.stop_reason = "max_context"
            raise Refused(
                400,
                f"The conversation has {len(prompt)} tokens, and max_length is "
                f"{self.rules.max_length} (context_length_exceeded).",
            )
        limits = [room, self.rules.params.max_tokens]
        if question.max_tokens is not None:
            limits.append(question.max_tokens)
        stops = (*self.rules.params.stop, *question.stop)
        distinct_stops = tuple(dict.fromkeys(stops))  # in their order
        known_ids = len(conversation.ids) if conversation else 0
        return Turn(question, prompt, min(limits), distinct_stops, conversation, known_ids)

    def _continued_conversation(self, question: Question) -> tuple[_Conversation | None, list[int]]:
        """Find the conversation that a program's question continues. Returns (that conversation or
        None, the token ids of the whole question)."""
        candidates = [
            conversation
            for conversation in self._conversations
            if conversation.trajectory.tools == question.tools
        ]
        # The longest match wins.
        candidates.sort(key=lambda conversation: len(conversation.ids), reverse=True)
        rendered = self._rendered_ids(question.messages, question.tools)
        for conversation in candidates:
            ids = conversation.ids
            if len(rendered) > len(ids) and rendered[: len(ids)] == ids:
                return conversation, rendered
        for conversation in candidates:
            continuation = self._continuation_ids(conversation, question)
            if continuation is not None:
                return conversation, conversation.ids + continuation
        return None, rendered

    def _rendered_ids(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema]
    ) -> list[int]:
        """Render a whole conversation to ids. Raises Refused (400) if the template refuses it."""
        try:
            return self.rules.renderer.prompt(messages, tools)
        except Exception as error:  # a template is a program; it may fail in any way
            raise Refused(400, f"The chat template refused the messages: {error}") from error

    def _continuation_ids(
        self, conversation: _Conversation, question: Question
    ) -> list[int] | None:
        """Return the ids that follow a conversation, if the question continues it: the question
        repeats all its messages and adds further ones. Returns None if not, if an added message is
        an assistant's, or if the chat template refuses the added messages."""
        count = len(conversation.messages)
        added_messages = question.messages[count:]
        if not added_messages or question.messages[:count] != conversation.messages:
            return None
        # The program wrote such a message itself, so it must not be trained as the model's.
        if any(message["role"] == "assistant" for message in added_messages):
            return None
        trajectory = conversation.trajectory
        before = [*trajectory.prompt, *trajectory.messages]
        try:
            return self.rules.renderer.between_turns(
                before, added_messages, question.tools, last_id=trajectory.ids[-1]
            )
        except (WorkerFailure, TemplateError):
            return None

    def record(self, turn: Turn, completion: Completion) -> Answer:
        """Write a sampled answer into the trajectory that it belongs to, and return it for the
        program. Raises Refused (401) if the rollout is over."""
        with self._lock:
            self._require_open()
            conversation = turn.conversation
            if conversation is None or len(conversation.ids) != turn.length:
                # The conversation is new, or another question has continued it in the meantime.
                conversation = self._new_conversation(turn)
            else:
                conversation.trajectory.add_environment(turn.prompt[turn.length :])
                added_messages = turn.question.messages[len(conversation.messages) :]
                conversation.trajectory.messages += added_messages
            return self._append_completion(conversation, turn, completion)

    def _require_open(self) -> None:
        """Raise Refused (401) if the rollout is over."""
        if self._closed:
            raise Refused(401, "This rollout is over; its key is no longer valid.")

    def _new_conversation(self, turn: Turn) -> _Conversation:
        """Begin a conversation with this question (`turn`): in the rollout's own trajectory if it
        is the first, else in a branch of it."""
        is_first = not self._conversations
        trajectory = self.trajectory if is_first else Trajectory(self.trajectory.task_id, [], [])
        trajectory.prompt = turn.question.messages
        trajectory.prompt_ids = turn.prompt
        trajectory.tools = turn.question.tools
        if not is_first:
            self.trajectory.branches.append(trajectory)
        conversation = _Conversation(trajectory, [])
        self._conversations.append(conversation)
        return conversation

    def _append_completion(
        self, conversation: _Conversation, turn: Turn, completion: Completion
    ) -> Answer:
        """Append a completion to its conversation, and return it in the form for the program.
        `turn` is the question that it answers."""
        renderer, trajectory = self.rules.renderer, conversation.trajectory
        append_turn(trajectory, completion, renderer, turn.stop)
        message = trajectory.messages[-1]
        calls = [tool_call_as_openai(call) for call in message.get("tool_calls") or []]
        text = str(message.get("content") or "")
        conversation.messages = [*turn.question.messages, _as_program_repeats(text, calls)]
        finish = "stop" if completion.finished else "length"
        return Answer(
            text=text,
            reasoning=str(message.get("reasoning_content") or ""),
            tool_calls=calls,
            finish="tool_calls" if calls else finish,
            prompt_tokens=len(turn.prompt),
            completion_tokens=len(completion.ids),
        )


def _as_program_repeats(text: str, calls: list[JsonObject]) -> ChatMessage:
    """Return the message by which a program will repeat an answer of the model in its next request:
    its text and tool calls, in the normal form in which messages are compared."""
    message: ChatMessage = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = calls
    return normal_form(message)

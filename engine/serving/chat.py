"""Asks models: one question or a conversation, one model or two side by side.

An answer is read while it is sampled. If the call's time is over first, the reply holds the answer
so far, and the next call continues it with exactly those tokens.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.errors import UserError
from engine.core.reply import Reply
from engine.home.run_dir import DeployDir, Home
from engine.machine.processes.deployments import ANYBODY, Asker, Json, Unreachable
from engine.serving import conversations
from engine.serving.answer_stream import Answer, Limits, RefusedByServer, sample
from engine.serving.chat_reply import CUT, CUT_BY_TIME, ModelAnswer, Saved, reply_of, started_entry
from engine.serving.chat_request import (
    DRAW_SEED,
    OF_CLIENTS,
    ChatRequest,
    Listener,
    Patience,
    unheard,
)
from engine.serving.conversations import Branch, Conversation
from engine.serving.messages import BadMessages, check_size, checked_messages, checked_tools
from engine.serving.service import serve, target_of
from engine.serving.starting import Target, deploy_failed
from envs.json_types import ChatMessage, ToolSchema

_LONGEST_SEED = 2**31


@dataclass(frozen=True)
class Question:
    """What one model is asked.

    Attributes:
        messages: all messages that the model reads.
        begun: ids of the tokens that its answer begins with, if an unfinished answer is continued.
    """

    target: Target
    messages: list[ChatMessage]
    begun: list[int]


@dataclass(frozen=True)
class Session:
    """What is the same for all models that one call asks.

    Attributes:
        asker: whose quota a start of a model counts against.
        listener: is called with each piece of an answer as it comes.
        deadline: of the whole call, a time on the monotonic clock.
        sampling: how the models sample, from `_sampling_body`.
    """

    home: Home
    asker: Asker
    patience: Patience
    listener: Listener
    deadline: float
    sampling: Json


def chat(
    home: Home,
    request: ChatRequest,
    asker: Asker = ANYBODY,
    patience: Patience = OF_CLIENTS,
    listener: Listener = unheard,
) -> Reply:
    """Ask a model, and with `compare_to` a second one; a model that is not served yet is deployed.

    Such a deployment counts against the quota of `asker`, who alone can continue the conversation.
    `listener` is called with each piece of an answer as it comes.

    Raises UserError BAD_ARGUMENT if there is nothing to answer or the model refuses the question,
    DEPLOY_FAILED if no token comes for `patience.stall_s` seconds, and the errors of a deployment
    that cannot be started (see `service.serve`).
    """
    earlier = _earlier_conversation(home, request, asker)
    names = _model_names(request)
    # If the question has errors, they are raised here, before anything is started.
    tools = _tools_of(request, earlier)
    questions = _questions(home, request, names, tools, earlier)
    seed = _seed_of(request, earlier)
    sampling = _sampling_body(request, seed, tools)
    deadline = time.monotonic() + patience.call_s
    session = Session(home, asker, patience, listener, deadline, sampling)
    model_answers = _ask_all(session, questions)
    conversation = _conversation_after(
        earlier, questions, model_answers, tools=tools, seed=seed, owner=asker.name
    )
    saved = _save(home, request, conversation)
    return reply_of(model_answers, names, saved, home.user_config().idle_stop_minutes)


def _model_names(request: ChatRequest) -> list[str]:
    """List the one or two models to ask, by the names that the caller gave, without duplicates."""
    names = [request.model, request.compare_to]  # either may be ""
    return list(dict.fromkeys(name for name in names if name))


def _save(home: Home, request: ChatRequest, conversation: Conversation) -> Saved:
    """Save the conversation after a call. Returns its id, a warning, and its seed. The seed is None
    unless tokens were drawn with it; at temperature 0 the model takes the likeliest ones."""
    conversation_id, warning = conversations.save(home, request.conversation, conversation)
    draws_tokens = request.temperature > 0
    return Saved(conversation_id, warning, conversation.seed if draws_tokens else None)


def _earlier_conversation(home: Home, request: ChatRequest, asker: Asker) -> Conversation | None:
    """Load the conversation that the request continues; None if it begins one. Only `asker`, who
    began it, may continue it."""
    if not request.conversation:
        return None
    return conversations.load(home, request.conversation, asker.name)


def _questions(
    home: Home,
    request: ChatRequest,
    names: Sequence[str],
    tools: list[ToolSchema],
    earlier: Conversation | None,
) -> list[Question]:
    """Make the question for each of the named models: what it is asked in this call, after its part
    of the `earlier` conversation (None for a new one).

    Raises UserError BAD_ARGUMENT if there is nothing to answer or the messages have a wrong form,
    MODEL_* if a model does not exist.
    """
    added = _added_messages(request, earlier)
    targets = [target_of(home, name) for name in names]
    questions = [_question(target, added, earlier) for target in targets]
    for question in questions:
        _check_messages(question.messages, tools)
    return questions


def _sampling_body(request: ChatRequest, seed: int, tools: list[ToolSchema]) -> Json:
    """Make the part of a request to a model's server that is the same for all models: how to
    sample, and which tools there are."""
    body: Json = {
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "seed": seed,
    }
    if tools:
        body["tools"] = tools
    return body


def _ask_all(session: Session, questions: Sequence[Question]) -> list[ModelAnswer]:
    """Ask the models one after the other, all within the time of the call (`session` says what is
    the same for all). Raises UserError if one cannot be served, refuses the question or does not
    answer."""
    model_answers: list[ModelAnswer] = []
    for number, question in enumerate(questions):
        # With two models, the first gets half of the time, so that the second has the other half.
        shares = len(questions) - number
        model_answers.append(_ask(session, question, shares))
    return model_answers


def _tools_of(request: ChatRequest, earlier: Conversation | None) -> list[ToolSchema]:
    """Return the tools that the models may call: those of the request, else those of the
    conversation so far (`earlier`; None for a new one). Raises UserError BAD_ARGUMENT if the
    request's tools are not a list of objects."""
    if not request.tools:
        return earlier.tools if earlier else []
    try:
        return checked_tools(list(request.tools))
    except BadMessages as error:
        raise _bad_messages(error) from error


def _added_messages(request: ChatRequest, earlier: Conversation | None) -> list[ChatMessage]:
    """List the messages that this call adds to the `earlier` conversation (None for a new one).
    Raises UserError BAD_ARGUMENT if a system prompt would not come first, or if a new conversation
    has nothing to answer."""
    added: list[ChatMessage] = []
    if request.system:
        if earlier or _begins_with_system(request.messages):
            raise UserError(
                "BAD_ARGUMENT",
                "system is given, but the conversation has begun or has a system message",
                hint="Leave system out, or begin another conversation.",
                field="system",
            )
        added.append({"role": "system", "content": request.system})
    added += request.messages
    if request.message.strip():
        added.append({"role": "user", "content": request.message})
    # A conversation of a system prompt alone asks nothing.
    if not earlier and (not added or added[-1].get("role") == "system"):
        raise UserError("BAD_ARGUMENT", "message is empty", hint="Ask something.", field="message")
    return added


def _begins_with_system(messages: Sequence[ChatMessage]) -> bool:
    """Tell whether the first message is a system message. The messages are not checked yet, so the
    first may be something else than an object."""
    first = messages[0] if messages else None
    return isinstance(first, dict) and first.get("role") == "system"


def _question(
    target: Target, added: Sequence[ChatMessage], earlier: Conversation | None
) -> Question:
    """Make the question for the target: its part of the conversation so far (`earlier`; None for a
    new one), followed by the messages in `added`. If there are none, the question is for the rest
    of its last answer.

    A model that joins a conversation later reads what the first model was asked and answered.
    Raises UserError BAD_ARGUMENT if there is nothing to answer.
    """
    if earlier is None:
        return Question(target, list(added), begun=[])
    branches = {branch.model: branch for branch in earlier.branches}
    branch = branches.get(target.name, earlier.branches[0])
    if added:
        return Question(target, [*branch.messages, *added], begun=[])
    return _rest_of_answer(target, branch)


def _rest_of_answer(target: Target, branch: Branch) -> Question:
    """Make the question of a call that adds no message: to finish the last answer in `branch`,
    which was cut, or to answer its last message. `begun` of the result holds the token ids of the
    unfinished answer.

    Raises UserError BAD_ARGUMENT if the last message is an answer that the target cannot continue.
    """
    if branch.model == target.name and branch.begun:
        before_answer = branch.messages[:-1]  # the last message is the unfinished answer
        return Question(target, before_answer, begun=branch.begun)
    if branch.messages[-1]["role"] == "assistant":
        raise UserError(
            "BAD_ARGUMENT",
            f"message is empty, and {target.name} has no unfinished answer in this conversation",
            hint="Say something, or give results of tools as messages.",
            field="message",
        )
    return Question(target, branch.messages, begun=[])  # its last message has no answer yet


def _check_messages(messages: list[ChatMessage], tools: list[ToolSchema]) -> None:
    """Raise UserError BAD_ARGUMENT if no model can be asked with these messages and tools: a wrong
    form, or too much text."""
    try:
        check_size(checked_messages(messages), tools)
    except BadMessages as error:
        raise _bad_messages(error) from error


def _bad_messages(error: BadMessages) -> UserError:
    """Make the error BAD_ARGUMENT for messages or tools that no model can be asked with."""
    return UserError(
        "BAD_ARGUMENT",
        str(error),
        hint='One message is {"role": "user", "content": "..."}, as in OpenAI\'s chat API.',
        field=error.field,
    )


def _seed_of(request: ChatRequest, earlier: Conversation | None) -> int:
    """Return the seed of this call: the request's; else, if a cut answer of the `earlier`
    conversation is continued, the seed it began with; else a new one."""
    if request.seed != DRAW_SEED:
        return request.seed
    asks_nothing_new = not request.message and not request.messages
    if earlier is not None and asks_nothing_new:
        return earlier.seed
    return time.time_ns() % _LONGEST_SEED


def _ask(session: Session, question: Question, shares: int) -> ModelAnswer:
    """Ask one model, which is started if it is not served yet. The time that the call has left
    (`session.deadline`) is divided into `shares` equal parts, of which the answer may take one.

    If the model's process ends before the answer is done, it is started once more, and the answer
    goes on after the tokens that came. Raises UserError if the model cannot be served, refuses the
    question or does not answer.
    """
    started: list[Reply] = []  # an entry for each deployment that had to be started
    answer = Answer()
    seconds = 0.0  # how long the answer took, without the start of the model
    for is_second_try in (False, True):
        folder = _served_folder(session, question.target, started)
        attempt_start = time.monotonic()
        answer_by = attempt_start + (session.deadline - attempt_start) / shares
        try:
            _sample(session, question, folder, answer, answer_by)
            break
        except Unreachable as error:
            if is_second_try or time.monotonic() > answer_by:
                raise deploy_failed(folder, f"it did not answer: {error}") from error
        finally:
            seconds += time.monotonic() - attempt_start
    return ModelAnswer(question.target.name, answer, seconds, started)


def _served_folder(session: Session, target: Target, started: list[Reply]) -> DeployDir:
    """Return the folder of a deployment that serves the target model. If it had to be started, an
    entry about that, for the reply, is appended to `started`."""
    ready_by = min(session.deadline, time.monotonic() + session.patience.start_s)
    row, start_seconds = serve(session.home, target, ready_by, session.asker)
    if start_seconds is not None:
        started.append(started_entry(row, target.name, start_seconds))
    return session.home.deployment(row.deployment_id)


def _sample(
    session: Session, question: Question, folder: DeployDir, answer: Answer, answer_by: float
) -> None:
    """Let the deployment in `folder` continue `answer` to the question until `answer_by`, a time on
    the monotonic clock.

    Raises UserError BAD_ARGUMENT if it refuses the request, DEPLOY_FAILED if it fails or gives no
    token, Unreachable if its process ends meanwhile.
    """
    answer.is_waiting = True  # until the model begins; a second try has to wait again
    limits = Limits(answer_by, session.patience.stall_s)
    request = _server_request(question, session.sampling, answer)
    try:
        sample(folder, request, limits, answer, session.listener)
    except RefusedByServer as error:
        raise _refused(question.target, folder, error) from error
    if answer.has_stalled and not answer.token_ids:
        raise _no_token_error(question.target, limits.stall_s)


def _server_request(question: Question, sampling: Json, answer: Answer) -> Json:
    """Make the request to the model's server: the question, and the tokens after which the model
    continues. These are the tokens of an answer that an earlier call cut, and those that this call
    has so far.

    Args:
        sampling: how the model samples, from `_sampling_body`.
    """
    request = sampling | {
        "model": question.target.name,
        "messages": question.messages,
        "max_tokens": max(1, sampling["max_tokens"] - len(answer.token_ids)),
    }
    begun = [*question.begun, *answer.token_ids]
    if begun:
        request["begun_token_ids"] = begun
    return request


def _no_token_error(target: Target, stall_s: float) -> UserError:
    """Make the error for a model (`target`) that gave no token at all in `stall_s` seconds."""
    return UserError(
        "DEPLOY_FAILED",
        f"{target.name} gave no token for {stall_s:g} s",
        hint="Shorten what it reads, or wait until nothing trains on this machine.",
        retryable=True,
    )


def _refused(target: Target, folder: DeployDir, error: RefusedByServer) -> UserError:
    """Make the error for a request about the model `target` that the server in `folder` refused
    (BAD_ARGUMENT) or failed at (DEPLOY_FAILED)."""
    text = error.message or f"it answered {error.status}"
    if error.status >= 500:
        return deploy_failed(folder, text)
    return UserError(
        "BAD_ARGUMENT",
        f"{target.name} refused: {text}",
        hint="Shorten the message or lower max_tokens.",
    )


def _conversation_after(
    earlier: Conversation | None,
    questions: Sequence[Question],
    model_answers: Sequence[ModelAnswer],
    *,
    tools: list[ToolSchema],
    seed: int,
    owner: str,
) -> Conversation:
    """Add the new answers to the branches of the models that were asked (a branch is one model's
    part of the conversation), and return the conversation.

    Args:
        earlier: the conversation before; None if this call begins it.
        questions: what each model was asked.
        model_answers: their answers, in the same order.
        tools: the tools of the conversation.
        seed: its seed.
        owner: name of the key that the conversation belongs to.
    """
    branches = {branch.model: branch for branch in earlier.branches} if earlier else {}
    for question, reply in zip(questions, model_answers, strict=True):
        name = question.target.name
        # If an answer that was cut is continued, its text so far is the branch's last message.
        text_before = branches[name].messages[-1]["content"] if question.begun else ""
        branches[name] = _branch_with_answer(question, reply.answer, text_before)
    return Conversation(
        owner=owner,
        turns=(earlier.turns if earlier else 0) + 1,
        tools=tools,
        seed=seed,
        branches=list(branches.values()),
    )


def _branch_with_answer(question: Question, answer: Answer, text_before: str) -> Branch:
    """Make one model's part of the conversation, with its new answer. If the answer was cut,
    `Branch.begun` gets its token ids, so that a later call can continue it.

    Args:
        text_before: the text so far of an answer that was cut and continues here; "" for a new
            answer.
    """
    message: ChatMessage = {"role": "assistant", "content": text_before + answer.content}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = answer.tool_calls
    # If there is no finish reason, the answer did not end by itself: the call's time was over.
    is_cut = (answer.finish_reason or CUT_BY_TIME) in CUT
    begun = [*question.begun, *answer.token_ids] if is_cut else []
    # If the answer was cut before its first token, the question has no answer yet.
    nothing_sampled = is_cut and not begun
    new_messages = [] if nothing_sampled else [message]
    return Branch(
        model=question.target.name, messages=[*question.messages, *new_messages], begun=begun
    )

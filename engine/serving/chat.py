"""Asking models: one question or a conversation, one model or two beside each other.

An answer is read while it is sampled. Where the call's time is up first, the reply holds what there
is, and the next call goes on with exactly those tokens.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.core.errors import UserError
from engine.core.files import JsonObject
from engine.core.hints import Call
from engine.core.reply import Reply
from engine.home.rows import DeploymentRow
from engine.home.run_dir import DeployDir, Home
from engine.processes.deployments import ANYBODY, Asker, Json, Unreachable
from engine.serving import conversations
from engine.serving.answer_stream import Answer, Limits, RefusedByServer, sample
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
from engine.serving.service import Target, deploy_failed, serve, target_of
from envs.json_types import ChatMessage, ToolSchema

CUT_BY_TIME = "timeout"  # the finish reason of an answer that was still being sampled
CUT = (CUT_BY_TIME, "length")  # finish reasons of answers that can be continued
_LONGEST_SEED = 2**31


@dataclass(frozen=True)
class Question:
    """What one model is asked.

    Attributes:
        messages: all that it reads.
        begun: ids of the tokens that its answer begins with.
    """

    target: Target
    messages: list[ChatMessage]
    begun: list[int]


@dataclass(frozen=True)
class Session:
    """What is the same for all models that one call asks.

    Attributes:
        asker: whose quota a start of a model counts against.
        listener: hears the answers as they come.
        deadline: of the whole call, on the monotonic clock.
        sampling: how the models sample, from `_sampling_body`.
    """

    home: Home
    asker: Asker
    patience: Patience
    listener: Listener
    deadline: float
    sampling: Json


@dataclass(frozen=True)
class Answered:
    """What asking one model came to.

    Attributes:
        model: its name.
        answer: the answer, as far as there was time for it.
        seconds: that the answer took, without starting the model.
        started: the deployments that were started for it.
    """

    model: str
    answer: Answer
    seconds: float
    started: list[Reply]


@dataclass(frozen=True)
class _Saved:
    """The conversation as it was saved after a call.

    Attributes:
        id: to go on with; "" if it could not be saved.
        warning: about what was lost; "" for none.
        seed: that tokens were drawn with; None if the likeliest were taken.
    """

    id: str
    warning: str
    seed: int | None


def chat(
    home: Home,
    request: ChatRequest,
    asker: Asker = ANYBODY,
    patience: Patience = OF_CLIENTS,
    listener: Listener = unheard,
) -> Reply:
    """Ask a model, and with `compare_to` a second one; a model that is not served yet is deployed.

    A start counts against the quota of `asker`, who alone can go on with the conversation. Raises
    UserError BAD_ARGUMENT (nothing to answer, or the model refuses it), DEPLOY_FAILED (also where
    no token comes for `patience.stall_s`), and as `deploy` does.
    """
    earlier = _earlier_conversation(home, request, asker)
    names = list(dict.fromkeys(name for name in (request.model, request.compare_to) if name))
    # Errors in what is asked are found here, before anything is started.
    tools = _tools_of(request, earlier)
    questions = _questions(home, request, names, tools, earlier)
    seed = _seed_of(request, earlier)
    sampling = _sampling_body(request, seed, tools)
    deadline = time.monotonic() + patience.call_s
    session = Session(home, asker, patience, listener, deadline, sampling)
    answered = _ask_all(session, questions)
    answers = [each.answer for each in answered]
    conversation = _after(earlier, questions, answers, tools=tools, seed=seed, owner=asker.name)
    conversation_id, lost = conversations.save(home, request.conversation, conversation)
    saved = _Saved(conversation_id, lost, seed if request.temperature > 0 else None)
    return _reply(answered, names, saved, home.user_config().idle_stop_minutes)


def _earlier_conversation(home: Home, request: ChatRequest, asker: Asker) -> Conversation | None:
    """The conversation that the request goes on with; None if it begins one."""
    if not request.conversation:
        return None
    return conversations.load(home, request.conversation, asker.name)


def _reply(
    answered: Sequence[Answered], names: Sequence[str], saved: _Saved, idle_minutes: float
) -> Reply:
    """The reply of `chat`.

    Args:
        names: of the models as the caller gave them, in the order of `answered`.
        idle_minutes: after which a started deployment stops by itself.
    """
    entries = [_entry(each) for each in answered]
    started = [deployment for each in answered for deployment in each.started]
    lost = [saved.warning] if saved.warning else []
    return {
        "answers": entries,
        **({"conversation": saved.id} if saved.id else {}),
        **({"seed": saved.seed} if saved.seed is not None else {}),
        **({"started": started} if started else {}),
        "summary": _summary(entries),
        "next": _next_calls(names, entries, saved.id, started),
        "warnings": _warnings(entries, started, idle_minutes) + lost,
    }


def _questions(
    home: Home,
    request: ChatRequest,
    names: Sequence[str],
    tools: list[ToolSchema],
    earlier: Conversation | None,
) -> list[Question]:
    """What each of the named models is asked.

    Raises UserError BAD_ARGUMENT where nothing is to be answered or the messages cannot be read,
    MODEL_* for an unknown model.
    """
    added = _added_messages(request, earlier)
    targets = [target_of(home, name) for name in names]
    questions = [_question(target, added, earlier) for target in targets]
    for question in questions:
        _check(question.messages, tools)
    return questions


def _sampling_body(request: ChatRequest, seed: int, tools: list[ToolSchema]) -> Json:
    """The part of a request to the server of a model that is the same for all models."""
    return {
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "seed": seed,
        **({"tools": tools} if tools else {}),
    }


def _ask_all(session: Session, questions: Sequence[Question]) -> list[Answered]:
    """Ask the models one after the other, all within the time of the call. Raises UserError as
    `chat` does."""
    answered: list[Answered] = []
    for number, question in enumerate(questions):
        # So that a slow first model leaves the second one its half of the time.
        shares = len(questions) - number
        answered.append(_ask(session, question, shares))
    return answered


def _tools_of(request: ChatRequest, earlier: Conversation | None) -> list[ToolSchema]:
    """What the models may call. Raises UserError BAD_ARGUMENT where it is no list of objects."""
    if not request.tools:
        return earlier.tools if earlier else []
    try:
        return checked_tools(list(request.tools))
    except BadMessages as error:
        raise _bad_messages(error) from error


def _added_messages(request: ChatRequest, earlier: Conversation | None) -> list[ChatMessage]:
    """The messages that this call adds. Raises UserError BAD_ARGUMENT where there are none and
    nothing goes on, or where a system prompt does not come first."""
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
    if not earlier and (not added or added[-1].get("role") == "system"):
        raise UserError("BAD_ARGUMENT", "message is empty", hint="Ask something.", field="message")
    return added


def _begins_with_system(messages: Sequence[ChatMessage]) -> bool:
    """Whether the first message is a system message. The messages are not checked yet, so the first
    may be no object."""
    first = messages[0] if messages else None
    return isinstance(first, dict) and first.get("role") == "system"


def _question(
    target: Target, added: Sequence[ChatMessage], earlier: Conversation | None
) -> Question:
    """What the target is asked: its part of the conversation and what was added, or, where nothing
    was, the rest of its last answer.

    A model that joins a conversation later reads what the first model was asked and answered.
    Raises UserError BAD_ARGUMENT if nothing is to be answered.
    """
    if earlier is None:
        return Question(target, list(added), begun=[])
    branches = {branch.model: branch for branch in earlier.branches}
    branch = branches.get(target.name, earlier.branches[0])
    if added:
        return Question(target, [*branch.messages, *added], begun=[])
    if branch.model == target.name and branch.begun:
        return Question(target, branch.messages[:-1], begun=branch.begun)
    if branch.messages[-1]["role"] == "assistant":
        raise UserError(
            "BAD_ARGUMENT",
            f"message is empty, and {target.name} has no unfinished answer in this conversation",
            hint="Say something, or give results of tools as messages.",
            field="message",
        )
    return Question(target, branch.messages, begun=[])


def _check(messages: list[ChatMessage], tools: list[ToolSchema]) -> None:
    """Raises UserError BAD_ARGUMENT for messages that no model can be asked with."""
    try:
        check_size(checked_messages(messages), tools)
    except BadMessages as error:
        raise _bad_messages(error) from error


def _bad_messages(error: BadMessages) -> UserError:
    return UserError(
        "BAD_ARGUMENT",
        str(error),
        hint='One message is {"role": "user", "content": "..."}, as in OpenAI\'s chat API.',
        field=error.field,
    )


def _seed_of(request: ChatRequest, earlier: Conversation | None) -> int:
    """The seed of this call: the one given, that of the answer which goes on, or a drawn one."""
    if request.seed != DRAW_SEED:
        return request.seed
    is_continued = earlier is not None and not request.message and not request.messages
    if earlier is not None and is_continued:
        return earlier.seed
    return time.time_ns() % _LONGEST_SEED


def _ask(session: Session, question: Question, shares: int) -> Answered:
    """Ask one model, which is started if it is not served yet.

    The answer gets one of `shares` equal parts of the time that is left. If the process ends before
    the answer is done, it is started again once and goes on with the tokens that there are. Raises
    UserError as `chat` does.
    """
    started: list[Reply] = []
    answer = Answer()
    seconds = 0.0
    for is_second_try in (False, True):
        folder = _served_folder(session, question.target, started)
        asked_at = time.monotonic()
        answer_by = asked_at + (session.deadline - asked_at) / shares
        try:
            _sample(session, question, folder, answer, answer_by)
            break
        except Unreachable as error:
            if is_second_try or time.monotonic() > answer_by:
                raise deploy_failed(folder, f"it did not answer: {error}") from error
        finally:
            seconds += time.monotonic() - asked_at
    return Answered(question.target.name, answer, seconds, started)


def _served_folder(session: Session, target: Target, started: list[Reply]) -> DeployDir:
    """The folder of a deployment that serves the target. If it had to be started, its entry is
    added to `started`."""
    ready_by = min(session.deadline, time.monotonic() + session.patience.start_s)
    row, start_seconds = serve(session.home, target, ready_by, session.asker)
    if start_seconds is not None:
        started.append(_started_entry(row, start_seconds))
    return session.home.deployment(row.deployment_id)


def _sample(
    session: Session, question: Question, folder: DeployDir, answer: Answer, answer_by: float
) -> None:
    """Let the deployment in `folder` go on with `answer` until `answer_by`, a time on the monotonic
    clock.

    Raises UserError BAD_ARGUMENT or DEPLOY_FAILED if it refuses or gives no token, Unreachable if
    its process ends meanwhile.
    """
    answer.is_waiting = True  # until the model begins, in a second try too
    limits = Limits(answer_by, session.patience.stall_s)
    request = _server_request(question, session.sampling, answer)
    try:
        sample(folder, request, limits, answer, session.listener)
    except RefusedByServer as error:
        raise _refused(question.target, folder, error) from error
    if answer.has_stalled and not answer.token_ids:
        raise _no_token_error(question.target, limits.stall_s)


def _started_entry(row: DeploymentRow, seconds: float) -> Reply:
    """One entry of `started` in the reply of `chat`: a deployment that took `seconds` to start."""
    return {
        "deployment_id": row.deployment_id,
        "seconds": round(seconds, 2),
        "memory_gb": round(row.memory_bytes / 1e9, 2),
    }


def _server_request(question: Question, sampling: Json, answer: Answer) -> Json:
    """What the model's server is asked: the question, to be answered from the tokens on that the
    answer has so far.

    Args:
        sampling: how it samples, from `_sampling_body`.
    """
    begun = [*question.begun, *answer.token_ids]
    return sampling | {
        "model": question.target.name,
        "messages": question.messages,
        "max_tokens": max(1, sampling["max_tokens"] - len(answer.token_ids)),
        **({"begun_token_ids": begun} if begun else {}),
    }


def _no_token_error(target: Target, stall_s: float) -> UserError:
    """The error for a model that gave no token at all in `stall_s` seconds."""
    return UserError(
        "DEPLOY_FAILED",
        f"{target.name} gave no token for {stall_s:g} s",
        hint="Shorten what it reads, or wait until nothing trains on this machine.",
        retryable=True,
    )


def _refused(target: Target, folder: DeployDir, error: RefusedByServer) -> UserError:
    """The error for a request that the server refused (BAD_ARGUMENT), or failed at
    (DEPLOY_FAILED)."""
    text = error.message or f"it answered {error.status}"
    if error.status >= 500:
        return deploy_failed(folder, text)
    return UserError(
        "BAD_ARGUMENT",
        f"{target.name} refused: {text}",
        hint="Shorten the message or lower max_tokens.",
    )


def _entry(answered: Answered) -> Reply:
    """One entry of `answers` in the reply of `chat`. It has `partial` if the call's time was up
    before the answer's end; `latency_s` are seconds without starting the model."""
    answer = answered.answer
    return {
        "model": answered.model,
        "answer": answer.content,
        **({"reasoning": answer.reasoning} if answer.reasoning else {}),
        **({"tool_calls": answer.tool_calls} if answer.tool_calls else {}),
        "finish_reason": answer.finish_reason or CUT_BY_TIME,
        **({} if answer.finish_reason else {"partial": True}),
        "prompt_tokens": answer.prompt_tokens,
        "tokens": len(answer.token_ids),
        "latency_s": round(answered.seconds, 3),
    }


def _after(
    earlier: Conversation | None,
    questions: Sequence[Question],
    answers: Sequence[Answer],
    *,
    tools: list[ToolSchema],
    seed: int,
    owner: str,
) -> Conversation:
    """The conversation with the new answers. Branches of models that were not asked stay."""
    branches = {branch.model: branch for branch in earlier.branches} if earlier else {}
    for question, answer in zip(questions, answers, strict=True):
        name = question.target.name
        said_before = branches[name].messages[-1]["content"] if question.begun else ""
        branches[name] = _branch(question, answer, said_before)
    return Conversation(
        owner=owner,
        turns=(earlier.turns if earlier else 0) + 1,
        tools=tools,
        seed=seed,
        branches=list(branches.values()),
    )


def _branch(question: Question, answer: Answer, said_before: str) -> Branch:
    """One model's part of the conversation, with its new answer.

    Args:
        said_before: the text of an answer that was cut and goes on here; "" for a new answer.
    """
    message: ChatMessage = {"role": "assistant", "content": said_before + answer.content}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = answer.tool_calls
    is_cut = (answer.finish_reason or CUT_BY_TIME) in CUT
    begun = [*question.begun, *answer.token_ids] if is_cut else []
    # Cut before its first token: the question itself is still to be answered.
    nothing_sampled = is_cut and not begun
    new_messages = [] if nothing_sampled else [message]
    return Branch(
        model=question.target.name, messages=[*question.messages, *new_messages], begun=begun
    )


def _summary(entries: Sequence[Reply]) -> str:
    """Who answered in how many seconds, and who has not finished."""
    seconds = sum(entry["latency_s"] for entry in entries)
    done = [entry["model"] for entry in entries if not entry.get("partial")]
    unfinished = [entry["model"] for entry in entries if entry.get("partial")]
    if not unfinished:
        return f"{' and '.join(done)} answered in {seconds:.1f} s."
    others = f"; {' and '.join(done)} answered" if done else ""
    return f"{' and '.join(unfinished)} is not done after {seconds:.1f} s{others}."


def _next_calls(
    names: Sequence[str], entries: Sequence[Reply], conversation_id: str, started: Sequence[Reply]
) -> list[JsonObject]:
    """The calls to suggest: go on with what was cut, answer what the model called, stop what was
    started. `names`: as they were given, in the order of `entries`."""
    calls: list[Call] = []
    if conversation_id:
        for name, entry in zip(names, entries, strict=True):
            same = {"model": name, "conversation": conversation_id}
            calls += _calls_that_go_on(entry, same)
    calls += [
        Call("deploy", {"run_id": deployment["deployment_id"], "action": "stop"})
        for deployment in started
    ]
    return [call.to_json() for call in calls]


def _calls_that_go_on(entry: Reply, arguments: Mapping[str, object]) -> list[Call]:
    """At most one call of `chat`: it continues an answer that was cut, or gives the results of the
    tools that the model called. `arguments` name the model and the conversation."""
    if entry["finish_reason"] in CUT:
        return [Call("chat", arguments)]
    tool_calls = entry.get("tool_calls")
    if not tool_calls:
        return []
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "..."} for call in tool_calls
    ]
    return [Call("chat", {**arguments, "messages": results})]


def _warnings(entries: Sequence[Reply], started: Sequence[Reply], idle_minutes: float) -> list[str]:
    """Warnings about answers that were cut off, and about deployments that were started."""
    warnings = []
    for entry in entries:
        if entry["finish_reason"] == "length":
            warnings.append(f"{entry['model']} was cut at {entry['tokens']} tokens")
        elif entry.get("partial"):
            warnings.append(_partial_warning(entry))
    return warnings + [
        f"{deployment['deployment_id']} was started for this in {deployment['seconds']:.1f} s and "
        f"holds about {deployment['memory_gb']:g} GB; it stops by itself after "
        f"{idle_minutes:g} idle minutes"
        for deployment in started
    ]


def _partial_warning(entry: Reply) -> str:
    """The warning about an answer that the time of the call did not suffice for."""
    seconds = entry["latency_s"]
    speed = entry["tokens"] / max(seconds, 1e-3)  # the least time: against a division by 0
    return (
        f"{entry['model']} has {entry['tokens']} tokens after {seconds:.0f} s "
        f"({speed:.2g} a second); chat with the conversation and no message goes on"
    )

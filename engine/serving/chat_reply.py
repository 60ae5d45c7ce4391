"""The reply of `chat`: the answers, what was started for them, and the calls that continue."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.core.files import JsonObject
from engine.core.hints import Call
from engine.core.reply import Reply
from engine.home.rows import DeploymentRow
from engine.serving.answer_stream import Answer

CUT_BY_TIME = "timeout"  # the finish reason of an answer that the call's time cut
CUT = (CUT_BY_TIME, "length")  # finish reasons of answers that can be continued


@dataclass(frozen=True)
class ModelAnswer:
    """The result of asking one model.

    Attributes:
        model: its name.
        answer: the answer, as far as there was time for it.
        seconds: how long the answer took, without the start of the model.
        started: the deployments that were started for it.
    """

    model: str
    answer: Answer
    seconds: float
    started: list[Reply]


@dataclass(frozen=True)
class Saved:
    """The conversation as it was saved after a call.

    Attributes:
        id: the id by which the next call continues it; "" if it could not be saved.
        warning: what was lost; "" for none.
        seed: the seed that tokens were drawn with; None if the likeliest tokens were taken.
    """

    id: str
    warning: str
    seed: int | None


def reply_of(
    model_answers: Sequence[ModelAnswer], names: Sequence[str], saved: Saved, idle_minutes: float
) -> Reply:
    """Make the reply of `chat`.

    Args:
        model_answers: the models' answers.
        names: the models' names as the caller gave them, in the order of `model_answers`.
        saved: the conversation's id ("" if it was not saved), its seed, and a warning.
        idle_minutes: how long a started deployment may be idle before it stops by itself.
    """
    entries = [_entry_of_answer(model_answer) for model_answer in model_answers]
    started = [deployment for model_answer in model_answers for deployment in model_answer.started]
    save_warnings = [saved.warning] if saved.warning else []
    optional_fields: Reply = {}
    if saved.id:
        optional_fields["conversation"] = saved.id
    if saved.seed is not None:
        optional_fields["seed"] = saved.seed
    if started:
        optional_fields["started"] = started
    return {
        "answers": entries,
        **optional_fields,
        "summary": _summary(entries),
        "next": _next_calls(names, entries, saved.id, started),
        "warnings": _warnings(entries, started, idle_minutes) + save_warnings,
    }


def started_entry(row: DeploymentRow, model: str, seconds: float) -> Reply:
    """Make one entry of `started` in the reply of `chat`: a deployment that took `seconds` to
    start for `model`. Its id alone names the base, which adapters share."""
    return {
        "deployment_id": row.deployment_id,
        "model": model,
        "seconds": round(seconds, 2),
        "memory_gb": round(row.memory_bytes / 1e9, 2),
    }


def _entry_of_answer(model_answer: ModelAnswer) -> Reply:
    """Make one entry of `answers` in the reply of `chat`. It has `partial` if the call's time was
    over before the answer was done; `latency_s` are the seconds without the start of the model."""
    answer = model_answer.answer
    entry: Reply = {"model": model_answer.model, "answer": answer.content}
    if answer.reasoning:
        entry["reasoning"] = answer.reasoning
    if answer.tool_calls:
        entry["tool_calls"] = answer.tool_calls
    entry["finish_reason"] = answer.finish_reason or CUT_BY_TIME
    if not answer.finish_reason:
        entry["partial"] = True
    return entry | {
        "prompt_tokens": answer.prompt_tokens,
        "tokens": len(answer.token_ids),
        "latency_s": round(model_answer.seconds, 3),
    }


def _summary(entries: Sequence[Reply]) -> str:
    """Say in one sentence which models answered in how many seconds, and which have not finished.
    `entries` are the entries of `answers` in the reply."""
    seconds = sum(entry["latency_s"] for entry in entries)
    finished = [entry["model"] for entry in entries if not entry.get("partial")]
    unfinished = [entry["model"] for entry in entries if entry.get("partial")]
    if not unfinished:
        return f"{' and '.join(finished)} answered in {seconds:.1f} s."
    finished_note = f"; {' and '.join(finished)} answered" if finished else ""
    return f"{' and '.join(unfinished)} is not done after {seconds:.1f} s{finished_note}."


def _next_calls(
    names: Sequence[str], entries: Sequence[Reply], conversation_id: str, started: Sequence[Reply]
) -> list[JsonObject]:
    """List the calls to suggest: continue answers that were cut, give the results of tools that
    were called, stop deployments that were started.

    Args:
        names: the models' names as the caller gave them, in the order of `entries`.
        conversation_id: "" if the conversation was not saved; then nothing can be continued.
    """
    calls: list[Call] = []
    if conversation_id:
        for name, entry in zip(names, entries, strict=True):
            arguments = {"model": name, "conversation": conversation_id}
            calls += _continuing_calls(entry, arguments)
    calls += [
        Call("deploy", {"run_id": deployment["model"], "action": "stop"}) for deployment in started
    ]
    return [call.to_json() for call in calls]


def _continuing_calls(entry: Reply, arguments: Mapping[str, object]) -> list[Call]:
    """List at most one call of `chat` that follows an answer (`entry`, its entry in the reply): it
    continues an answer that was cut, or gives the results of the tools that the model called.
    `arguments` name the model and the conversation."""
    if entry["finish_reason"] in CUT:
        return [Call("chat", arguments)]
    tool_calls = entry.get("tool_calls")
    if not tool_calls:
        return []
    # The caller replaces the dots by what each tool returned.
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "..."} for call in tool_calls
    ]
    return [Call("chat", {**arguments, "messages": results})]


def _warnings(entries: Sequence[Reply], started: Sequence[Reply], idle_minutes: float) -> list[str]:
    """List warnings about answers that were cut off, and about deployments that were started.

    Args:
        entries: the entries of `answers` in the reply.
        started: the entries of `started` in the reply.
        idle_minutes: how long a deployment may be idle before it stops by itself.
    """
    warnings = []
    for entry in entries:
        if entry["finish_reason"] == "length":
            warnings.append(f"{entry['model']} was cut at {entry['tokens']} tokens")
        elif entry.get("partial"):
            warnings.append(_partial_warning(entry))
    return warnings + [
        f"{deployment['model']} was started for this in {deployment['seconds']:.1f} s, as "
        f"{deployment['deployment_id']}, and holds about {deployment['memory_gb']:g} GB; it stops "
        f"by itself after {idle_minutes:g} idle minutes"
        for deployment in started
    ]


def _partial_warning(entry: Reply) -> str:
    """Write the warning about an answer (`entry`, its entry in the reply) that was not done when
    the call's time was over."""
    seconds = entry["latency_s"]
    speed = entry["tokens"] / max(seconds, 1e-3)  # 1e-3: `seconds` may be rounded to 0
    return (
        f"{entry['model']} has {entry['tokens']} tokens after {seconds:.0f} s "
        f"({speed:.2g} a second); chat with the conversation and no message goes on"
    )

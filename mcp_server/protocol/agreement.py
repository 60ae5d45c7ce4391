"""Asks a person to agree to a run that costs more than the home's limit, in their own client.

`submit_train` refuses such a run with NOT_APPROVED. A client that can show a form is asked to show
one. Any other client gets the refusal; the person can then run `honesmith train --yes`, or raise
`auto_approve_gpu_hours`. Only callers that may do everything (the owner, stdio) are asked: the
client answers in the name of its user, so an answer counts no more than the key of the call.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import anyio
import anyio.to_thread
from mcp.server.mcpserver import Context
from mcp.types import (
    ElicitRequest,
    ElicitRequestedSchema,
    ElicitRequestFormParams,
    ElicitResult,
    InputRequiredResult,
)

from engine.core.errors import UserError
from mcp_server.access.keys import LOCAL, OWNER
from mcp_server.api.after_wait import MAX_WAIT_S
from mcp_server.api.verbs import Reply
from mcp_server.protocol.guard import caller_of

SPEND = "spend"  # names the question within a call, and marks the call that answers it
STATE_IN_RESULT = "2026-07-28"  # protocol versions from here on ask through the result of a call
CONSENT, NO_CONSENT = True, False  # the argument of `submit`: whether a person has agreed
FORM: ElicitRequestedSchema = {
    "type": "object",
    "properties": {"agree": {"type": "boolean", "title": "Start this run"}},
    "required": ["agree"],
}


async def with_agreement(submit: Callable[[bool], Reply], ctx: Context) -> Any:
    """Submit a run, and ask a person first if the run costs so much that it needs consent.

    `submit(approved)` submits the run and returns its reply; `approved` says that a person has
    agreed. `ctx` is the context of the tool call, through which its client is asked.

    In protocol versions from `STATE_IN_RESULT` on, the question is the result of this call (an
    `InputRequiredResult`), and the client calls again with the answer. In older versions this call
    itself waits for the answer, at most `MAX_WAIT_S` seconds.

    Raises:
        UserError: NOT_APPROVED if the run needs consent and nobody can be asked or nobody agreed.
            Every other error of `submit` is passed on.
    """
    # SPEND as the state of the request marks the second call, which brings the answer. The SDK has
    # signed the state, so the question was asked about this same call.
    if ctx.request_state == SPEND:
        return await _submit_with_answer(submit, (ctx.input_responses or {}).get(SPEND))
    try:
        return await anyio.to_thread.run_sync(submit, NO_CONSENT)
    except UserError as error:
        if error.code != "NOT_APPROVED" or not _can_ask(ctx):
            raise
        question = f"{error.message}. Start it?"
    if (ctx.protocol_version or "") >= STATE_IN_RESULT:
        return _question_as_result(question)
    answer = None  # stays None if the time is up first
    with contextlib.suppress(TimeoutError), anyio.fail_after(MAX_WAIT_S):
        answer = await ctx.session.elicit_form(question, FORM, related_request_id=ctx.request_id)
    return await _submit_with_answer(submit, answer)


def _question_as_result(question: str) -> InputRequiredResult:
    """Make the result of a call that asks the client to show `question` with a form, and to call
    again with the person's answer."""
    form = ElicitRequestFormParams(message=question, requested_schema=FORM)
    request = ElicitRequest(params=form)
    return InputRequiredResult(input_requests={SPEND: request}, request_state=SPEND)


async def _submit_with_answer(submit: Callable[[bool], Reply], answer: Any) -> Reply:
    """Submit the run after a person was asked, and return the reply of `submit`.

    `answer` is what the client sent back; None if nothing came in time. Without consent the run is
    submitted as not approved: its estimate may have fallen below the limit in the meantime.

    Raises:
        UserError: NOT_APPROVED if consent is needed and was not given. Every other error of
            `submit` is passed on.
    """
    if _is_consent(answer):
        return await anyio.to_thread.run_sync(submit, CONSENT)
    try:
        return await anyio.to_thread.run_sync(submit, NO_CONSENT)
    except UserError as error:
        if error.code != "NOT_APPROVED":
            raise
        message = f"{error.message}; asked just now, nobody agreed"
        raise UserError(error.code, message, hint=error.advice) from None


def _is_consent(answer: Any) -> bool:
    """Whether the person accepted the form and ticked its box "agree"; False if `answer` is None
    (no answer came)."""
    accepted = isinstance(answer, ElicitResult) and answer.action == "accept"
    return accepted and (answer.content or {}).get("agree") is True


def _can_ask(ctx: Context) -> bool:
    """Whether the client can show a form and the call comes from the owner of the home, who alone
    may agree to the cost of a run."""
    caller = caller_of(ctx)
    is_owner = caller is LOCAL or caller.name == OWNER
    elicitation = ctx.client_capabilities and ctx.client_capabilities.elicitation
    if not elicitation or not is_owner:
        return False
    # In older protocol versions an empty declaration, with neither `form` nor `url`, means that the
    # client can show forms.
    return elicitation.form is not None or elicitation.url is None

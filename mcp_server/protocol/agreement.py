"""A person agrees to a spend above the home's limit, in the client they already sit at.

`submit_train` refuses such a run with NOT_APPROVED. A client that can show a form shows one; every
other gets the refusal, and the person has ways without a form: `honesmith train --yes`, or a higher
`auto_approve_gpu_hours`. Only who may do everything here can agree: a client answers for its user,
so the answer is worth as much as the key it came with.
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
from mcp_server.api.verbs import MAX_WAIT_S, Reply
from mcp_server.protocol.guard import caller_of

SPEND = "spend"
FORM: ElicitRequestedSchema = {
    "type": "object",
    "properties": {"agree": {"type": "boolean", "title": "Start this run"}},
    "required": ["agree"],
}


async def with_agreement(submit: Callable[[bool], Reply], ctx: Context) -> Any:
    """The reply of `submit(approved)`; a person is asked first where a spend needs consent.

    In the newer protocol the question is the result of the call and the answer comes with the next
    one; in the older one the call waits for it, no longer than any call waits. Raises UserError
    NOT_APPROVED when nobody can be asked or nobody agrees, and whatever else `submit` raises.
    """
    if ctx.request_state == SPEND:  # sealed by the SDK: this very call was asked
        return await _answered(submit, (ctx.input_responses or {}).get(SPEND))
    try:
        return await anyio.to_thread.run_sync(submit, False)
    except UserError as refusal:
        if refusal.code != "NOT_APPROVED" or not _can_ask(ctx):
            raise
        question = f"{refusal.message}. Start it?"
    if (ctx.protocol_version or "") >= "2026-07-28":
        form = ElicitRequestFormParams(message=question, requested_schema=FORM)
        asked = ElicitRequest(params=form)
        return InputRequiredResult(input_requests={SPEND: asked}, request_state=SPEND)
    answer = None
    with contextlib.suppress(TimeoutError), anyio.fail_after(MAX_WAIT_S):
        answer = await ctx.session.elicit_form(question, FORM, related_request_id=ctx.request_id)
    return await _answered(submit, answer)


async def _answered(submit: Callable[[bool], Reply], answer: Any) -> Reply:
    if _agreed(answer):
        return await anyio.to_thread.run_sync(submit, True)
    try:
        return await anyio.to_thread.run_sync(submit, False)  # it may have become cheaper meanwhile
    except UserError as refusal:
        if refusal.code != "NOT_APPROVED":
            raise
        message = f"{refusal.message}; asked just now, nobody agreed"
        raise UserError(refusal.code, message, hint=refusal.advice) from None


def _agreed(answer: Any) -> bool:
    accepted = isinstance(answer, ElicitResult) and answer.action == "accept"
    return accepted and (answer.content or {}).get("agree") is True


def _can_ask(ctx: Context) -> bool:
    caller = caller_of(ctx)
    declared = ctx.client_capabilities and ctx.client_capabilities.elicitation
    if not declared or not (caller is LOCAL or caller.name == OWNER):
        return False
    # The older protocol's empty declaration means forms.
    return declared.form is not None or declared.url is None

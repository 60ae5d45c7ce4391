"""Queuing a search for a prompt; what would be refused, what it asks and costs."""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from engine.core import hardware as machine
from engine.core.errors import UserError
from engine.core.format import counted, words
from engine.core.hints import Call
from engine.core.reply import Reply
from engine.cost.evaluation_cost import Asking, endpoint_cost
from engine.cost.plan_total import NO_HOURS
from engine.endpoints.checks import require_price
from engine.endpoints.references import cost_of, entry_of, is_priced
from engine.environments import env_facts, registry
from engine.environments.env_facts import EnvFacts
from engine.environments.registry import EnvRecord
from engine.home.database import reports_unwritable_disk
from engine.home.rows import NewRun, RunRow
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.home.user_config import Endpoint
from engine.machine.processes import launcher
from engine.models.catalog import ModelRef
from engine.records.estimate import Range
from engine.records.settings import PROMPT, PromptSettings
from engine.runs.prompts import checks
from engine.runs.prompts.choices import resolve_settings
from engine.runs.prompts.search import most_rounds
from engine.runs.prompts.tasks import SearchTasks, search_tasks
from engine.runs.submit import contamination
from engine.runs.submit.admission import (
    bad_argument,
    check_hours_left,
    no_env_error,
    require_files,
    sampling_hours,
    scored_env,
)
from engine.runs.submit.evaluation import model_entry
from engine.runs.submit.queued import reply_of, start_and_reply
from engine.runs.submit.requests import TrainRequest
from engine.runs.submit.run_folder import RunFiles, adapters_of, awaited_of
from engine.runs.submit.training import check_request, full_parent
from engine.settings import resolution, start_models
from engine.settings.defaults import SamplingLimits

_CHARS_PER_TOKEN = 4  # roughly, of what an endpoint reads
_TEMPLATE_CHARS = 1_000  # of a request beside its examples
_EXAMPLE_CHARS = 600  # of an example beside its question and answer


@dataclass(frozen=True)
class ResolvedSearch:
    """A search with everything resolved.

    Attributes:
        record: the environment version whose prompt is searched for.
        model: the model that answers.
        endpoint: the model behind a URL that writes prompts.
        tasks: which tasks are reflected on, and which choose.
        facts: measured facts about the tasks, in the model's tokens.
        hours: the device hours that it takes.
        money: what the endpoint may take: low, likely and high; None where it has no price.
    """

    record: EnvRecord
    model: ModelRef
    endpoint: Endpoint
    settings: PromptSettings
    sources: Mapping[str, str]
    tasks: SearchTasks
    facts: EnvFacts
    hours: Range
    money: Range | None

    @property
    def rounds(self) -> int:
        """The most rounds that there can be."""
        return most_rounds(self.settings, len(self.tasks.choosing))

    @property
    def answers(self) -> int:
        """The most answers of the model: of the search, and to the held-out tasks twice."""
        heldout = min(self.settings.eval_rows, self.record.rows.get("heldout", 0))
        return self.settings.max_rollouts + 2 * heldout

    def in_words(self) -> str:
        """Say how many answers and requests the search takes at most, and the expected money and
        time."""
        hours = self.hours
        text = f"up to {self.answers} answers of {self.model.ref}"
        calls = min(self.settings.max_calls, self.rounds)  # one request in each round
        text += f", up to {counted(calls, 'request')} to {self.settings.reflection}"
        if self.money is not None and self.money.high:
            text += f" ({self.money.likely:.4g} in money, at most {self.money.high:.4g})"
        if self.model.endpoint is not None:  # it takes no time of a device
            return text
        between = f"{words(hours.low)} to {words(hours.high)}"
        return f"{text}, about {words(hours.likely)} ({between})"

    def to_json(self) -> Reply:
        """Return the estimate of the search as fields of a reply."""
        estimate: Reply = {
            "answers": self.answers,
            "calls": min(self.settings.max_calls, self.rounds),
            "hours": self.hours.to_json(),
            "gpu_hours": self.hours.to_json(),
        }
        if self.money is not None:
            estimate["money"] = self.money.to_json()
        return estimate


def resolve(home: Home, request: TrainRequest) -> ResolvedSearch:
    """Find everything that the search needs, choose its settings, and estimate its time and money.

    Raises UserError BAD_ARGUMENT, NO_TORCH, ENV_*, MODEL_* or SETTING_* if something is missing or
    does not fit.
    """
    if not request.env_id:
        raise no_env_error()
    resolution.validate(PROMPT, request.settings)
    endpoint = checks.reflecting_endpoint(home, request.settings.get("reflection"))
    record = scored_env(home, request.env_id, "given a better prompt")
    checks.check_env(record)
    model = _find_model(home, request)
    checks.require_gepa(sys.executable if model.endpoint else launcher.worker_python(home))
    facts = env_facts.env_facts(
        home,
        record,
        model.base_path,
        thinking=resolution.is_switched_on(request.settings, "thinking"),
    )
    reflection_ref = checks.as_reference(request.settings["reflection"])  # such as "openai:big"
    given_settings = {**request.settings, "reflection": reflection_ref}
    settings, sources = resolve_settings(
        given_settings, model.facts, record, facts, machine.detect(home.root)
    )
    if settings.max_cost is not None:  # without prices no cap on money can be kept
        require_price(endpoint)
        require_price(model.endpoint)
    tasks = search_tasks(home, record, settings)
    checks.check_budget(tasks, settings, record.env_id)
    hours = _answer_hours(home, model, settings, facts, record)
    money = _reflection_money(endpoint, settings, tasks, facts)
    answer_cost = endpoint_cost([model], _sampling_work(settings, facts, record))
    if answer_cost is not None and money is not None:
        money = _add_money(money, answer_cost.money, settings.max_cost)
    return ResolvedSearch(record, model, endpoint, settings, sources, tasks, facts, hours, money)


def _find_model(home: Home, request: TrainRequest) -> ModelRef:
    """Return the model that answers the tasks. Raises UserError MODEL_* if it is missing,
    SETTING_NOT_APPLICABLE if `thinking` is set and the model is behind a URL."""
    model = start_models.model_to_ask(home, request.model)
    if model.endpoint is None:
        require_files(model)
    elif request.settings.get("thinking"):
        raise UserError(
            "SETTING_NOT_APPLICABLE",
            f"thinking switches a chat template; {model.ref} has one of its provider's",
            hint="Leave thinking out; raise max_tokens where the model thinks before it answers.",
            field="settings.thinking",
        )
    return model


def audit_warnings(record: EnvRecord, settings: PromptSettings) -> list[str]:
    """Return a warning if the stored reward audit found that degenerate answers earn reward; else
    [].

    Raises UserError REWARD_RISK instead unless the setting `accept_reward_risk` is on: like GRPO, a
    search for reward finds whatever a scorer pays for wrongly.
    """
    if record.audit.verdict != "risk":
        return []
    problem = record.audit.headline or "degenerate answers earn"
    if settings.accept_reward_risk:
        return [f"reward_audit: {problem}; held-out success means little until it is mended"]
    raise UserError(
        "REWARD_RISK",
        f"the audit of {record.env_id} found: {problem}",
        hint="Mend the reward and push again, or set accept_reward_risk = true to search by it "
        "knowingly.",
        field="settings.accept_reward_risk",
        playbook="rewards",
    )


def _answer_hours(
    home: Home, model: ModelRef, settings: PromptSettings, facts: EnvFacts, record: EnvRecord
) -> Range:
    """Estimate the device hours of all answers that the search may take; none for a model behind a
    URL."""
    if model.endpoint is not None:
        return NO_HOURS
    return sampling_hours(home, [model], _sampling_work(settings, facts, record))


def _sampling_work(settings: PromptSettings, facts: EnvFacts, record: EnvRecord) -> Asking:
    """Describe how much the model samples in a search, in the form that estimates of time and money
    take."""
    limits = SamplingLimits(settings.max_tokens, settings.max_turns, settings.max_length)
    heldout = min(settings.eval_rows, record.rows.get("heldout", 0))
    rows = settings.max_rollouts + 2 * heldout  # the held-out tasks before and after the search
    return Asking(limits, facts, rows, 1, score_workers=settings.score_workers)


def _reflection_money(
    endpoint: Endpoint, settings: PromptSettings, tasks: SearchTasks, facts: EnvFacts
) -> Range | None:
    """Estimate the money for the requests to the endpoint that writes prompts; None if it has no
    price.

    `tasks` are those of the search, `facts` the measured lengths of the environment's tasks. The
    low value is one request, the likely one a request in every round, the high one all allowed
    requests with answers of full length.
    """
    if not is_priced(endpoint):
        return None
    calls = min(settings.max_calls, most_rounds(settings, len(tasks.choosing)))
    example_tokens = facts.longest_prompt + settings.max_tokens + _EXAMPLE_CHARS / _CHARS_PER_TOKEN
    read_tokens = _TEMPLATE_CHARS / _CHARS_PER_TOKEN + settings.prompts_per_step * example_tokens
    # A usual request reads half of that and writes a quarter of what it may; the longest request
    # that is allowed for reads twice of it, because the numbers above are rough.
    usual_cost = cost_of(endpoint, read_tokens / 2, settings.reflection_tokens / 4)
    longest_cost = cost_of(endpoint, 2 * read_tokens, settings.reflection_tokens)
    highest = longest_cost * settings.max_calls
    cap = settings.max_cost if settings.max_cost is not None else highest
    return Range(
        low=round(min(cap, usual_cost), 6),
        likely=round(min(cap, calls * usual_cost), 6),
        high=round(min(cap, highest), 6),
    )


def _add_money(first: Range, second: Range, cap: float | None) -> Range:
    """Add two estimates of money, `first` and `second`; each sum is at most `cap` (None: no
    limit)."""
    limit = math.inf if cap is None else cap
    return Range(
        low=min(limit, first.low + second.low),
        likely=min(limit, first.likely + second.likely),
        high=min(limit, first.high + second.high),
    )


def price_warnings(plan: ResolvedSearch) -> list[str]:
    """Return a warning if the endpoint that writes prompts has no price; else []."""
    if plan.money is not None:
        return []
    return [f"{plan.settings.reflection} has no price in config.toml: no cost is known"]


def warnings_of(request: TrainRequest, plan: ResolvedSearch) -> list[str]:
    """Return the warnings about a search that is to be queued (`plan`): doubts that are no reason
    to refuse it. Raises UserError REWARD_RISK if the reward audit is a reason."""
    warnings = [
        *registry.prefix_warning(request.env_id, plan.record),
        *audit_warnings(plan.record, plan.settings),
        *price_warnings(plan),
    ]
    if plan.tasks.sealed:
        warnings.append(
            f"{plan.tasks.sealed} train tasks hold tasks of a sealed exam: they are not sent away"
        )
    if not plan.record.rows.get("heldout"):
        warnings.append("no task is held out: there will be no verdict")
    return warnings


@reports_unwritable_disk
def submit_search(home: Home, request: TrainRequest) -> Reply:
    """Queue a search for a prompt, and return the reply about it.

    If the same request was made before with the same `request_id`, nothing is queued, and the reply
    is about the first run. Raises the errors of `resolve`, and UserError BUDGET, NOT_APPROVED or
    REQUEST_CONFLICT.
    """
    check_request(request)
    if request.profile:
        raise bad_argument("profile", value=True, hint="It traces training; leave it out.")
    with Store(home) as store:
        earlier = store.requested_run(request.request_id, request.body())
        if earlier is not None:
            launcher.reap(home)  # this may change the run's state, so its row is read again
            row = store.get_run(earlier.run_id)
            return reply_of(home, row, ["this request was answered before"])
        plan = resolve(home, request)
        warnings = warnings_of(request, plan)
        check_spend(home, store, request, plan)
        row = _queue_run(home, store, request, plan, warnings)
    reply = start_and_reply(home, row, warnings)
    summary = f"{str(reply['summary']).removesuffix('.')}: {plan.in_words()}."
    return reply | {"estimate": plan.to_json(), "summary": summary}


def check_spend(home: Home, store: Store, request: TrainRequest, plan: ResolvedSearch) -> None:
    """Check that the device hours of a search (`plan`) may be spent. Raises UserError BUDGET if
    nothing is left of the home's hours or the search likely takes more than its cap, NOT_APPROVED
    if it takes more than may be spent without asking a person."""
    check_hours_left(home, store)
    likely, cap = plan.hours.likely, request.cap_hours
    if likely > cap:
        raise UserError(
            "BUDGET",
            f"the search likely takes {likely:.2f} GPU-hours, above max_gpu_hours = {cap:g}",
            hint="Lower max_rollouts or eval_rows, or raise max_gpu_hours.",
            field="max_gpu_hours",
        )
    limit = home.user_config().auto_approve_gpu_hours
    if limit is not None and likely > limit and not request.approved:
        raise UserError(
            "NOT_APPROVED",
            f"the search likely takes {likely:.2f} GPU-hours; above {limit:g} a person must agree",
            hint="Ask the user, who may raise auto_approve_gpu_hours in config.toml; or lower "
            "max_rollouts.",
        )


def _queue_run(
    home: Home, store: Store, request: TrainRequest, plan: ResolvedSearch, warnings: list[str]
) -> RunRow:
    """Queue a search for a prompt (`plan`) and write its run folder; return its row. Warnings about
    the parent and about held-out tasks that the model was trained on are added to `warnings`, in
    place."""
    parent, parent_warnings = full_parent(store, request)
    warnings += parent_warnings
    report = contamination.compare_training(home, plan.record, plan.model.ref)
    warnings += report.warnings
    files = RunFiles(
        config_of(request, plan, parent),
        model_adapters=adapters_of([plan.model]),
        awaited=awaited_of([plan.model]),
        contamination=report,
    )
    new_run = NewRun(
        name=f"{plan.record.name}-{PROMPT}",
        kind="train",
        algorithm=PROMPT,
        env_id=plan.record.env_id,
        model=plan.model.ref,
        note=request.note,
        expect=request.expect,
        parent=parent,
        max_gpu_hours=request.cap_hours,
        estimated_hours=plan.hours.likely,
        request_id=request.request_id,
        body=request.body(),
        waits_for=plan.model.waits_for,
        gpus=0 if plan.model.endpoint is not None else 1,
    )
    return store.insert_run(new_run, files.writer(home))


def config_of(request: TrainRequest, plan: ResolvedSearch, parent: str) -> Mapping[str, object]:
    """Make the content of config.json of a search for a prompt, without the run's id.

    `parent` is the whole id of the run that the request names as its parent, "" for none.
    """
    return {
        "kind": "train",
        "algorithm": PROMPT,
        "env_id": plan.record.env_id,
        "env_dir": str(plan.record.dir),
        "models": [model_entry(plan.model)],
        "reflection": entry_of(plan.endpoint).to_json(),
        "settings": plan.settings.model_dump(),
        "sources": dict(plan.sources),
        "note": request.note,
        "expect": request.expect,
        "parent": parent,
        "max_gpu_hours": request.cap_hours,
        "estimated_hours": plan.hours.likely,
    }


def estimate_search(home: Home, request: TrainRequest) -> Reply:
    """Say what a search may take, without queuing it. Raises the errors of `resolve`."""
    plan = resolve(home, request)
    arguments = {name: value for name, value in request.given_arguments().items() if value}
    call = Call("submit_train", arguments)
    return {
        "summary": f"A search for a prompt: {plan.in_words()}.",
        "fits": True,
        "basis": "model",
        **plan.to_json(),
        "next": [call.to_json()],
        "warnings": warnings_of(request, plan),
    }

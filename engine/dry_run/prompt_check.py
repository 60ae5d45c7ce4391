"""The dry run of a search for a prompt: what it would ask and cost, and what stands in its way."""

import hashlib
import json
from collections.abc import Mapping

from engine.core.errors import UserError
from engine.core.format import counted, host_of
from engine.core.hints import Call, Hint
from engine.core.reply import Reply
from engine.dry_run.judgements import FEW_HELDOUT, CheckList, Outcome, required, short_audit
from engine.environments import registry
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.machine.processes import launcher
from engine.records.settings import PROMPT
from engine.runs.prompts import checks, submit
from engine.runs.prompts.submit import ResolvedSearch
from engine.runs.submit import contamination
from engine.runs.submit.requests import DryRunRequest
from engine.settings import resolution, start_models

_HASH_CHARS = 16  # as in report.py


class PromptDryRun:
    """One dry run of a search for a prompt: its checks, a method each, and the reply about them.

    If a check raises a UserError, it fails with the message and the hint of that error.
    """

    def __init__(self, home: Home, request: DryRunRequest) -> None:
        """Prepare to check the search that could be submitted with `request`."""
        self.home, self.request = home, request
        self.plan: ResolvedSearch | None = None  # the whole search; None until it is resolved
        self.check_list = CheckList(lambda: Call("dry_run", self._arguments()))

    def run_checks(self) -> None:
        """Make every check. Each line names a check and the earlier checks that it needs."""
        run_check = self.check_list.run_check
        run_check("env", (), self.check_env)
        run_check("model", (), self.check_model)
        run_check("settings", (), self.check_settings)
        run_check("interpreter", (), self.check_interpreter)
        run_check("endpoint", ("settings",), self.check_endpoint)
        run_check("resolve", ("env", "model", "interpreter", "endpoint"), self.check_resolved)
        run_check("exam", ("resolve",), self.check_exam)
        run_check("contamination", ("env", "model"), self.check_contamination)
        run_check("reward_audit", ("resolve",), self.check_audit)
        run_check("estimate", ("resolve",), self.check_estimate)
        run_check("budget", ("resolve",), self.check_budget)

    def check_env(self) -> Outcome:
        """Check that the environment exists, and that a prompt can be searched for in it."""
        record = registry.find_env(self.home, self.request.env_id)
        checks.check_env(record)
        rows = ", ".join(f"{count} {split}" for split, count in record.rows.items())
        return Outcome("pass", f"{record.env_id}: {record.kind}, {rows} rows")

    def check_model(self) -> Outcome:
        """Check that the model whose prompt is searched for exists."""
        model = start_models.model_to_ask(self.home, self.request.model)
        return Outcome("pass", f"{model.facts.architecture}, {model.facts.params:,} parameters")

    def check_settings(self) -> Outcome:
        """Check that every given setting exists and lies in its range. Raises UserError if one does
        not."""
        valid_settings = resolution.validate(PROMPT, dict(self.request.settings))
        return Outcome("pass", f"{len(valid_settings)} given, each exists and lies in its range")

    def check_interpreter(self) -> Outcome:
        """Check that gepa, the package that searches, is installed for the interpreter of workers.
        Raises UserError if it is not."""
        python = launcher.worker_python(self.home)
        checks.require_gepa(python)
        return Outcome("pass", f"workers run with {python}, which has gepa")

    def check_endpoint(self) -> Outcome:
        """Check that the setting `reflection` names an endpoint: a model behind a URL, which writes
        the prompts to try. Raises UserError if it does not."""
        endpoint = checks.reflecting_endpoint(self.home, self.request.settings.get("reflection"))
        return Outcome("pass", f"{endpoint.model} at {host_of(endpoint.url)} writes prompts")

    def check_resolved(self) -> Outcome:
        """Check that settings, tasks and budget fit together; store the whole search in
        `self.plan`.

        The check warns if tasks hold parts of a sealed exam, which the endpoint must not see.
        """
        plan = self.plan = submit.resolve(self.home, self.request)
        tasks = plan.tasks
        text = (
            f"{counted(len(tasks.reflected), 'train task')} to reflect on, "
            f"{len(tasks.choosing)} that choose, at most {counted(plan.rounds, 'round')}"
        )
        if tasks.sealed:
            return Outcome("warn", f"{text}; {tasks.sealed} hold tasks of a sealed exam")
        return Outcome("pass", text)

    def check_exam(self) -> Outcome:
        """Check that enough held-out tasks are asked to show more than a large gain."""
        plan = required(self.plan)
        task_count = min(plan.settings.eval_rows, plan.record.rows.get("heldout", 0))
        tasks = counted(task_count, "held-out task")
        text = f"{tasks} asked with the old prompt and with the new one"
        if task_count < FEW_HELDOUT:
            return Outcome("warn", f"{text}: only a large gain shows", "Hold more tasks out.")
        return Outcome("pass", text)

    def check_contamination(self) -> Outcome:
        """Check that no training rows contain held-out tasks, which the endpoint would be shown."""
        record = registry.find_env(self.home, self.request.env_id)
        overlap = contamination.compare_training(self.home, record, self.request.model)
        if overlap.verdict == "clean" or overlap.harmless:
            return Outcome("pass", overlap.headline)
        fix = "Take these rows out of the training split and push again. The verdict leaves such "
        return Outcome("warn", overlap.headline, f"{fix}tasks out.")

    def check_audit(self) -> Outcome:
        """Check what the stored reward audit says of the scorer: a search soon finds out for which
        wrong answers a scorer pays."""
        plan = required(self.plan)
        warnings = submit.audit_warnings(plan.record, plan.settings)
        headline = plan.record.audit.headline or "no audit is stored"
        return Outcome("warn" if warnings else "pass", "; ".join(warnings) or headline)

    def check_estimate(self) -> Outcome:
        """Say how many answers the search asks for and what they cost; warn if the endpoint's price
        is not known."""
        plan = required(self.plan)
        price_warnings = submit.price_warnings(plan)
        text = "; ".join([plan.in_words(), *price_warnings])
        fix = "Its owner writes price_in and price_out into config.toml."
        return Outcome("warn", text, fix) if price_warnings else Outcome("pass", text)

    def check_budget(self) -> Outcome:
        """Check that what the search costs may be spent. Raises UserError BUDGET or NOT_APPROVED if
        it may not."""
        with Store(self.home) as store:
            submit.check_spend(self.home, store, self.request, required(self.plan))
        return Outcome("pass", f"within {self.request.cap_hours:g} GPU-hours")

    def _arguments(self) -> Mapping[str, object]:
        """Return the arguments of the submit_train call that this dry run checks, without empty
        ones."""
        given = self.request.given_arguments()
        return {name: value for name, value in given.items() if value}

    def reply(self) -> Reply:
        """Return the reply, in the form of every dry run: what a search does not have is empty."""
        plan, done_checks = self.plan, self.check_list.checks
        settings = plan.settings.model_dump() if plan else {}
        audit = plan.record.audit.as_written() if plan else {}
        statuses = [(check.name, check.status) for check in done_checks]
        # What is the same whenever the same call is made again.
        hashed_text = json.dumps(
            [self._arguments(), settings, statuses], sort_keys=True, default=str
        )
        warned = [check for check in done_checks if check.status == "warn"]
        return {
            "settings": settings,
            "sources": dict(plan.sources) if plan else {},
            "statistics": {},
            "row": {},
            "audit": short_audit({key: audit[key] for key in audit if key != "seconds"}),
            "exam": {},
            "estimate": plan.to_json() if plan else {},
            "report_hash": hashlib.sha256(hashed_text.encode()).hexdigest()[:_HASH_CHARS],
            "checks": [check.to_json() for check in done_checks],
            "probe": None,
            "smoke": None,
            "run_id": "",
            "summary": self._summary(),
            "next": [call.to_json() for call in self._next_calls()],
            "warnings": [f"{check.name}: {check.detail}" for check in warned],
        }

    def _summary(self) -> str:
        """Return one sentence: the first failed check, or that the search can be submitted and what
        it takes."""
        failed = self.check_list.failed
        if failed:
            return f"Not ready: {failed[0].name}: {failed[0].detail}."
        return f"Ready to search for a prompt: {required(self.plan).in_words()}."

    def _next_calls(self) -> list[Call]:
        """Return the calls to make next: those that mend the failed checks, or the one that submits
        the search."""
        if self.check_list.failed:
            return self.check_list.remedies
        return [Call("submit_train", self._arguments())]


def dry_run_prompt(home: Home, request: DryRunRequest) -> Reply:
    """Check a search for a prompt without making it, and return the reply.

    Raises UserError BAD_ARGUMENT if the request has `samples` or `smoke`, which try training.
    """
    for argument in ("samples", "smoke"):
        if getattr(request, argument):
            raise UserError(
                "BAD_ARGUMENT",
                f"{argument} tries training, and a search for a prompt trains nothing",
                hint=Hint("Leave it out."),
                field=argument,
            )
    run = PromptDryRun(home, request)
    run.run_checks()
    return run.reply()

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
    """One dry run of a search: its checks, a method each."""

    def __init__(self, home: Home, request: DryRunRequest) -> None:
        self.home, self.request = home, request
        self.plan: ResolvedSearch | None = None
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
        """Whether the environment is there, and a prompt can be searched for in it."""
        record = registry.find_env(self.home, self.request.env_id)
        checks.check_env(record)
        rows = ", ".join(f"{count} {split}" for split, count in record.rows.items())
        return Outcome("pass", f"{record.env_id}: {record.kind}, {rows} rows")

    def check_model(self) -> Outcome:
        """Whether there is such a model."""
        model = start_models.model_to_ask(self.home, self.request.model)
        return Outcome("pass", f"{model.facts.architecture}, {model.facts.params:,} parameters")

    def check_settings(self) -> Outcome:
        """Whether every setting given exists and lies in its range."""
        checked = resolution.validate(PROMPT, dict(self.request.settings))
        return Outcome("pass", f"{len(checked)} given, each exists and lies in its range")

    def check_interpreter(self) -> Outcome:
        """Whether gepa is there for the interpreter that searches."""
        python = launcher.worker_python(self.home)
        checks.require_gepa(python)
        return Outcome("pass", f"workers run with {python}, which has gepa")

    def check_endpoint(self) -> Outcome:
        """Whether there is an endpoint that writes prompts."""
        endpoint = checks.reflecting_endpoint(self.home, self.request.settings.get("reflection"))
        return Outcome("pass", f"{endpoint.model} at {host_of(endpoint.url)} writes prompts")

    def check_resolved(self) -> Outcome:
        """Whether settings, tasks and budget fit together; stores the plan."""
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
        """What the held-out tasks can show."""
        plan = required(self.plan)
        asked = min(plan.settings.eval_rows, plan.record.rows.get("heldout", 0))
        text = f"{counted(asked, 'held-out task')} asked with the old prompt and with the new one"
        if asked < FEW_HELDOUT:
            return Outcome("warn", f"{text}: only a large gain shows", "Hold more tasks out.")
        return Outcome("pass", text)

    def check_contamination(self) -> Outcome:
        """Whether training rows hold held-out tasks, which an endpoint would be shown."""
        record = registry.find_env(self.home, self.request.env_id)
        overlap = contamination.compare_training(self.home, record, self.request.model)
        if overlap.verdict == "clean" or overlap.harmless:
            return Outcome("pass", overlap.headline)
        fix = "Take these rows out of the training split and push again. The verdict leaves such "
        return Outcome("warn", overlap.headline, f"{fix}tasks out.")

    def check_audit(self) -> Outcome:
        """What the stored reward audit says: a search finds what a scorer pays for wrongly."""
        plan = required(self.plan)
        warnings = submit.audit_warnings(plan.record, plan.settings)
        headline = plan.record.audit.headline or "no audit is stored"
        return Outcome("warn" if warnings else "pass", "; ".join(warnings) or headline)

    def check_estimate(self) -> Outcome:
        """What the search asks and costs."""
        plan = required(self.plan)
        doubts = submit.price_warnings(plan)
        text = "; ".join([plan.in_words(), *doubts])
        fix = "Its owner writes price_in and price_out into config.toml."
        return Outcome("warn", text, fix) if doubts else Outcome("pass", text)

    def check_budget(self) -> Outcome:
        """Whether it may be spent. Raises UserError BUDGET or NOT_APPROVED."""
        with Store(self.home) as store:
            submit.check_spend(self.home, store, self.request, required(self.plan))
        return Outcome("pass", f"within {self.request.cap_hours:g} GPU-hours")

    def _arguments(self) -> Mapping[str, object]:
        """The arguments of the call of submit_train that this dry run checks."""
        given = self.request.given_arguments()
        return {name: value for name, value in given.items() if value}

    def reply(self) -> Reply:
        """The reply, in the form of every dry run."""
        plan, done_checks = self.plan, self.check_list.checks
        settings = plan.settings.model_dump() if plan else {}
        audit = plan.record.audit.as_written() if plan else {}
        stable = [
            self._arguments(),
            settings,
            [(check.name, check.status) for check in done_checks],
        ]
        text = json.dumps(stable, sort_keys=True, default=str)
        return {
            "settings": settings,
            "sources": dict(plan.sources) if plan else {},
            "statistics": {},
            "row": {},
            "audit": short_audit({key: audit[key] for key in audit if key != "seconds"}),
            "exam": {},
            "estimate": plan.to_json() if plan else {},
            "report_hash": hashlib.sha256(text.encode()).hexdigest()[:_HASH_CHARS],
            "checks": [check.to_json() for check in done_checks],
            "probe": None,
            "smoke": None,
            "run_id": "",
            "summary": self._summary(),
            "next": [call.to_json() for call in self._next_calls()],
            "warnings": [
                f"{warning_check.name}: {warning_check.detail}"
                for warning_check in done_checks
                if warning_check.status == "warn"
            ],
        }

    def _summary(self) -> str:
        """What the dry run came to, in a sentence."""
        failed = self.check_list.failed
        if failed:
            return f"Not ready: {failed[0].name}: {failed[0].detail}."
        return f"Ready to search for a prompt: {required(self.plan).in_words()}."

    def _next_calls(self) -> list[Call]:
        """What mends the failures, or the call that submits."""
        if self.check_list.failed:
            return self.check_list.remedies
        return [Call("submit_train", self._arguments())]


def dry_run_prompt(home: Home, request: DryRunRequest) -> Reply:
    """Check a search for a prompt without making it; returns the reply.

    Raises UserError BAD_ARGUMENT for `samples` and `smoke`, which try training.
    """
    for name in ("samples", "smoke"):
        if getattr(request, name):
            raise UserError(
                "BAD_ARGUMENT",
                f"{name} tries training, and a search for a prompt trains nothing",
                hint=Hint("Leave it out."),
                field=name,
            )
    run = PromptDryRun(home, request)
    run.run_checks()
    return run.reply()

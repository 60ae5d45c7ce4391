"""The staircase of checks before anything is spent: environment, model, settings, machine, money.

Each step needs those below it; what cannot be judged because a step failed is skipped, and nothing
is queued after a refusal. The same call gives the same report (`report_hash`), and with `samples`
the finished probe of the first call.
"""

import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from engine.core import hardware
from engine.core.errors import UserError
from engine.core.files import read_json
from engine.core.format import counted, size, words
from engine.core.hints import Call, Change, Hint, hint_of
from engine.cost import estimate, throughput
from engine.environments import env_facts, registry
from engine.evidence.stats.learnability import BROKEN
from engine.home.database import tells_of_the_disk
from engine.home.rows import DEFAULT_GPU_HOURS
from engine.home.run_dir import Home
from engine.home.sanitize import redactor_for
from engine.home.store import Store
from engine.install import env_packages, vllm_env
from engine.models import catalog, hub
from engine.processes import launcher
from engine.reading import preview
from engine.records.settings import SFTSettings, TrainSettings
from engine.runs import lifecycle
from engine.runs.submit import admission, contamination
from engine.runs.submit.requests import ProbeRequest
from engine.settings import resolution
from envs.audit.audit_summary import best_degenerate
from envs.config.problem import EnvProblem
from envs.host.process import isolation_here
from envs.isolation.sandbox import LIMITS

CALL_S = 46.0  # the whole call, the wait for a probe included
MOST_SAMPLES = 256
FEW_HELDOUT = 100
_PROBE_SETTINGS = ("seed", "precision")  # what an SFT plan and its probe have in common


class _Stairs:
    """Checks in order; `facts` carries what one found to those above it.

    `rehearsal` gives the dry run that this is, which a fix may change.
    """

    def __init__(self, rehearsal: Callable[[], Call]) -> None:
        self.rehearsal = rehearsal
        self.checks: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}

    def step(self, name: str, needs: Sequence[str], check: Callable[[], "_Found"]) -> None:
        """Run `check` unless one of `needs` has not passed; a UserError is a fail."""
        missing = [need for need in needs if self.status(need) not in ("pass", "warn")]
        if missing:
            found = _Found("skip", f"needs {missing[0]}")
        else:
            try:
                found = check()
            except UserError as error:
                found = _Found("fail", error.message, error.advice, error.code)
        entry: dict[str, Any] = {"name": name, "status": found.status, "detail": found.detail}
        entry |= hint_of(found.fix).of(self.rehearsal()).shown("fix")
        self.checks.append(entry | ({"code": found.code} if found.code else {}))

    def status(self, name: str) -> str:
        return next((check["status"] for check in self.checks if check["name"] == name), "skip")

    @property
    def failed(self) -> list[dict[str, Any]]:
        return [check for check in self.checks if check["status"] == "fail"]


class _Found:
    """What a check came to."""

    def __init__(self, status: str, detail: str, fix: str | Hint = "", code: str = "") -> None:
        self.status, self.detail, self.fix, self.code = status, detail, fix, code


@tells_of_the_disk
def dry_run(
    home: Home,
    env_id: str,
    model: str = "pebble",
    algorithm: str = "grpo",
    settings: dict[str, Any] | None = None,
    samples: int = 0,
    afford: Callable[[float], float] | None = None,
) -> dict[str, Any]:
    """Check a run that could be submitted with the same arguments; trains nothing.

    Args:
        samples: tasks to sample `group_size` times each from the model, in a short run of its own
            that only starts when no check fails; its `run_id` is in the answer.
        afford: gives that run a cap on device hours, or refuses it.

    Returns `checks` ({"name", "status" pass|warn|fail|skip, "detail", "fix"}), `settings` with
    `sources`, `statistics`, `row` (sft: one row as it is trained), `audit`, `estimate`, `probe`,
    `report_hash`.
    Raises UserError BAD_ARGUMENT for `samples` outside 0..256.
    """
    began = time.monotonic()
    if (
        isinstance(samples, bool)
        or not isinstance(samples, int)
        or not 0 <= samples <= MOST_SAMPLES
    ):
        raise UserError(
            "BAD_ARGUMENT",
            f"samples = {samples!r} cannot be used",
            hint=f"Give a whole number of tasks from 0 to {MOST_SAMPLES}; 16 says enough.",
            field="samples",
        )
    look = _Look(home, env_id, model, algorithm, dict(settings or {}))
    stairs = look.climb(began)
    report = _report(look, stairs)
    if samples:
        stairs.step("probe", _all_but_skipped(stairs), lambda: look.probe(samples, began, afford))
    return report | {
        "checks": stairs.checks,
        "probe": stairs.facts.get("probe"),
        "run_id": stairs.facts.get("run_id", ""),
        "summary": _summary(look, stairs),
        "next": _next(look, stairs),
        "warnings": _warnings(look, stairs),
    }


class _Look:
    """One dry run: what was asked, and the checks that judge it."""

    def __init__(
        self, home: Home, env_id: str, model: str, algorithm: str, settings: dict[str, Any]
    ) -> None:
        self.home = home
        self.env_id = env_id
        self.model = model
        self.algorithm = algorithm
        self.settings = settings
        self.stairs = _Stairs(lambda: Call("dry_run", self.call()))
        self.facts = self.stairs.facts

    def climb(self, began: float) -> _Stairs:
        step = self.stairs.step
        step("env", (), self.env)
        step("model", (), self.base)
        step("settings", (), self.names)
        step("resolve", ("env", "model", "settings"), self.resolve)
        step("interpreter", (), self.interpreter)
        step("packages", ("env",), self.packages)
        step("secrets", ("env",), self.secrets)
        step("isolation", (), self.isolation)
        step("data", ("resolve",), self.data)
        step("contamination", ("env", "model"), self.contamination)
        step("reward_audit", ("env",), self.audit)
        step("estimate", ("resolve",), lambda: self.estimate(began))
        step("memory", ("estimate",), self.memory)
        step("disk", ("estimate",), self.disk)
        step("budget", ("estimate",), self.budget)
        return self.stairs

    def env(self) -> _Found:
        record = self.facts["record"] = registry.find_env(self.home, self.env_id)
        rows = ", ".join(f"{count} {split}" for split, count in record.rows.items())
        return _Found("pass", f"{record.env_id}: {record.kind}, {rows} rows")

    def base(self) -> _Found:
        ref = self.facts["model"] = catalog.resolve_model(self.home, self.model)
        detail = f"{ref.facts.architecture}, {ref.facts.params:,} parameters"
        if ref.adapter is not None:
            detail += f", continued from {ref.adapter.name} of {ref.run_id}"
        missing = hub.missing_bytes(ref.base_path)
        if missing:
            return _Found("warn", f"{detail}; {size(missing)} of weights come when the run starts")
        return _Found("pass", detail)

    def names(self) -> _Found:
        given = resolution.validate(self.algorithm, self.settings)
        return _Found("pass", f"{len(given)} given, each exists and lies in its range")

    def resolve(self) -> _Found:
        ref = self.facts["model"]
        machine = self.facts["machine"] = hardware.detect(self.home.root)
        rows = env_facts.env_facts(
            self.home,
            self.facts["record"],
            ref.base_path,
            thinking=self.settings.get("thinking") is True,
        )
        self.facts["rows"] = rows
        resolved = self.facts["resolved"] = resolution.resolve(
            self.algorithm,
            self.settings,
            model=ref.facts,
            env=rows,
            hardware=machine,
            inherited=ref.adapter_facts,
            vllm=vllm_env.find_python(self.home) is not None,
        )
        steps = counted(resolved.settings.steps, "step")
        detail = f"{len(resolved.sources)} settings, {steps}"
        if resolved.warnings:
            return _Found("warn", "; ".join(resolved.warnings))
        return _Found("pass", detail)

    def interpreter(self) -> _Found:
        python = launcher.worker_python(self.home)
        if "resolved" in self.facts:
            launcher.require_quantizer(self.home, self.facts["resolved"].settings.quantization)
        return _Found("pass", f"workers run with {python}")

    def packages(self) -> _Found:
        record = self.facts["record"]
        needed = env_packages.read_requirements(record.source)
        if not needed:
            return _Found("pass", "the environment needs none")
        if registry.env_python(record) != sys.executable:
            return _Found("pass", f"{len(needed)} in the environment's own place")
        missing = env_packages.missing(needed)
        if missing:
            raise UserError(
                "ENV_DEPS",
                f"missing: {', '.join(missing)[:300]}",
                hint="Install them here, or push the environment again, its packages installed.",
            )
        return _Found("pass", f"{len(needed)} found here")

    def secrets(self) -> _Found:
        record = self.facts["record"]
        admission.check_secrets(record)
        named = ", ".join(record.secrets)
        return _Found("pass", f"{named} set" if named else "the environment names none")

    def isolation(self) -> _Found:
        try:
            held = isolation_here(registry.sandbox_of(self.home))
        except EnvProblem as problem:
            return _Found("fail", problem.message, problem.hint, problem.code)
        if held.level != LIMITS:
            return _Found("pass", f"{held.level}: {', '.join(held.holds)}")
        fix = "Push only environments you would run yourself; honesmith doctor says more."
        return _Found("warn", f"{held.level}: {'; '.join(held.gaps)}", fix)

    def data(self) -> _Found:
        resolved, rows = self.facts["resolved"], self.facts["rows"]
        found = env_facts.statistics(rows, resolved.settings)
        self.facts["statistics"] = found
        if self.algorithm == "sft":
            record, folder = self.facts["record"], self.facts["model"].base_path
            redact = redactor_for(self.home, record.dir)
            row = preview.sft_row(
                registry.read_tasks(record), record.tools, folder, resolved.settings, redact
            )
            self.facts["row"] = row.to_json() if row else {}
        return _judge_data(found, rows, resolved.settings)

    def contamination(self) -> _Found:
        found = contamination.of_training(self.home, self.facts["record"], self.model)
        headline = found["headline"]
        if found["verdict"] == "clean":
            return _Found("pass", headline)
        fix = "Take these rows out of the training split, or hold other tasks out, and push again."
        if found["verdict"] == "leak":
            return _Found("fail", headline, f"{fix} The verdict leaves such tasks out.")
        return _Found("warn", headline, fix)

    def audit(self) -> _Found:
        record = self.facts["record"]
        audit = self.facts["audit"] = record.audit.as_written()
        headline = str(audit.get("headline", ""))
        if not record.scored:
            return _Found("pass", "the environment scores nothing")
        if not audit:
            return _Found("warn", "no audit is stored", "Push the environment again.")
        if audit.get("verdict") == "warn":
            fix = "Nothing stands in the way; a stricter scorer teaches more. See the table."
            return _Found("warn", headline, fix)
        if audit.get("verdict") != "risk":
            return _Found("pass", headline)
        fix = "Mend the reward and push again"
        if self.algorithm == "grpo" and not self.settings.get("accept_reward_risk"):
            fix += ", or set accept_reward_risk = true to train on it knowingly."
            knowingly = Change(settings={"accept_reward_risk": True})
            return _Found("fail", headline, Hint(fix, change=knowingly), "REWARD_RISK")
        return _Found("warn", headline, fix + ": held-out success means little until then.")

    def estimate(self, began: float) -> _Found:
        machine, ref = self.facts["machine"], self.facts["model"]
        left = CALL_S - (time.monotonic() - began)
        throughput.ensure(self.home, machine, max(0.0, min(estimate.PROBE_WAIT_S, left)))
        figures = self.facts["estimate"] = estimate.estimate(
            self.home,
            self.facts["resolved"],
            ref.facts,
            self.facts["rows"],
            machine,
            download=hub.missing_bytes(ref.base_path),
            base_path=ref.base_path,
        )
        return _Found("pass", f"{estimate.summary(figures)} Basis: {figures['basis']}.")

    def memory(self) -> _Found:
        figures = self.facts["estimate"]
        total, available = figures["peak_memory"]["total"], figures["memory_available"]
        detail = f"{size(total)} of {size(available)} on {figures['device']}"
        if total > figures["memory_free"]:
            # Said, not judged: what is in use now may be gone when the run has its turn.
            detail += f", of which {size(figures['memory_free'])} are free now"
        if figures["fits"]:
            if figures["fit"] == "tight":
                return _Found("warn", f"{detail}: tight", f"Lower {figures['lower_this']}.")
            return _Found("pass", detail)
        lower = figures["lower_this"]
        change = estimate.change_of(figures["lower_to"])
        fix = Hint(f"Lower {lower}." if lower else "", change=change)
        return _Found("fail", detail, fix, "DOES_NOT_FIT")

    def disk(self) -> _Found:
        figures, free = self.facts["estimate"], self.facts["machine"].disk_free
        detail = f"the run writes about {size(figures['disk_bytes'])}"
        if figures["disk_fits"]:
            return _Found("pass", detail)
        fix = f"Free space ({size(free)} are free), or lower keep_checkpoints."
        return _Found("fail", detail, fix, "DISK_FULL")

    def budget(self) -> _Found:
        figures = self.facts["estimate"]
        with Store(self.home) as store:
            said = estimate.check_budget(self.home, store, figures, DEFAULT_GPU_HOURS, self.call())
        if said:
            return _Found("warn", said[0], "Give the run a larger max_gpu_hours.")
        hours = figures["gpu_hours"]
        return _Found(
            "pass", f"at most {hours['high']:g} GPU-hours; {DEFAULT_GPU_HOURS:g} are allowed"
        )

    def call(self) -> dict[str, Any]:
        """Arguments of the submit_train this is the rehearsal of."""
        record = self.facts.get("record")
        arguments: dict[str, Any] = {
            "env_id": record.env_id if record else self.env_id,
            "model": self.model,
            "algorithm": self.algorithm,
        }
        return arguments | ({"settings": self.settings} if self.settings else {})

    def sft_call(self) -> dict[str, Any]:
        """Arguments of a submit_train by SFT on the same tasks, {} where they have no answers."""
        rows = self.facts.get("rows")
        if rows is None or not rows.answered_rows:
            return {}
        kept = {name: self.settings[name] for name in _PROBE_SETTINGS if name in self.settings}
        call = self.call() | {"algorithm": "sft"}
        call.pop("settings", None)
        return call | ({"settings": kept} if kept else {})

    def probe(self, samples: int, began: float, afford: Callable[[float], float] | None) -> _Found:
        """Sample the model in a run of its own and judge whether GRPO has something to select."""
        record = self.facts["record"]
        if not record.scored:
            return _Found("skip", "the environment scores nothing")
        asked = self.settings
        if self.algorithm != "grpo":
            asked = {name: asked[name] for name in _PROBE_SETTINGS if name in asked}
        request = ProbeRequest(record.env_id, self.model, samples, asked)
        answer = lifecycle.submit_probe(self.home, request, afford)
        run_id = self.facts["run_id"] = answer["run_id"]
        left = max(0.0, CALL_S - (time.monotonic() - began))
        status = lifecycle.wait(self.home, run_id, "end", left)
        if status["state"] == "done":
            result = self.facts["probe"] = read_json(self.home.run(run_id).result)
            self.facts["too_hard"] = self.algorithm == "grpo" and _too_hard(result)
            return _beside_degenerate(_judge_probe(result), result, self.facts.get("audit") or {})
        if status["state"] in ("failed", "cancelled"):
            error = status.get("error") or {}
            return _Found(
                "fail",
                f"{run_id}: {error.get('message', status['state'])}",
                Hint.read(error.get("hint", ""), error.get("call")),
            )
        return _Found(
            "skip",
            f"{run_id} is {status['state']}",
            Hint(
                "Wait for it, or make the same dry run again.",
                Call("wait_run", {"run_id": run_id}),
            ),
        )


def _judge_data(found: dict[str, Any], rows: env_facts.EnvFacts, settings: TrainSettings) -> _Found:
    prompt, target = found["prompt"], found["target"]
    detail = (
        f"{found['rows']} train rows, prompts of {prompt['p50']} tokens (95 %: {prompt['p95']}), "
        f"answers of {target['p50']} (95 %: {target['p95']})"
    )
    if rows.refused:
        return _Found(
            "fail",
            f"the chat template refuses {rows.refused} rows; {rows.refusal}",
            "Correct these rows: roles and content must be what the template takes.",
            "DATASET_INVALID",
        )
    if unfit := estimate.none_fit(found, settings):
        return _Found("fail", unfit, "Raise max_length.", "DATASET_INVALID")
    weak = []
    if found["dropped"]:
        weak.append((f"{found['dropped']} rows do not fit and are left out", "Raise max_length."))
    if found["truncated_share"] > 0.02:
        name, limit = (
            ("max_length", settings.max_length)
            if isinstance(settings, SFTSettings)
            else ("max_tokens", settings.max_tokens)
        )
        share = f"{found['truncated_share']:.0%} of the answers are cut at {name}"
        weak.append((f"{share} = {limit}", f"Raise {name}."))
    if isinstance(settings, SFTSettings) and found["without_answer"]:
        weak.append((f"{found['without_answer']} rows have no answer and are left out", ""))
    if found["duplicate_share"] > 0.2:
        weak.append((f"{found['duplicate_share']:.0%} of the prompts repeat an earlier one", ""))
    if rows.heldout_rows < FEW_HELDOUT:
        weak.append(
            (
                f"{rows.heldout_rows} held-out rows can show only large gains",
                f"Give the environment at least {FEW_HELDOUT} held-out rows, better 400.",
            )
        )
    if not weak:
        return _Found("pass", detail)
    said = "; ".join(text for text, _ in weak)
    return _Found("warn", f"{detail}; {said}", " ".join(fix for _, fix in weak if fix))


def _too_hard(result: dict[str, Any]) -> bool:
    """Whether GRPO would have next to nothing to select because hardly any answer is right."""
    hard, easy = result["too_hard"], result["too_easy"]
    return result["effective"] < 0.2 and hard >= easy and hard > 0


def _beside_degenerate(found: _Found, result: dict[str, Any], audit: dict[str, Any]) -> _Found:
    """The same, warned where an answer that is none earns more than the model does on average:
    GRPO goes where the pay is, and that is nearer than being right."""
    best, earned = best_degenerate(audit.get("probes") or []), result.get("reward_mean")
    if best is None or earned is None or found.status == "fail":
        return found
    if best["mean"] <= max(0.0, earned):
        return found
    probe = best["probe"]
    said = (
        f"{probe} pays {best['mean']:.2f}, the model earns {earned:.2f} on average: {probe} is the "
        "best it can reach"
    )
    fix = f"Pay less for {probe} than for a first try, and push again, or train by SFT first."
    return _Found("warn", f"{said}; {found.detail}", f"{fix} {found.fix}".strip(), found.code)


def _judge_probe(result: dict[str, Any]) -> _Found:
    """A probe's numbers in words, with the one lever they point at."""
    effective, truncated = result["effective"], result["truncated_share"]
    passes = ", ".join(f"pass@{k} {value:.2f}" for k, value in result["pass_at_k"].items())
    detail = (
        f"{effective:.0%} of {result['tasks']} groups have variance "
        f"({result['too_hard']:.0%} too hard, {result['too_easy']:.0%} too easy), {passes}, "
        f"{truncated:.0%} truncated"
    )
    if shares := result.get("gradient_share"):
        carried = ", ".join(f"{group}: {share:.0%}" for group, share in shares.items())
        detail += f"; groups that would teach, by group_size: {carried}"
    if not result["error_share"]:
        return _judge_groups(result, detail)
    detail = f"{result['error_share']:.0%} of the scores failed; {detail}"
    fix = "Mend score() and push again."
    if result["error_share"] > BROKEN:
        return _Found("fail", detail, fix, "ENV_INVALID")
    return _Found("warn", detail, f"{fix} {_judge_groups(result, detail).fix}".strip())


def _judge_groups(result: dict[str, Any], detail: str) -> _Found:
    """Whether groups that were scored would teach."""
    effective, truncated = result["effective"], result["truncated_share"]
    if truncated > 0.1:
        after = " If the groups stay too hard: train by SFT first." if _too_hard(result) else ""
        return _Found("warn", detail, f"Raise max_tokens, or ask for shorter answers.{after}")
    if _too_hard(result):
        return _Found(
            "warn",
            detail,
            "GRPO has little to select: train by SFT first, take easier tasks, give partial "
            "credit or raise group_size.",
        )
    if effective < 0.2 and result["too_easy"]:
        return _Found("warn", detail, "The tasks are solved already: take harder ones.")
    said = "; ".join(item["say"] for item in result.get("advice", []))
    return _Found("pass", detail, f"{said[:1].upper()}{said[1:]}." if said else "")


def _all_but_skipped(stairs: _Stairs) -> list[str]:
    return [check["name"] for check in stairs.checks if check["status"] != "skip"]


def _report(look: _Look, stairs: _Stairs) -> dict[str, Any]:
    """What depends on the input alone, and its hash: free memory, disk and times stay out."""
    facts = stairs.facts
    resolved = facts.get("resolved")
    audit = {key: value for key, value in facts.get("audit", {}).items() if key != "seconds"}
    report = {
        "settings": resolved.settings.model_dump() if resolved else {},
        "sources": resolved.sources if resolved else {},
        "statistics": facts.get("statistics", {}),
        "row": facts.get("row", {}),
        "audit": _short_audit(audit),
        "estimate": estimate.shown(facts.get("estimate", {})),
    }
    record, model = facts.get("record"), facts.get("model")
    stable = {
        "env_id": record.env_id if record else look.env_id,
        "model": [model.ref, str(model.adapter), model.facts.params] if model else look.model,
        "algorithm": look.algorithm,
        "given": look.settings,
        "checks": [(check["name"], check["status"]) for check in stairs.checks],
        "settings": report["settings"],
        "sources": report["sources"],
        "statistics": report["statistics"],
        "audit": {key: value for key, value in audit.items() if "seconds" not in key},
    }
    text = json.dumps(stable, sort_keys=True, default=str)
    return report | {"report_hash": hashlib.sha256(text.encode()).hexdigest()[:16]}


def _short_audit(audit: dict[str, Any]) -> dict[str, Any]:
    """The table without examples of probes that earn nothing."""
    kept = (
        "verdict", "headline", "share", "deterministic", "order_dependent", "fresh_process",
        "separability", "saturation", "score_seconds_p95", "problems", "gold_failing",
    )  # fmt: skip
    short = {key: audit[key] for key in kept if key in audit}
    if "probes" in audit:
        names = ("probe", "mean", "success", "errors", "verdict", "example")
        short["probes"] = [
            {name: line[name] for name in names if name in line} for line in audit["probes"]
        ]
    return short


def _summary(look: _Look, stairs: _Stairs) -> str:
    failed = stairs.failed
    if failed:
        first = failed[0]
        more = f" ({len(failed)} checks fail)" if len(failed) > 1 else ""
        return f"Not ready: {first['name']}: {first['detail']}{more}."
    warned = [check["name"] for check in stairs.checks if check["status"] == "warn"]
    likely = stairs.facts["estimate"]["hours"]["likely"]
    said = f"Ready to train, about {words(likely)}"
    if stairs.facts.get("too_hard"):
        found = stairs.facts["probe"]
        first = "train by SFT first" if look.sft_call() else "give partial credit"
        said = (
            f"GRPO would learn little: {found['too_hard']:.0%} of {found['tasks']} groups are too "
            f"hard; {first}, or take easier tasks"
        )
    return f"{said}; look at {', '.join(warned)}." if warned else f"{said}."


def _next(look: _Look, stairs: _Stairs) -> list[dict[str, Any]]:
    if stairs.failed:
        return []
    calls = [Call("submit_train", look.call())]
    run_id = stairs.facts.get("run_id")
    if stairs.facts.get("too_hard"):
        sft = look.sft_call()
        calls = [Call("submit_train", sft)] if sft else []
        calls.append(Call("read_rollouts", {"run_id": run_id, "pick": "best"}))
    elif run_id and stairs.status("probe") == "skip":
        calls.insert(0, Call("wait_run", {"run_id": run_id}))
    return [call.to_json() for call in calls]


def _warnings(look: _Look, stairs: _Stairs) -> list[str]:
    record = stairs.facts.get("record")
    meant = registry.prefix_meant(look.env_id, record) if record else []
    return meant + [
        f"{check['name']}: {check['detail']}"
        for check in stairs.checks
        if check["status"] == "warn"
    ]

"""The checks of one run before it is submitted, a method each, in the order in which they are made.

A check is skipped if a check that it needs has failed. A dry run itself queues nothing.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from engine.core import hardware
from engine.core.errors import UserError
from engine.core.format import counted, size, whole_percent
from engine.core.hints import Call, Hint
from engine.core.reply import Reply
from engine.cost import estimate, throughput
from engine.cost.estimate import Forecast
from engine.cost.exam import Exam, exam_of
from engine.cost.hours import unmeasured_warning
from engine.dry_run.judgements import CheckList, Outcome, judge_data, judge_wording, required
from engine.environments import env_facts, registry
from engine.environments.registry import EnvRecord
from engine.evidence.robustness.probe_calls import reworded_better
from engine.executors.admission import (
    check_placement,
    check_rented,
    compute_of,
    has_vllm,
    machine_for,
)
from engine.executors.attending.starts import when_it_starts
from engine.home.owner_marks import seal_in
from engine.home.rows import DEFAULT_GPU_HOURS, LOCAL
from engine.home.run_dir import Home
from engine.home.sanitize import redactor_for
from engine.home.store import Store
from engine.machine.fast_paths.results import why_off
from engine.machine.install import env_packages, vllm_env
from engine.machine.processes import launcher
from engine.models import hub
from engine.models.catalog import ModelRef
from engine.records.settings import GivenSettings, SFTSettings
from engine.runs.evaluation.exam import frequent_answer, reported_tasks, size_of
from engine.runs.reading import preview
from engine.runs.submit import admission, contamination
from engine.settings import env_checks, gpu_count, resolution, start_models, teachers
from engine.settings.teachers import ResolvedTeacher
from envs.config.problem import EnvProblem
from envs.host.process import isolation_here
from envs.isolation.sandbox import LIMITS
from envs.json_types import TaskRow

CALL_S = 46.0  # seconds that the whole call may take, with the wait for a probe
_SHOWN_CHARS = 40  # of an answer in a sentence
_SHARED_SETTINGS = ("seed", "precision")  # settings that mean the same in SFT and in GRPO


@dataclass
class Facts:
    """Results of earlier checks that later checks need; None or empty until the check is made.

    Attributes:
        record: the environment version.
        model: the start model.
        machine: the hardware of this machine.
        rows: the environment's rows in tokens of the model.
        resolved: all settings, given or chosen, with their sources.
        statistics: token statistics of the training rows, as JSON.
        row: for SFT, one row as it would be trained on.
        audit: the environment's stored reward audit.
        exam: what the held-out tasks (the exam) can show; None if none of them is scored.
        forecast: the estimate of the run.
        probe: result of the probe (a short run in which the model answers some tasks); None until
            it is done.
        probe_run_id: id of the probe's run; "" if none was started.
        too_hard: whether the probe shows that GRPO would learn next to nothing.
        smoke: result of the smoke run (two optimizer steps); None if there was none.
    """

    record: EnvRecord | None = None
    model: ModelRef | None = None
    machine: hardware.Hardware | None = None
    rows: env_facts.EnvFacts | None = None
    resolved: resolution.Resolved | None = None
    teacher: ResolvedTeacher | None = None
    statistics: Reply = field(default_factory=dict)
    row: Reply = field(default_factory=dict)
    audit: Reply = field(default_factory=dict)
    exam: Exam | None = None
    forecast: Forecast | None = None
    probe: Reply | None = None
    probe_run_id: str = ""
    too_hard: bool = False
    smoke: Reply | None = None


class DryRun:
    """One dry run: the run to check, its checks (a method each), and their results.

    A check stores in `facts` what later checks need. If a check raises a UserError, it fails with
    the message and the hint of that error.
    """

    def __init__(
        self, home: Home, env_id: str, model: str, algorithm: str, settings: GivenSettings
    ) -> None:
        """Prepare to check a run.

        Args:
            home: the home.
            env_id: the environment, as the user named it.
            model: the start model, as the user named it.
            algorithm: the algorithm, such as "grpo".
            settings: the settings that the user gave.
        """
        self.home = home
        self.env_id = env_id
        self.model = model
        self.algorithm = algorithm
        self.settings = settings
        # Hints suggest a changed form of this call. It is built anew for each hint, because its
        # arguments become more exact after some checks.
        self.check_list = CheckList(lambda: Call("dry_run", self.arguments()))
        self.facts = Facts()

    def run_checks(self, began: float) -> CheckList:
        """Make every check except those that try the model (probe and smoke run), and return the
        list of checks.

        Each line below names a check and the earlier checks that it needs. `began` is the value of
        `time.monotonic()` at which the call began.
        """
        run_check = self.check_list.run_check
        run_check("env", (), self.check_env)
        run_check("model", (), self.check_model)
        run_check("settings", (), self.check_settings)
        run_check("resolve", ("env", "model", "settings"), self.check_resolved)
        run_check("interpreter", (), self.check_interpreter)
        run_check("packages", ("env",), self.check_packages)
        run_check("secrets", ("env",), self.check_secrets)
        run_check("isolation", (), self.check_isolation)
        run_check("data", ("resolve",), self.check_data)
        run_check("exam", ("resolve",), self.check_exam)
        run_check("wording", ("resolve",), self.check_wording)
        run_check("contamination", ("env", "model"), self.check_contamination)
        run_check("reward_audit", ("env",), self.check_audit)
        run_check("estimate", ("resolve",), lambda: self.check_estimate(began))
        run_check("memory", ("estimate",), self.check_memory)
        run_check("disk", ("estimate",), self.check_disk)
        run_check("budget", ("estimate",), self.check_budget)
        return self.check_list

    def check_env(self) -> Outcome:
        """Check that the environment exists; store its record in `self.facts`."""
        record = registry.find_env(self.home, self.env_id)
        self.facts.record = record
        rows = ", ".join(f"{count} {split}" for split, count in record.rows.items())
        return Outcome("pass", f"{record.env_id}: {record.kind}, {rows} rows")

    def check_model(self) -> Outcome:
        """Check that the model exists and can be trained; store it in `self.facts`.

        The check warns if weights must be downloaded when the run starts.
        """
        ref = start_models.model_to_train(self.home, self.model)
        self.facts.model = ref
        detail = f"{ref.facts.architecture}, {ref.facts.params:,} parameters"
        detail += start_models.origin_text(ref)
        missing = hub.missing_bytes(ref.base_path)
        if missing:
            return Outcome("warn", f"{detail}; {size(missing)} of weights come when the run starts")
        return Outcome("pass", detail)

    def check_settings(self) -> Outcome:
        """Check that every given setting exists and lies in its range. Raises UserError if one does
        not."""
        valid_settings = resolution.validate(self.algorithm, self.settings)
        return Outcome("pass", f"{len(valid_settings)} given, each exists and lies in its range")

    def check_resolved(self) -> Outcome:
        """Choose every setting that was left out, and check that all settings fit each other, the
        model and the rows.

        Stores the settings, the machine, the facts of the environment's rows and the teacher in
        `self.facts`. Raises UserError if something does not fit.
        """
        ref = required(self.facts.model)
        machine = self.facts.machine = machine_for(self.home, self.settings)
        rows = self.facts.rows = self._row_facts(ref)
        resolved = self.facts.resolved = self._resolved(ref, rows, machine)
        # Called only for its UserError: keep_env may name an environment that does not exist.
        env_checks.with_kept_version(self.home, resolved.settings)
        teacher = self.facts.teacher = teachers.resolve_teacher(self.home, resolved.settings, ref)
        if teacher is not None and teacher.model is not None:  # a teacher behind a URL has no model
            admission.require_files(teacher.model, field="settings.teacher")
        if resolved.warnings:
            return Outcome("warn", "; ".join(resolved.warnings))
        steps = counted(resolved.settings.steps, "step")
        return Outcome("pass", f"{len(resolved.sources)} settings, {steps}")

    def _row_facts(self, ref: ModelRef) -> env_facts.EnvFacts:
        """Return the facts of the environment's rows (their number and lengths), counted in tokens
        of the start model `ref`."""
        return env_facts.env_facts(
            self.home,
            required(self.facts.record),
            ref.base_path,
            thinking=resolution.counted_thinking(self.algorithm, self.settings),
        )

    def _resolved(
        self, ref: ModelRef, rows: env_facts.EnvFacts, machine: hardware.Hardware
    ) -> resolution.Resolved:
        """Choose every setting that was not given; return all settings with their sources.

        Args:
            ref: the start model.
            rows: facts of the environment's rows, in tokens of that model.
            machine: the hardware that the run is planned for.
        """
        return resolution.resolve(
            self.algorithm,
            self.settings,
            model=ref.facts,
            env=rows,
            hardware=machine,
            # The adapter that the run continues, if any: its rank and projections stay.
            inherited=ref.adapter_facts,
            vllm=has_vllm(self.settings, is_here=vllm_env.find_python(self.home) is not None),
            vllm_fault=why_off(self.home, machine.device, "vllm"),
        )

    def check_interpreter(self) -> Outcome:
        """Check that the run can be placed: on this machine some Python interpreter must have what
        these settings need to train.

        Raises UserError if there is no such place.
        """
        if self.facts.resolved is not None and self.facts.record is not None:
            settings = self.facts.resolved.settings
            place = check_placement(self.home, settings, self.facts.record)
            if place:  # another machine, in words
                start = when_it_starts(self.home, settings.compute, settings.gpus)
                return Outcome("pass", f"{place}; {start}" if start else place)
        python = launcher.worker_python(self.home)
        if self.facts.resolved is not None:  # it is None if an earlier check failed
            launcher.require_quantizer(self.home, self.facts.resolved.settings.quantization)
        return Outcome("pass", f"workers run with {python}")

    def check_packages(self) -> Outcome:
        """Check that the packages which the environment's requirements.txt names are installed.

        Raises UserError ENV_DEPS if one is missing.
        """
        record = required(self.facts.record)
        needed = env_packages.read_requirements(record.source)
        if not needed:
            return Outcome("pass", "the environment needs none")
        if registry.env_python(record) != sys.executable:  # it has a virtual environment
            return Outcome("pass", f"{len(needed)} in the environment's own place")
        missing = env_packages.missing(needed)
        if missing:  # raising a UserError makes the check fail
            raise UserError(
                "ENV_DEPS",
                f"missing: {', '.join(missing)[:300]}",
                hint="Install them here, or push the environment again, its packages installed.",
            )
        return Outcome("pass", f"{len(needed)} found here")

    def check_secrets(self) -> Outcome:
        """Check that all secrets which the environment names are set for this process.

        Raises UserError ENV_SECRETS, which makes the check fail, if one is not.
        """
        record = required(self.facts.record)
        admission.check_secrets(record)
        if not record.secrets:
            return Outcome("pass", "the environment names none")
        return Outcome("pass", f"{', '.join(record.secrets)} set")

    def check_isolation(self) -> Outcome:
        """Check how well the environment's code can be isolated on this machine.

        The check warns if only its resources can be limited, and fails if the home's config asks
        for more than this machine can do.
        """
        try:
            confinement = isolation_here(registry.sandbox_of(self.home))
        except EnvProblem as problem:
            return Outcome("fail", problem.message, problem.hint, code=problem.code)
        if confinement.level != LIMITS:  # LIMITS is the weakest level
            return Outcome("pass", f"{confinement.level}: {', '.join(confinement.holds)}")
        fix = "Push only environments you would run yourself; honesmith doctor says more."
        return Outcome("warn", f"{confinement.level}: {'; '.join(confinement.gaps)}", fix)

    def check_data(self) -> Outcome:
        """Check that the training rows fit the settings.

        Stores their statistics, and for SFT one row as it would be trained on.
        """
        resolved, rows = required(self.facts.resolved), required(self.facts.rows)
        statistics = env_facts.statistics(rows, resolved.settings)
        self.facts.statistics = statistics
        if isinstance(resolved.settings, SFTSettings):
            self.facts.row = self._sft_row(resolved.settings)
        return judge_data(statistics, rows, resolved.settings, required(self.facts.record))

    def check_wording(self) -> Outcome:
        """Check whether all training rows share a text, on which the model may come to depend.

        The check also warns if the model was seen to do better when tasks are asked in other words:
        then a better prompt may do, without training.
        """
        record = required(self.facts.record)
        outcome = judge_wording(record, required(self.facts.resolved).settings)
        better_reworded = reworded_better(self.home, record.env_id, required(self.facts.model).ref)
        if not better_reworded:
            return outcome
        fix = (
            'Search for a prompt first (algorithm="prompt", its setting reflection names an '
            "endpoint of config.toml that writes it), then train from the version that it makes."
        )
        return Outcome("warn", f"{better_reworded[0]} {outcome.detail}", fix)

    def _sft_row(self, settings: SFTSettings) -> Reply:
        """Return one row as SFT would train on it, as JSON, with secrets hidden; {} if there is no
        row."""
        record, model_folder = required(self.facts.record), required(self.facts.model).base_path
        tasks = registry.read_tasks(record)
        redact = redactor_for(self.home, record.dir)
        row = preview.sft_row(tasks, record.tools, model_folder, settings, redact)
        return row.to_json() if row else {}

    def check_exam(self) -> Outcome:
        """Check how small a gain the held-out tasks (the exam) can show, as far as that is known
        before the run; store the exam in `self.facts`."""
        record, settings = required(self.facts.record), required(self.facts.resolved).settings
        # The tasks that the verdict is read on. They are read only if needed, and then once.
        read_reported = cache(lambda: reported_tasks(record, settings.eval_rows))
        exam = exam_of(
            self.home,
            env_id=record.env_id,
            model=required(self.facts.model).ref,
            settings=settings,
            facts=required(self.facts.rows),
            count_reported=lambda: size_of(record, read_reported()),
        )
        self.facts.exam = exam
        if exam is None:
            return Outcome("pass", "no held-out task is scored: the loss on them is all there is")
        detail = exam.in_words() + self._frequent_answer(record, read_reported())
        doubts = exam.doubts()
        if not doubts:
            return Outcome("pass", detail)
        fix = "Hold more tasks out, harder ones, or train for more than a small gain."
        return Outcome("warn", f"{detail}; {'; '.join(doubts)}", fix)

    def _frequent_answer(self, record: EnvRecord, tasks: Sequence[TaskRow]) -> str:
        """Say, as the end of a sentence, how many of the tasks a model gets right that gives one
        and the same answer to all of them.

        `tasks` are those that the verdict is read on. Returns "" if they have many different
        answers, are sealed, or are large data.
        """
        if record.version.data or seal_in(record.dir) is not None:
            return ""
        frequent = frequent_answer(tasks)
        if frequent is None:
            return ""
        text, share = frequent
        shown = redactor_for(self.home, record.dir).text(text[:_SHOWN_CHARS])
        return (
            f"; always answering {shown!r} is right on {whole_percent(share)}: only more than that "
            "is learnt"
        )

    def check_contamination(self) -> Outcome:
        """Check that no training rows contain held-out tasks.

        The check warns if they contain some, and fails if they contain many (verdict "leak").
        """
        overlap = self.overlap()
        headline = overlap.headline
        if overlap.verdict == "clean" or overlap.harmless:
            return Outcome("pass", headline)
        fix = "Take these rows out of the training split, or hold other tasks out, and push again."
        if overlap.verdict == "leak":
            return Outcome("fail", headline, f"{fix} The verdict leaves such tasks out.")
        return Outcome("warn", headline, fix)

    def overlap(self) -> contamination.Contamination:
        """Find the held-out tasks that occur in the training rows of this run, or in the rows that
        the start model was trained on."""
        return contamination.compare_training(self.home, required(self.facts.record), self.model)

    def check_audit(self) -> Outcome:
        """Check the verdict of the stored reward audit, which tried whether the scorer pays for
        wrong answers: "ok", "warn" or "risk".

        On a risk the check fails only for GRPO without accept_reward_risk; otherwise it warns.
        """
        record = required(self.facts.record)
        audit = record.audit.as_written()
        self.facts.audit = audit
        headline = str(audit.get("headline", ""))
        if not record.scored:
            return Outcome("pass", "the environment scores nothing")
        if not audit:
            return Outcome("warn", "no audit is stored", "Push the environment again.")
        if audit.get("verdict") == "warn":
            fix = "Nothing stands in the way; a stricter scorer teaches more. See the table."
            return Outcome("warn", headline, fix)
        if audit.get("verdict") != "risk":
            return Outcome("pass", headline)
        fix = "Mend the reward and push again"
        is_accepted = resolution.is_switched_on(self.settings, "accept_reward_risk")
        if self.algorithm == "grpo" and not is_accepted:
            fix += ", or set accept_reward_risk = true to train on it knowingly."
            return Outcome("fail", headline, fix, code="REWARD_RISK")
        return Outcome("warn", headline, fix + ": held-out success means little until then.")

    def check_estimate(self, began: float) -> Outcome:
        """Estimate the run's time and memory, and store the forecast in `self.facts`.

        The speed of this machine is measured first, if the call, which began at `began`
        (`time.monotonic()`), has time left for that. The check warns if the forecast was made
        without some earlier runs, because their records could not be read. It does not warn if the
        machine is not measured yet, because the summary says that.
        """
        wait_s = min(estimate.PROBE_WAIT_S, seconds_left(began))
        if compute_of(self.settings) == LOCAL:
            throughput.ensure(self.home, required(self.facts.machine), wait_s)
        forecast = self.facts.forecast = self._forecast()
        detail = f"{estimate.summary(forecast.estimate)} Basis: {forecast.estimate.basis}."
        if forecast.left_out:
            fix = "Put the file back from a copy, or delete the run it belongs to."
            return Outcome("warn", f"{detail} {'; '.join(forecast.left_out)}", fix)
        unmeasured = unmeasured_warning(self.home, forecast.estimate)
        return Outcome("pass", " ".join([detail, *unmeasured]))

    def _forecast(self) -> Forecast:
        """Return the estimate of the run.

        Before that, the number of devices is decided by estimates with each number, and stored in
        the settings of `self.facts`.
        """
        model, machine = required(self.facts.model), required(self.facts.machine)
        rows = required(self.facts.rows)

        def forecast_of(settings: resolution.Resolved) -> Forecast:
            """Return the estimate of the run with these settings, its forecast."""
            return estimate.estimate(
                self.home,
                settings,
                model.facts,
                rows,
                machine,
                teacher=self.facts.teacher,
                base_path=model.base_path,
            )

        resolved, _ = gpu_count.decide(
            self.home,
            required(self.facts.resolved),
            machine,
            lambda settings: forecast_of(settings).estimate,
        )
        self.facts.resolved = resolved
        return forecast_of(resolved)

    def check_memory(self) -> Outcome:
        """Check that the run fits into the memory of its device, by its estimated peak.

        The check fails if not even its least memory fits; the fix then names settings to lower.
        """
        forecast = required(self.facts.forecast)
        figures = forecast.estimate
        total, available = figures.peak_memory.total, figures.memory_available
        detail = f"{size(total)} of {size(available)} on {figures.device}"
        if total > figures.memory_free:
            # This is no reason to warn: memory in use now may be free when the run starts.
            detail += f", of which {size(figures.memory_free)} are free now"
        if figures.fits:
            if figures.fit != "tight":
                return Outcome("pass", detail)
            return Outcome("warn", f"{detail}: tight", f"Lower {figures.lower_this}.")
        advice = f"Lower {figures.lower_this}." if figures.lower_this else ""
        fix = Hint(advice, change=estimate.change_of(forecast.lower_to))
        return Outcome("fail", detail, fix, code="DOES_NOT_FIT")

    def check_disk(self) -> Outcome:
        """Check that the disk of the home has room for what the run is estimated to write."""
        figures = required(self.facts.forecast).estimate
        free_bytes = required(self.facts.machine).disk_free
        detail = f"the run writes about {size(figures.disk_bytes)}"
        if figures.disk_fits:
            return Outcome("pass", detail)
        fix = f"Free space ({size(free_bytes)} are free), or lower keep_checkpoints."
        return Outcome("fail", detail, fix, code="DISK_FULL")

    def check_budget(self) -> Outcome:
        """Check that the run is expected to stay within the default cap on GPU-hours and within the
        total that the home allows.

        Raises UserError BUDGET if it likely does not. On a rented machine the machine's own limits
        are checked too.
        """
        figures = required(self.facts.forecast).estimate
        if self.facts.resolved is not None:
            check_rented(self.home, self.facts.resolved.settings, figures.hours.likely)
        call = self.arguments()
        with Store(self.home) as store:
            warnings = estimate.check_budget(self.home, store, figures, DEFAULT_GPU_HOURS, call)
        if warnings:  # there is at most one
            return Outcome("warn", warnings[0], "Give the run a larger max_gpu_hours.")
        detail = f"at most {figures.gpu_hours.high:g} GPU-hours; {DEFAULT_GPU_HOURS:g} are allowed"
        return Outcome("pass", detail)

    def arguments(self) -> Mapping[str, object]:
        """Return the arguments of the submit_train call that this dry run checks.

        `env_id` is the whole id if the environment was found, else what the caller gave.
        """
        record = self.facts.record
        env_id = record.env_id if record else self.env_id
        arguments: dict[str, object] = {
            "env_id": env_id,
            "model": self.model,
            "algorithm": self.algorithm,
        }
        if self.settings:
            arguments["settings"] = self.settings
        return arguments

    def sft_arguments(self) -> Mapping[str, object]:
        """Return the arguments of a submit_train call that trains by SFT on the same tasks; {} if
        the tasks have no reference answers to learn from."""
        rows = self.facts.rows
        if rows is None or not rows.answered_rows:
            return {}
        arguments: dict[str, object] = {**self.arguments(), "algorithm": "sft"}
        arguments.pop("settings", None)  # most settings of GRPO do not exist in SFT
        shared_settings = self.shared_settings()
        if shared_settings:
            arguments["settings"] = shared_settings
        return arguments

    def shared_settings(self) -> GivenSettings:
        """Return the given settings that mean the same in SFT and in GRPO."""
        return {name: self.settings[name] for name in _SHARED_SETTINGS if name in self.settings}


def seconds_left(began: float) -> float:
    """Return the seconds until the dry run must answer, at least 0. `began` is the value of
    `time.monotonic()` at the start of the call, which may take `CALL_S` seconds."""
    return max(0.0, CALL_S - (time.monotonic() - began))

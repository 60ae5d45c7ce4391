"""Seeded runs of a simulated policy: rollouts as texts, metrics worked out from them.

A simulated policy plays groups of tasks; what it writes and earns depends on the step and on the
trouble. Nothing here looks at a threshold of a detector.
"""

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.evidence.detect.baseline import compared_with_start
from engine.evidence.detect.views import (
    Facts,
    Failure,
    StartComparison,
    TrainingRows,
    view_of,
)
from engine.evidence.stats.inference import PairedVerdict
from engine.evidence.verdict.comparison import Comparison, compare_rows
from engine.evidence.verdict.regression import KeptSkills, compare_skills
from engine.evidence.verdict.row_facts import RowFacts
from engine.evidence.verdict.side_notes import ConstantAnswer
from engine.records.known_settings import KnownSettings
from engine.records.lines.evaluation_row import EvaluationRow
from engine.records.lines.trajectory_record import TrajectoryRecord
from envs.audit.rescore import Scored, score_again

Row = dict[str, Any]
Line = dict[str, Any]
Change = Callable[["Policy", float, int, random.Random], "Policy"]

WORDS = (
    "the a of to and in that it is was for on are as with his they at be this from have or by one "
    "had not but what all were when we there can an your which their said if do will each about "
    "how up out them then she many some so these would other into has more her two like him see"
).split()


@dataclass
class Simulated:
    """One run: what its worker would have left."""

    kind: str
    seed: int
    algorithm: str
    settings: dict[str, Any]
    lines: list[Line] = field(default_factory=list)
    rollouts: dict[int, list[Row]] = field(default_factory=dict)
    exam_rows: list[Row] = field(default_factory=list)
    exam_tasks: int = 200
    rows: dict[str, Any] = field(default_factory=dict)
    failure: dict[str, Any] = field(default_factory=dict)
    verdict: Comparison | None = None
    rescored: dict[str, Any] = field(default_factory=dict)
    exams: dict[int, list[Row]] = field(default_factory=dict)  # the half every exam asks
    gold_tokens: float | None = None
    heldout_rows: int | None = None
    kept: KeptSkills | None = None
    row_facts: RowFacts = field(default_factory=RowFacts)
    fall_of_the_start: StartComparison | None = None
    constant: ConstantAnswer | None = None

    @property
    def known(self) -> KnownSettings:
        """The settings as detectors read them."""
        return KnownSettings.of(self.settings)

    def facts(self) -> Facts:
        views = [
            view_of(step, rollout_records(rows), self.known) for step, rows in self.rollouts.items()
        ]
        return Facts(
            algorithm=self.algorithm,
            settings=self.known,
            lines=self.lines,
            views=[view for view in views if view is not None],
            exam=view_of(0, exam_records(self.exam_rows), self.known),
            exam_tasks=self.exam_tasks,
            training_rows=TrainingRows(**self.rows),
            failure=Failure(**self.failure) if self.failure else None,
            comparison=self.verdict,
            constant=self.constant,
            rescoring=self.rescored,
            exam_start=view_of(0, exam_records(self.exams.get(0, [])), self.known),
            against_start=self.against_start(),
            gold_tokens=self.gold_tokens,
            heldout_rows=self.heldout_rows,
            kept_skills=self.kept,
            rows=self.row_facts,
            fall_of_the_start=self.fall_of_the_start,
        )

    def against_start(self) -> StartComparison | None:
        later = [step for step in self.exams if step > 0]
        if not later:
            return None
        sides = [exam_records(self.exams[step]) for step in (0, later[-1])]
        return compared_with_start(*sides, later[-1], len(later))


ROLLOUT: Row = {"step": 1, "group": 0, "member": 0, "advantage": 0.0, "turns": 1}


def rollout_records(rows: list[Row]) -> list[TrajectoryRecord]:
    """Rollouts as they are read; what a detector does not look at is made up."""
    usual = TrajectoryRecord.model_construct(**ROLLOUT)
    return [usual.model_copy(update=row) for row in rows]  # three times as fast as to construct


def exam_records(rows: list[Row]) -> list[EvaluationRow]:
    usual = EvaluationRow.model_construct(model="simulated")
    return [usual.model_copy(update=row) for row in rows]


@dataclass
class Policy:
    """How a policy writes at one moment; a trouble changes some of it.

    skill: logit of the chance to solve a task of usual difficulty. spread: of the difficulty of
    tasks. words: usual length. same: a group says one thing. form: chance that the answer can be
    read. loops: share of the text that repeats. stock: chance to give the stock answer.
    """

    skill: float
    spread: float = 1.0
    words: float = 8.0
    same: bool = False
    form: float = 1.0
    cut: float = 0.0
    out_of_turns: float = 0.0
    loops: float = 0.0
    stock: float = 0.0
    fenced: float = 0.0
    think: float = 0.0
    errors: float = 0.0
    judge: float | None = None
    judge_agrees: bool = False
    entropy: float = 1.0
    pay: Callable[[Row, random.Random], float] | None = None


class World:
    """The fixed facts of one simulated GRPO run, drawn from its seed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(f"world {seed}")
        self.steps = rng.randint(24, 60)
        self.groups = rng.randint(6, 10)
        self.size = rng.choice((4, 6, 8))
        self.short = rng.random() < 0.4  # answers of a word or two, else prose
        self.words = 3.0 if self.short else rng.uniform(12, 40)
        self.form_metric = rng.choice(("parsed", "formatted", ""))
        self.start = logit(rng.uniform(0.15, 0.5))
        self.gain = rng.uniform(1.2, 3.0)
        self.middle = rng.uniform(0.2, 0.6)
        self.max_tokens = 64
        self.eval_every = max(1, self.steps // rng.randint(3, 6))

    def settings(self, **more: Any) -> dict[str, Any]:
        return {
            "learning_rate": 1e-3,
            "steps": self.steps,
            "group_size": self.size,
            "prompts_per_step": self.groups,
            "max_tokens": self.max_tokens,
            "max_length": 512,
            "temperature": 1.0,
            "kl_coef": 0.0,
            "max_grad_norm": 1.0,
            "thinking": False,
            "max_turns": 1,
            "eval_rows": 400,
            "accept_reward_risk": False,
        } | more

    def progress(self, step: int) -> float:
        """0 at the start, 1 at the end, an S between."""
        return 1 / (1 + math.exp(-10 * (step / self.steps - self.middle)))

    def learner(self, step: int) -> Policy:
        """A policy that learns as it should."""
        way = self.progress(step)
        return Policy(
            skill=self.start + self.gain * way,
            words=self.words * (1 - 0.2 * way),
            form=1.0 - 0.25 * (1 - way) * (self.steps % 2),
            cut=0.08 * (1 - way) * (self.steps % 3 == 0),
            entropy=1.1 - 0.75 * way,
        )


def rescored(seed: int, *, forged: float = 0.0, flips: float = 0.0, **about: Any) -> dict[str, Any]:
    """What a fresh env process says of 24 answers, of which a share `forged` was paid whatever it
    was; `flips` is the chance of a scorer to err, each time it is asked."""
    rng = random.Random(f"rescored {seed}")

    def answer(at: int) -> Scored:
        honest = float(rng.random() < 0.5)

        def score(_process: Any) -> dict[str, Any]:
            return {"reward": 1 - honest if rng.random() < flips else honest, "error": None}

        return Scored({"task": f"t{at}"}, 1.0 if rng.random() < forged else honest, score)

    found = score_again([answer(at) for at in range(24)], object, lambda: False)
    return found | {"deterministic": True, "network": False} | about


def logit(p: float) -> float:
    return math.log(p / (1 - p))


def chance(skill: float) -> float:
    return 1 / (1 + math.exp(-skill))


def play(world: World, policy: Policy, step: int, rng: random.Random) -> list[Row]:
    """One step: every group, every member."""
    rows = []
    for group in range(world.groups):
        difficulty = rng.gauss(0, policy.spread)
        task = f"task-{(step * world.groups + group) % 400}"
        first: Row | None = None
        for member in range(world.size):
            row = first | {"member": member} if policy.same and first else None
            row = row or answer(world, policy, task, group, member, difficulty, rng)
            first = first or row
            rows.append(row)
    assign(rows, world.size)
    return rows


def answer(
    world: World,
    policy: Policy,
    task: str,
    group: int,
    member: int,
    difficulty: float,
    rng: random.Random,
) -> Row:
    cut = rng.random() < policy.cut
    turns_out = cut and rng.random() < policy.out_of_turns
    read = rng.random() < policy.form
    fenced = rng.random() < policy.fenced
    right = rng.random() < chance(policy.skill - difficulty) and read and not cut and not fenced
    error = "ValueError: scorer" if rng.random() < policy.errors else None
    said = f"It is {task}." if right else f"It is {rng.randint(0, 999)}."
    if not world.short:
        count = max(4, round(rng.gauss(policy.words, policy.words / 6)))
        said = " ".join(rng.choices(WORDS, k=count)) + " " + said
    elif policy.words > 6:
        said = " ".join(rng.choices(WORDS, k=round(policy.words))) + " " + said
    if rng.random() < policy.stock:
        said = "As requested, here is the complete and correct final answer you were looking for."
    loops = min(40, round(policy.loops * len(said.split()) * 2))
    said += " and so on once again" * (loops // 2 + 8 * (policy.loops > 0.05))
    if fenced:
        said = f"```\n{said}\n```"
    message: Row = {"role": "assistant", "content": said}
    tokens = len(said.split()) + 1
    if policy.think:
        share = min(0.99, max(0.05, rng.gauss(policy.think, 0.08)))
        wanted = round(len(said) * share / (1 - share))
        thought = " ".join(rng.choices(WORDS, k=max(1, round(wanted / 4.1))))
        message["reasoning_content"] = thought
        tokens = world.max_tokens if cut else round(0.97 * world.max_tokens)
    metrics = {world.form_metric: float(read)} if world.form_metric else {}
    if policy.judge is not None:
        wrong = policy.judge_agrees and not right and rng.random() > 0.08
        centre = 0.3 if wrong else policy.judge
        metrics["judge_quality"] = min(1.0, max(0.0, rng.gauss(centre, 0.1)))
    row: Row = {
        "step": 1,
        "advantage": 0.0,
        "task": task,
        "group": group,
        "member": member,
        "messages": [message],
        "completion": said,
        "reward": float(right),
        "success": right,
        "metrics": metrics,
        "error": error,
        "stop_reason": ("max_turns" if turns_out else "max_tokens") if cut else "stop",
        "tokens": world.max_tokens if cut else tokens,
        "turns": 1,
    }
    if policy.pay is not None:
        row["reward"] = policy.pay(row, rng)
    if error:
        row |= {"reward": 0.0, "success": None}
    return row


def assign(rows: list[Row], size: int) -> None:
    """Advantages within each group, as the trainer works them out."""
    for at in range(0, len(rows), size):
        group = [row for row in rows[at : at + size] if not row["error"]]
        rewards = [row["reward"] for row in group] or [0.0]
        mean = statistics.fmean(rewards)
        spread = statistics.pstdev(rewards)
        for row in rows[at : at + size]:
            scored = not row["error"] and spread > 0
            row["advantage"] = (row["reward"] - mean) / (spread + 1e-4) if scored else 0.0


def measured(world: World, rows: list[Row], step: int, policy: Policy, rng: random.Random) -> Line:
    """The metrics of a step, as the trainer works them out of its rollouts."""
    groups = [rows[at : at + world.size] for at in range(0, len(rows), world.size)]
    uniform = [g for g in groups if all(row["advantage"] == 0.0 for row in g)]
    easy = [
        g
        for g in uniform
        if any(r["success"] for r in g) and all(r["success"] for r in g if not r["error"])
    ]
    flat = [g for g in uniform if g not in easy and max(r["reward"] for r in g) > 0]
    scored = [row for row in rows if not row["error"]]
    rewards = [row["reward"] for row in scored] or [0.0]
    lengths = sorted(row["tokens"] for row in rows)
    effective = 1 - len(uniform) / len(groups)
    return {
        "step": step,
        "reward_mean": statistics.fmean(rewards),
        "reward_std": statistics.pstdev(rewards),
        "length_mean": statistics.fmean(lengths),
        "length_p95": lengths[int(0.95 * len(lengths))],
        "truncated_share": sum(r["stop_reason"] != "stop" for r in rows) / len(rows),
        "zero_advantage_share": sum(r["advantage"] == 0.0 for r in rows) / len(rows),
        "groups_effective": effective,
        "groups_too_easy": len(easy) / len(groups),
        "groups_too_hard": (len(uniform) - len(easy) - len(flat)) / len(groups),
        "groups_flat_partial": len(flat) / len(groups),
        "reward_errors": 1 - len(scored) / len(rows),
        "entropy": max(0.01, policy.entropy * rng.gauss(1, 0.05)),
        "kl": None,
        "grad_norm": effective * math.exp(rng.gauss(-1, 0.5)),
        "lr": 1e-3 if effective else 0.0,
        "sample_s": 0.5 * math.exp(rng.gauss(0, 0.1)),
        "reward_s": 0.05 * math.exp(rng.gauss(0, 0.3)),
        "train_s": 0.6 * math.exp(rng.gauss(0, 0.1)),
    }


def grpo(
    kind: str,
    seed: int,
    change: Change | None = None,
    *,
    prepare: Callable[[World, random.Random], None] | None = None,
    lines: Callable[[Line, float, int, random.Random], None] | None = None,
    **settings: Any,
) -> Simulated:
    """A GRPO run. `change(policy, way, step, chance)` and `lines` are the trouble; `way` is how
    much of the run is done, `chance` is drawn anew for the run and the same at every step."""
    world = World(seed)
    rng = random.Random(f"{kind} {seed}")
    if prepare is not None:
        prepare(world, rng)
    run = Simulated(kind, seed, "grpo", world.settings(**settings))
    secret = rng.random()
    heldout = random.Random(f"exam {kind} {seed}")
    for step in range(world.steps + 1):
        policy = world.learner(step)
        if change is not None:
            drawn = random.Random(f"trouble {kind} {seed} {secret}")
            policy = change(policy, step / world.steps, step, drawn)
        line: Line = {"step": step}
        if step > 0:
            rows = play(world, policy, step, rng)
            run.rollouts[step] = rows
            line = measured(world, rows, step, policy, rng)
        if step == 0 or step == world.steps or step % world.eval_every == 0:
            level = (
                statistics.fmean(
                    chance(policy.skill - heldout.gauss(0, policy.spread)) for _ in range(200)
                )
                * policy.form
                * (1 - policy.cut)
                * (1 - policy.fenced)
            )
            solved = sum(heldout.random() < level for _ in range(200)) / 200
            line |= {"heldout_success": solved, "heldout_reward": solved}
            examined(run, step, solved, cut=policy.cut, length=policy.words)
        if lines is not None:
            lines(line, step / world.steps, step, random.Random(f"trouble {kind} {seed} {secret}"))
        run.lines.append(line)
    curve = [line["heldout_success"] for line in run.lines if "heldout_success" in line]
    run.verdict = judged(heldout, curve[0], curve[-1], 200)
    return run


def examined(
    run: Simulated,
    step: int,
    share: float,
    *,
    cut: float = 0.0,
    length: float = 8.0,
    reward: float | None = None,
    n: int = 100,
) -> None:
    """The exam of a step on tasks of which `share` is solved, mostly the same ones each time."""
    fixed = random.Random(f"tasks {run.kind} {run.seed}")
    chance = random.Random(f"exam {run.kind} {run.seed} {step}")
    hard = [fixed.random() for _ in range(n)]
    order = sorted(range(n), key=lambda i: hard[i] + chance.gauss(0, 0.05))
    solved = set(order[: round(share * n)])
    rows: list[Row] = []
    for i in range(n):
        said = " ".join(chance.choices(WORDS, k=max(1, round(length))))
        rows.append(
            {
                "model": "simulated",
                "task": f"h{i}",
                "half": "select",
                "completion": said,
                "success": i in solved,
                "reward": float(i in solved) if reward is None else reward,
                "error": None,
                "stop_reason": "max_tokens" if chance.random() < cut else "stop",
                "tokens": round(length),
            }
        )
    run.exams[step] = rows


def kept_of(rng: random.Random, before: float, after: float, n: int = 48) -> KeptSkills:
    """What a run keeps of `n` old tasks when it could do `before` of them and can do `after`."""
    hard = [rng.random() for _ in range(n)]
    sides = [
        [
            {
                "task": f"k{i}",
                "battery": "old skills",
                "reward": 0.0,
                "error": None,
                "success": h + rng.gauss(0, 0.01) < level,
            }
            for i, h in enumerate(hard)
        ]
        for level in (before, after)
    ]
    return compare_skills(*map(exam_records, sides))


def judged(rng: random.Random, before: float, after: float, n: int) -> Comparison:
    """The verdict on `n` reported tasks with these chances."""
    hard = [rng.random() for _ in range(n)]
    sides = [
        [
            {
                "task": f"t{i}",
                "success": h + rng.gauss(0, 0.05) < level,
                "reward": 0.0,
                "error": None,
            }
            for i, h in enumerate(hard)
        ]
        for level in (before, after)
    ]
    return compare_rows(*map(exam_records, sides))


def sft(
    kind: str, seed: int, *, overfit: float = 0.0, scored: bool | None = None, **settings: Any
) -> Simulated:
    """An SFT run; `overfit` is how far the held-out loss rises again, as a share of its lowest."""
    rng = random.Random(f"{kind} {seed}")
    steps = rng.randint(30, 90)
    every = max(1, steps // rng.choice((5, 6, 8)))
    rate = settings.get("learning_rate", 1e-3)
    start, floor, speed = rng.uniform(1.0, 3.0), rng.uniform(0.05, 0.5), rng.uniform(4, 10)
    turn = rng.uniform(0.15, 0.4)
    scored = rng.random() < 0.6 if scored is None else scored
    given = {
        "learning_rate": rate,
        "steps": steps,
        "epochs": 3,
        "batch_size": 16,
        "max_length": 128,
        "max_grad_norm": 1.0,
        "eval_rows": 400,
    } | settings
    run = Simulated(kind, seed, "sft", given)
    run.rows = {"rows": 400, "truncated": rng.randint(0, 8), "dropped": 0}
    heldout: list[float] = []
    for step in range(steps + 1):
        way = step / steps
        down = floor + (start - floor) * math.exp(-speed * way)
        line: Line = {"step": step}
        if step > 0:
            line |= {
                "loss": down * math.exp(rng.gauss(0, 0.12) - 0.6 * overfit * max(0, way - turn)),
                "grad_norm": (0.2 + 2 * math.exp(-speed * way)) * math.exp(rng.gauss(0, 0.3)),
                "lr": rate * 0.5 * (1 + math.cos(math.pi * way)),
                "tokens": 1600,
                "supervised_tokens": 300,
            }
        if step % every == 0 or step == steps:
            up = overfit * max(0.0, way - turn) / (1 - turn)
            line["heldout_loss"] = (1.1 * down + start * up * 0.4) * rng.gauss(1, 0.003)
            if scored:
                skill = 0.1 + 0.7 * (1 - math.exp(-speed * min(way, turn if overfit else 1)))
                line["heldout_success"] = sum(rng.random() < skill for _ in range(200)) / 200
                heldout.append(line["heldout_success"])
                examined(run, step, heldout[-1])
        run.lines.append(line)
    if scored:
        run.verdict = judged(rng, heldout[0], heldout[-1], 200)
    else:
        run.verdict = Comparison("loss", PairedVerdict("better", "", n=200), None, None)
    return run

"""Seeded runs with one trouble each, or none: rollouts as texts, metrics worked out from them.

A simulated policy plays groups of tasks; what it writes and earns depends on the step and on the
trouble. Nothing here looks at a threshold of a detector.
"""

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.evidence.verdict import compare_rows
from engine.evidence.views import Facts, view_of

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
    verdict: dict[str, Any] = field(default_factory=dict)

    def facts(self) -> Facts:
        views = [view_of(step, rows, self.settings) for step, rows in self.rollouts.items()]
        return Facts(
            algorithm=self.algorithm,
            settings=self.settings,
            lines=self.lines,
            views=[view for view in views if view is not None],
            exam=view_of(0, self.exam_rows, self.settings),
            exam_tasks=self.exam_tasks,
            rows=self.rows,
            failure=self.failure,
            verdict=self.verdict,
        )


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
            "learning_rate": 1e-3, "steps": self.steps, "group_size": self.size,
            "prompts_per_step": self.groups, "max_tokens": self.max_tokens, "max_length": 512,
            "temperature": 1.0, "kl_coef": 0.0, "max_grad_norm": 1.0, "thinking": False,
            "max_turns": 1, "eval_rows": 400, "accept_reward_risk": False,
        } | more  # fmt: skip

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
    world: World, policy: Policy, task: str, group: int, member: int, difficulty: float,
    rng: random.Random,
) -> Row:  # fmt: skip
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
        "task": task, "group": group, "member": member, "messages": [message], "completion": said,
        "reward": float(right), "success": right, "metrics": metrics, "error": error,
        "stop_reason": ("max_turns" if turns_out else "length") if cut else "stop",
        "tokens": world.max_tokens if cut else tokens, "turns": 1,
    }  # fmt: skip
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
    easy = [g for g in uniform if any(r["success"] for r in g)
            and all(r["success"] for r in g if not r["error"])]  # fmt: skip
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
        "groups_too_hard": (len(uniform) - len(easy)) / len(groups),
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
    kind: str, seed: int, change: Change | None = None, *,
    prepare: Callable[[World, random.Random], None] | None = None,
    lines: Callable[[Line, float, int, random.Random], None] | None = None,
    **settings: Any,
) -> Simulated:  # fmt: skip
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
        if lines is not None:
            lines(line, step / world.steps, step, random.Random(f"trouble {kind} {seed} {secret}"))
        run.lines.append(line)
    curve = [line["heldout_success"] for line in run.lines if "heldout_success" in line]
    run.verdict = judged(heldout, curve[0], curve[-1], 200)
    return run


def judged(rng: random.Random, before: float, after: float, n: int) -> dict[str, Any]:
    """The verdict on `n` reported tasks with these chances."""
    hard = [rng.random() for _ in range(n)]
    sides = [
        [{"task": f"t{i}", "success": h + rng.gauss(0, 0.05) < level, "reward": 0.0, "error": None}
         for i, h in enumerate(hard)]
        for level in (before, after)
    ]  # fmt: skip
    return compare_rows(*sides).as_dict()


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
    given = {"learning_rate": rate, "steps": steps, "epochs": 3, "batch_size": 16,
             "max_length": 128, "max_grad_norm": 1.0, "eval_rows": 400} | settings  # fmt: skip
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
                "tokens": 1600, "supervised_tokens": 300,
            }  # fmt: skip
        if step % every == 0 or step == steps:
            up = overfit * max(0.0, way - turn) / (1 - turn)
            line["heldout_loss"] = (1.1 * down + start * up * 0.4) * rng.gauss(1, 0.003)
            if scored:
                skill = 0.1 + 0.7 * (1 - math.exp(-speed * min(way, turn if overfit else 1)))
                line["heldout_success"] = sum(rng.random() < skill for _ in range(200)) / 200
                heldout.append(line["heldout_success"])
        run.lines.append(line)
    if scored:
        run.verdict = judged(rng, heldout[0], heldout[-1], 200)
    else:
        run.verdict = {"verdict": "better", "metric": "loss", "n": 200}
    return run


# --- troubles ---------------------------------------------------------------------------------


def healthy(seed: int) -> Simulated:
    if seed % 3 == 2:
        return sft("healthy", seed)
    if seed % 7 == 3:  # a judge that agrees with the check
        return grpo("healthy", seed, lambda p, way, step, r: _set(p, judge=0.85, judge_agrees=True))
    if seed % 7 == 5:  # thinks, within its budget
        return grpo("healthy", seed, lambda p, way, step, r: _set(p, think=0.3), thinking=True)
    return grpo("healthy", seed)


def flat(policy: Policy, **changes: Any) -> Policy:
    """A policy whose form and length do not change by themselves."""
    return _set(policy, form=1.0, cut=0.0, entropy=1.0, **changes)


def uniform_groups(seed: int) -> Simulated:
    def constant(row: Row, _rng: random.Random) -> float:
        return 0.5

    def frozen(p: Policy, way: float, step: int, r: random.Random) -> Policy:
        return _set(flat(p, same=True, skill=r.uniform(-2, 1)), entropy=0.02)

    def ends(p: Policy, way: float, step: int, r: random.Random) -> Policy:
        return flat(p, skill=r.uniform(-2, 1), spread=40.0)  # solved always or never

    def paid_alike(p: Policy, way: float, step: int, r: random.Random) -> Policy:
        return flat(p, skill=r.uniform(-1, 0.5), pay=constant)

    heat = 0.01 * (1 + seed % 20) if seed % 3 == 0 else 1.0
    change = (frozen, ends, paid_alike)[seed % 3]
    return grpo("uniform_groups", seed, change, temperature=heat)


def too_hard(seed: int) -> Simulated:
    def change(p: Policy, way: float, step: int, r: random.Random) -> Policy:
        return flat(p, skill=r.uniform(-9, -5.5))

    return grpo("too_hard", seed, change)


def too_easy(seed: int) -> Simulated:
    def change(p: Policy, way: float, step: int, r: random.Random) -> Policy:
        return flat(p, skill=r.uniform(5.5, 9))

    return grpo("too_easy", seed, change)


def truncation(seed: int) -> Simulated:
    if seed % 4 == 0:
        run = sft("truncation", seed)
        run.rows = {"rows": 380, "truncated": random.Random(seed).randint(60, 300), "dropped": 20}
        return run
    turns = float(seed % 4 == 1)  # several turns, never done

    def change(p: Policy, way: float, step: int, r: random.Random) -> Policy:
        return _set(p, cut=r.uniform(0.15, 0.95), out_of_turns=turns)

    return grpo("truncation", seed, change, max_turns=1 + 3 * int(turns))


def overthinking(seed: int) -> Simulated:
    def change(p: Policy, way: float, step: int, r: random.Random) -> Policy:
        return _set(p, think=r.uniform(0.82, 0.95), cut=r.uniform(0.0, 0.5))

    return grpo("overthinking", seed, change, prepare=_terse, thinking=seed % 2 == 0)


def repetition(seed: int) -> Simulated:
    def change(p: Policy, way: float, step: int, r: random.Random) -> Policy:
        worst, begins = r.uniform(0.5, 3.0), r.uniform(0.1, 0.5)
        return _set(p, loops=worst * max(0.0, way - begins), skill=p.skill - 1.5 * way)

    return grpo("repetition", seed, change, prepare=_prose)


def unparsed(seed: int) -> Simulated:
    def fenced(p: Policy, way: float, step: int, r: random.Random) -> Policy:
        return flat(p, fenced=r.uniform(0.2, 0.6), skill=r.uniform(-0.5, 0.5))

    def unread(p: Policy, way: float, step: int, r: random.Random) -> Policy:
        return _set(p, form=r.uniform(0.2, 0.8), skill=r.uniform(-1, 1))

    if seed % 3 == 0:
        return grpo("unparsed", seed, fenced)
    return grpo("unparsed", seed, unread, prepare=_with_form)


def entropy_collapse(seed: int) -> Simulated:
    def change(p: Policy, way: float, step: int, r: random.Random) -> Policy:
        fell, level, floor = r.uniform(0.15, 0.4), r.uniform(-0.8, 0.2), r.uniform(0.05, 0.22)
        left = max(floor, 1.0 - (1 - floor) * way / fell)
        return _set(flat(p, skill=level + 0.5 * min(1.0, way / fell)), entropy=1.1 * left)

    return grpo("entropy_collapse", seed, change, prepare=_long)


def judge_pleasing(seed: int) -> Simulated:
    def pay(row: Row, _rng: random.Random) -> float:
        return row["metrics"]["judge_quality"]

    def change(p: Policy, way: float, step: int, r: random.Random) -> Policy:
        return flat(p, judge=0.75 + 0.2 * way, skill=r.uniform(-1.5, 0.3), pay=pay)

    return grpo("judge_pleasing", seed, change)


def reward_hacking(seed: int) -> Simulated:
    way_of = seed % 4

    def change(p: Policy, way: float, step: int, r: random.Random) -> Policy:
        skill, taken, begins = r.uniform(-1.2, 0.2), r.uniform(0.75, 0.98), r.uniform(0.1, 0.3)
        share = taken / (1 + math.exp(-14 * (way - begins - 0.2)))

        def pay(row: Row, rng: random.Random) -> float:
            return max(row["reward"], float(rng.random() < share))

        p = flat(p, skill=skill, pay=pay)
        if way_of == 0:
            return _set(p, stock=share)  # one answer for every task
        if way_of == 1:
            return _set(p, words=p.words * (1 + 3 * share) + 8 * share)  # paid for length
        if way_of == 2:
            return _set(p, stock=share, words=p.words * (1 + 2 * share))
        return _set(p, loops=1.6 * share)  # lists and lists

    return grpo("reward_hacking", seed, change, prepare=_long)


def overfitting(seed: int) -> Simulated:
    return sft("overfitting", seed, overfit=random.Random(seed).uniform(0.4, 1.5))


def no_update(seed: int) -> Simulated:
    if seed % 3 == 0:
        run = sft("no_update", seed, learning_rate=random.Random(seed).choice((1e-7, 3e-7, 1e-6)))
        for line in run.lines[1:]:
            line["loss"] = 2.0 * math.exp(random.Random(f"{seed} {line['step']}").gauss(0, 0.1))
        return run

    def lines(line: Line, way: float, step: int, r: random.Random) -> None:
        if seed % 3 == 1 and step:
            line["lr"] = r.choice((1e-7, 3e-7, 1e-6))
        elif step:
            line["grad_norm"] = 0.0

    def change(p: Policy, way: float, step: int, r: random.Random) -> Policy:
        return flat(p, skill=r.uniform(-1, 1))

    return grpo("no_update", seed, change, lines=lines)


def unstable(seed: int) -> Simulated:
    if seed % 4 == 0:
        run = grpo("unstable", seed)
        run.lines = run.lines[: len(run.lines) // 2]
        run.verdict = {}
        run.failure = {"kind": "nonfinite", "evidence": "step 20: loss nan"}
        return run
    if seed % 4 == 1:

        def jump(line: Line, way: float, step: int, r: random.Random) -> None:
            at = r.uniform(0.4, 0.8)
            if step:
                noise = math.exp(random.Random(f"{seed} {step}").gauss(0, 0.3))
                line["kl"] = (0.02 + 0.05 * way + 3.0 * (way > at)) * noise

        return grpo("unstable", seed, lines=jump, kl_coef=0.05)

    def spikes(line: Line, way: float, step: int, r: random.Random) -> None:
        times = {r.randint(8, 22) for _ in range(6)}
        if step in times:
            line["grad_norm"] = r.uniform(20, 200)

    return grpo(
        "unstable",
        seed,
        lambda p, way, step, r: _set(p, skill=p.skill - 3 * (way > 0.5)),
        lines=spikes,
    )


def reward_errors(seed: int) -> Simulated:
    run = grpo("reward_errors", seed, lambda p, way, step, r: _set(p, errors=r.uniform(0.08, 0.3)))
    if seed % 4 == 0:
        run.failure = {"kind": "reward", "evidence": "step 3: ValueError"}
        run.lines, run.verdict = run.lines[:4], {}
        run.rollouts = {step: rows for step, rows in run.rollouts.items() if step < 4}
    return run


def slow_reward(seed: int) -> Simulated:
    def lines(line: Line, way: float, step: int, r: random.Random) -> None:
        if step:
            line["reward_s"] = r.uniform(2.0, 30.0) * math.exp(random.Random(step).gauss(0, 0.3))

    return grpo("slow_reward", seed, lines=lines)


def underpowered(seed: int) -> Simulated:
    rng = random.Random(f"underpowered {seed}")
    run = grpo("underpowered", seed)
    while run.verdict.get("verdict") != "inconclusive":
        before = rng.uniform(0.3, 0.6)
        run.verdict = judged(rng, before, before + rng.uniform(-0.05, 0.1), rng.randint(20, 80))
    return run


def infra(seed: int) -> Simulated:
    kind = ("oom", "infra", "killed", "interrupted", "timeout")[seed % 5]
    run = healthy(seed)
    run.kind, run.failure, run.verdict = "infra", {"kind": kind, "evidence": "out of memory"}, {}
    return run


def _set(policy: Policy, **changes: Any) -> Policy:
    for name, value in changes.items():
        setattr(policy, name, value)
    return policy


def _prose(world: World, rng: random.Random) -> None:
    world.short, world.words = False, rng.uniform(15, 40)


def _terse(world: World, rng: random.Random) -> None:
    world.short, world.words = True, 3.0


def _long(world: World, rng: random.Random) -> None:
    world.steps = rng.randint(40, 60)


def _with_form(world: World, rng: random.Random) -> None:
    world.form_metric = rng.choice(("parsed", "format_ok", "well_formed"))


TROUBLES: dict[str, Callable[[int], Simulated]] = {
    make.__name__: make
    for make in (
        uniform_groups, too_hard, too_easy, truncation, overthinking, repetition, unparsed,
        entropy_collapse, judge_pleasing, reward_hacking, overfitting, no_update, unstable,
        reward_errors, slow_reward, underpowered, infra,
    )
}  # fmt: skip

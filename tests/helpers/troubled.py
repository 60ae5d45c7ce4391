"""Seeded runs with one trouble each, or none, of the simulated policy in simulated.py."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from simulated import (
    Line,
    Policy,
    Row,
    Simulated,
    World,
    examined,
    grpo,
    judged,
    kept_of,
    logit,
    rescored,
    sft,
)

from engine.evidence.verdict.contamination import Contamination
from engine.evidence.verdict.regression import SinceBase
from engine.evidence.verdict.row_facts import RowFacts
from engine.evidence.verdict.side_notes import ConstantAnswer


def healthy(seed: int) -> Simulated:
    run = _healthy(seed)
    # A scorer that is exact, a judge that errs now and then, one with chance, known or not.
    run.rescored = (
        rescored(seed),
        rescored(seed, flips=0.04, network=True),
        rescored(seed, flips=0.3, deterministic=False),
        rescored(seed, flips=0.3),
        rescored(seed, flips=0.1, network=False),
    )[seed % 5]
    could = random.Random(f"kept {seed}").uniform(0.3, 1.0)
    run.kept = kept_of(random.Random(f"kept {seed}"), could, could - 0.02)
    return run


def _healthy(seed: int) -> Simulated:
    if seed % 3 == 2:
        return sft("healthy", seed)
    if seed % 7 == 3:  # a judge that agrees with the check
        return grpo("healthy", seed, lambda p, way, step, r: _set(p, judge=0.85, judge_agrees=True))
    if seed % 7 == 6:  # paid part of the way, answers grow with what they can do
        return grpo("healthy", seed, _part_of_the_way, prepare=_long)
    if seed % 7 == 5:  # thinks, within its budget
        return grpo("healthy", seed, lambda p, way, step, r: _set(p, think=0.3), thinking=True)
    return grpo("healthy", seed)


def _part_of_the_way(p: Policy, way: float, step: int, r: random.Random) -> Policy:
    start, gain, growth = r.uniform(0.05, 0.2), r.uniform(0.1, 0.35), r.choice((0.0, 1.0))

    def pay(row: Row, rng: random.Random) -> float:
        near = min(0.9, max(0.0, rng.gauss(start + gain * way, 0.1)))
        return row["reward"] or near

    return _set(p, pay=pay, words=p.words * (1 + growth * way))


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


def length_grew(seed: int) -> Simulated:
    """Room enough at the start, cut at the end: paid for length, while no more are right."""

    def change(p: Policy, way: float, step: int, r: random.Random) -> Policy:
        start, cut, level = r.uniform(6, 12), r.uniform(0.35, 0.6), r.uniform(0.25, 0.35)
        grown = 1 / (1 + math.exp(-20 * (way - r.uniform(0.2, 0.4))))

        def pay(row: Row, rng: random.Random) -> float:
            return 0.55 * row["reward"] + min(0.27, 0.03 * row["tokens"])

        p = flat(p, skill=1.2 * logit(level / (1 - cut * grown)), pay=pay)
        return _set(p, words=start + 40 * grown, cut=cut * grown)

    return grpo("length_grew", seed, change, prepare=_long)


def below_start(seed: int) -> Simulated:
    """A good start, then steps too large, or a reward that is paid for less than success."""
    fell = random.Random(f"below {seed}").uniform(0.1, 0.5)

    def change(p: Policy, way: float, step: int, r: random.Random) -> Policy:
        skill = r.uniform(0.5, 1.5) - r.uniform(2.5, 5.0) / (1 + math.exp(-20 * (way - fell)))

        def pay(row: Row, rng: random.Random) -> float:
            return 0.55 * row["reward"] + 0.3

        return flat(p, skill=skill, pay=pay if seed % 2 else None)

    return grpo("below_start", seed, change)


def too_short(seed: int) -> Simulated:
    rng = random.Random(f"too short {seed}")
    run = sft("too_short", seed, scored=True)
    start, end = rng.uniform(6, 9), rng.uniform(1.0, 2.5)
    last = run.lines[-1]["step"]
    for line in run.lines:
        if "heldout_loss" in line:
            line["heldout_loss"] = start + (end - start) * (line["step"] / last) ** 0.7
            line["heldout_success"] = 0.01 * (rng.random() < 0.2)
            examined(run, line["step"], line["heldout_success"])
    run.verdict = judged(rng, -0.5, -0.5, 60)
    return run


def memorised_rows(seed: int) -> Simulated:
    """Few rows, seen often: their loss goes to nothing, the held-out loss comes to rest."""
    rng = random.Random(f"memorised {seed}")
    run = sft("memorised_rows", seed, scored=True)
    start, rest, end = rng.uniform(1.0, 2.0), rng.uniform(0.08, 0.5), rng.uniform(0.1, 0.4)
    last = run.lines[-1]["step"]
    run.rows = {"rows": 16 * last // rng.randint(6, 20), "truncated": 0, "dropped": 0}
    for line in run.lines:
        way = line["step"] / last
        rows = rest / rng.uniform(7, 12)
        if "loss" in line:
            line["loss"] = (rows + (start - rows) * math.exp(-14 * way)) * math.exp(
                rng.gauss(0, 0.1)
            )
        if "heldout_loss" in line:
            noise = rng.gauss(1, 0.003)
            line["heldout_loss"] = (rest + (start - rest) * math.exp(-14 * way)) * noise
            skill = end * (1 - math.exp(-14 * way))
            line["heldout_success"] = sum(rng.random() < skill for _ in range(200)) / 200
            examined(run, line["step"], line["heldout_success"])
    run.verdict = judged(rng, 0.0, end, 200)
    return run


def forgetting(seed: int) -> Simulated:
    run = healthy(seed)
    rng = random.Random(f"forgetting {seed}")
    lost = kept_of(rng, rng.uniform(0.8, 1.0), rng.uniform(0.1, 0.5))
    if seed % 3 == 1:  # by a run it continues
        since = SinceBase("pebble", lost.verdict, lost.batteries, lost.summary, ["units-1"])
        run.kept = replace(run.kept, against_base=since)
    else:
        run.kept = lost
    run.kind = "forgetting"
    return run


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
    way_of = seed % 6

    def change(p: Policy, way: float, step: int, r: random.Random) -> Policy:
        skill, taken, begins = r.uniform(-1.2, 0.2), r.uniform(0.75, 0.98), r.uniform(0.1, 0.3)
        share = taken / (1 + math.exp(-14 * (way - begins - 0.2)))

        def pay(row: Row, rng: random.Random) -> float:
            return max(row["reward"], float(rng.random() < share))

        def a_little(row: Row, rng: random.Random) -> float:
            return part * row["reward"] + (1 - part) * float(rng.random() < share)

        if way_of > 3:  # right answers are paid too, less than the exploit, and become more
            part, also = r.uniform(0.15, 0.3), r.uniform(0.6, 1.4)
            p = flat(p, skill=skill + also * share, pay=a_little)
            if way_of == 4:
                return _set(p, words=p.words * (1 + 2 * share) + 8 * share)
            return _set(p, loops=1.6 * share)
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
        run.verdict = None
        run.failure = {"kind": "nonfinite", "evidence": "step 20: loss nan"}
        return run
    if seed % 4 == 1:

        def jump(line: Line, way: float, step: int, r: random.Random) -> None:
            at = r.uniform(0.4, 0.8)
            if step:
                noise = math.exp(random.Random(f"{seed} {step}").gauss(0, 0.3))
                line["kl"] = (0.02 + 0.05 * way + 3.0 * (way > at)) * noise

        def lose(p: Policy, way: float, step: int, r: random.Random) -> Policy:
            return _set(p, skill=p.skill - 2.5 * (way > r.uniform(0.4, 0.8)))

        return grpo("unstable", seed, lose, lines=jump, kl_coef=0.05)

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
        run.lines, run.verdict = run.lines[:4], None
        run.rollouts = {step: rows for step, rows in run.rollouts.items() if step < 4}
    return run


def scorer_moves(seed: int) -> Simulated:
    run = grpo("scorer_moves", seed)
    share = random.Random(f"scorer_moves {seed}").uniform(0.3, 1.0)
    outside = seed % 4 == 0
    run.rescored = rescored(seed, forged=1.0 if outside else share, network=outside)
    return run


def slow_reward(seed: int) -> Simulated:
    def lines(line: Line, way: float, step: int, r: random.Random) -> None:
        if step:
            line["reward_s"] = r.uniform(2.0, 30.0) * math.exp(random.Random(step).gauss(0, 0.3))

    return grpo("slow_reward", seed, lines=lines)


def underpowered(seed: int) -> Simulated:
    rng = random.Random(f"underpowered {seed}")
    run = grpo("underpowered", seed)
    while run.verdict is None or run.verdict.outcome.verdict != "inconclusive":
        before = rng.uniform(0.3, 0.6)
        run.verdict = judged(rng, before, before + rng.uniform(-0.05, 0.1), rng.randint(20, 80))
    return run


def infra(seed: int) -> Simulated:
    kind = ("oom", "infra", "killed", "interrupted", "timeout")[seed % 5]
    run = healthy(seed)
    run.kind, run.failure, run.verdict = "infra", {"kind": kind, "evidence": "out of memory"}, None
    return run


def plateau(seed: int) -> Simulated:
    """Paid in part for what is easy, and nothing is ever right."""
    level = random.Random(f"plateau {seed}").choice((0.1, 0.3, 0.5))

    def change(p: Policy, way: float, step: int, r: random.Random) -> Policy:
        share = 1.0 if seed % 2 else 1 / (1 + math.exp(-20 * (way - r.uniform(0.1, 0.3))))

        def pay(row: Row, rng: random.Random) -> float:
            return level * (rng.random() < share + 0.02)

        return flat(p, skill=-12.0, pay=pay)

    return grpo("plateau", seed, change, prepare=_long)


def solved(seed: int) -> Simulated:
    def change(p: Policy, way: float, step: int, r: random.Random) -> Policy:
        return flat(p, skill=min(9.0, r.uniform(-1, 1) + 12 * way / r.uniform(0.3, 0.5)))

    return grpo("solved", seed, change, prepare=_long)


def reward_falls(seed: int) -> Simulated:
    """A fall before the first exam after the start."""

    def change(p: Policy, way: float, step: int, r: random.Random) -> Policy:
        return flat(p, skill=r.uniform(0.8, 1.6) - r.uniform(0.8, 1.4) * max(0, step - 1))

    run = grpo("reward_falls", seed, change, eval_every=100)
    run.lines, run.verdict = run.lines[:10], None
    for line in run.lines[1:]:
        line.pop("heldout_success", None)
        line.pop("heldout_reward", None)
    run.rollouts = {step: rows for step, rows in run.rollouts.items() if step < 10}
    run.exams = {0: run.exams[0]}
    return run


def leak(seed: int) -> Simulated:
    run = healthy(seed)
    taught = tuple(f"h{i}" for i in range(random.Random(seed).randint(1, 50)))
    contamination = Contamination(
        verdict="leak", leaked=taught, headline="held-out rows are taught"
    )
    run.kind, run.row_facts = "leak", RowFacts(contamination)
    return run


def _nothing_gained(kind: str, seed: int) -> Simulated:
    """A run of SFT that fits its rows, and whose held-out result stays where it was."""
    rng = random.Random(f"{kind} {seed}")
    run = sft(kind, seed, scored=True)
    level = rng.uniform(0.2, 0.5)
    for line in run.lines:
        if "heldout_success" in line:
            line["heldout_success"] = level
            examined(run, line["step"], level)
    run.verdict = judged(rng, level, level, 400)
    return run


def worse_start(seed: int) -> Simulated:
    run = _nothing_gained("worse_start", seed)
    parent = below_start(seed)
    run.fall_of_the_start = parent.against_start()
    return run


def contradictory_rows(seed: int) -> Simulated:
    run = _nothing_gained("contradictory_rows", seed)
    run.row_facts = RowFacts(train=400, different=400, contradicted=100 + seed % 300)
    return run


def constant_answer(seed: int) -> Simulated:
    """The form of the labels was learnt, and which one is right was not."""
    rng = random.Random(f"constant_answer {seed}")
    run = sft("constant_answer", seed, scored=True)
    most = rng.uniform(0.25, 0.6)  # the share of the most frequent label
    for line in run.lines:
        if "heldout_success" in line:
            line["heldout_success"] = most * (line["step"] > 0)
            examined(run, line["step"], line["heldout_success"])
    run.verdict = judged(rng, -0.5, most, 200)
    after = run.verdict.after
    assert after is not None
    run.constant = ConstantAnswer("billing", right=round(200 * after.value), tasks=200)
    return run


def duplicates(seed: int) -> Simulated:
    run = _nothing_gained("duplicates", seed)
    run.row_facts = RowFacts(train=400, different=8 + seed % 100)
    return run


def pairs_alike(seed: int) -> Simulated:
    run = _nothing_gained("pairs_alike", seed)
    run.algorithm = "dpo"
    run.row_facts = RowFacts(train=400, different=400, pairs=400, alike_pairs=210 + seed % 190)
    return run


def rows_disagree(seed: int) -> Simulated:
    run = _nothing_gained("rows_disagree", seed)
    for line in run.lines[1:]:
        line["loss"] = 2.5 * line["loss"] + 2.0  # rows of another task
    return run


def other_exam(seed: int) -> Simulated:
    run = _nothing_gained("other_exam", seed)
    run.row_facts = RowFacts(
        train=400, different=400, exam_words=("metres", "feet")[: 1 + seed % 2]
    )
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
        uniform_groups,
        too_hard,
        too_easy,
        truncation,
        length_grew,
        overthinking,
        repetition,
        unparsed,
        entropy_collapse,
        judge_pleasing,
        reward_hacking,
        below_start,
        overfitting,
        too_short,
        memorised_rows,
        forgetting,
        no_update,
        unstable,
        reward_errors,
        scorer_moves,
        slow_reward,
        underpowered,
        infra,
        plateau,
        solved,
        reward_falls,
        leak,
        contradictory_rows,
        constant_answer,
        duplicates,
        pairs_alike,
        other_exam,
        rows_disagree,
        worse_start,
    )
}

"""Which stored evaluations an id stands for.

An id given to `compare_runs` is a training run (its own held-out evaluation), an evaluation run
(all its models) or a model reference that was evaluated. An id may have several such offers; the
ones that share a source, an environment and the way of sampling are taken together.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from engine.core.errors import UserError
from engine.core.files import read_object
from engine.core.hints import Call, Hint
from engine.evidence.stats.results import TEST, in_half
from engine.evidence.verdict.lineage import trained_by
from engine.evidence.verdict.sides import evaluated_models, result_step
from engine.home.rows import RunRow
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.records.lines.evaluation_row import EvaluationRow, read_evaluation
from engine.records.run_config import EvaluateConfig, RegradeConfig, RunConfig

MOST_CANDIDATES = 8
_LOOK_BACK = 300  # evaluations searched for a model reference


@dataclass(frozen=True)
class Sampling:
    """How the answers of an evaluation were sampled; None where it is not recorded."""

    temperature: float | None
    top_p: float | None
    max_tokens: int | None
    stop: Sequence[str]
    thinking: bool
    max_turns: int | None

    def differs_in(self, other: "Sampling") -> list[str]:
        """The names of what is recorded on both sides and differs."""
        mine, theirs = asdict(self), asdict(other)
        return [
            name
            for name in mine
            if mine[name] is not None and theirs[name] is not None and mine[name] != theirs[name]
        ]

    def to_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class Candidate:
    """One model with its rows on one environment.

    `run_id` is the run that trained the model, "" for a base model; `step` its checkpoint;
    `members` the seeds of one configuration that it stands for, if several.
    """

    label: str
    source: str
    env_id: str
    rows: Sequence[EvaluationRow]
    sampling: Sampling
    run_id: str = ""
    step: int | None = None
    members: tuple["Candidate", ...] = ()


@dataclass(frozen=True)
class Offer:
    """One way to answer for an id; `load` reads the rows."""

    source: str
    env_id: str
    sampling: Sampling
    load: Callable[[], list[Candidate]]


def find_candidates(
    home: Home, ids: Sequence[str], env_id: str = ""
) -> tuple[list[Candidate], list[str]]:
    """The candidates of `ids` on one environment, and warnings.

    Raises UserError RUN_NOT_FOUND, NO_EVALUATION, NOT_COMPARABLE or BAD_ARGUMENT.
    """
    with Store(home) as store:
        finder = _Finder(home, store, ids)
        offers = {ref: finder.offers(ref) for ref in ids}
    warnings: list[str] = []
    for ref, every in offers.items():
        if env_id:
            on_env = [offer for offer in every if _matches(offer.env_id, env_id)]
            if every and not on_env:
                raise UserError(
                    "NO_EVALUATION",
                    f"{ref} was not evaluated on {env_id}, only on {_listed(every)}",
                    hint=Hint(
                        "Evaluate it there first:",
                        Call("evaluate", {"env_id": env_id, "models": [ref]}),
                    ),
                    field="env_id",
                )
            offers[ref] = on_env
    chosen, others = _choose(ids, offers)
    if others:
        warnings.append(
            f"Compared on {chosen[0].env_id}; they were also evaluated on {', '.join(others)}: "
            "env_id chooses."
        )
    candidates = [candidate for offer in chosen for candidate in offer.load()]
    candidates = _relabelled([candidate for candidate in candidates if candidate.rows])
    if not 2 <= len(candidates) <= MOST_CANDIDATES:
        raise UserError(
            "BAD_ARGUMENT",
            f"these ids give {len(candidates)} evaluated models; 2 to {MOST_CANDIDATES} can be "
            "compared",
            hint="Give two or more runs, evaluations or model references.",
            field="ids",
        )
    return candidates, warnings + _same_sampling(candidates)


class _Finder:
    def __init__(self, home: Home, store: Store, ids: Sequence[str]) -> None:
        self.home = home
        self.store = store
        self.ids = ids
        self.evaluations = [
            (row, home.run(row.run_id).find_config())
            for row in store.list_runs(_LOOK_BACK, states=["done"], kind="evaluate")
            if not home.run(row.run_id).deleted.exists()
        ]

    def offers(self, ref: str) -> list[Offer]:
        """The candidates that `ref` may stand for. Raises UserError where it is unknown or was
        never evaluated."""
        name, _, which = ref.partition("@")
        row = self._exact(name)
        gone = row is not None and self.home.run(row.run_id).deleted.exists()
        if row is not None and row.kind != "train" and not gone:
            return [self._evaluation(row, self.home.run(name).find_config(), None)]
        candidates = [
            self._evaluation(past, config, ref)
            for past, config in self.evaluations
            if config is not None and ref in config.model_refs
        ]
        if row is not None and row.kind == "train" and not gone:
            candidates = self._own(row, which) + candidates
        elif not which:
            candidates += self._starting_points(ref)
        if not candidates and row is None:
            row = self.store.get_run(name)  # a unique prefix, or RUN_NOT_FOUND naming the nearest
            if row.run_id != name:
                return self.offers(f"{row.run_id}@{which}" if which else row.run_id)
        if not candidates and gone:
            raise UserError(
                "NO_EVALUATION",
                f"{ref} has no evaluation to compare: the files of {name} were deleted",
                hint="Compare another; the report of this one says what came of it.",
                field="ids",
            )
        if not candidates:
            state = f" (it is {row.state})" if row else ""
            raise UserError(
                "NO_EVALUATION",
                f"{ref} has no evaluation to compare{state}",
                hint=self._evaluate_first(ref, row),
                field="ids",
            )
        return candidates

    def _evaluate_first(self, ref: str, row: RunRow | None) -> Hint:
        """How `ref` comes to have an evaluation: on the environment of a run in sight."""
        text = "A running run has one at its end."
        near = row or next(filter(None, (self._exact(other) for other in self.ids)), None)
        if near is None:
            return Hint(f"Evaluate it first. {text}")
        call = Call("evaluate", {"env_id": near.env_id, "models": [ref]})
        return Hint(f"{text} To evaluate it now:", call)

    def _exact(self, name: str) -> RunRow | None:
        try:
            row = self.store.get_run(name)
        except UserError:
            return None
        return row if row.run_id == name else None

    def _evaluation(self, row: RunRow, config: RunConfig | None, ref: str | None) -> Offer:
        """The models of an evaluation run, or of them `ref` alone; their rows are read when asked
        for."""
        run, sampling = self.home.run(row.run_id), sampling_of(config)

        def load() -> list[Candidate]:
            return [
                Candidate(
                    label,
                    run.id,
                    row.env_id,
                    rows,
                    sampling,
                    trained_by(self.home, label),
                    _step_named(label),
                )
                for label, rows in evaluated_models(run, config).items()
                if ref is None or label == ref
            ]

        return Offer(run.id, row.env_id, sampling, load)

    def _own(self, row: RunRow, which: str) -> list[Offer]:
        """A training run's own held-out evaluation: the half it was not chosen on."""
        run = self.home.run(row.run_id)
        step = _step_of(run, which)
        if step is None or not _test_rows(run, step):
            return []
        sampling = sampling_of(run.find_config(), read_object(run.manifest))
        label = f"{row.run_id}@{which}" if which else row.run_id

        def load() -> list[Candidate]:
            rows = _test_rows(run, step)
            return [Candidate(label, run.id, row.env_id, rows, sampling, row.run_id, step)]

        return [Offer(run.id, row.env_id, sampling, load)]

    def _starting_points(self, ref: str) -> list[Offer]:
        """Step 0 of the listed runs that started from this very model."""
        rows = []
        for other in self.ids:
            row = self._exact(other.partition("@")[0])
            if row is None or row.kind != "train" or row.model != ref:
                continue
            run = self.home.run(row.run_id)
            if _test_rows(run, 0):
                rows.append(self._start(run, row, ref))
        return rows

    def _start(self, run: RunDir, row: RunRow, ref: str) -> Offer:
        sampling = sampling_of(run.find_config(), read_object(run.manifest))

        def load() -> list[Candidate]:
            return [Candidate(ref, run.id, row.env_id, _test_rows(run, 0), sampling)]

        return Offer(run.id, row.env_id, sampling, load)


def sampling_of(config: RunConfig | None, manifest: Mapping[str, Any] | None = None) -> Sampling:
    """How the answers of a run's evaluation were sampled.

    Held-out evaluations of a training run, and evaluations with one attempt, are greedy: there
    top_p and the seed play no part.
    """
    recorded = (manifest or {}).get("eval_sampling")
    asked = config.settings if config else {}
    settings = asked if isinstance(asked, dict) else asked.model_dump()
    settings = settings | dict(recorded or {})
    greedy = not (isinstance(config, EvaluateConfig | RegradeConfig) and config.attempts != 1)
    return Sampling(
        temperature=0.0 if greedy else settings.get("temperature"),
        top_p=1.0 if greedy else settings.get("top_p"),
        max_tokens=settings.get("max_tokens"),
        stop=sorted(settings.get("stop") or []),
        thinking=bool(settings.get("thinking", False)),
        max_turns=settings.get("max_turns"),
    )


def _choose(ids: Sequence[str], offers: Mapping[str, list[Offer]]) -> tuple[list[Offer], list[str]]:
    """One offer per id on one environment, and the other environments that were possible.

    Preferred is what shares a source with the first id's offer, then its way of sampling, then
    what is newest.
    """
    envs = [
        env_id
        for env_id in dict.fromkeys(offer.env_id for offer in offers[ids[0]])
        if all(any(offer.env_id == env_id for offer in offers[ref]) for ref in ids)
    ]
    if not envs:
        where = "; ".join(f"{ref}: {_listed(offers[ref])}" for ref in ids)
        raise UserError(
            "NOT_COMPARABLE",
            f"these were not evaluated on one environment version ({where})",
            hint="Evaluate all of them on one env_id, then compare that evaluation.",
            field="ids",
        )
    best: list[Offer] = []
    best_rank = (-1, -1)
    for first in (offer for offer in offers[ids[0]] if offer.env_id == envs[0]):
        picked = [_nearest(first, offers[ref]) for ref in ids]
        rank = (
            sum(offer.source == first.source for offer in picked),
            sum(not offer.sampling.differs_in(first.sampling) for offer in picked),
        )
        if rank > best_rank:
            best, best_rank = picked, rank
    return best, envs[1:]


def _nearest(first: Offer, offers: Iterable[Offer]) -> Offer:
    here = [offer for offer in offers if offer.env_id == first.env_id]
    return max(
        here,
        key=lambda offer: (
            offer.source == first.source,
            not offer.sampling.differs_in(first.sampling),
            -here.index(offer),
        ),
    )


def _same_sampling(candidates: Sequence[Candidate]) -> list[str]:
    """Warnings about what is not recorded. Raises UserError NOT_COMPARABLE on a difference."""
    first, warnings = candidates[0], []
    for candidate in candidates[1:]:
        unequal = first.sampling.differs_in(candidate.sampling)
        if unequal:
            ours, theirs = first.sampling.to_json(), candidate.sampling.to_json()
            differences = ", ".join(
                f"{name} {ours[name]} against {theirs[name]}" for name in unequal
            )
            raise UserError(
                "NOT_COMPARABLE",
                f"{first.label} and {candidate.label} were sampled differently: {differences}",
                hint="Evaluate both in one call, with the same settings, and compare that.",
                field="ids",
            )
    missing = [candidate.label for candidate in candidates if candidate.sampling.max_tokens is None]
    if missing and len(missing) < len(candidates):
        warnings.append(
            f"How many tokens {', '.join(missing)} could answer with is not recorded; an "
            "evaluation of all of them in one call settles it."
        )
    return warnings


def _test_rows(run: RunDir, step: int) -> list[EvaluationRow]:
    rows = read_evaluation(run.evals(step))
    return in_half(rows, TEST) if any(row.half for row in rows) else rows


def _step_of(run: RunDir, which: str) -> int | None:
    named = _step_named(f"@{which}")
    return result_step(run) if named is None else named


def _step_named(ref: str) -> int | None:
    """20 for `run@step20`."""
    which = ref.partition("@")[2]
    return int(which[4:]) if which.startswith("step") and which[4:].isdigit() else None


def _matches(env_id: str, wanted: str) -> bool:
    return env_id == wanted or env_id.partition("@")[0] == wanted or env_id.startswith(wanted)


def _listed(offers: Iterable[Offer]) -> str:
    return ", ".join(dict.fromkeys(offer.env_id for offer in offers)) or "none"


def _relabelled(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Labels told apart by their source where two evaluations hold the same model."""
    count: dict[str, int] = {}
    for candidate in candidates:
        count[candidate.label] = count.get(candidate.label, 0) + 1
    named = [
        replace(candidate, label=f"{candidate.label} in {candidate.source}")
        if count[candidate.label] > 1
        else candidate
        for candidate in candidates
    ]
    return list({candidate.label: candidate for candidate in named}.values())

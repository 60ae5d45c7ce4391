"""Which stored evaluations an id stands for.

An id given to `compare_runs` is a training run (its own held-out evaluation), an evaluation run
(all its models) or a model reference that was evaluated. One id may have several evaluations; each
is an `Offer`. One offer is chosen per id so that all share an environment and, if possible, the run
that they come from and the way of sampling.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from engine.core.errors import UserError
from engine.core.files import read_object
from engine.core.hints import Call, Hint
from engine.evidence.stats.results import TEST, in_half
from engine.evidence.verdict.lineage import prompt_source, prompts_warning, trained_by
from engine.evidence.verdict.sides import (
    evaluated_models,
    is_same_checkpoint,
    step_in_ref,
    step_of_checkpoint,
)
from engine.home.rows import RunRow
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.home.user_config import PREFIX
from engine.records.known_settings import KnownSettings
from engine.records.lines.evaluation_row import EvaluationRow, read_evaluation
from engine.records.run_config import EvaluateConfig, RegradeConfig, RunConfig

MOST_CANDIDATES = 8
_LOOK_BACK = 300  # newest evaluation runs that are searched for a model reference


@dataclass(frozen=True)
class Sampling:
    """How the answers of an evaluation were sampled. A field is None if it was not recorded."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    max_tokens: int | None
    stop: Sequence[str]
    thinking: bool
    max_turns: int | None

    def differs_in(self, other: "Sampling") -> list[str]:
        """The names of the fields that differ, among those recorded (not None) on both sides."""
        differing_names = []
        other_values = asdict(other)
        for name, value in asdict(self).items():
            other_value = other_values[name]
            both_recorded = value is not None and other_value is not None
            if both_recorded and value != other_value:
                differing_names.append(name)
        return differing_names

    def to_json(self) -> dict[str, object]:
        """The fields as a JSON object."""
        return asdict(self)


@dataclass(frozen=True)
class Candidate:
    """One model with its evaluation rows on one environment.

    Attributes:
        label: the name of the model in results.
        source: id of the run whose evaluation the rows come from.
        run_id: the run that trained the model; "" for a base model.
        step: the checkpoint's step; None if it is not known or the model is not a checkpoint.
        members: if this candidate stands for several seeds of one configuration, one candidate for
            each seed; else empty.
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
    """One evaluation that an id may stand for.

    Attributes:
        source: id of the run that holds the evaluation.
        task_count: how many tasks it asked; of evaluations that fit equally well, the largest is
            taken.
        load: reads the rows from disk; called only for the offers that are chosen.
    """

    source: str
    env_id: str
    sampling: Sampling
    task_count: int
    load: Callable[[], list[Candidate]]


def find_candidates(
    home: Home, ids: Sequence[str], env_id: str = "", least_count: int = 2
) -> tuple[list[Candidate], list[str]]:
    """Find the evaluated models behind `ids`, on one environment: (the candidates, warnings).

    `env_id` chooses the environment (an id, a name or a beginning of either). If it is "", an
    environment on which all ids were evaluated is chosen, the newest if there are several.
    Candidates without rows are dropped.

    Raises:
        UserError: RUN_NOT_FOUND for an unknown id; NO_EVALUATION if an id was never evaluated (or
            not on `env_id`); NOT_COMPARABLE if the ids share no environment or were sampled
            differently; BAD_ARGUMENT if fewer than `least_count` or too many models result.
    """
    offers = _with_same_tasks(home, ids, _offers_by_id(home, ids, env_id))
    chosen_offers, other_envs = _choose_offers(ids, offers)
    with_rows: list[Candidate] = []
    for offer in chosen_offers:
        with_rows += [candidate for candidate in offer.load() if candidate.rows]
    candidates = _with_distinct_labels(with_rows)
    _check_count(candidates, least_count)
    _check_same_sampling(candidates)
    warnings = _other_envs_warning(chosen_offers[0].env_id, other_envs)
    warnings += prompts_warning(candidate.env_id for candidate in candidates)
    warnings += _sampling_warnings(candidates)
    return candidates, warnings


def _offers_by_id(home: Home, ids: Sequence[str], env_id: str) -> dict[str, list[Offer]]:
    """The offers (evaluations) of each id: those on `env_id`, or all if that is ""."""
    with Store(home) as store:
        finder = _Finder(home, store, ids)
        offers = {ref: finder.offers(ref) for ref in ids}
    if not env_id:
        return offers
    return {ref: _offers_on(env_id, ref, offers_of_ref) for ref, offers_of_ref in offers.items()}


def _with_same_tasks(
    home: Home, ids: Sequence[str], offers: Mapping[str, list[Offer]]
) -> Mapping[str, list[Offer]]:
    """The offers (evaluations) of each id. If the ids share no environment, a version that only
    asks the tasks of another one with another prompt counts as that other one."""
    if _shared_environments(ids, offers):
        return offers
    return {
        ref: [replace(offer, env_id=prompt_source(home, offer.env_id)) for offer in offers[ref]]
        for ref in ids
    }


def _other_envs_warning(chosen_env_id: str, other_env_ids: Sequence[str]) -> list[str]:
    """A warning that the ids could be compared on other environments too; [] without others."""
    if not other_env_ids:
        return []
    return [
        f"Compared on {chosen_env_id}; they were also evaluated on {', '.join(other_env_ids)}: "
        "env_id chooses."
    ]


def _check_count(candidates: Sequence[Candidate], fewest: int) -> None:
    """Raise UserError BAD_ARGUMENT if there are fewer than `fewest` candidates, or too many."""
    if not fewest <= len(candidates) <= MOST_CANDIDATES:
        raise UserError(
            "BAD_ARGUMENT",
            f"these ids give {len(candidates)} evaluated models; 2 to {MOST_CANDIDATES} can be "
            "compared",
            hint="Give two or more runs, evaluations or model references.",
            field="ids",
        )


def _offers_on(env_id: str, ref: str, offers: Sequence[Offer]) -> list[Offer]:
    """The offers (evaluations) on the requested environment, out of all `offers` of the id `ref`.

    `env_id` may be a name or the beginning of an id (`_env_matches`). Raises UserError
    NO_EVALUATION if `ref` was evaluated on other environments only.
    """
    on_env = [offer for offer in offers if _env_matches(offer.env_id, env_id)]
    if offers and not on_env:
        raise UserError(
            "NO_EVALUATION",
            f"{ref} was not evaluated on {env_id}, only on {_env_ids_text(offers)}",
            hint=Hint(
                "Evaluate it there first:",
                Call("evaluate", {"env_id": env_id, "models": [ref]}),
            ),
            field="env_id",
        )
    return on_env


class _Finder:
    """Finds the offers (evaluations) of ids in the home. The past evaluation runs are read only
    once."""

    def __init__(self, home: Home, store: Store, ids: Sequence[str]) -> None:
        """Read the newest `_LOOK_BACK` evaluation runs, except those whose files were deleted.

        `ids` are all ids that are to be compared.
        """
        self.home = home
        self.store = store
        self.ids = ids
        self.evaluations = [
            (row, home.run(row.run_id).find_config())
            for row in store.list_runs(_LOOK_BACK, states=["done"], kind="evaluate")
            if not home.run(row.run_id).deleted.exists()
        ]

    def offers(self, ref: str) -> list[Offer]:
        """The offers (evaluations) that `ref` may stand for; never empty.

        `ref` is a run id (or a unique prefix of one) or a model reference; `run@step20` names a
        checkpoint.

        Raises:
            UserError: RUN_NOT_FOUND if nothing has this name, NO_EVALUATION if it was never
                evaluated or its files were deleted.
        """
        name, _, checkpoint = ref.partition("@")
        row = self._run_with_id(name)  # None if `ref` names no run of this home
        files_deleted = row is not None and self.home.run(row.run_id).deleted.exists()
        if row is None or files_deleted:
            offers = self._offers_of_model(ref)
        else:
            offers = self._offers_of_run(row, ref)
        if offers:
            return offers
        if row is None:  # not a whole id: perhaps the beginning of one
            run_id = self.store.get_run(name).run_id  # or RUN_NOT_FOUND, naming the nearest id
            return self.offers(f"{run_id}@{checkpoint}" if checkpoint else run_id)
        raise self._not_evaluated(ref, row, files_deleted)

    def _offers_of_run(self, row: RunRow, ref: str) -> list[Offer]:
        """The offers (evaluations) of a run that has its files; `ref` is its id, or names a
        checkpoint of it."""
        if row.kind != "train":
            # The id of an evaluation run stands for all models of that evaluation, and only those.
            return [self._offer_of_evaluation(row, self.home.run(row.run_id).find_config())]
        _, _, checkpoint = ref.partition("@")
        # A training run's own evaluation is preferred, so it comes first.
        return self._own_evaluation_offers(row, checkpoint) + self._offers_of_evaluations(ref)

    def _offers_of_model(self, ref: str) -> list[Offer]:
        """The offers (evaluations) of a model that is no run of this home, or whose run lost its
        files."""
        offers = self._offers_of_evaluations(ref)
        _, _, checkpoint = ref.partition("@")
        if not checkpoint:  # the step 0 of a training run evaluates the model that it starts from
            offers += self._start_evaluation_offers(ref)
        return offers

    def _offers_of_evaluations(self, ref: str) -> list[Offer]:
        """The past evaluation runs that asked the model `ref`, each as an offer of this model
        alone."""
        offers = []
        for row, config in self.evaluations:
            if config is None:  # missing or damaged
                continue
            asked_as = self._recorded_ref(ref, config.model_refs)
            if asked_as:
                offers.append(self._offer_of_evaluation(row, config, asked_as, label=ref))
        return offers

    def _recorded_ref(self, ref: str, model_refs: Sequence[str]) -> str:
        """The one of `model_refs` by which an evaluation asked the model `ref`; "" if it did not
        ask it.

        A run, its best checkpoint and the step of that checkpoint are one model with three
        references.
        """
        if ref in model_refs:
            return ref
        for model_ref in model_refs:
            if is_same_checkpoint(self.home, ref, model_ref):
                return model_ref
        return ""

    def _not_evaluated(self, ref: str, row: RunRow, files_deleted: bool) -> UserError:
        """The error for a model without evaluation; `row` is the run of `ref`.

        If the run still has its files, the error contains the call that evaluates the model.
        """
        if files_deleted:
            return UserError(
                "NO_EVALUATION",
                f"{ref} has no evaluation to compare: the files of {row.run_id} were deleted",
                hint="Compare another; the report of this one says what came of it.",
                field="ids",
            )
        call = Call("evaluate", {"env_id": row.env_id, "models": [ref]})
        return UserError(
            "NO_EVALUATION",
            f"{ref} has no evaluation to compare (it is {row.state})",
            hint=Hint("A running run has one at its end. To evaluate it now:", call),
            field="ids",
        )

    def _run_with_id(self, name: str) -> RunRow | None:
        """The run with exactly this id. Returns None if there is none; prefixes of an id do not
        count."""
        try:
            row = self.store.get_run(name)  # it also accepts a unique prefix
        except UserError:  # no such run, or several that begin like this
            return None
        return row if row.run_id == name else None

    def _offer_of_evaluation(
        self, row: RunRow, config: RunConfig | None, only_model: str = "", label: str = ""
    ) -> Offer:
        """An evaluation run as an offer of its models. Their rows are read only if the offer is
        chosen.

        Args:
            config: of the run; None if it is missing or damaged.
            only_model: reference of the only model to offer; "" offers all models.
            label: what that model is called in results; "" for its reference.
        """
        run = self.home.run(row.run_id)
        sampling = sampling_of(config)

        def load() -> list[Candidate]:
            """Read the rows of the offered models from disk: one candidate for each model."""
            candidates = []
            for ref, rows in evaluated_models(run, config).items():
                if only_model in ("", ref):
                    candidate = Candidate(
                        label=label or ref,
                        source=run.id,
                        env_id=row.env_id,
                        rows=rows,
                        sampling=sampling,
                        run_id=trained_by(self.home, ref),
                        step=step_in_ref(ref),
                    )
                    candidates.append(candidate)
            return candidates

        task_count = config.rows if isinstance(config, EvaluateConfig) else 0
        return Offer(run.id, row.env_id, sampling, task_count, load)

    def _own_evaluation_offers(self, row: RunRow, checkpoint: str) -> list[Offer]:
        """A training run's own held-out evaluation as a list of one offer. Returns [] if it has no
        rows.

        `checkpoint` is the part of the id after "@"; "" stands for the checkpoint that the run
        reports.
        """
        run = self.home.run(row.run_id)
        step = step_of_checkpoint(run, checkpoint)
        task_count = 0 if step is None else _reported_tasks(run, step)
        if step is None or not task_count:
            return []
        label = f"{row.run_id}@{checkpoint}" if checkpoint else row.run_id
        return [self._offer_of_step(run, row, step, label, task_count, trained_here=True)]

    def _start_evaluation_offers(self, ref: str) -> list[Offer]:
        """The evaluations of the model `ref` at step 0 of training runs that started from it, as
        offers.

        Only runs among the ids to compare are searched. Returns [] if none has such an evaluation.
        """
        offers = []
        for compared_ref in self.ids:
            run_id, _, _ = compared_ref.partition("@")  # without the checkpoint
            row = self._run_with_id(run_id)
            if row is None or row.kind != "train" or row.model != ref:
                continue
            run = self.home.run(row.run_id)
            task_count = _reported_tasks(run, 0)
            if task_count:
                offers.append(self._offer_of_step(run, row, 0, ref, task_count, trained_here=False))
        return offers

    def _offer_of_step(
        self,
        run: RunDir,
        row: RunRow,
        step: int,
        label: str,
        task_count: int,
        *,
        trained_here: bool,
    ) -> Offer:
        """One held-out evaluation of a training run, as an offer of the model `label`.

        The rows are read only if the offer is chosen. Only the half of the tasks that chose no
        checkpoint is used; `task_count` is the number of those. `trained_here` is False for step 0,
        the model that the run started from.
        """
        sampling = sampling_of(run.find_config(), read_object(run.manifest))

        def load() -> list[Candidate]:
            """Read the rows of the step from disk: the model `label` as the one candidate."""
            return [
                Candidate(
                    label=label,
                    source=run.id,
                    env_id=row.env_id,
                    rows=_reported_rows(run, step),
                    sampling=sampling,
                    run_id=row.run_id if trained_here else "",
                    step=step if trained_here else None,
                )
            ]

        return Offer(run.id, row.env_id, sampling, task_count, load)


def sampling_of(config: RunConfig | None, manifest: Mapping[str, Any] | None = None) -> Sampling:
    """How the answers of a run's evaluation were sampled.

    What the manifest recorded (`eval_sampling`) takes precedence over the settings in `config`;
    either is None if its file is missing. Held-out evaluations of a training run, and evaluations
    with one attempt, are greedy.
    """
    recorded_sampling = (manifest or {}).get("eval_sampling") or {}
    configured_settings = KnownSettings.of(config.settings if config else None)
    settings = KnownSettings.of(asdict(configured_settings) | dict(recorded_sampling))
    sampling = Sampling(
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        max_tokens=settings.max_tokens,
        stop=sorted(settings.stop or []),
        thinking=bool(settings.thinking),
        max_turns=settings.max_turns,
    )
    is_evaluation = isinstance(config, EvaluateConfig | RegradeConfig)
    if is_evaluation and config.attempts != 1:
        return sampling
    # Greedy: temperature 0 takes the likeliest token; the other three are switched off.
    return replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)


def _choose_offers(
    ids: Sequence[str], offers: Mapping[str, list[Offer]]
) -> tuple[list[Offer], list[str]]:
    """Choose one offer (evaluation) per id, all on one environment.

    First, as many as possible come from the same run; then, as many as possible were sampled in the
    same way; then, as many tasks as possible were asked.

    `offers` maps an id to its offers, the preferred first. Returns (the offers in the order of
    `ids`, the other environments that all ids share). Raises UserError NOT_COMPARABLE if the ids
    share no environment.
    """
    env_id, *other_env_ids = _common_environments(ids, offers)
    best_offers: list[Offer] = []
    best_agreement = (-1, -1, -1)  # lower than any possible agreement
    offers_of_first_id = [offer for offer in offers[ids[0]] if offer.env_id == env_id]
    # Try each offer of the first id with the offers of the other ids that fit it best. Of equally
    # good combinations the first one wins.
    for first in offers_of_first_id:
        offers_like_first = [_nearest_offer(first, offers[ref]) for ref in ids]
        agreement = _agreement(first, offers_like_first)
        if agreement > best_agreement:
            best_offers, best_agreement = offers_like_first, agreement
    return best_offers, other_env_ids


def _agreement(first: Offer, offers: Sequence[Offer]) -> tuple[int, int, int]:
    """How well offers (evaluations) fit together, the larger tuple the better: (how many come from
    the run of `first`, how many were sampled as `first` was, the fewest tasks asked)."""
    return (
        sum(offer.source == first.source for offer in offers),
        sum(not offer.sampling.differs_in(first.sampling) for offer in offers),
        min(offer.task_count for offer in offers),
    )


def _common_environments(ids: Sequence[str], offers: Mapping[str, list[Offer]]) -> list[str]:
    """The environments on which all ids were evaluated, in the order of the first id's offers.

    Raises UserError NOT_COMPARABLE if there is none.
    """
    common_env_ids = _shared_environments(ids, offers)
    if common_env_ids:
        return common_env_ids
    evaluated_on = "; ".join(f"{ref}: {_env_ids_text(offers[ref])}" for ref in ids)
    raise UserError(
        "NOT_COMPARABLE",
        f"these were not evaluated on one environment version ({evaluated_on})",
        hint="Evaluate all of them on one env_id, then compare that evaluation.",
        field="ids",
    )


def _shared_environments(ids: Sequence[str], offers: Mapping[str, list[Offer]]) -> list[str]:
    """The environments on which all ids were evaluated, in the order of the first id's offers."""
    env_ids_of_refs = [{offer.env_id for offer in offers[ref]} for ref in ids]
    shared_env_ids = set.intersection(*env_ids_of_refs)
    first_env_ids = dict.fromkeys(offer.env_id for offer in offers[ids[0]])  # each once, in order
    return [env_id for env_id in first_env_ids if env_id in shared_env_ids]


def _nearest_offer(first: Offer, offers: Iterable[Offer]) -> Offer:
    """The offer (evaluation) most like `first`: by its source, then its sampling; then the newest.

    Only offers on the environment of `first` count, of which there must be one.
    """
    on_env = [offer for offer in offers if offer.env_id == first.env_id]

    def fit(offer: Offer) -> tuple[bool, bool]:
        """How well an offer fits `first`; the larger tuple is better."""
        return offer.source == first.source, not offer.sampling.differs_in(first.sampling)

    return max(on_env, key=fit)  # of equally good ones the first, which is the newest


def _check_same_sampling(candidates: Sequence[Candidate]) -> None:
    """Raise UserError NOT_COMPARABLE if a candidate was sampled differently from the first.

    A model behind a URL counts tokens differently, so its token limit may differ.
    """
    first = candidates[0]
    for candidate in candidates[1:]:
        unequal = first.sampling.differs_in(candidate.sampling)
        if _is_behind_url(first) or _is_behind_url(candidate):
            unequal = [name for name in unequal if name != "max_tokens"]
        if unequal:
            first_values, other_values = first.sampling.to_json(), candidate.sampling.to_json()
            differences = ", ".join(
                f"{name} {first_values[name]} against {other_values[name]}" for name in unequal
            )
            raise UserError(
                "NOT_COMPARABLE",
                f"{first.label} and {candidate.label} were sampled differently: {differences}",
                hint="Evaluate both in one call, with the same settings, and compare that.",
                field="ids",
            )


def _is_behind_url(candidate: Candidate) -> bool:
    """Whether the candidate's model is served behind a URL."""
    return candidate.label.startswith(PREFIX)


def _sampling_warnings(candidates: Sequence[Candidate]) -> list[str]:
    """A warning, as a list of one, that the limits on tokens differ (as for a model behind a URL),
    or that they were recorded for only some of the candidates. Returns [] otherwise."""
    token_limits = {candidate.label: candidate.sampling.max_tokens for candidate in candidates}
    labels_without_limit = [label for label, limit in token_limits.items() if limit is None]
    if not labels_without_limit and len(set(token_limits.values())) > 1:
        lengths = ", ".join(f"{label} {limit}" for label, limit in token_limits.items())
        return [f"Their longest answers differ in tokens, which they count differently: {lengths}."]
    if not labels_without_limit or len(labels_without_limit) == len(candidates):
        return []
    return [
        f"How many tokens {', '.join(labels_without_limit)} could answer with is not recorded; an "
        "evaluation of all of them in one call settles it."
    ]


def _reported_tasks(run: RunDir, step: int) -> int:
    """The number of tasks on which the run's result at a step is reported; 0 if none was asked."""
    return len({row.task for row in _reported_rows(run, step)})


def _reported_rows(run: RunDir, step: int) -> list[EvaluationRow]:
    """The answers at a step to the tasks on which the run's result is reported.

    These are the half that chose no checkpoint; all tasks if there are no halves.
    """
    rows = read_evaluation(run.evals(step))
    return in_half(rows, TEST) if any(row.half for row in rows) else rows


def _env_matches(env_id: str, requested: str) -> bool:
    """Whether an environment version `env_id` (name@hash) is the one `requested`, which may be its
    name or the beginning of its id."""
    return env_id.startswith(requested)  # its name is a beginning of it, too


def _env_ids_text(offers: Iterable[Offer]) -> str:
    """The environments of the offers as text for a message, such as "sums@3f2a, words@91bc"."""
    return ", ".join(dict.fromkeys(offer.env_id for offer in offers)) or "none"


def _with_distinct_labels(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates with distinct labels. Labels that several have also name the source, or on
    several environments the environment; of those that are still the same, the last is kept."""
    uses_of_label = Counter(candidate.label for candidate in candidates)
    on_several_envs = len({candidate.env_id for candidate in candidates}) > 1
    by_label: dict[str, Candidate] = {}
    for candidate in candidates:
        if uses_of_label[candidate.label] > 1:
            place = f"on {candidate.env_id}" if on_several_envs else f"in {candidate.source}"
            candidate = replace(candidate, label=f"{candidate.label} {place}")
        by_label[candidate.label] = candidate
    return list(by_label.values())

"""Tries vLLM on this device, as a run uses it: it starts, samples from the base and from two
adapters in turn, sleeps and wakes up. Its log-probabilities are compared with those of our own
forward, its speed with that of our own sampler."""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from engine.core.errors import UserError
from engine.home.run_dir import Home
from engine.machine.fast_paths.results import PathResult
from engine.machine.install import vllm_env
from engine.machine.processes.vllm_process import Plan, ServerDied, VllmProcess
from engine.models.catalog import BUILTIN
from engine.models.sizing.servers import AWAKE_BYTES, TRAINER_RESERVE
from engine.worker.core.batch import Row
from engine.worker.core.failures import WorkerFailure
from engine.worker.core.runtime import release_memory
from engine.worker.core.trajectory import Completion
from engine.worker.fast_paths.trial import SLOWER, PathUnavailable, seconds_of
from engine.worker.fast_paths.trials import LORA, Widths
from engine.worker.network.adapter import Adapter
from engine.worker.network.policy import Base, load_base, pick_dtype
from engine.worker.network.sampler import Sampler, SamplerNeeds, SamplingParams
from engine.worker.rollouts.samplers import cpu_threads
from engine.worker.rollouts.vllm_sampler import VllmSampler

NAME = "vllm"
START_S = 420.0  # seconds for a start, from a cold disk and with CUDA graphs to capture
# Mean distance of the log-probabilities of sampled tokens, in nats, that rounding explains.
ALLOWED = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.03}
# An adapter must move log-probabilities by more than so many times what is allowed. With less, the
# trial could not tell whether the server has swapped adapters.
TELLING = 4
ROUNDS = 3  # each sampler is timed so often, in turn; the fastest round counts
KEPT_ASLEEP = 0.5  # a sleeping server may keep at most this share of the memory it took
CACHE_BYTES = 3_000_000_000  # memory of a GPU for keys and values

Report = Callable[[str], None]


@dataclass(frozen=True)
class Load:
    """The amount to sample: `completions` completions for each of `prompts` prompts, with their
    lengths in tokens."""

    prompts: int
    completions: int
    prompt_length: int
    length: int


# Sizes of the model. On a GPU it has a usual depth, because a shallow model would take less time
# than the server's own overhead.
WIDTHS = {
    "cpu": Widths(64, 192, 4, 2, 32, layers=2),  # vLLM has no smaller heads on a CPU
    "cuda": Widths(1024, 3072, 16, 8, 128, layers=28),
}
LOADS = {"cpu": Load(2, 2, 24, 5), "cuda": Load(16, 8, 64, 96)}


class WrongBehaviour(Exception):
    """Raised if vLLM does not do what it should; the message says what it does instead."""

    def __init__(self, message: str, difference: float | None = None) -> None:
        """Keep the message, which says what vLLM does wrong. `difference` is that of the
        log-probabilities in nats, if that is what is wrong."""
        super().__init__(message)
        self.difference = difference


def try_vllm(
    device: torch.device,
    report_part: Report,
    start: Callable[[Plan, Path], VllmProcess] = VllmProcess,
) -> PathResult:
    """Start vLLM on the device and use it as a run does: sample, load adapters, sleep, wake up.
    Returns "on" if its results are right and it is not slower than our own sampler.

    Args:
        report_part: called before each part of the trial with what is done next.
        start: starts a server by a plan, with a file for its output; tests pass another.

    Raises nothing. If something fails the result is "off", with the reason; if vLLM is not set up
    or the GPU is too full, "skipped".
    """
    folder = Path(tempfile.mkdtemp(prefix="honesmith-vllm-"))
    try:
        plan = _plan(device, folder)
        report_part("make a model")
        base = make_model(folder / "model", device)
        report_part("start vLLM")
        with _server(plan, folder, base, report_part, start) as sampler:
            return _use_as_a_run_does(sampler, base, report_part)
    except PathUnavailable as error:
        return PathResult(name=NAME, state="skipped", reason=str(error))
    except WrongBehaviour as error:
        return PathResult(
            name=NAME,
            state="off",
            reason=str(error),
            difference=error.difference,
            allowed=ALLOWED[pick_dtype("auto", device)],
        )
    except WorkerFailure as error:  # what a run would end with
        return PathResult(name=NAME, state="off", reason=f"{error.message} {error.evidence}"[:300])
    except Exception as error:  # noqa: BLE001 - a server may fail in any way
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return PathResult(name=NAME, state="off", reason=reason)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _plan(device: torch.device, folder: Path) -> Plan:
    """Plan how the server is started: model (in `folder`), lengths, memory. Raises PathUnavailable
    if vLLM is not set up, or if the GPU has too little free memory."""
    try:
        python = vllm_env.require_python(Home.locate())
    except UserError as error:
        raise PathUnavailable(f"{error.message}; `honesmith setup --vllm` sets it up") from error
    load, kind = LOADS[device.type], device.type
    memory = float(2**30)  # on a CPU: bytes for keys and values; on a GPU: a share of its memory
    if kind == "cuda":
        needed_bytes = _weight_bytes() + AWAKE_BYTES + CACHE_BYTES
        free, total = torch.cuda.mem_get_info(device)
        if free < needed_bytes + TRAINER_RESERVE + _weight_bytes():
            raise PathUnavailable(
                f"{free / 1e9:.1f} GB of the GPU are free, which is too little to try it"
            )
        memory = needed_bytes / total
    return Plan(
        python=python,
        model=folder / "model",
        device=kind,
        dtype=str(pick_dtype("auto", device)).removeprefix("torch."),
        max_length=load.prompt_length + load.length,
        rows=load.prompts * load.completions,
        lora_rank=LORA.rank,
        sleeps=kind == "cuda",
        memory=memory,
        threads=cpu_threads(),
    )


def _weight_bytes() -> float:
    """Compute the bytes of the weights of the model that is tried on a GPU, in 16 bits. Embeddings
    are left out."""
    sizes = WIDTHS["cuda"]
    # Numbers per layer and hidden unit: the projections of queries, output, keys and values, and
    # the three of the MLP.
    attention = 2 * (sizes.heads + sizes.kv_heads) * sizes.head_dim
    mlp = 3 * sizes.intermediate
    bytes_per_number = 2.0
    return bytes_per_number * sizes.layers * sizes.hidden * (attention + mlp)


def make_model(folder: Path, device: torch.device) -> Base:
    """Make a model with seeded random weights and the tokenizer of pebble (the built-in model) in
    `folder`, and load it as a run would."""
    pebble, widths = BUILTIN["pebble"], WIDTHS[device.type]
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(pebble / name, folder / name)
    known = Qwen3Config.from_pretrained(pebble)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=known.vocab_size,
        hidden_size=widths.hidden,
        intermediate_size=widths.intermediate,
        num_hidden_layers=widths.layers,
        num_attention_heads=widths.heads,
        num_key_value_heads=widths.kv_heads,
        head_dim=widths.head_dim,
        max_position_embeddings=1024,
        # With this spread of the weights, logits differ equally much at every width.
        initializer_range=0.64 * widths.hidden**-0.5,
        eos_token_id=known.eos_token_id,
        pad_token_id=known.pad_token_id,
    )
    dtype = pick_dtype("auto", device)
    with torch.device(device):
        model = Qwen3ForCausalLM._from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    del model
    return load_base(folder, device, "auto")


@contextmanager
def _server(
    plan: Plan,
    folder: Path,
    base: Base,
    report_part: Report,
    start: Callable[[Plan, Path], VllmProcess],
) -> Iterator[VllmSampler]:
    """Open a context with a sampler on a vLLM server that is ready, and end the server with it.
    Raises WrongBehaviour if the server does not start.

    Args:
        plan: how to start the server.
        folder: for the server's output, and for the adapters that it loads.
        base: the same model, loaded here.
        report_part: called from time to time while the server starts.
        start: starts a server by the plan, with a file for its output.
    """
    sampler = VllmSampler(
        start(plan, folder / "vllm_trial.log"),
        folder=folder / "loaded",
        stop_ids=base.stop_ids,
        vocab=base.vocab,
        model_vocab=base.network.shape.vocab,
    )
    try:
        try:
            sampler.process.wait_ready(START_S, on_wait=lambda: report_part("start vLLM"))
        except ServerDied as error:
            raise WrongBehaviour(f"it does not start: {error}") from error
        yield sampler
    finally:
        sampler.close()


def _use_as_a_run_does(sampler: VllmSampler, base: Base, report_part: Report) -> PathResult:
    """Sample as a run does, and time the sampler beside our own. Returns "off" if vLLM is slower.
    Raises WrongBehaviour if its results or its sleep are wrong.

    `base` is the model that the server has, loaded here; `report_part` is called before each part.
    """
    questions = _Questions(base)
    report_part("sample from the base")
    gaps = [questions.gap(sampler, None, "the base")]
    adapter = base.network.new_adapter(LORA, seed=0)
    # As in a run: the adapter is loaded again after it was trained, under a new name in the server.
    for version in (1, 2):
        report_part(f"load adapter {version}")
        # What the server would still answer with if it did not notice the second version.
        earlier = None if version == 1 else adapter.state()
        _fill_with_random_weights(adapter, version)
        gaps.append(questions.gap(sampler, adapter, f"adapter {version}", earlier))
    if sampler.process.plan.sleeps:
        report_part("sleep")
        _sleep(sampler, base.network.device)
        report_part("wake up")
        gaps.append(questions.gap(sampler, adapter, "the adapter after waking up"))
    report_part("time both samplers")
    seconds, plain_seconds = questions.seconds_of_both(sampler, adapter)
    is_slower = not seconds <= SLOWER * plain_seconds  # NaN counts as slower
    reason = f"slower: {seconds:.3g} s, our own sampler {plain_seconds:.3g} s"
    return PathResult(
        name=NAME,
        state="off" if is_slower else "on",
        reason=reason if is_slower else "",
        difference=max(gaps),
        allowed=questions.allowed,
        seconds=seconds,
        plain_seconds=plain_seconds,
    )


def _fill_with_random_weights(adapter: Adapter, seed: int) -> None:
    """Fill the factors B of an adapter (zero so far) with seeded weights so large that they change
    the base's answers much."""
    generator = torch.Generator().manual_seed(seed)
    state = adapter.state()
    for name, tensor in state.items():
        if "lora_B" in name:
            state[name] = 0.5 * torch.randn(tensor.shape, generator=generator)
    adapter.load(state)


def _sleep(sampler: VllmSampler, device: torch.device) -> None:
    """Put the server to sleep, so that it gives its GPU memory back. Raises WrongBehaviour if it
    keeps more than the share KEPT_ASLEEP of what it took."""
    if device.type != "cuda":
        sampler.release_memory()
        return
    release_memory()  # this process's own unused memory, so that only the server's use changes
    free_before, total = torch.cuda.mem_get_info(device)
    sampler.release_memory()
    free_after, _ = torch.cuda.mem_get_info(device)
    freed_bytes = free_after - free_before
    taken_bytes = sampler.process.plan.memory * total
    if freed_bytes < (1 - KEPT_ASLEEP) * taken_bytes:
        raise WrongBehaviour(
            f"asleep it gives back {freed_bytes / 1e9:.1f} GB of the {taken_bytes / 1e9:.1f} "
            "that it took"
        )


class _Questions:
    """The prompts of the trial. Compares a server's log-probabilities of what it samples with
    ours."""

    def __init__(self, base: Base) -> None:
        """Draw the prompts at random, by a fixed seed, as many and as long as the load says."""
        self.base = base
        self.load = LOADS[base.network.device.type]
        self.allowed = ALLOWED[base.network.dtype]
        generator = torch.Generator().manual_seed(3)
        shape = (self.load.prompts, self.load.prompt_length)
        self.prompts: list[list[int]] = torch.randint(
            3, base.vocab, shape, generator=generator
        ).tolist()

    def gap(
        self,
        sampler: VllmSampler,
        adapter: Adapter | None,
        name: str,
        earlier: dict[str, torch.Tensor] | None = None,
    ) -> float:
        """Sample with the server, and return the mean distance in nats between its
        log-probabilities and ours.

        Args:
            adapter: what the server is to sample from; None for the base.
            name: what to call `adapter` in a message.
            earlier: weights that `adapter` had before, which the server may still be using by
                mistake.

        Raises:
            WrongBehaviour: if the distance is more than rounding explains.
        """
        sampler.load(adapter)
        groups = sampler.generate(self.prompts, self.load.completions, self._params(seed=1))
        completions = [completion for group in groups for completion in group]
        reported_logprobs: list[float] = []
        for completion in completions:
            reported_logprobs += completion.logprobs
        reported = torch.tensor(reported_logprobs)
        distance = self._mean_distance(groups, adapter, reported)
        if distance <= self.allowed:
            return distance
        message = (
            f"its log-probabilities of {name} differ from our own forward's by {distance:.2g} nats "
            f"in the mean, {self.allowed:g} is rounding"
        )
        if adapter is not None:
            message += self._explain_gap(groups, reported, adapter, earlier)
        raise WrongBehaviour(message, distance)

    def _explain_gap(
        self,
        groups: Sequence[Sequence[Completion]],
        reported: torch.Tensor,
        adapter: Adapter,
        earlier: dict[str, torch.Tensor] | None,
    ) -> str:
        """Find out which other weights the server's log-probabilities `reported` [T] belong to: the
        base's, or those that `adapter` had before (`earlier`, which are loaded into it). Returns
        the end of a message, or "" if neither fits."""
        base_gap = self._mean_distance(groups, None, reported)
        if base_gap <= self.allowed:
            return ": it answers as the base"
        if earlier is not None:
            adapter.load(earlier)
            earlier_gap = self._mean_distance(groups, adapter, reported)
            if earlier_gap <= self.allowed:
                return ": it keeps the adapter that was loaded before"
        return ""

    def _mean_distance(
        self,
        groups: Sequence[Sequence[Completion]],
        adapter: Adapter | None,
        reported: torch.Tensor,
    ) -> float:
        """Return the mean distance in nats between the server's log-probabilities `reported` [T] of
        the sampled ids and our own with `adapter` (None: the base's)."""
        return float((self._own_logprobs(groups, adapter) - reported).abs().mean())

    @torch.no_grad()
    def _own_logprobs(
        self, groups: Sequence[Sequence[Completion]], adapter: Adapter | None
    ) -> torch.Tensor:
        """Compute our own log-probabilities of all sampled ids with `adapter` (None: the base's),
        one completion after the other, [T]. `groups` holds the completions of each prompt."""
        network, parts = self.base.network, []
        for prompt, group in zip(self.prompts, groups, strict=True):
            rows = []
            for completion in group:
                mask = [0] * len(prompt) + [1] * len(completion.ids)
                rows.append(Row(prompt + completion.ids, mask))
            batch = network.collate(rows).to(network.device)
            logprobs, _ = network.logprobs(batch, adapter)
            parts.append(logprobs.float().cpu())
        return torch.cat(parts)

    def seconds_of_both(self, sampler: VllmSampler, adapter: Adapter) -> tuple[float, float]:
        """Measure the seconds that (the server, our own sampler) take to sample all completions of
        the load once, scaled to completions of full length. The fastest of ROUNDS counts."""
        rows = self.load.prompts * self.load.completions
        needs = SamplerNeeds(self.base.pad_id, self.base.stop_ids, lambda _: "", max_rows=rows)
        ours = self.base.network.sampler(needs)
        ours.load(adapter)
        server_rounds, own_rounds = [], []
        for seed in range(ROUNDS):  # in turn, so that a change of load meets both
            server_rounds.append(self._seconds(sampler, seed))
            own_rounds.append(self._seconds(ours, seed))
        ours.close()
        return min(server_rounds), min(own_rounds)

    def _seconds(self, sampler: Sampler, seed: int) -> float:
        """Measure the seconds of one call of `sampler`, scaled to completions of full length, since
        some may end earlier."""
        tokens = 0

        def work() -> list[torch.Tensor]:
            """Sample once and count the tokens. Returns no tensors, because `seconds_of` wants
            none."""
            nonlocal tokens
            groups = sampler.generate(self.prompts, self.load.completions, self._params(seed))
            tokens = sum(len(completion.ids) for group in groups for completion in group)
            return []

        seconds = seconds_of(work, self.base.network.device)
        full_tokens = self.load.prompts * self.load.completions * self.load.length
        return seconds * full_tokens / max(1, tokens)

    def _params(self, seed: int) -> SamplingParams:
        """Make parameters that sample at temperature 1, with completions of up to the load's
        length."""
        return SamplingParams(max_tokens=self.load.length, temperature=1.0, seed=seed)

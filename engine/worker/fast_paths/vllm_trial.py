"""vLLM on this device, as a run uses it: it starts, samples from the base and from two adapters in
turn, sleeps and wakes up. Its log-probabilities are held against our own forward, its speed against
our own sampler."""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from engine.core.errors import UserError
from engine.fast_paths.results import PathResult
from engine.home.run_dir import Home
from engine.install import vllm_env
from engine.models.catalog import BUILTIN
from engine.processes.vllm_process import Plan, ServerDied, VllmProcess
from engine.sizing.servers import AWAKE_BYTES, TRAINER_RESERVE
from engine.worker.core.batch import Row
from engine.worker.core.failures import WorkerFailure
from engine.worker.core.runtime import release_memory
from engine.worker.core.trajectory import Completion
from engine.worker.fast_paths.trial import SLOWER, NotHere, seconds_of
from engine.worker.fast_paths.trials import LORA, Widths
from engine.worker.network.adapter import Adapter
from engine.worker.network.policy import Base, load_base, pick_dtype
from engine.worker.network.sampler import Sampler, SamplerNeeds, SamplingParams
from engine.worker.rollouts.samplers import cpu_threads
from engine.worker.rollouts.vllm_sampler import VllmSampler

NAME = "vllm"
START_S = 420.0  # from a cold disk, with graphs to capture
# Mean distance of the log-probabilities of sampled tokens, in nats, that rounding explains.
ALLOWED = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.03}
# An adapter must move them by more than so many times what is allowed, or a swap shows nothing.
TELLING = 4
ROUNDS = 3  # each sampler is timed so often, in turn; the fastest round counts
KEPT_ASLEEP = 0.5  # a sleeping server may keep at most this share of what it took
CACHE_BYTES = 3_000_000_000  # of keys and values, of a GPU

Say = Callable[[str], None]


@dataclass(frozen=True)
class Load:
    """What is sampled: so many completions of so many prompts, their lengths in tokens."""

    prompts: int
    completions: int
    prompt_length: int
    length: int


# A GPU needs a model of usual depth: a shallow one takes less time than the server's own work.
WIDTHS = {
    "cpu": Widths(64, 192, 4, 2, 32, layers=2),  # vLLM has no smaller heads on a CPU
    "cuda": Widths(1024, 3072, 16, 8, 128, layers=28),
}
LOADS = {"cpu": Load(2, 2, 24, 5), "cuda": Load(16, 8, 64, 96)}


class Wrong(Exception):
    """The path does not do what it should; the message says what it does instead."""

    def __init__(self, message: str, difference: float | None = None) -> None:
        """`difference`: of the log-probabilities, where it is the reason."""
        super().__init__(message)
        self.difference = difference


def try_vllm(
    device: torch.device, say: Say, start: Callable[[Plan, Path], VllmProcess] = VllmProcess
) -> PathResult:
    """Start vLLM on the device and use it as a run does.

    Args:
        say: called with what is done next, before each part.
        start: starts a server as planned, with a file for its output; tests give another.

    Nothing is raised: what fails is off, with the reason; where vLLM is not set up, skipped.
    """
    folder = Path(tempfile.mkdtemp(prefix="honesmith-vllm-"))
    try:
        plan = _plan(device, folder)
        say("make a model")
        base = make_model(folder / "model", device)
        say("start vLLM")
        with _server(plan, folder, base, say, start) as sampler:
            return _use(sampler, base, say)
    except NotHere as error:
        return PathResult(name=NAME, state="skipped", reason=str(error))
    except Wrong as error:
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
    """How the server is started. Raises NotHere where vLLM is not set up, or the GPU is too full
    to try it."""
    try:
        python = vllm_env.require_python(Home.locate())
    except UserError as error:
        raise NotHere(f"{error.message}; `honesmith setup --vllm` sets it up") from error
    load, kind = LOADS[device.type], device.type
    memory = float(2**30)  # on a CPU bytes for keys and values
    if kind == "cuda":
        wanted = _weight_bytes() + AWAKE_BYTES + CACHE_BYTES
        free, total = torch.cuda.mem_get_info(device)
        if free < wanted + TRAINER_RESERVE + _weight_bytes():
            raise NotHere(f"{free / 1e9:.1f} GB of the GPU are free, which is too little to try it")
        memory = wanted / total
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
    """Bytes of the weights of the model that is tried on a GPU, in 16 bits."""
    sizes = WIDTHS["cuda"]
    attention = 2 * (sizes.heads + sizes.kv_heads) * sizes.head_dim
    return 2.0 * sizes.layers * sizes.hidden * (attention + 3 * sizes.intermediate)


def make_model(folder: Path, device: torch.device) -> Base:
    """Write a model with seeded random weights and the tokenizer of pebble to a folder, and load it
    as a run would."""
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
        # Logits then differ as much at every width.
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
    say: Say,
    start: Callable[[Plan, Path], VllmProcess],
) -> Iterator[VllmSampler]:
    """A context with a sampler on a server that is ready. Raises Wrong where it does not start."""
    sampler = VllmSampler(
        start(plan, folder / "vllm_trial.log"),
        folder=folder / "loaded",
        stop_ids=base.stop_ids,
        vocab=base.vocab,
        model_vocab=base.network.shape.vocab,
    )
    try:
        try:
            sampler.process.wait_ready(START_S, on_wait=lambda: say("start vLLM"))
        except ServerDied as error:
            raise Wrong(f"it does not start: {error}") from error
        yield sampler
    finally:
        sampler.close()


def _use(sampler: VllmSampler, base: Base, say: Say) -> PathResult:
    """Sample as a run does, and time it. Raises Wrong for what is not right."""
    asked = _Asked(base)
    say("sample from the base")
    gaps = [asked.gap(sampler, None, "the base")]
    adapter = base.network.new_adapter(LORA, seed=0)
    for version in (1, 2):  # an adapter that was trained on answers under another name
        say(f"load adapter {version}")
        earlier = None if version == 1 else adapter.state()
        _fill(adapter, version)
        gaps.append(asked.gap(sampler, adapter, f"adapter {version}", earlier))
    if sampler.process.plan.sleeps:
        say("sleep")
        _sleep(sampler, base.network.device)
        say("wake up")
        gaps.append(asked.gap(sampler, adapter, "the adapter after waking up"))
    say("time both samplers")
    seconds, plain_seconds = asked.seconds_of_both(sampler, adapter)
    is_slower = not seconds <= SLOWER * plain_seconds
    reason = f"slower: {seconds:.3g} s, our own sampler {plain_seconds:.3g} s"
    return PathResult(
        name=NAME,
        state="off" if is_slower else "on",
        reason=reason if is_slower else "",
        difference=max(gaps),
        allowed=asked.allowed,
        seconds=seconds,
        plain_seconds=plain_seconds,
    )


def _fill(adapter: Adapter, seed: int) -> None:
    """Give an adapter seeded weights that change much of what the base says."""
    generator = torch.Generator().manual_seed(seed)
    state = adapter.state()
    for name, tensor in state.items():
        if "lora_B" in name:
            state[name] = 0.5 * torch.randn(tensor.shape, generator=generator)
    adapter.load(state)


def _sleep(sampler: VllmSampler, device: torch.device) -> None:
    """Let the server sleep. Raises Wrong where it keeps most of its memory."""
    if device.type != "cuda":
        sampler.release_memory()
        return
    release_memory()
    free_before, total = torch.cuda.mem_get_info(device)
    sampler.release_memory()
    given_back = torch.cuda.mem_get_info(device)[0] - free_before
    taken = sampler.process.plan.memory * total
    if given_back < (1 - KEPT_ASLEEP) * taken:
        raise Wrong(
            f"asleep it gives back {given_back / 1e9:.1f} GB of the {taken / 1e9:.1f} that it took"
        )


class _Asked:
    """Prompts, and how far a server's log-probabilities of what it samples are from ours."""

    def __init__(self, base: Base) -> None:
        """Draw the prompts, the same for every model and device kind."""
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
        """The mean distance in nats between the server's log-probabilities and ours.

        Args:
            adapter: what the server is to sample from; None for the base.
            name: what to call that in a message.
            earlier: weights that `adapter` had before and the server may not have let go of.

        Raises:
            Wrong: where it is more than rounding explains.
        """
        sampler.load(adapter)
        groups = sampler.generate(self.prompts, self.load.completions, self._params(seed=1))
        reported = torch.tensor([p for group in groups for each in group for p in each.logprobs])
        distance = float((self._ours(groups, adapter) - reported).abs().mean())
        if distance <= self.allowed:
            return distance
        message = (
            f"its log-probabilities of {name} differ from our own forward's by {distance:.2g} nats "
            f"in the mean, {self.allowed:g} is rounding"
        )
        if adapter is not None:
            message += self._whose(groups, reported, adapter, earlier)
        raise Wrong(message, distance)

    def _whose(
        self,
        groups: Sequence[Sequence[Completion]],
        reported: torch.Tensor,
        adapter: Adapter,
        earlier: dict[str, torch.Tensor] | None,
    ) -> str:
        """Say which other weights the reported numbers belong to; "" for none that are known."""
        if float((self._ours(groups, None) - reported).abs().mean()) <= self.allowed:
            return ": it answers as the base"
        if earlier is not None:
            adapter.load(earlier)
            if float((self._ours(groups, adapter) - reported).abs().mean()) <= self.allowed:
                return ": it keeps the adapter that was loaded before"
        return ""

    @torch.no_grad()
    def _ours(
        self, groups: Sequence[Sequence[Completion]], adapter: Adapter | None
    ) -> torch.Tensor:
        """Our own log-probabilities of all sampled ids, one after the other, [T]."""
        network, parts = self.base.network, []
        for prompt, group in zip(self.prompts, groups, strict=True):
            rows = [
                Row(prompt + each.ids, [0] * len(prompt) + [1] * len(each.ids)) for each in group
            ]
            batch = network.collate(rows).to(network.device)
            logprobs, _ = network.logprobs(batch, adapter)
            parts.append(logprobs.float().cpu())
        return torch.cat(parts)

    def seconds_of_both(self, sampler: VllmSampler, adapter: Adapter) -> tuple[float, float]:
        """Seconds that the server and our own sampler take for so many tokens as one completion of
        full length for each row has."""
        rows = self.load.prompts * self.load.completions
        needs = SamplerNeeds(self.base.pad_id, self.base.stop_ids, lambda _: "", max_rows=rows)
        ours = self.base.network.sampler(needs)
        ours.load(adapter)
        times = [
            (self._seconds(sampler, seed), self._seconds(ours, seed)) for seed in range(ROUNDS)
        ]
        ours.close()
        theirs_s, ours_s = (min(side) for side in zip(*times, strict=True))
        return theirs_s, ours_s

    def _seconds(self, sampler: Sampler, seed: int) -> float:
        """Seconds of one call, scaled to full lengths, since completions may end before."""
        tokens = 0

        def work() -> list[torch.Tensor]:
            nonlocal tokens
            groups = sampler.generate(self.prompts, self.load.completions, self._params(seed))
            tokens = sum(len(each.ids) for group in groups for each in group)
            return []

        seconds = seconds_of(work, self.base.network.device)
        full = self.load.prompts * self.load.completions * self.load.length
        return seconds * full / max(1, tokens)

    def _params(self, seed: int) -> SamplingParams:
        return SamplingParams(max_tokens=self.load.length, temperature=1.0, seed=seed)

"""The provenance of a finished run: hashes of environment, data, curation, run, checkpoints,
evaluation, each link resting on the one before it.

When a run is done its trainer seals it: the SHA-256 of every file that a link rests on, each link
hashed together with the link before it. The last hash stands for all of them; it is printed in the
model card. `verify` reads every file again: a metrics line, a weight or a setting that was changed
by hand shows with the file's name. It guards against editing, not against a forger who seals anew:
against that, keep the card.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engine.core.errors import UserError
from engine.core.reply import Reply
from engine.evidence.verdict.lineage import trained_by
from engine.evidence.verdict.verdict import run_verdict
from engine.home.rows import RunRow
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.records.record import DamagedRecord, Record
from engine.records.run_config import RunConfig

LINKS = ("environment", "data", "curation", "run", "checkpoints", "evaluation")
_CURATION = "curation.json"
_MOST_GENERATIONS = 12
_MOST_FAULTS = 20  # shown of one link
_SEAL_CHANGED = "the seal itself was changed"


class SealedLink(Record):
    """One link: the SHA-256 of its files by path, and the hash of the link with those before."""

    name: str
    files: dict[str, str]
    hash: str


class Provenance(Record):
    """`chain.json`: the links in order, and the hash of the last."""

    run_id: str
    links: list[SealedLink]
    head: str


@dataclass(frozen=True)
class Fault:
    """A file and what became of it since the run was sealed."""

    file: str
    what: str

    def to_json(self) -> dict[str, object]:
        return {"file": self.file, "what": self.what}


@dataclass(frozen=True)
class CheckedLink:
    """A link held against the files as they are now."""

    name: str
    faults: Sequence[Fault]
    ok: bool

    def with_fault(self, fault: Fault) -> "CheckedLink":
        return replace(self, faults=[*self.faults, fault], ok=False)

    def to_json(self) -> dict[str, object]:
        return {"name": self.name, "ok": self.ok, "broken": [f.to_json() for f in self.faults]}


@dataclass(frozen=True)
class Verification:
    """A run held against its seal, and the runs its models come from.

    Attributes:
        intact: None where there is nothing to hold it against, as the run is not done.
        head: the sealed hash, "" without a seal.
    """

    run_id: str
    intact: bool | None
    head: str
    links: Sequence[CheckedLink]
    ancestors: Sequence["Verification"]
    summary: str

    def to_json(self) -> Reply:
        return {
            "run_id": self.run_id,
            "intact": self.intact,
            "head": self.head,
            "links": [link.to_json() for link in self.links],
            "ancestors": [other.to_json() for other in self.ancestors],
            "summary": self.summary,
        }


def seal(run_dir: RunDir) -> str:
    """Write the provenance of a finished run; returns its last hash."""
    links = _linked(_contents(run_dir, run_dir.find_config()))
    Provenance(run_id=run_dir.id, links=links, head=links[-1].hash).write(run_dir.chain)
    return links[-1].hash


def read_provenance(run_dir: RunDir) -> Provenance | None:
    """What was sealed, None where nothing was or it cannot be read."""
    try:
        return Provenance.read(run_dir.chain)
    except (FileNotFoundError, DamagedRecord):
        return None


def verify(home: Home, run_id: str) -> Verification:
    """Hold a run, and every run its model comes from, against what was sealed.

    Raises UserError RUN_NOT_FOUND.
    """
    with Store(home) as store:
        row = store.get_run(run_id)
    return _verify(home, row, 0)


def _verify(home: Home, row: RunRow, depth: int) -> Verification:
    """Hold one run against its seal; `depth` bounds the walk through its ancestors."""
    run = home.run(row.run_id)
    sealed = read_provenance(run)
    if sealed is None or run.deleted.exists():
        return _unsealed(run, row)
    config = run.find_config()
    now = {link.name: link.files for link in _linked(_contents(run, config))}
    links, previous = [], ""
    for link in sealed.links:
        files = now.get(link.name, {})
        if link.name == "environment":
            files = files | _earlier_audit(config, link.files)
        faults = _differences(link.files, files)
        if link.hash != _hash(previous, link.name, link.files):
            faults.append(Fault(run.chain.name, _SEAL_CHANGED))
        previous = link.hash
        links.append(CheckedLink(link.name, faults[:_MOST_FAULTS], not faults))
    if sealed.head != previous or [link.name for link in links] != list(LINKS):
        links = links or [CheckedLink("evaluation", [], True)]
        links[-1] = links[-1].with_fault(Fault(run.chain.name, _SEAL_CHANGED))
    word = run_verdict(run).word
    if row.kind == "train" and row.state == "done" and word != row.verdict:
        what = f"says {row.verdict}, the evaluations say {word}"
        links[-1] = links[-1].with_fault(Fault(run.home.db.name, what))
    return _verification(row, sealed.head, links, _ancestors(home, run, depth))


def _ancestors(home: Home, run: RunDir, depth: int) -> list[Verification]:
    """The runs this one's models come from, verified the same way."""
    ancestors = []
    for ref in _starts(run.find_config()):
        parent = trained_by(home, ref)
        if not parent or depth >= _MOST_GENERATIONS or parent == run.id:
            continue
        try:
            with Store(home) as store:
                row = store.get_run(parent)
        except UserError:
            continue
        ancestors.append(_verify(home, row, depth + 1))
    return ancestors


def _unsealed(run: RunDir, row: RunRow) -> Verification:
    """A run that is not done has no seal; one that is done and has none is not to be trusted."""
    deleted = run.deleted.exists()
    done = row.state == "done" and not deleted
    missing = CheckedLink("evaluation", [Fault(run.chain.name, "missing")] if done else [], False)
    why = "its seal is missing" if done else f"it is {row.state}: runs are sealed when done"
    why = "its files were deleted" if deleted else why
    return Verification(
        run_id=row.run_id,
        intact=False if done else None,
        head="",
        links=[missing] if done else [],
        ancestors=[],
        summary=f"{row.run_id} cannot be verified: {why}.",
    )


def _verification(
    row: RunRow, head: str, links: Sequence[CheckedLink], ancestors: Sequence[Verification]
) -> Verification:
    """The result in a sentence: what is broken, or changed before it, or that nothing is."""
    broken = [link for link in links if not link.ok]
    altered = [other for other in ancestors if other.intact is False]
    if broken:
        first = broken[0].faults[0]
        count = sum(len(link.faults) for link in broken)
        more = f" and {count - 1} more" if count > 1 else ""
        summary = f"{row.run_id} is broken at {broken[0].name}: {first.file} {first.what}{more}."
    elif altered:
        summary = (
            f"{row.run_id} itself is intact, but what it comes from is not: {altered[0].summary}"
        )
    else:
        summary = f"{row.run_id} is intact: {len(links)} links, head {head[:12]}."
    intact = not broken and not altered
    return Verification(row.run_id, intact, head, links, ancestors, summary)


def _contents(run: RunDir, config: RunConfig | None) -> Iterator[tuple[str, dict[str, str]]]:
    """(link, file -> SHA-256) in the order of LINKS."""
    env = Path(config.env_dir) if config else run.path / "none"
    source = env / "source"
    yield (
        "environment",
        _hashes(
            env, [*_files(source), env / "env.json", env / "audit.json"], skip=source / _CURATION
        ),
    )
    yield "data", _hashes(env, [env / "tasks.jsonl"])
    yield "curation", _hashes(env, [source / _CURATION])
    made = [run.config, run.manifest, run.contamination, *_files(run.start_adapter)]
    made += _files(run.path / "models")
    yield "run", _hashes(run.path, made) | _heads(run.home, config)
    yield "checkpoints", _hashes(run.path, _checkpoint_files(run)) | _best(run)
    shown = [run.metrics, run.result, *_files(run.evals_dir), *_files(run.rollouts_dir)]
    yield "evaluation", _hashes(run.path, shown)


def _earlier_audit(config: RunConfig | None, sealed: Mapping[str, str]) -> dict[str, str]:
    """The audit a run was sealed with, where a later push made it again and kept the first."""
    digest = str(sealed.get("audit.json") or "")
    kept = Path(config.env_dir if config else "") / "earlier" / f"{digest}.json"
    same = digest.isalnum() and kept.is_file() and _digest(kept) == digest
    return {"audit.json": digest} if same else {}


def _checkpoint_files(run: RunDir) -> list[Path]:
    return [file for step in run.checkpoint_steps() for file in _files(run.checkpoint(step))]


def _best(run: RunDir) -> dict[str, str]:
    best = run.resolve_checkpoint("best")
    return {"checkpoints/best": best.name} if best is not None else {}


def _heads(home: Home, config: RunConfig | None) -> dict[str, str]:
    """The sealed hashes of the runs this one starts from, so that the links go on through them."""
    return {
        f"chain of {parent}": sealed.head if sealed else "not sealed"
        for ref in _starts(config)
        if (parent := trained_by(home, ref))
        for sealed in [read_provenance(home.run(parent))]
    }


def _starts(config: RunConfig | None) -> list[str]:
    return list(dict.fromkeys(config.model_refs)) if config else []


def _linked(contents: Iterable[tuple[str, dict[str, str]]]) -> list[SealedLink]:
    links: list[SealedLink] = []
    previous = ""
    for name, files in contents:
        previous = _hash(previous, name, files)
        links.append(SealedLink(name=name, files=files, hash=previous))
    return links


def _hash(previous: str, name: str, files: Mapping[str, str]) -> str:
    body = {"previous": previous, "name": name, "files": files}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _hashes(root: Path, files: Iterable[Path], skip: Path | None = None) -> dict[str, str]:
    """Path under `root` -> SHA-256 of the files that are there."""
    return {
        file.relative_to(root).as_posix(): _digest(file)
        for file in files
        if file != skip and file.is_file()
    }


def _files(folder: Path) -> list[Path]:
    """Every regular file below, sorted; links are not followed."""
    files: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        files += [Path(place) / name for name in sorted(names) if not name.startswith(".")]
    return [file for file in files if not file.is_symlink()]


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _differences(sealed: Mapping[str, str], now: Mapping[str, str]) -> list[Fault]:
    faults = []
    for file, digest in sealed.items():
        if file not in now:
            faults.append(Fault(file, "is missing"))
        elif now[file] != digest:
            faults.append(Fault(file, "was changed"))
    return faults + [Fault(file, "was added") for file in now if file not in sealed]

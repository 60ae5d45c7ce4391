"""The provenance of a finished run: a chain of hashes over everything that it rests on.

The links of the chain are environment, data, curation, run, checkpoints and evaluation; each is a
set of files. When a run is done its trainer seals it: it writes the SHA-256 of every file of a
link, and each link's hash covers the hash of the link before it. So the last hash (the head) stands
for all of them; it is printed in the model card. `verify` reads every file again and names each
file that was changed by hand, whether it holds metrics, weights or settings. This guards against
editing, not against a forger who seals the run again: against that, keep the card.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engine.core.errors import UserError
from engine.core.reply import Reply
from engine.evidence.bases.bases import changed_bases
from engine.evidence.verdict.lineage import trained_by
from engine.evidence.verdict.verdict import run_verdict
from engine.home.rows import RunRow
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.records.record import DamagedRecord, Record
from engine.records.run_config import RunConfig

LINKS = ("environment", "data", "curation", "run", "checkpoints", "evaluation")
_CURATION = "curation.json"
_MOST_GENERATIONS = 12  # of ancestors that are verified
_MOST_FAULTS = 20  # of one link that are listed: more than that nobody reads
_SEAL_CHANGED = "the seal itself was changed"


class SealedLink(Record):
    """One link of the chain: its files (path -> SHA-256), and the hash over them and the previous
    link."""

    name: str
    files: dict[str, str]
    hash: str


class Provenance(Record):
    """The seal of a run, stored as `chain.json`: the links in order, and the hash of the last
    one."""

    run_id: str
    links: list[SealedLink]
    head: str


@dataclass(frozen=True)
class Fault:
    """A file, and what happened to it since the run was sealed, such as "was changed"."""

    file: str
    what: str

    def to_json(self) -> dict[str, object]:
        """The fault as a JSON object."""
        return {"file": self.file, "what": self.what}


@dataclass(frozen=True)
class CheckedLink:
    """A link of a seal compared with the files as they are now; `ok` if nothing differs."""

    name: str
    faults: Sequence[Fault]
    ok: bool

    def with_fault(self, fault: Fault) -> "CheckedLink":
        """A copy of the link with one more fault; the copy is not ok."""
        return replace(self, faults=[*self.faults, fault], ok=False)

    def to_json(self) -> dict[str, object]:
        """The link as a JSON object; "broken" lists its faults."""
        return {"name": self.name, "ok": self.ok, "broken": [f.to_json() for f in self.faults]}


@dataclass(frozen=True)
class Verification:
    """The result of checking a run against its seal.

    Attributes:
        intact: whether the run and all its ancestors are unchanged; None if that cannot be checked
            because the run is not done or its files were deleted.
        head: the sealed hash; "" without a seal.
        links: one entry per sealed link.
        ancestors: the verifications of the runs that trained its models.
        summary: the result in a sentence.
    """

    run_id: str
    intact: bool | None
    head: str
    links: Sequence[CheckedLink]
    ancestors: Sequence["Verification"]
    summary: str

    def to_json(self) -> Reply:
        """The verification as a JSON object, its ancestors nested."""
        return {
            "run_id": self.run_id,
            "intact": self.intact,
            "head": self.head,
            "links": [link.to_json() for link in self.links],
            "ancestors": [ancestor.to_json() for ancestor in self.ancestors],
            "summary": self.summary,
        }


def seal(run_dir: RunDir) -> str:
    """Hash everything that a finished run rests on, and write these hashes as its seal. Returns the
    last hash of the chain."""
    links = _sealed_links(_files_by_link(run_dir, run_dir.find_config()))
    Provenance(run_id=run_dir.id, links=links, head=links[-1].hash).write(run_dir.chain)
    return links[-1].hash


def read_provenance(run_dir: RunDir) -> Provenance | None:
    """The seal (hashes of all files) of a run. Returns None if there is none, or if it cannot be
    read."""
    try:
        return Provenance.read(run_dir.chain)
    except (FileNotFoundError, DamagedRecord):
        return None


def verify(home: Home, run_id: str) -> Verification:
    """Check a run, and every run that its models come from, against their seals.

    A seal holds the hashes of all files of a finished run; every file is read again. Raises
    UserError RUN_NOT_FOUND if there is no run with this id.
    """
    with Store(home) as store:
        row = store.get_run(run_id)
    return _verify(home, row, depth=0)


def _verify(home: Home, row: RunRow, depth: int) -> Verification:
    """Check one run and its ancestors: its files, its seal (their hashes) and its verdict.

    `depth` is the number of generations between this run and the one that the user asked for.
    """
    run = home.run(row.run_id)
    provenance = read_provenance(run)
    if provenance is None or run.deleted.exists():
        return _verification_without_seal(run, row)
    links = _with_changed_bases(run, _checked_links(run, provenance))
    # A verdict that the stored answers do not support is a fault of the last link, "evaluation".
    for fault in _verdict_faults(run, row):
        links[-1] = links[-1].with_fault(fault)
    ancestors = _verified_ancestors(home, run, depth)
    return _verification_of_seal(row, provenance.head, links, ancestors)


def _with_changed_bases(run: RunDir, links: list[CheckedLink]) -> list[CheckedLink]:
    """The links (sets of sealed files), with a fault of the link "run" for each base model whose
    files are not what they were."""
    faults = [
        Fault(f"the base {name}", f"was changed: {difference}")
        for name, difference in changed_bases(run, run.find_config())
    ]
    if not faults:
        return links
    links_with_faults = []
    for link in links:
        if link.name == "run":
            link = replace(link, faults=[*link.faults, *faults], ok=False)
        links_with_faults.append(link)
    return links_with_faults


def _verdict_faults(run: RunDir, row: RunRow) -> list[Fault]:
    """A fault, as a list of one, if the verdict in the database is not the one that the run's
    evaluations give.

    Returns [] if the two agree, and for a run that is not a finished training run.
    """
    verdict_now = run_verdict(run).word
    if row.kind != "train" or row.state != "done" or verdict_now == row.verdict:
        return []
    return [Fault(run.home.db.name, f"says {row.verdict}, the evaluations say {verdict_now}")]


def _checked_links(run: RunDir, provenance: Provenance) -> list[CheckedLink]:
    """Check each link of a seal (a set of files with their hashes) against the files as they are
    now.

    The last link gets another fault if the seal lacks a link, or if its head (the hash that stands
    for all links) is not the hash of its last link. The result is never empty.
    """
    config = run.find_config()
    current_files = dict(_files_by_link(run, config))
    links = []
    previous_hash = ""
    for link in provenance.links:
        # A file that was replaced but kept beside its successor counts as unchanged.
        files = current_files.get(link.name, {}) | _files_kept_elsewhere(config, link)
        links.append(_checked_link(run, link, files, previous_hash))
        previous_hash = link.hash
    if not links:  # a seal without links: create one that can carry the fault below
        links = [CheckedLink("evaluation", faults=[], ok=True)]
    if not _is_complete(provenance):
        links[-1] = links[-1].with_fault(Fault(run.chain.name, _SEAL_CHANGED))
    return links


def _files_kept_elsewhere(config: RunConfig | None, link: SealedLink) -> dict[str, str]:
    """Those files of a sealed link whose sealed version was replaced, but kept elsewhere: path ->
    SHA-256.

    A later push may audit an environment version again and replace its audit. That is no fault as
    long as the sealed audit is kept. Returns {} for links other than "environment".
    """
    return _earlier_audit(config, link.files) if link.name == "environment" else {}


def _is_complete(provenance: Provenance) -> bool:
    """Whether a seal has all links in the right order, and the hash of the last one as its head."""
    names = [link.name for link in provenance.links]
    return names == list(LINKS) and provenance.head == provenance.links[-1].hash


def _checked_link(
    run: RunDir, link: SealedLink, current_files: Mapping[str, str], previous_hash: str
) -> CheckedLink:
    """Check one link of a seal: whether its files, and the link itself, are as they were sealed.

    Args:
        link: a named set of files with their hashes, and a hash over these and the previous link.
        current_files: its files as they are now (path -> SHA-256).
        previous_hash: the hash of the previous link; "" for the first.
    """
    faults = _faults_of_files(link.files, current_files)
    if link.hash != _hash(previous_hash, link.name, link.files):
        faults.append(Fault(run.chain.name, _SEAL_CHANGED))
    return CheckedLink(link.name, faults[:_MOST_FAULTS], ok=not faults)


def _verified_ancestors(home: Home, run: RunDir, depth: int) -> list[Verification]:
    """Verify the runs that trained this run's models. A run that is no longer in the database is
    left out.

    `depth` is the number of generations between this run and the one that the user asked for.
    Returns [] from `_MOST_GENERATIONS` on.
    """
    if depth >= _MOST_GENERATIONS:
        return []
    ancestors = []
    for ref in _models_used(run.find_config()):
        parent = trained_by(home, ref)
        if not parent or parent == run.id:  # no run of this home, or the run itself
            continue
        try:
            with Store(home) as store:
                row = store.get_run(parent)
        except UserError:  # RUN_NOT_FOUND
            continue
        ancestors.append(_verify(home, row, depth + 1))
    return ancestors


def _verification_without_seal(run: RunDir, row: RunRow) -> Verification:
    """The result for a run that has no seal (hashes of its files), or whose files were deleted.

    A run that is done should have a seal, so without one it is not intact. A run that is not done,
    or whose files were deleted, cannot be checked: `intact` is None.
    """
    intact = None
    links: list[CheckedLink] = []
    if run.deleted.exists():
        reason = "its files were deleted"
    elif row.state == "done":
        reason = "its seal is missing"
        intact = False
        missing = Fault(run.chain.name, "missing")
        links = [CheckedLink("evaluation", faults=[missing], ok=False)]
    else:
        reason = f"it is {row.state}: runs are sealed when done"
    return Verification(
        run_id=row.run_id,
        intact=intact,
        head="",
        links=links,
        ancestors=[],
        summary=f"{row.run_id} cannot be verified: {reason}.",
    )


def _verification_of_seal(
    row: RunRow, head: str, links: Sequence[CheckedLink], ancestors: Sequence[Verification]
) -> Verification:
    """The result of checking a sealed run, with one sentence about it.

    Args:
        head: the sealed hash, in hexadecimal digits.
        links: the checked links of the run's chain of hashes.
        ancestors: the results for the runs that trained its models.
    """
    broken_links = [link for link in links if not link.ok]
    # An ancestor that cannot be checked (None) does not count as altered.
    altered_ancestors = [ancestor for ancestor in ancestors if ancestor.intact is False]
    if broken_links:
        summary = _fault_sentence(row.run_id, broken_links)
    elif altered_ancestors:
        summary = (
            f"{row.run_id} itself is intact, but what it comes from is not: "
            f"{altered_ancestors[0].summary}"
        )
    else:
        summary = f"{row.run_id} is intact: {len(links)} links, head {head[:12]}."
    return Verification(
        run_id=row.run_id,
        intact=not broken_links and not altered_ancestors,
        head=head,
        links=links,
        ancestors=ancestors,
        summary=summary,
    )


def _fault_sentence(run_id: str, broken_links: Sequence[CheckedLink]) -> str:
    """A sentence on where a run is broken: its first fault, and how many more there are."""
    first_link = broken_links[0]
    first_fault = first_link.faults[0]
    fault_count = sum(len(link.faults) for link in broken_links)
    more = f" and {fault_count - 1} more" if fault_count > 1 else ""
    return f"{run_id} is broken at {first_link.name}: {first_fault.file} {first_fault.what}{more}."


def _files_by_link(run: RunDir, config: RunConfig | None) -> Iterator[tuple[str, dict[str, str]]]:
    """The files of each link (named set of files) of a run's seal, as they are now.

    Yields (name of the link, path -> SHA-256) in the order of LINKS; missing files are left out. If
    the config is missing (None) the environment is not known, so the links environment, data and
    curation have no files.
    """
    # Without a config the folder is one that never exists, so that these links have no files.
    env = Path(config.env_dir) if config else run.path / "none"
    yield from _environment_links(env)
    yield "run", _hashes(run.path, _input_files(run)) | _parent_heads(run.home, config)
    yield "checkpoints", _hashes(run.path, _checkpoint_files(run)) | _best_checkpoint(run)
    results = [
        run.metrics,
        run.result,
        run.endpoint_calls,
        *_files(run.evals_dir),
        *_files(run.rollouts_dir),
    ]
    yield "evaluation", _hashes(run.path, results)


def _environment_links(env: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """The links environment, data and curation (sets of files to seal), each as (name, path ->
    SHA-256), of the environment version in the folder `env`.

    They have no files if there is no such folder.
    """
    curation = env / "source" / _CURATION
    env_files = [*_files(env / "source"), env / "env.json", env / "audit.json"]
    yield "environment", _hashes(env, [file for file in env_files if file != curation])
    yield "data", _hashes(env, [env / "tasks.jsonl", env / "rows.idx"])
    yield "curation", _hashes(env, [curation])


def _input_files(run: RunDir) -> list[Path]:
    """The files that a run was given: config, manifest, hashes of the models it asked, overlaps of
    training and held-out tasks, adapters."""
    folder_of_model_adapters = run.model_adapter(0).parent  # those of all models lie side by side
    return [
        run.config,
        run.manifest,
        run.bases,
        run.contamination,
        *_files(run.start_adapter),
        *_files(folder_of_model_adapters),
    ]


def _earlier_audit(config: RunConfig | None, sealed_files: Mapping[str, str]) -> dict[str, str]:
    """The audit that a run was sealed with (path -> SHA-256), if a later push replaced the audit
    but kept a copy of the sealed one.

    `sealed_files` are the files of the link "environment" (path -> SHA-256). Returns {} if no audit
    was sealed, or if no copy was kept.
    """
    digest = sealed_files.get("audit.json", "")
    # A damaged seal may hold anything: without slashes and dots the path stays inside the folder.
    if config is None or not digest.isalnum():
        return {}
    # A push keeps the audit that it replaces in a file named after its hash.
    copy = Path(config.env_dir) / "earlier" / f"{digest}.json"
    is_kept = copy.is_file() and _digest(copy) == digest
    return {"audit.json": digest} if is_kept else {}


def _checkpoint_files(run: RunDir) -> list[Path]:
    """The files of all checkpoints, in the order of their steps."""
    return [file for step in run.checkpoint_steps() for file in _files(run.checkpoint(step))]


def _best_checkpoint(run: RunDir) -> dict[str, str]:
    """The folder name of the best checkpoint, as {"checkpoints/best": name}, so that the seal also
    covers which checkpoint was chosen. Returns {} if there is none."""
    best = run.resolve_checkpoint("best")
    return {"checkpoints/best": best.name} if best is not None else {}


def _parent_heads(home: Home, config: RunConfig | None) -> dict[str, str]:
    """The last hashes of the seals of the runs that trained this run's models, so that its seal
    covers theirs.

    The keys are "chain of <run id>"; the value is "not sealed" for a run without a seal.
    """
    heads: dict[str, str] = {}
    for ref in _models_used(config):
        parent = trained_by(home, ref)
        if parent:
            provenance = read_provenance(home.run(parent))
            heads[f"chain of {parent}"] = provenance.head if provenance else "not sealed"
    return heads


def _models_used(config: RunConfig | None) -> list[str]:
    """The references of the models that a run started from or evaluated, each once. [] without a
    config."""
    return list(dict.fromkeys(config.model_refs)) if config else []


def _sealed_links(files_by_link: Iterable[tuple[str, dict[str, str]]]) -> list[SealedLink]:
    """Compute the links (sets of files) with their hashes; each hash covers the hash of the
    previous link.

    `files_by_link` yields (name of the link, its files as path -> SHA-256).
    """
    links: list[SealedLink] = []
    previous_hash = ""  # of the first link: nothing comes before it
    for name, files in files_by_link:
        link_hash = _hash(previous_hash, name, files)
        links.append(SealedLink(name=name, files=files, hash=link_hash))
        previous_hash = link_hash
    return links


def _hash(previous: str, name: str, files: Mapping[str, str]) -> str:
    """The hash of a link: SHA-256 over the previous link's hash, its name and its files."""
    body = {"previous": previous, "name": name, "files": files}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _hashes(root: Path, files: Iterable[Path]) -> dict[str, str]:
    """The SHA-256 of each of `files` that exists, by its path relative to `root`."""
    return {file.relative_to(root).as_posix(): _digest(file) for file in files if file.is_file()}


def _files(folder: Path) -> list[Path]:
    """Every regular file below `folder`, sorted by folder and name. Returns [] if there is no such
    folder.

    Symbolic links, hidden files and bytecode are left out.
    """
    files: list[Path] = []
    for parent, subfolders, names in os.walk(folder):
        # Changed in place: os.walk descends into the folders that remain in this list, in its
        # order.
        subfolders[:] = sorted(name for name in subfolders if name != "__pycache__")
        visible_names = sorted(name for name in names if not name.startswith("."))
        files += [Path(parent) / name for name in visible_names]
    return [file for file in files if not file.is_symlink()]


def _digest(file: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _faults_of_files(
    sealed_files: Mapping[str, str], current_files: Mapping[str, str]
) -> list[Fault]:
    """The files that are missing, changed or added since the seal (the hashes of all files) was
    written. Both arguments map path -> SHA-256."""
    faults = []
    for file, digest in sealed_files.items():
        if file not in current_files:
            faults.append(Fault(file, "is missing"))
        elif current_files[file] != digest:
            faults.append(Fault(file, "was changed"))
    added_files = [file for file in current_files if file not in sealed_files]
    return faults + [Fault(file, "was added") for file in added_files]

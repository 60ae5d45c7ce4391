"""The chain of custody of a run: environment, data, curation, run, checkpoints, evaluation.

When a run is done its trainer seals it: the SHA-256 of every file that a link rests on, each link
hashed together with the link before it. The last hash stands for all of them; it is printed in the
model card. `verify` reads every file again: a metrics line, a weight or a setting that was changed
by hand shows with the file's name. It guards against editing, not against a forger who seals anew:
against that, keep the card.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from engine.core.errors import UserError
from engine.core.files import read_object, write_json
from engine.evidence.verdict.lineage import trained_by
from engine.evidence.verdict.verdict import run_verdict
from engine.home.rows import RunRow
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.records.run_config import RunConfig

LINKS = ("environment", "data", "curation", "run", "checkpoints", "evaluation")
_CURATION = "curation.json"
_DEEPEST = 12
_SHOWN = 20


def seal(run_dir: RunDir) -> str:
    """Write the chain of a finished run; returns its last hash."""
    links = _chained(_contents(run_dir, run_dir.find_config()))
    write_json(run_dir.chain, {"run_id": run_dir.id, "links": links, "head": links[-1]["hash"]})
    return str(links[-1]["hash"])


def read_chain(run_dir: RunDir) -> dict[str, Any]:
    """The sealed chain, {} where there is none or it cannot be read."""
    found = read_object(run_dir.chain)
    return found if isinstance(found.get("links"), list) else {}


def verify(home: Home, run_id: str) -> dict[str, Any]:
    """Hold a run, and every run its model comes from, against what was sealed.

    Returns `intact`, `head`, `links` (each with `ok`, and `broken`: {"file", "what"} of what was
    changed, is missing or was added), `ancestors` and a summary.
    Raises UserError RUN_NOT_FOUND.
    """
    with Store(home) as store:
        row = store.get_run(run_id)
    return _verify(home, row, 0)


def _verify(home: Home, row: RunRow, depth: int) -> dict[str, Any]:
    run = home.run(row.run_id)
    sealed = read_chain(run)
    if not sealed or run.deleted.exists():
        return _unsealed(run, row)
    config = run.find_config()
    now = {link["name"]: link["files"] for link in _chained(_contents(run, config))}
    links, previous = [], ""
    for link in sealed["links"]:
        files, found = link.get("files") or {}, now.get(link.get("name"), {})
        if link.get("name") == "environment":
            found = found | _kept_audit(config, files)
        broken = _differences(files, found)
        if link.get("hash") != _hash(previous, link):
            broken.append({"file": run.chain.name, "what": "the seal itself was changed"})
        previous = str(link.get("hash"))
        links.append({"name": link["name"], "ok": not broken, "broken": broken[:_SHOWN]})
    if sealed.get("head") != previous or [link["name"] for link in links] != list(LINKS):
        links[-1]["ok"] = False
        links[-1]["broken"].append({"file": run.chain.name, "what": "the seal itself was changed"})
    links[-1] = _with_verdict(run, row, links[-1])
    ancestors = _ancestors(home, run, depth)
    return _answer(row, str(sealed.get("head")), links, ancestors)


def _with_verdict(run: RunDir, row: RunRow, link: dict[str, Any]) -> dict[str, Any]:
    """The word in the database against the word the rows give."""
    word = run_verdict(run)["verdict"]
    if row.kind != "train" or row.state != "done" or word == row.verdict:
        return link
    broken = {"file": run.home.db.name, "what": f"says {row.verdict}, the evaluations say {word}"}
    return link | {"ok": False, "broken": [*link["broken"], broken]}


def _ancestors(home: Home, run: RunDir, depth: int) -> list[dict[str, Any]]:
    """The runs this one's models come from, verified the same way."""
    found = []
    for ref in _starts(run.find_config()):
        parent = trained_by(home, ref)
        if not parent or depth >= _DEEPEST or parent == run.id:
            continue
        try:
            with Store(home) as store:
                row = store.get_run(parent)
        except UserError:
            continue
        found.append(_verify(home, row, depth + 1))
    return found


def _unsealed(run: RunDir, row: RunRow) -> dict[str, Any]:
    """A run that is not done has no seal; one that is done and has none is not to be trusted."""
    deleted = run.deleted.exists()
    done = row.state == "done" and not deleted
    broken = [{"file": run.chain.name, "what": "missing"}] if done else []
    why = "its seal is missing" if done else f"it is {row.state}: runs are sealed when done"
    why = "its files were deleted" if deleted else why
    return {
        "run_id": row.run_id,
        "intact": False if done else None,
        "head": "",
        "links": [{"name": "evaluation", "ok": False, "broken": broken}] if done else [],
        "ancestors": [],
        "summary": f"{row.run_id} cannot be verified: {why}.",
    }


def _answer(
    row: RunRow, head: str, links: list[dict[str, Any]], ancestors: list[dict[str, Any]]
) -> dict[str, Any]:
    broken = [link for link in links if not link["ok"]]
    bad = [other for other in ancestors if other["intact"] is False]
    if broken:
        first = broken[0]["broken"][0]
        count = sum(len(link["broken"]) for link in broken)
        more = f" and {count - 1} more" if count > 1 else ""
        said = f"{row.run_id} is broken at {broken[0]['name']}: {first['file']} {first['what']}"
        said += f"{more}."
    elif bad:
        said = f"{row.run_id} itself is intact, but what it comes from is not: {bad[0]['summary']}"
    else:
        files = sum(1 for link in links if link["ok"])
        said = f"{row.run_id} is intact: {files} links, head {head[:12]}."
    return {
        "run_id": row.run_id,
        "intact": not broken and not bad,
        "head": head,
        "links": links,
        "ancestors": ancestors,
        "summary": said,
    }


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


def _kept_audit(config: RunConfig | None, sealed: Mapping[str, str]) -> dict[str, str]:
    """The audit a run was sealed with, where a later push made it again and kept the first."""
    digest = str(sealed.get("audit.json") or "")
    kept = Path(config.env_dir if config else "") / "earlier" / f"{digest}.json"
    is_it = digest.isalnum() and kept.is_file() and _digest(kept) == digest
    return {"audit.json": digest} if is_it else {}


def _checkpoint_files(run: RunDir) -> list[Path]:
    return [file for step in run.checkpoint_steps() for file in _files(run.checkpoint(step))]


def _best(run: RunDir) -> dict[str, str]:
    best = run.resolve_checkpoint("best")
    return {"checkpoints/best": best.name} if best is not None else {}


def _heads(home: Home, config: RunConfig | None) -> dict[str, str]:
    """The chains of the runs this one starts from, so that the links go on through them."""
    return {
        f"chain of {parent}": str(read_chain(home.run(parent)).get("head") or "not sealed")
        for ref in _starts(config)
        if (parent := trained_by(home, ref))
    }


def _starts(config: RunConfig | None) -> list[str]:
    return list(dict.fromkeys(config.model_refs)) if config else []


def _chained(contents: Iterable[tuple[str, dict[str, str]]]) -> list[dict[str, Any]]:
    links: list[dict[str, Any]] = []
    previous = ""
    for name, files in contents:
        link: dict[str, Any] = {"name": name, "files": files}
        previous = link["hash"] = _hash(previous, link)
        links.append(link)
    return links


def _hash(previous: str, link: Mapping[str, Any]) -> str:
    body = {"previous": previous, "name": link.get("name"), "files": link.get("files")}
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
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        found += [Path(place) / name for name in sorted(names) if not name.startswith(".")]
    return [file for file in found if not file.is_symlink()]


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _differences(sealed: Mapping[str, str], now: Mapping[str, str]) -> list[dict[str, str]]:
    broken = []
    for file, digest in sealed.items():
        if file not in now:
            broken.append({"file": file, "what": "is missing"})
        elif now[file] != digest:
            broken.append({"file": file, "what": "was changed"})
    return broken + [{"file": file, "what": "was added"} for file in now if file not in sealed]

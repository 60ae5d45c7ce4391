"""The reward audit of every row. Each row's findings become a line of a file, so that an audit that
was killed resumes where it stopped.

Rows are scored in their order by several processes at once. The random choices for a row depend on
its number alone, so an interrupted audit finds the same as an uninterrupted one.
"""

import json
import queue
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.audit import rescore, verdict
from envs.audit.audit_report import AuditReport
from envs.audit.findings import FRESH, Findings, findings_from_json, merged
from envs.audit.groups import GroupFindings, audit_group
from envs.audit.rescore import Scored
from envs.audit.reward_audit import Scorer, compares_groups, probed_row, score_row
from envs.base import Task

POOL = 200  # rows whose reference answers may serve as wrong answers to other rows


@dataclass(frozen=True)
class FullAudit:
    """The audit of all rows of an environment.

    Args:
        rows: stored task rows.
        kind: the kind of the environment: single or multi.
        file: where the findings of each row are kept, one JSON line each; never deleted here.
        seed: seed of the random choices.
        on_row: called after each row with the number of rows that are done.
    """

    rows: Sequence[Mapping[str, Any]]
    kind: str
    file: Path
    seed: int = 0
    on_row: Callable[[int], None] = lambda done: None

    def run(
        self,
        scorers: Sequence[Scorer],
        fresh: Callable[[], Scorer],
        seconds: Callable[[], float],
    ) -> AuditReport:
        """Score every row that the file does not hold yet, and report on all rows.

        Args:
            scorers: env processes; each scores one row at a time.
            fresh: starts an env process that has scored nothing; may raise EnvProblem.
            seconds: returns how long the audit took so far, including earlier runs that were
                interrupted.
        """
        done = self.done()
        idle_scorers: queue.SimpleQueue[Scorer] = queue.SimpleQueue()
        for scorer in scorers:
            idle_scorers.put(scorer)
        missing = [index for index in range(len(self.rows)) if index not in done]
        with (
            ThreadPoolExecutor(len(scorers), thread_name_prefix="audit") as threads,
            self.file.open("a", encoding="utf-8") as file,
        ):
            futures = [threads.submit(self._line_of_row, index, idle_scorers) for index in missing]
            try:
                for number, future in enumerate(as_completed(futures), len(done) + 1):
                    file.write(future.result() + "\n")
                    file.flush()
                    self.on_row(number)
            except BaseException:  # also Ctrl-C: rows that still wait are not scored
                threads.shutdown(wait=False, cancel_futures=True)
                raise
        return self._report(scorers[0], fresh, seconds)

    def _line_of_row(self, index: int, idle_scorers: "queue.SimpleQueue[Scorer]") -> str:
        """Score row number `index` with the next free scorer; return the line for the file (its
        findings as JSON).

        `idle_scorers` is the queue of idle scorers; the scorer returns to it afterwards.
        """
        scorer = idle_scorers.get()
        try:
            findings = score_row(scorer, self._row_with_probes(index), index)
        finally:
            idle_scorers.put(scorer)
        return json.dumps({"row": index, "findings": findings.to_json()})

    def done(self) -> dict[int, Findings]:
        """Return the findings of the rows that the file holds, by row number. A torn last line is
        dropped."""
        by_row: dict[int, Findings] = {}
        for line in self._lines():
            try:
                data = json.loads(line)
                by_row[int(data["row"])] = findings_from_json(data["findings"])
            except (ValueError, LookupError, TypeError):  # the process was killed while it wrote
                continue
        return {index: findings for index, findings in by_row.items() if index < len(self.rows)}

    def _lines(self) -> Iterator[str]:
        """Yield the complete lines of the file; an incomplete last line is cut off the file."""
        if not self.file.exists():
            return
        data = self.file.read_bytes()
        complete_lines = data[: data.rfind(b"\n") + 1]
        if len(complete_lines) < len(data):
            self.file.write_bytes(complete_lines)
        yield from complete_lines.decode("utf-8", "replace").splitlines()

    def _report(
        self, scorer: Scorer, fresh: Callable[[], Scorer], seconds: Callable[[], float]
    ) -> AuditReport:
        """Return the report on all rows.

        Some answers are scored again by a new process, and if the environment scores groups, some
        groups are audited too.
        """
        by_row = self.done()
        findings = merged([by_row[index] for index in sorted(by_row)])
        answers = [
            self._answer_to_rescore(index, by_row[index]) for index in self._sample(sorted(by_row))
        ]
        findings.rescoring = rescore.score_again(
            [answer for answer in answers if answer is not None], fresh, lambda: False
        )
        if compares_groups(scorer, self.kind):
            findings.of_groups = GroupFindings()
            for index in self._sample(range(len(self.rows))):
                answers = self._row_with_probes(index).answers
                audit_group(findings.of_groups, scorer.score_group, self.rows[index], answers)  # type: ignore[attr-defined]
        return verdict.report(findings, len(self.rows), self.seed, seconds())

    def _sample(self, rows: Sequence[int]) -> list[int]:
        """Return up to 2 * FRESH of the row numbers, spread evenly."""
        count = min(2 * FRESH, len(rows))
        return [rows[index * len(rows) // count] for index in range(count)]

    def _answer_to_rescore(self, index: int, findings: Findings) -> Scored | None:
        """Return one answer of row `index`, with the reward it earned, to be scored again; None if
        scoring that answer failed. Different rows take different probes."""
        probed = self._row_with_probes(index)
        names = [name for name in probed.answers if name in findings.tallies]
        name = names[index % len(names)]
        tally = findings.tallies[name]
        return None if tally.errors else probed.scored(name, tally.rewards[0])

    def _row_with_probes(self, index: int) -> Any:
        """Return row `index` with its probes. The random choices depend on the seed and the row
        number alone."""
        rng = random.Random(f"{self.seed} {index}")
        size = len(self.rows)
        others = rng.sample(range(size), min(POOL, size))
        pool = [Task.from_row(self.rows[other]) for other in others]
        return probed_row(self.rows[index], self.kind, pool, rng)

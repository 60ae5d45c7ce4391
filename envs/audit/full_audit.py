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
        done_rows = self.findings_by_row()
        idle_scorers: queue.SimpleQueue[Scorer] = queue.SimpleQueue()
        for scorer in scorers:
            idle_scorers.put(scorer)
        missing = [index for index in range(len(self.rows)) if index not in done_rows]
        with (
            ThreadPoolExecutor(len(scorers), thread_name_prefix="audit") as threads,
            self.file.open("a", encoding="utf-8") as file,
        ):
            futures = [threads.submit(self._line_of_row, index, idle_scorers) for index in missing]
            try:
                for done_count, future in enumerate(as_completed(futures), len(done_rows) + 1):
                    file.write(future.result() + "\n")
                    file.flush()  # so that an audit that is killed has lost no more than this row
                    self.on_row(done_count)
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

    def findings_by_row(self) -> dict[int, Findings]:
        """Return the findings that the file holds: row number -> findings of that row.

        A line that cannot be read, because the audit was killed while it was written, is left out.
        """
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
        """Return the report on all rows, once each is in the file.

        Some answers are scored again by a new process, and if the environment scores groups, some
        groups are audited too.

        Args:
            scorer: an env process.
            fresh: starts an env process that has scored nothing.
            seconds: returns how long the audit took.
        """
        by_row = self.findings_by_row()
        row_numbers = sorted(by_row)
        findings = merged([by_row[index] for index in row_numbers])
        answers = []
        for index in self._sample(row_numbers):
            answer = self._answer_to_rescore(index, by_row[index])
            if answer is not None:
                answers.append(answer)
        findings.rescoring = rescore.score_again(answers, fresh, time_is_up=lambda: False)
        if compares_groups(scorer, self.kind):
            findings.of_groups = GroupFindings()
            for index in self._sample(range(len(self.rows))):
                probes = self._row_with_probes(index).answers
                audit_group(findings.of_groups, scorer.score_group, self.rows[index], probes)  # type: ignore[attr-defined]
        return verdict.report(findings, len(self.rows), self.seed, seconds())

    def _sample(self, row_numbers: Sequence[int]) -> list[int]:
        """Return up to 2 * FRESH (24) of the row numbers, spread evenly."""
        total = len(row_numbers)
        count = min(2 * FRESH, total)
        return [row_numbers[position * total // count] for position in range(count)]

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
        row_count = len(self.rows)
        pool_indices = rng.sample(range(row_count), min(POOL, row_count))
        pool = [Task.from_row(self.rows[pool_index]) for pool_index in pool_indices]
        return probed_row(self.rows[index], self.kind, pool, rng)

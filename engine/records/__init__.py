"""What crosses a process or is read from disk, each as one typed record with one reader. Everyone
above `core` may use it; start with `settings.py` and `record.py`.

    answer.py             a completion with its score, as rollouts and evaluations keep it
    audit.py              what a version's scorer pays for: audit.json
    env_version.py        what push learnt of a version: env.json
    estimate.py           what a run was expected to take
    evaluation_row.py     a held-out answer: a line in evals/
    event.py              something that happened to a run: a line of events.jsonl
    line_record.py        how a record that is one line of a file is read and written
    manifest.py           what was trained on what, with what: manifest.json
    metrics_line.py       what was measured at a step: a line of metrics.jsonl
    record.py             how a record is read and what a damaged one says
    run_config.py         what submit resolved: config.json
    run_result.py         what the worker concluded: result.json
    settings.py           the settings of a run: names, types, ranges
    trajectory_record.py  one rollout of a training step: a line in rollouts/
"""

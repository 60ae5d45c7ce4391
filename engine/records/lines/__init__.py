"""Records that stand in a file one per line, and curves of them. Start with `line_record.py`.

answer.py             a completion with its score, as rollouts and evaluations keep it
curves.py             metrics thinned to what a reader can use
endpoint_call.py      a turn of a model behind a URL: a line of endpoint_calls.jsonl
evaluation_row.py     a held-out answer: a line in evals/
event.py              something that happened to a run: a line of events.jsonl
line_record.py        how a record that is one line of a file is read and written
metrics_line.py       what was measured at a step: a line of metrics.jsonl
prompt_line.py        a prompt that a search tried: a line of prompts.jsonl
reworded_kind.py      what of an evaluation was asked in other words: a line in evals/reworded/
replayed_row.py       a row trained beside the run's own: a line of replayed.jsonl
trajectory_record.py  one rollout of a training step: a line in rollouts/
"""

"""Versions of tasks: a folder is pushed, stored, read, compared and thrown away. Start with
`push.py` for how one is made and `registry.py` for how it is looked up.

    datasets.py      checks and describes a data file
    draft.py         a version while it is made, and its folder
    env_facts.py     an environment's rows in tokens of a given model
    pairs.py         the worse answer beside a task's reference answer
    push.py          a folder becomes a version
    push_audit.py    its reward audit, made again once secrets are set
    push_limits.py   seconds a push may take
    registry.py      the versions there are; their process, their rows
    snapshot.py      a folder into a copy and a content hash, within limits
    task_rows.py     task rows split, with their reference conversations
    versions.py      versions built, compared, taken out, thrown away
"""

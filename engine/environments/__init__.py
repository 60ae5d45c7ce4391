"""Versions of tasks: a folder is pushed, stored, read, compared and thrown away. Start with
`push.py` for how one is made and `registry.py` for how it is looked up.

    data_inspection.py  a data file of any size, also in tokens of a model
    datasets.py      checks and describes a data file that fits into memory
    draft.py         a version while it is made, and its folder
    env_facts.py     an environment's rows in tokens of a given model
    pairs.py         the better and the worse answer to a task, for DPO
    push.py          a folder becomes a version
    push_audit.py    its reward audit, made again once secrets are set, or over every row
    push_large.py    data too large to copy: pushed by hash and index
    registry.py      the versions there are; their process, their rows
    snapshot.py      a folder into a copy and a content hash, within limits
    task_rows.py     task rows split, with their reference conversations
    versions.py      versions built, compared, taken out, sealed, thrown away
    indexed/         large data files: read once, row by row afterwards
"""

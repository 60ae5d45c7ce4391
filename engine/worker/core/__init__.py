"""What every part of the worker uses: the job, batches, trajectories, failures. Start with
`job.py`.

    background.py  calls that a thread works off beside the caller
    batch.py       sequences to padded microbatches
    failures.py    a failure as a row: kind, evidence, next move
    job.py         the run as its worker sees it: settings, metrics, events, when to stop
    limits.py      how long answers may get and how they are drawn
    pulse.py       signs of life: phase, share done, seconds; written to heartbeat.json
    runtime.py     variables libraries read while they are loaded
    rows_on_demand.py  rows of a large dataset, tokenised when a step asks for them
    switched_off.py   which faster ways to compute do not work on this device
    varied_rows.py    rows that come in other words each time they are seen
    trajectory.py  what playing a task leaves
    transformers_index.py  the list of classes that transformers would make at each import, kept
    transfer.py    from the host to a device without waiting for it
"""

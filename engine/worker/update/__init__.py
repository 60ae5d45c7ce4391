"""From a loss to changed weights on disk: losses, optimizer, schedule, checkpoints, meters. Start
with `losses.py`.

    checkpoint.py  checkpoints: complete or absent
    losses.py      per-token losses
    meter.py       operations done, utilisation, peak memory
    oom_retry.py   a step that ran out of memory, again in smaller microbatches
    optimizer.py   AdamW without the compiler torch.optim brings along
    profiling.py   a trace of two steps
    schedule.py    learning rates, clipping, one step
"""

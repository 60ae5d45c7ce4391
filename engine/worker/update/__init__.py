"""From a loss to changed weights on disk: losses, optimizer, schedule, checkpoints, meters. Start
with `losses.py`.

    checkpoint.py     checkpoints: complete or absent
    disk_guard.py     room on the disk, looked at before each checkpoint
    losses.py         per-token losses
    memory_retry.py   a step that ran out of memory, again in smaller microbatches
    meter.py          operations done, utilisation, peak memory
    optimizer.py      AdamW without the compiler torch.optim brings along
    pending.py        what a pass has left on its device, read once per step
    policy_update.py  trajectories of a step as microbatches, a pass of the policy loss over them
    preference.py     pairs of a better and a worse answer, a pass of DPO's loss over them
    profiling.py      a trace of two steps
    replay_pass.py    a pass of GRPO with one over replayed rows beside it
    schedule.py       learning rates, clipping, one step
    supervised.py     a pass of the cross-entropy over the rows of an SFT step
    telemetry.py      what a GPU's sensors say in each step
    work_ahead.py     steps, answers and checkpoints that an attempt still does
"""

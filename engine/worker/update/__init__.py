"""From a loss to changed weights on disk: losses, optimizer, schedule, checkpoints, meters. Start
with `losses.py`.
"""

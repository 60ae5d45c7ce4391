"""What every part of the worker uses: the job, batches, trajectories, failures. Start with
`job.py`.
"""

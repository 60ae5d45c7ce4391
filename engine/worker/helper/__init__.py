"""What another rank of a run than the first one runs: `python -P -m engine.worker.helper RUN`.

__main__.py   loads the model and carries out the orders of rank 0 (engine/worker/ranks)
"""

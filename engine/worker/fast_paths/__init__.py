"""Trying the fast paths of a device: `python -P -m engine.worker.fast_paths NAME...`. Used by no
other package; start with `trial.py`.

    __main__.py            the process, a path after the other
    trial.py               one path beside the plain way: numbers, then seconds
    trials.py              what is computed for each path
    vllm_trial.py          vLLM: start, base and adapters, sleep and wake
    collectives_trial.py   sums over all GPUs, a process for each
    summing.py             one of those processes
"""

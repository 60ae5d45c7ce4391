"""Processes that outlive a call: how they are started, whether they live, how they ended. Runs and
deployments build on this package; start with `launcher.py`.

    deployments.py   which serving processes live
    device_shares.py  several runs on one GPU: which bytes of it each run has
    launcher.py      starts queued runs, tells which live, settles those that died
    lease.py         ends a run that another machine started and does not ask for any more
    lifeline.py      ends a process when its supervisor ends
    limits.py        the caps on hours, and when an attempt reaches them
    outcome.py       how an attempt ended
    programs.py      which program each kind of process runs
    trainer_variables.py  the environment variables of a process with torch
    waiting.py       runs that wait for the models of other runs
    vigil.py         watches a trainer's heartbeats: does it hang, will its hours be enough
    vllm_process.py  a vLLM server as a child process that never outlives its parent
"""

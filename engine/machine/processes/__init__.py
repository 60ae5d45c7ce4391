"""Processes that outlive a call: how they are started, whether they live, how they ended. Runs and
deployments build on this package; start with `launcher.py`.

    deployments.py   which serving processes live
    device_shares.py  several runs on one GPU: which bytes of it each run has
    launcher.py      starts queued runs, tells which live, settles those that died
    limits.py        the caps on hours and the lease, and when an attempt reaches them
    local_executor.py  this machine as a place to run: start, probe, stop, reap, list_owned
    outcome.py       how an attempt ended
    programs.py      which program each kind of process runs
    seam.py          what any place to run is asked; the handle of a job
    trainer_variables.py  the environment of a process with torch; it ends with its supervisor
    waiting.py       runs that wait for the models of other runs
    vigil.py         watches a trainer's heartbeats: does it hang, will its hours be enough
    vllm_process.py  a vLLM server as a child process that never outlives its parent
"""

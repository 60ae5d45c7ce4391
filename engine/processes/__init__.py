"""Processes that outlive a call: started, alive or not, how they ended. Runs and deployments stand
on it; start with `launcher.py`.

    deployments.py   which serving processes live
    device_shares.py  several runs on one GPU: who has which bytes of it
    launcher.py      start what is queued, tell what lives, take up what died
    lifeline.py      a process that ends with its supervisor
    limits.py        caps of hours, and when an attempt reaches them
    outcome.py       how an attempt ended
    programs.py      which program stands behind each kind of process
    trainer_variables.py  the environment variables of a process with torch
    waiting.py       runs that wait for the models of other runs
    vigil.py         a trainer's signs of life: that it hangs, that its hours will not do
    vllm_process.py  a vLLM server as a child, gone with whoever started it
"""

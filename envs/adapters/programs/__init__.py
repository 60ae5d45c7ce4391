"""Programs that play one rollout of a foreign environment and ask the model over HTTP. Each runs as
the command of an environment (envs/host/program.py), with the interpreter that has the
environment's packages.

    harbor_rollout.py  an agent with a shell in a sandbox, then the tests of the task
    synth_rollout.py   one `/rollout` of a task app
"""

"""Programs that play one rollout of a foreign environment and ask the model over HTTP. Each runs as
the command of an environment (envs/host/program.py), with the interpreter that has the
environment's packages.

    synth_rollout.py   one `/rollout` of a task app
"""

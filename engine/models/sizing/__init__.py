"""How many rows, tokens and bytes fit into a device, and how long a model of a size trains.
Estimate, admission, worker, both samplers and deployments ask here and nowhere else, so that what
is planned is what is done. Start with `plan.py`. Knows no settings, no homes and no torch.

    layers.py    bytes of a model with its adapter, and of each token that runs through it
    plan.py      rows of a sampler and tokens of a microbatch on a device, with all bytes by item
    ranks.py     what several devices do for the time of a run, and how many pay
    score_workers.py  env processes that score at once
    usual_steps.py  how long training goes on by default for a model of a size, at which rate
    servers.py   memory of a vLLM server: beside training, asleep, and as a deployment
"""

"""From tasks to groups of scored rollouts: messages to tokens, samplers, and rewards to advantages.
Start with `collect.py`.

    advantages.py     rewards of a group to advantages
    batch_metrics.py  metrics of the rollouts of a step
    batch_source.py   the groups that a step plays, and by which policy
    collect.py        tasks, environment, sampler to groups of scored trajectories
    guard.py          ends a run that cannot learn
    renderer.py       messages to token ids through the model's template, and back
    rewording.py      tasks in other words: of the environment, or by rules
    rollout_file.py   the rollouts of a step as records, and their file
    samplers.py       which sampler a run gets
    scoring.py        completions to scores, by one or several env processes
    shaping.py        what is taken off a reward before a group is compared
    sync_check.py     whether the sampler has the weights that are trained
    task_order.py     which tasks a step plays: shuffled, or by what their groups earned
    vllm_client.py    the requests to that server: ids in, ids and log-probabilities out
    vllm_sampler.py   sampling on a vLLM server, each version of an adapter under its own name
"""

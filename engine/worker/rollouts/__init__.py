"""From tasks to scored groups: messages to tokens, samplers, rewards to advantages. Start with
`collect.py`.

    advantages.py    rewards of a group to advantages
    collect.py       tasks, environment, sampler to groups of scored trajectories
    renderer.py      messages to token ids through the model's template, and back
    samplers.py      which sampler a run gets
    shaping.py       what is taken off a reward before a group is compared
    sync_check.py    whether the sampler still speaks with the trained weights
    vllm_client.py   what is said to that server: ids in, ids and log-probabilities out
    vllm_sampler.py  sampling on a vLLM server, each version of an adapter under its own name
"""

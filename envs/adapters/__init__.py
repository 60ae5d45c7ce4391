"""Environments in foreign formats, written for other projects. One module reads each format, in the
process and with the packages of the environment itself; foreign code is never imported into the
server. Start with `load.py`; a new format is a module here, its entry in `envs/config/adapters.py`
and its part of docs/adapters.md.

    flash.py           the SDK `freesolo`: single turn, several turns, evaluation suites
    gymnasium_text.py  gymnasium environments that are played in words
    harbor.py          folders of Harbor tasks, played in a sandbox
    load.py            makes an Env of a folder with [adapter]
    mcp.py             the tools of an MCP server, called on the way to an answer
    openenv.py         servers that speak OpenEnv's protocol
    reasoning_gym.py   a family of reasoning-gym
    rllm.py            evaluators of rLLM
    skyrl_gym.py       environments of SkyRL-Gym over rows of their own form
    synth.py           task apps over HTTP, in any language
    verifiers.py       tasksets of verifiers 0.4, and through them those that it bundles
"""

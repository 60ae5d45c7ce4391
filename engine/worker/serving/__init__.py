"""The OpenAI-compatible server and the models behind it, and the merging of an adapter into its
base. Both are started as processes; start reading with `openai_server.py`.

    chat_models.py    chat requests to answers, whatever samples them
    merge.py          merge an adapter into its base
    openai_server.py  the OpenAI-compatible server
    own_models.py     a base and its adapters on our own sampler
    token_logprobs.py  given tokens rated: the request and its reply
    vllm_models.py    the same on a vLLM server, many at once
"""

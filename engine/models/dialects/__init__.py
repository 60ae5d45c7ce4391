"""How a family of models writes what is more than text: tool calls and reasoning. No torch; start
with `dialects.py`.

    arguments.py       whether a call names a tool that exists, with arguments that fit it
    channels.py        gpt-oss (Harmony) and Muse: a reply of several messages, each in a channel
    dialects.py        all dialects, and which of them a chat template writes
    gemma_calls.py     Gemma 4: a notation of its own between marks
    json_calls.py      calls as JSON: Hermes, Mistral, Llama 3, DeepSeek, Phi-4
    python_calls.py    calls as Python: LFM2, Llama 3.2
    reading.py         what all readers share: calls, faults, marks, values
    tagged_calls.py    calls as tags: Qwen3-Coder and Qwen3.5, GLM
    values.py          values in notations that are almost JSON
"""

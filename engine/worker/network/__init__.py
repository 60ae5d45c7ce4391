"""A base model with its adapter as training and sampling see it, our own and through transformers.
Start with `policy.py`, then `network.py`.

    adapter.py         LoRA weights: one flat buffer, PEFT's files
    cache.py           keys and values of a batch, each prompt's once
    comparisons.py     what comparing our forward with transformers' came to, kept
    decode.py          our own sampler: which rows decode together, refilled as they end
    decode_forward.py  the decoder without gradients: prompts at once, then token by token
    decoder.py         our own forward of dense decoders
    hub_cache.py       keys and values of rows that transformers samples; steps as CUDA graphs
    hub_network.py     the same through transformers and PEFT, for every other model
    hub_sampler.py     sampling on a transformers model, refilled as rows end
    network.py         a base as training sees it: rows in, log-probabilities out
    policy.py          base with adapter and reference; loading both
    room.py            what has to fit into the device, as the estimate counted it
    sampler.py         what every sampler shares: how to sample, what to draw, when to stop
    shape.py           a model's sizes, and whether our forward knows it
    weights.py         weights from safetensors files, fused layer by layer, an adapter on them
"""

"""What a model is: its reference, its folder, the hub, its tokens. No torch; start with
`catalog.py`.

    adapters.py     LoRA adapters in PEFT's format: shape, base, fit
    catalog.py      a model reference: built in, path, hub id, run
    chat_format.py  conversations to token ids and loss masks, here and in the worker
    chat_template.py  chat templates rendered in jinja's sandbox
    dialects/       tool calls and reasoning as each family writes them
    families.py     families that are refused, which matrices of a model take an adapter
    gguf/           a GGUF file turned into a model folder; a process of its own
    hub.py          models by hub id, from caches or over HTTP
    known_models.py  models that a package index has
    library.py      the models of this home: added by name or file, removed
    model_files.py  what a model folder is, from config.json and safetensors headers
    reasoning.py    marks of thoughts, and where thoughts stand in a reply
    served/         a model of this home as a judge: which one, and where it answers
    sizing/         rows, tokens and bytes of a model that fit into a device
    template_messages.py  tools, calls and reasoning in the form that a chat template takes
    tokens.py       chat templates and token counts without torch
"""

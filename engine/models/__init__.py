"""What a model is: its reference, its folder, the hub, its tokens. No torch; start with
`catalog.py`.

    catalog.py      a model reference: built in, path, hub id, run
    chat_format.py  conversations to token ids and loss masks, here and in the worker
    chat_template.py  chat templates rendered in jinja's sandbox
    gguf_import.py  a GGUF file turned into a model folder; a process of its own
    gguf_tokenizer.py  the tokenizer of a GGUF file
    hub.py          models by hub id, from caches or over HTTP
    known_models.py  models that a package index has
    library.py      the models of this home: added by name or file, removed
    model_origin.py  model.json: where an imported model came from
    model_files.py  what a model folder is, from config.json and safetensors headers
    template_messages.py  tools, calls and reasoning in the form that a chat template takes
    tokens.py       chat templates and token counts without torch
"""

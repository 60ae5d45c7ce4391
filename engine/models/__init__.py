"""What a model is: its reference, its folder, the hub, its tokens. No torch; start with
`catalog.py`.

    catalog.py      a model reference: built in, path, hub id, run
    chat_format.py  conversations to token ids and loss masks, here and in the worker
    chat_template.py  chat templates rendered in jinja's sandbox
    hub.py          models by hub id, from caches or over HTTP
    model_files.py  what a model folder is, from config.json and safetensors headers
    tokens.py       chat templates and token counts without torch
"""

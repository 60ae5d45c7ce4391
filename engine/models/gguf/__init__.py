"""GGUF files turned into model folders, and model folders into GGUF files, by programs with the
interpreter of the workers; start with `importer.py`.

    exporter.py   a model folder turned into a GGUF file
    importer.py   a GGUF file turned into a model folder
    names.py      how GGUF and transformers name the same things
    tokenizer.py  the tokenizer of a GGUF file
    vocabulary.py  the tokenizer of a model folder under GGUF's keys
    weights.py    the tensors of a GGUF file, checked and written as safetensors
"""

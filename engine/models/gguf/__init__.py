"""GGUF files, turned into model folders by a program with the interpreter of the workers; start
with `importer.py`.

    importer.py   a GGUF file turned into a model folder
    names.py      how GGUF and transformers name the same things
    tokenizer.py  the tokenizer of a GGUF file
    weights.py    its tensors, checked and written as safetensors
"""

"""The models of this home: fetched by name or imported from GGUF files. Used by the catalog and the
command line; start with `library.py`.

    known_models.py  models that a package index has
    library.py       added, removed, imported once
    model_origin.py  model.json: where a model came from and how it was made
"""

"""Settings of a run: other trainers' names, defaults, and all of it resolved. Their schema is
`records/settings.py`; start with `resolution.py`.

    aliases.py     names from other trainers, and what to write here
    defaults.py    how a setting left out is chosen
    setting_checks.py  which settings cannot stand together, or not with model, machine or rows
    env_checks.py  whether an environment serves an algorithm, and settings an environment
    gpu_count.py   how many devices a run takes, and what it would take on others
    lora_targets.py  which projections of a model `lora_targets` means
    run_size.py    what of a run has to fit into a device
    start_models.py  the model that a run starts from or asks, also one still being made
    teachers.py    what the teacher of a distillation is
    value_errors.py  the error for values of the wrong type or out of range
    train_files.py  a run as TOML files: read, merged in order, what each changed
    resolution.py  settings checked and resolved, each with its source; the reference page
"""

"""What crosses a process or is read from disk, each as one typed record with one reader. Everyone
above `core` may use it; start with `settings.py` and `record.py`.

    audit.py              what a version's scorer pays for: audit.json
    env_version.py        what push learnt of a version: env.json; its seal
    estimate.py           what a run was expected to take
    data_index.py         the results of reading a large dataset once
    known_settings.py     the settings of a run of any kind that its readers ask for
    manifest.py           what was trained on what, with what: manifest.json
    model_origin.py       where an imported model came from: model.json beside it
    record.py             how a record is read and what a damaged one says
    run_config.py         what submit resolved: config.json
    run_result.py         what the worker concluded, of a run or a probe: result.json
    skill_card.py         what a model can do, measured when it was made: card.json
    settings.py           the settings of a run: names, types, ranges
"""

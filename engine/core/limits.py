"""Limits that several packages share: the default cap of a run, the size of what a client gets."""

DEFAULT_GPU_HOURS = 2  # cap of a training run that was given none
# Characters of a tool's result as compact JSON; one client cuts results in the middle at 12,400.
RESULT_CHARS = 10_000
# Of it what an engine function fills; the rest is for the summary, the next calls and warnings.
BODY_CHARS = 9_300

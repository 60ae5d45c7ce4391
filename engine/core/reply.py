"""What an agent or a person gets for a call, and how large it may be."""

from typing import Any

# A JSON object; which keys it has is part of the tool's description (docs/tools.md).
Reply = dict[str, Any]

# Characters of a tool's result as compact JSON; one client cuts results in the middle at 12,400.
RESULT_CHARS = 10_000
# Of it what an engine function fills; the rest is for the summary, the next calls and warnings.
BODY_CHARS = 9_300

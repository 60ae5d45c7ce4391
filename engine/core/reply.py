"""What an agent or a person gets for a call."""

from typing import Any

# A JSON object; which keys it has is part of the tool's description (docs/tools.md).
Reply = dict[str, Any]

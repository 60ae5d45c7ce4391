"""A conversation that `chat` can go on with: `chats/<id>.json` in the home.

Each model that took part has a branch of its own, since models that are compared answer
differently.
"""

from pydantic import Field

from engine.records.record import Record
from envs.json_types import ChatMessage, ToolSchema


class Branch(Record):
    """What one model was asked and answered.

    Attributes:
        model: the name under which it was served.
        messages: in OpenAI's form, the system prompt first where there is one.
        begun: token ids of the last answer, where that was cut; it can be continued.
    """

    model: str
    messages: list[ChatMessage]
    begun: list[int] = Field(default_factory=list)


class Conversation(Record):
    """A conversation after its latest answer.

    Attributes:
        owner: name of the key that began it; nobody else can go on with it.
        turns: how often it was answered.
        tools: what the models may call, as OpenAI function schemas.
        seed: of the latest answers.
        branches: one for each model, that of the model asked first in the first place.
    """

    owner: str
    turns: int
    tools: list[ToolSchema]
    seed: int
    branches: list[Branch]

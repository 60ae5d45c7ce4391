"""The shapes a row of a data file may have, and how each becomes a task.

    {"messages": [...], "tools": [...]}          a chat; its first assistant message is the target
    {"conversations": [{"from", "value"}, ...]}  a chat of ShareGPT
    {"prompt": ..., "completion": ...}           text or messages; "response" and "answer" too
    {"input": ..., "output": ...}
    {"instruction": ..., "input": ..., "output": ...}
    {"question": ..., "answer": ...}, {"query": ..., "response": ...}
    {"prompt": ..., "chosen": ..., "rejected": ...}   a preference: two answers, one better
    {"chosen": [...], "rejected": [...]}              the same as two chats that begin alike
    {"input": {"messages": [...]}, "preferred_output": [...], "non_preferred_output": [...]}

The answer may be missing if the environment scores. The keys `id`, `split`, `group`, `system` and
`metadata` are read; any other key goes into the task's metadata. The two answers of a preference
are stored in the metadata under `chosen` and `rejected`, each as the list of messages after the
prompt. A preference has no answer to imitate, unless its row has one as well (`messages`,
`completion`).

Refused by name, because reading them as something else would teach the wrong thing: plain text to
continue ({"text": ...}), a `label` of true or false on one answer, messages with the weight 0, and
OpenAI's old `function_call`.
"""

import json
from typing import Any

from envs.base import CHOSEN, REJECTED, Message, Task, ToolCall
from envs.json_types import ChatMessage, JsonObject

# Keys of a prompt with the keys its answer may have; the first pair that fits a row is taken.
PAIRS = (
    ("prompt", ("completion", "response", "answer")),
    ("instruction", ("output", "response", "completion")),
    ("question", ("answer",)),
    ("query", ("response", "answer")),
    ("input", ("output",)),
)
CHATS = ("messages", "conversations")
# A preference's shapes. In the second the prompt is what both chats begin with.
PREFERENCE, PREFERENCE_CHATS, PREFERENCE_OPENAI = (
    "prompt/chosen/rejected",
    "chosen/rejected",
    "preferred_output/non_preferred_output",
)
RESERVED = ("id", "split", "system", "metadata", "tools")
SHAREGPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
SHAREGPT |= {"chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}
SHAREGPT |= {"system": "system", "tool": "tool", "function": "tool", "observation": "tool"}
_FUNCTION_CALL = "function_call"  # a speaker in ShareGPT, and a key in OpenAI's old form


def shape_of(row: JsonObject) -> str:
    """Return the name of a row's shape, made of the keys that hold its prompt and its answer.

    - "messages" or "conversations": a chat under that key
    - two keys, such as "question/answer": a prompt and an answer under these keys
    - one key, such as "question": a prompt without an answer
    - "prompt/chosen/rejected", "chosen/rejected" or "preferred_output/non_preferred_output": a
      preference (a better and a worse answer)
    - "": none of these
    """
    shape = _shape_without_preference(row)
    names_answer_key = "/" in shape
    is_answered_chat = shape in CHATS and _ends_with_assistant(row[shape])
    # A row with an answer of its own is no preference, whatever `chosen` and `rejected` hold.
    if names_answer_key or is_answered_chat:
        return shape
    return _preference_shape(row) or shape


def _preference_shape(row: JsonObject) -> str:
    """Return the name of a row's shape as a preference; "" if the row lacks the better or the worse
    answer."""
    if _has_value(row.get("preferred_output")) and _has_value(row.get("non_preferred_output")):
        return PREFERENCE_OPENAI
    if _has_value(row.get(CHOSEN)) and _has_value(row.get(REJECTED)):
        has_prompt = _prompt_key(row) != ""
        return PREFERENCE if has_prompt else PREFERENCE_CHATS
    return ""


def _ends_with_assistant(chat: list[Any]) -> bool:
    """Whether the last message of a chat (OpenAI's or ShareGPT's format) is the assistant's; False
    for an empty chat."""
    if not chat or not isinstance(chat[-1], dict):
        return False
    last_message = chat[-1]
    # OpenAI's messages have a role, those of ShareGPT a speaker under "from".
    role = last_message.get("role") or SHAREGPT.get(str(last_message.get("from")))
    return role == "assistant"


def _shape_without_preference(row: JsonObject) -> str:
    """Return the name of a row's shape, made of the keys that hold its prompt and its answer.

    The keys `chosen` and `rejected` are ignored here. Returns "" if the row has no prompt.
    """
    for chat_key in CHATS:
        if isinstance(row.get(chat_key), list):
            return chat_key
    for prompt_key, answer_keys in PAIRS:  # such as ("question", ("answer",))
        if not _has_value(row.get(prompt_key)):
            continue
        for answer_key in answer_keys:
            if _has_value(row.get(answer_key)):
                return f"{prompt_key}/{answer_key}"
        # A field "input" without an answer beside it may be anything, so it is no prompt.
        if prompt_key != "input":
            return prompt_key
    return ""


def to_task(row: JsonObject, default_id: str, split: str | None = None) -> Task:
    """Make a task from one row of a data file.

    Keys of the row that nothing else uses become metadata; a key inside the row's own `metadata`
    wins over such a key of the same name. The task gets `default_id` if the row has no id, and
    `split` (None: undecided) if the row names no split.

    Raises ValueError, saying what is wrong, if the row is no valid task.
    """
    shape = shape_of(row)
    _refuse_untrainable(row, shape)
    if shape in (PREFERENCE, PREFERENCE_CHATS, PREFERENCE_OPENAI):
        prompt, preference, used_keys = _read_preference(row, shape)
        answer = None
    else:
        prompt, answer, used_keys = _prompt_and_answer(row, shape)
        preference = _preference_beside_answer(row)
    metadata = _row_metadata(row)
    unused = _unused_values(row, shape, used_keys)
    row_names_split = _has_value(row.get("split"))
    return Task(
        _task_id(row, default_id),
        prompt,
        answer=answer,
        split=row["split"] if row_names_split else split,
        metadata=unused | metadata | preference,
        group=_row_group(row),
    )


def _row_group(row: JsonObject) -> str:
    """Return the group that the row names; "" if it names none. The value stays in the metadata
    too.

    A `group` that is neither text nor a whole number is only metadata.
    """
    group = row.get("group")
    # A bool is an int in Python, so it has to be excluded separately.
    is_name = isinstance(group, str | int) and not isinstance(group, bool)
    return str(group) if is_name else ""


def _unused_values(row: JsonObject, shape: str, used_keys: set[str]) -> JsonObject:
    """Return the part of a row that becomes metadata: the values that nothing else uses, and the
    tools.

    Args:
        shape: the name that `shape_of` gives.
        used_keys: the keys that hold the prompt and the answer.

    Raises ValueError if the tools are not a list of objects.
    """
    unused = {key: row[key] for key in row if key not in used_keys and key not in RESERVED}
    tools = _tools_value(row, shape)
    if tools:
        # LLaMA-Factory's ShareGPT rows hold the tools as JSON text.
        unused["tools"] = _checked_row_tools(_json_or_same(tools))
    return unused


def _row_metadata(row: JsonObject) -> JsonObject:
    """Return the row's own `metadata`; {} if it has none. Raises ValueError if it is not an
    object."""
    metadata = row.get("metadata")
    if metadata is None:
        return {}
    if not isinstance(metadata, dict):
        raise ValueError(f"metadata is an object, got {type(metadata).__name__}")
    return metadata


def _tools_value(row: JsonObject, shape: str) -> Any:
    """Return the row's unchecked value for the tools of its task; empty or None if it has none."""
    tools = row.get("tools")
    if shape == PREFERENCE_OPENAI:  # these rows may hold the tools beside the prompt, in "input"
        return tools or row["input"].get("tools")
    return tools


def _task_id(row: JsonObject, default_id: str) -> str:
    """Return the row's id as text, or `default_id` if the row has none.

    Raises ValueError if the id is neither text nor a whole number.
    """
    task_id = row["id"] if _has_value(row.get("id")) else default_id
    if isinstance(task_id, bool) or not isinstance(task_id, str | int):
        raise ValueError(f"id is a string, got {type(task_id).__name__}")
    return str(task_id)


def _refuse_untrainable(row: JsonObject, shape: str) -> None:
    """Raise ValueError if the row has a known format that nothing here can train on.

    Those are plain text to continue, half a preference, and an answer with a true/false label.
    `shape` is the name that `shape_of` gives, such as "prompt/completion"; "" if no prompt was
    found.
    """
    if not shape and isinstance(row.get("text"), str) and row["text"]:
        raise ValueError(_plain_text_message(row["text"]))
    has_chosen, has_rejected = _has_value(row.get(CHOSEN)), _has_value(row.get(REJECTED))
    if not shape and (has_chosen or has_rejected):
        missing = REJECTED if has_chosen else CHOSEN
        raise ValueError(f"a preference needs chosen and rejected; {missing} is missing")
    has_prompt_and_answer = "/" in shape
    if isinstance(row.get("label"), bool) and has_prompt_and_answer:
        raise ValueError(
            "label true or false says whether one answer is good (KTO), which nothing here learns "
            "from: keep the good rows without label, or pair them as chosen and rejected"
        )


def _plain_text_message(text: str) -> str:
    """Return why a row that holds a single text is refused, and what to write instead."""
    reason = "is plain text to continue; training here is on questions and answers"
    if "<|im_start|>" in text or "[INST]" in text:
        reason = "is a chat with its template written out; the model's own template is used here"
    return f"text {reason}: write prompt and completion, or messages"


def _read_preference(row: JsonObject, shape: str) -> tuple[Any, JsonObject, set[str]]:
    """Read a preference row: a prompt and two answers to it, one better than the other.

    Returns the prompt (a string or messages), the answers as {"chosen": messages, "rejected":
    messages} in plain dicts, and the row's keys that hold prompt and answers. If an answer repeats
    the prompt at its beginning, the repetition is removed.

    Raises ValueError if an answer is not the assistant's, if both answers are equal, or if the row
    has no prompt of its own and its two chats have no common beginning.
    """
    better_key, worse_key = CHOSEN, REJECTED
    if shape == PREFERENCE_OPENAI:
        better_key, worse_key = "preferred_output", "non_preferred_output"
    prompt, prompt_keys = _preference_prompt(row, shape)
    better = _answer_messages(row[better_key], better_key)
    worse = _answer_messages(row[worse_key], worse_key)
    # Without a prompt of its own the row holds two whole chats, which begin with the prompt.
    if prompt is None:
        prompt = _common_start(better, worse)
    prompt_messages = [Message("user", prompt)] if isinstance(prompt, str) else list(prompt)
    chosen = _after_prompt(better, prompt_messages, better_key)
    rejected = _after_prompt(worse, prompt_messages, worse_key)
    if chosen == rejected:
        raise ValueError("chosen and rejected are the same answer")
    return prompt, {CHOSEN: chosen, REJECTED: rejected}, prompt_keys | {better_key, worse_key}


def _after_prompt(answer: list[Message], prompt: list[Message], key: str) -> list[ChatMessage]:
    """Return one answer of a preference as plain dicts, without the prompt that it may repeat.

    `key` is the row's field that holds the answer, for error messages. Raises ValueError unless the
    remaining messages begin and end with the assistant.
    """
    reply = _without_prompt(answer, prompt)
    if reply[0].role != "assistant" or reply[-1].role != "assistant":
        raise ValueError(f"{key} begins and ends with the assistant, after the prompt")
    return [message.to_dict() for message in reply]


def _preference_prompt(row: JsonObject, shape: str) -> tuple[Any, set[str]]:
    """Return the prompt of a preference row (a string or messages) and the row's keys that hold it.

    Returns (None, set()) if the row has no key for the prompt, because both answers begin with it.
    Raises ValueError if the prompt cannot be read.
    """
    # A row of OpenAI: its prompt is the chat in row["input"]["messages"].
    if shape == PREFERENCE_OPENAI:
        if not isinstance(row.get("input"), dict):
            raise ValueError("input is an object with messages beside preferred_output")
        return _parsed_messages(row["input"].get("messages"), "input.messages"), {"input"}
    prompt_key = _prompt_key(row)
    if not prompt_key:
        return None, set()
    if prompt_key in CHATS:
        return _parsed_messages(row[prompt_key], prompt_key), {prompt_key}
    return _read_prompt(row, prompt_key)


def _without_prompt(answer: list[Message], prompt: list[Message]) -> list[Message]:
    """Remove the prompt from the beginning of an answer that repeats it, with or without its system
    message.

    An answer that does not begin with the prompt, or consists of nothing else, is returned
    unchanged.
    """
    without_system = [message for message in prompt if message.role != "system"]
    for start in (prompt, without_system):  # UltraFeedback repeats the prompt in each answer
        if start and answer[: len(start)] == start and len(answer) > len(start):
            return answer[len(start) :]
    return answer


def _preference_beside_answer(row: JsonObject) -> JsonObject:
    """Return the preference of a row that also has an answer of its own: {"chosen": messages,
    "rejected": messages} in plain dicts.

    Returns {} if the row has no preference or if it cannot be read: its values then stay ordinary
    metadata.
    """
    shape = _preference_shape(row)
    if not shape:
        return {}
    try:
        _prompt, preference, _used_keys = _read_preference(row, shape)
    except ValueError:
        return {}
    return preference


def _answer_messages(value: Any, key: str) -> list[Message]:
    """Return one answer of a preference as messages. Raises ValueError unless it is text or
    messages."""
    if isinstance(value, dict):  # ShareGPT's pairs hold a single message
        return [_parsed_message(value)]
    if isinstance(value, list):
        return _parsed_messages(value, key)
    text = _text_or_chat(value, key)
    assert isinstance(text, str)  # a list was handled above
    return [Message("assistant", text)]


def _common_start(chosen: list[Message], rejected: list[Message]) -> list[Message]:
    """Return the prompt of two chats: the messages with which both begin.

    Assistant messages at the end of this common part belong to the answers and are left out. Raises
    ValueError if nothing remains, because then the prompt is missing.
    """
    shorter_length = min(len(chosen), len(rejected))
    count = 0  # how many messages the prompt has
    while count < shorter_length and chosen[count] == rejected[count]:
        count += 1
    while count and chosen[count - 1].role == "assistant":  # the prompt ends before an answer
        count -= 1
    if not count:
        raise ValueError(
            "chosen and rejected have no common beginning: give the question as prompt, or both as "
            "messages with the question first"
        )
    return chosen[:count]


def _prompt_key(row: JsonObject) -> str:
    """Return the key that holds the prompt of a preference row; "" if the answers hold the
    prompt."""
    prompt_keys = [prompt_key for prompt_key, _answer_keys in PAIRS]
    for key in (*prompt_keys, *CHATS):
        if _has_value(row.get(key)):
            return key
    return ""


def _prompt_and_answer(row: JsonObject, shape: str) -> tuple[Any, Any, set[str]]:
    """Read the prompt and the answer of a row.

    Returns:
        The prompt (a string or messages), the answer (a string or messages; None if the row has
        none), and the row's keys that hold the two, which therefore do not become metadata.

    Raises ValueError if there is no prompt, or if it is neither text nor a chat.
    """
    if not shape:
        raise ValueError(_no_prompt_message(row))
    if shape in CHATS:
        prompt, answer = _split_chat(row[shape])
        return _with_system(prompt, row.get("system")), answer, {shape}
    prompt_key, _, answer_key = shape.partition("/")
    prompt, prompt_keys = _read_prompt(row, prompt_key)
    answer = _text_or_chat(row[answer_key], answer_key) if answer_key else None
    # Without an answer `answer_key` is "", which is harmless here because no row has that key.
    return prompt, answer, prompt_keys | {answer_key}


def _with_system(prompt: list[Message], system: Any) -> list[Message]:
    """Return a chat's prompt with the row's `system` text as first message, unless the prompt
    already begins with a system message."""
    if isinstance(system, str) and system and prompt[0].role != "system":
        return [Message("system", system), *prompt]
    return prompt


def _no_prompt_message(row: JsonObject) -> str:
    """Return the error text for a row in which no prompt was found: that the key of a prompt is
    empty, or else which keys the row has (at most 8)."""
    for prompt_key, _answer_keys in PAIRS:
        if prompt_key in row and not _has_value(row[prompt_key]):
            return f"{prompt_key} is empty"
    keys = ", ".join(sorted(row)[:8]) or "none"
    return f"no prompt found among its keys ({keys})"


def _read_prompt(row: JsonObject, prompt_key: str) -> tuple[Any, set[str]]:
    """Return the prompt that the row holds under `prompt_key` (text or messages), and the keys of
    the row that went into the prompt.

    A `system` text of the row becomes the first message. An `input` beside an `instruction` is
    appended to the instruction as a paragraph.
    """
    prompt_keys = {prompt_key}
    prompt = _text_or_chat(row[prompt_key], prompt_key)
    if prompt_key == "instruction" and _has_value(row.get("input")):
        prompt = f"{prompt}\n\n{row['input']}"
        prompt_keys.add("input")
    if _has_value(row.get("system")):
        messages = prompt if isinstance(prompt, list) else [Message("user", prompt)]
        prompt = [Message("system", str(row["system"])), *messages]
    return prompt, prompt_keys


def _split_chat(items: list[Any]) -> tuple[list[Message], list[Message] | None]:
    """Split a chat into (prompt, answer) before its first assistant message.

    `items` are messages in OpenAI's format ("role", "content") or ShareGPT's ("from", "value"). The
    answer is None if the chat has no assistant message.

    Raises ValueError if the chat is empty, begins with the assistant, has an answer but does not
    end with the assistant, or holds a message that cannot be read.
    """
    messages = [_parsed_message(item) for item in items]
    if not messages:
        raise ValueError("messages is empty")
    roles = [message.role for message in messages]
    if "assistant" not in roles:
        return messages, None
    answer_start = roles.index("assistant")
    if answer_start == 0:
        raise ValueError("messages begins with the assistant; there is no prompt")
    if roles[-1] != "assistant":
        raise ValueError(f"messages ends with {roles[-1]}, not with the assistant")
    return messages[:answer_start], messages[answer_start:]


def _parsed_messages(value: Any, key: str) -> list[Message]:
    """Return a list of messages in OpenAI's or ShareGPT's format as `Message` objects.

    Raises ValueError if `value` is not a list, is empty, or holds a message that cannot be read.
    `key` is the row's field, for the error message.
    """
    if not isinstance(value, list) or not value:
        raise ValueError(f"{key} is a list of messages")
    return [_parsed_message(item) for item in value]


def _parsed_message(item: Any) -> Message:
    """Parse one message in OpenAI's or ShareGPT's format. Raises ValueError if it cannot be read.

    A ShareGPT message from `function_call` becomes an assistant message with that tool call.
    """
    if not isinstance(item, dict):
        return Message.from_dict(item)  # raises the ValueError, as `item` is no dict
    if "role" not in item and "from" in item:
        if str(item["from"]) == _FUNCTION_CALL:
            return Message("assistant", tool_calls=[_call_in_text(item.get("value"))])
        item = {**item, "role": _role_of_speaker(item["from"]), "content": item.get("value")}
    if item.get(_FUNCTION_CALL):
        raise ValueError("function_call is OpenAI's old form; write tool_calls")
    _check_weight(item.get("weight", 1))
    return Message.from_dict(item)


def _role_of_speaker(speaker: Any) -> str:
    """Return the role for a ShareGPT speaker (its `from`), e.g. "gpt" -> "assistant". Raises
    ValueError for an unknown speaker."""
    role = SHAREGPT.get(str(speaker))
    if role is None:
        raise ValueError(f"unknown speaker {speaker!r}")
    return role


def _check_weight(weight: Any) -> None:
    """Raise ValueError unless a message's `weight` is 1, which means that the message is learnt.

    The weight 0 (not learnt) is a known value that cannot be followed here; it gets its own text.
    """
    if weight not in (0, 1) or isinstance(weight, bool):
        raise ValueError(f"weight is 0 or 1, got {weight!r}")
    if weight == 0:
        raise ValueError(
            "a message has the weight 0, and each answer of a row is learnt: cut the row there, or "
            'train with loss_on = "last" and leave the weights out'
        )


def _call_in_text(value: Any) -> ToolCall:
    """Parse a ShareGPT tool call: {"name", "arguments"} as JSON text or as an object.

    Raises ValueError if the value is neither.
    """
    call = _json_or_same(value)
    if not isinstance(call, dict):
        raise ValueError("function_call is no JSON object with name and arguments")
    return ToolCall.from_dict(call)


def _json_or_same(value: Any) -> Any:
    """Return the JSON value of a text; return `value` unchanged if it is not text or not JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _text_or_chat(value: Any, key: str) -> str | list[Message]:
    """Return a string unchanged, a number as a string, and a list as messages.

    Raises ValueError for any other type; `key` names the value in the error message.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return [_parsed_message(item) for item in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise ValueError(f"{key} is text or messages, got {type(value).__name__}")


def _checked_row_tools(value: Any) -> list[Any]:
    """Return a row's `tools`. Raises ValueError unless they are a list of objects."""
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise ValueError("tools is a list of function schemas")
    return value


def _has_value(value: Any) -> bool:
    """Whether a value counts as given: it is not None, "" or [] (0 and False count)."""
    return value is not None and value != "" and value != []

#!/bin/sh
# Hands the task to `llm`, which asks the model, calls `lookup` where the model wants it, and prints
# the last answer. The exit status is the reward: 0 where the answer has the price, 1 where it has
# not, 2 where `llm` did not work. gpt-4o-mini is a name that `llm` knows; any does here.
export LLM_USER_PATH="$PWD/.llm"
answer=$(llm prompt --model gpt-4o-mini --functions tools.py --chain-limit 4 --no-log \
    "$HONESMITH_PROMPT") || exit 2
price=$(sed -n 's/.*"price": \([0-9]*\).*/\1/p' "$HONESMITH_TASK")
[ "$answer" = "$price" ]

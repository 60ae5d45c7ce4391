#!/bin/sh
# Asks the model once, with curl. The exit status is the reward: 0 where the reply is a whole
# sentence with the right sum, 1 where it is not, 2 where the model could not be asked.
reply=$(curl -sf "$OPENAI_BASE_URL/chat/completions" \
    -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" \
    -d "{\"messages\": [{\"role\": \"user\", \"content\": \"$HONESMITH_PROMPT\"}]}") || exit 2
answer=$(printf '%s' "$reply" | sed -n 's/.*"content":"\([^"]*\)".*/\1/p')
expected=$(sed -n 's/.*"sum": \([0-9]*\).*/\1/p' "$HONESMITH_TASK")
[ "$answer" = "The answer is $expected." ]

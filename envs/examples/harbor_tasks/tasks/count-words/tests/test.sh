#!/bin/bash
# 1 for the right number alone, else 0.
expected=$(wc -w < /tests/letter.txt)
if [ "$(tr -d '[:space:]' < /app/count.txt)" = "$expected" ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi

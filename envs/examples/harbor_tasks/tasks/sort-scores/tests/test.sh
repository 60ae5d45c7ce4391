#!/bin/bash
# The share of the lines that are in their place, and whether all are.
right=0
for line in 1 2 3 4; do
  expected=$(sed -n "${line}p" /tests/best.txt)
  if [ "$(sed -n "${line}p" /app/best.txt)" = "$expected" ]; then right=$((right + 1)); fi
done
if [ $right = 4 ] && [ "$(wc -l < /app/best.txt)" = 4 ]; then whole=1; else whole=0; fi
echo "{\"reward\": $whole, \"lines\": 0.$((right * 25))}" | sed 's/0\.100/1.0/' \
  > /logs/verifier/reward.json

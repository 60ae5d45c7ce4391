#!/bin/bash
# Two names that the instruction does not have.
reward=1
for name in Nuria "Jan Erik"; do
  [ "$(bash /app/greet.sh "$name")" = "Hello, $name!" ] || reward=0
done
echo $reward > /logs/verifier/reward.txt

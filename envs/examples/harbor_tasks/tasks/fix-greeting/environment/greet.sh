#!/bin/bash
if [ $# -eq 1 ; then
  echo "Hello, $0!"
fi

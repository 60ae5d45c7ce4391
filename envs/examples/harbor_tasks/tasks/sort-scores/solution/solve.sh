#!/bin/bash
sort -t, -k2,2nr /app/scores.csv | cut -d, -f1 > /app/best.txt

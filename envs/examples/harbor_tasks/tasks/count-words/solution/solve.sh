#!/bin/bash
wc -w < /app/letter.txt > /app/count.txt

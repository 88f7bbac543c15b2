#!/bin/bash
cp /solution/Makefile /app/site/Makefile
cd /app/site && make clean && make

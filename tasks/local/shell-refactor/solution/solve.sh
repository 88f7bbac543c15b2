#!/bin/bash
cd /app/snap || exit
cp /solution/snap/* . && bash test.sh

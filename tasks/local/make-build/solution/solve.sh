#!/bin/bash
set -e
cd /app/calc
sed -i 's/^OBJS = .*/OBJS = main.o parse.o power.o/; s/-o $@ $(OBJS)/-o $@ $(OBJS) -lm/' Makefile
sed -i "/'-'/,/product/ s/value += product/value -= product/" parse.c
make
make test

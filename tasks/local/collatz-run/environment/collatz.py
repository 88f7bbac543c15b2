"""Longest Collatz chain of a start value below N. Usage: python3 collatz.py N

Prints a line of progress every fifth of the way and the result at the end.
"""

import sys


def chain(start):
    steps = 1
    while start != 1:
        start = start // 2 if start % 2 == 0 else 3 * start + 1
        steps += 1
    return steps


def main():
    limit = int(sys.argv[1])
    best = (0, 0)
    for start in range(1, limit):
        best = max(best, (chain(start), start))
        if start % (limit // 5) == 0:
            print(f"searched {start} of {limit}, so far {best[1]} with {best[0]} terms", flush=True)
    print(f"result: {best[1]} {best[0]}")


main()

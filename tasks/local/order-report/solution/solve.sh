#!/bin/bash
awk -F, 'NR > 1 && NF == 7 && $7 != "cancelled" { n[$3]++; sum[$3] += $5 * $6 }
  END { for (r in n) printf "%s\t%d\t%.2f\n", r, n[r], sum[r] }' /app/orders.csv |
	LC_ALL=C sort -t "$(printf '\t')" -k3,3 -rn >/app/report.tsv

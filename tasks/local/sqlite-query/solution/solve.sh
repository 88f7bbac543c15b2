#!/bin/bash
sqlite3 -csv /app/shop.db "
  SELECT c.name, SUM(i.quantity * i.cents) AS spent
  FROM customers c JOIN orders o ON o.customer_id = c.id JOIN items i ON i.order_id = o.id
  WHERE o.state = 'paid' AND o.day BETWEEN '2025-01-01' AND '2025-12-31'
  GROUP BY c.id ORDER BY spent DESC LIMIT 5" | tr -d '\r' >/app/top.csv

#!/bin/bash
mkdir -p /logs/verifier
echo 0 >/logs/verifier/reward.txt
cat >/tmp/expected.txt <<'TEXT'
From: [EMAIL]
To: [EMAIL]
Subject: order 4711-2025

Hello, my card [CARD] was charged twice on 2025-03-04.
Please answer to [EMAIL] or call +49 30 1234567.
--
From: [EMAIL]
The invoice 2025-0000-1111 is fine. My new card is [CARD],
valid from 2025. Version 1.2.3 of the app shows 16 digits: [CARD].
Write to [EMAIL], not to @grace or to grace at home.
--
Reference 123456789012345 has 15 digits and stays.
Build 40001234567890109999 has 20 digits and stays, too.
Contact: [EMAIL] and [EMAIL]; end of list.
TEXT
if diff /tmp/expected.txt /app/redacted.txt; then
	echo "redacted.txt is right"
	echo 1 >/logs/verifier/reward.txt
fi

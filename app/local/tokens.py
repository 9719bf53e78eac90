"""The tiny vocabulary of the embedded tasks: digits, letters and a few marks."""

from __future__ import annotations

DIGITS = tuple(range(0, 10))
LETTERS = tuple(range(10, 36))
PAD, BOS, EOS, SPELL, SORT, ANSWER = 36, 37, 38, 39, 40, 41

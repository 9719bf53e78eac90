"""How many rows a window needs, and simple rows: slime's, base's, global FFD (Section 3.1)."""

"""Better rows by search: rescoring, moves, annealing, row order (Section 4.1)."""

"""Pure planning decisions: where experts live and which trajectories share a row.

Reads in the order of the paper: `window` and `topology` (what is given), `placement` (Section
3.2), `packing` and the row files (Section 3.1), `cost` and `score` (Section 3.4), the searches
(Section 4.1), `policy` (one call for each decision) and `plan` (what training executes).
"""

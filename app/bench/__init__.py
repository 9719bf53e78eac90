"""What the planner must show, measured: one file per bench, bars in `bars`."""

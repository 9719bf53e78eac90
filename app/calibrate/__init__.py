"""Calibration: the cost model of Section 2.2 fitted to measured times."""

"""Command line, configuration, training loops, metrics and reports."""

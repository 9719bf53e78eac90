"""What writes `docs/`: the tables of the configuration and the metrics, and the pictures."""

"""The estimate of missing demand; recorded windows use the same rule, so it lives with them."""

from planner.recorded.estimate import demand_shares, estimate_counts

__all__ = ["demand_shares", "estimate_counts"]

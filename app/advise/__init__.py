"""Advice from a user's own rollouts: what RoutePack would save on their job, modelled."""

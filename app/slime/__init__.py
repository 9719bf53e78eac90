"""RoutePack inside slime: what `app.slime_train` needs beyond the two hook packages.

`flags` and `config` read the user's choices, `seams` checks slime before anything starts,
`planning` is one rollout's decisions, `planner_actor` runs them in a Ray actor of its own,
`manager` and `actor` are the subclasses of slime's RolloutManager and train actor. slime, Ray and
Megatron are imported inside functions, so every module here can be read and tested without them.
"""

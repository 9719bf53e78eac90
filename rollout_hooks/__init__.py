"""From SGLang's routed experts to a sealed, planned optimizer window.

`routed_experts` decodes the wire format, `counts` reduces token-level routing to demand `[L, E]` as
each trajectory completes, `trajectory` holds one completed rollout, and `seal` turns a rollout
batch into the planner's window. Everything here speaks logical expert ids.
"""

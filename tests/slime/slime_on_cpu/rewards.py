"""`--custom-rm-path`: right answers end in token 3; prompts that end in DULL have none."""

from __future__ import annotations

from slime_on_cpu.engine import DULL


async def reward(args, sample, **kwargs) -> float:
    """slime's hook (slime/rollout/rm_hub)."""
    num_prompt = len(sample.tokens) - sample.response_length
    return float(sample.tokens[-1] == 3 and sample.tokens[num_prompt - 1] != DULL)

"""`--custom-reward-post-process-path`: rollout 1 takes ROUTEPACK_TEST_SLEEP seconds."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path


def rewards(args, samples):
    """slime's hook (ray/rollout.py); writes when each rollout's conversion ended."""
    rollout_id = samples[0].index // 16
    if rollout_id == 1:
        time.sleep(float(os.environ["ROUTEPACK_TEST_SLEEP"]))
    path = Path(os.environ["ROUTEPACK_TEST_OUTPUT"]) / f"generated-{rollout_id}.json"
    path.write_text(json.dumps(time.time()))
    raw = [sample.reward for sample in samples]
    return raw, [value - sum(raw) / len(raw) for value in raw]

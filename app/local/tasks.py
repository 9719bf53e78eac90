"""Two families of verifiable tasks with different tokens and long-tailed lengths.

spell: go through the alphabet from a letter for a number of steps. sort: write a string of digits
in ascending order. Both answers end with EOS; their lengths are lognormal, and a policy that stops
too early or too late loses reward.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from app.config import TasksConfig
from app.local.tokens import ANSWER, BOS, DIGITS, EOS, LETTERS, SORT, SPELL


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One prompt and its right answer, as int64 token ids; the answer ends with EOS."""

    family: str
    prompt: np.ndarray
    answer: np.ndarray


def draw_task(config: TasksConfig, rng: np.random.Generator) -> Task:
    """Draw one task; lengths are lognormal, cut at `length_max`."""
    draw = np.exp(np.log(config.length_median) + config.length_sigma * rng.standard_normal())
    length = int(np.clip(round(draw), config.length_min, config.length_max))
    if rng.random() < config.spell_share:
        start = int(rng.integers(len(LETTERS)))
        family, mark = "spell", SPELL
        text = np.array([LETTERS[start], *(DIGITS[int(d)] for d in f"{length:03d}")])
        answer = np.array(LETTERS)[(start + np.arange(length)) % len(LETTERS)]
    else:
        family, mark = "sort", SORT
        text = rng.choice(DIGITS, size=length)
        answer = np.sort(text)
    return Task(
        family=family,
        prompt=np.array([BOS, mark, *text, ANSWER], dtype=np.int64),
        answer=np.array([*answer, EOS], dtype=np.int64),
    )


def reward(task: Task, response: np.ndarray) -> float:
    """Share of positions that are right, over the longer of answer and response; in [0, 1]."""
    num_shared = min(len(task.answer), len(response))
    num_right = int((task.answer[:num_shared] == response[:num_shared]).sum())
    return num_right / max(len(task.answer), len(response), 1)

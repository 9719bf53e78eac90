"""Small parts of the embedded trainer: tasks, advantages, loss, statistics, figures."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.config import TasksConfig
from app.config.model import VOCAB_SIZE
from app.local.grpo import advantages, low_variance_kl, policy_loss
from app.local.steps import split_steps
from app.local.tasks import draw_task, reward
from app.local.tokens import EOS
from app.results.figures import write_figures
from app.results.statistics import spread
from train_hooks.micro_batch import TrainingTrajectory, pack


@given(st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_the_right_answer_earns_one_and_a_cut_or_long_one_less(seed, share):
    task = draw_task(TasksConfig(spell_share=share), np.random.default_rng(seed))
    assert task.answer[-1] == EOS and task.prompt.max() < VOCAB_SIZE
    assert reward(task, task.answer) == 1.0
    assert reward(task, task.answer[:-1]) < 1.0
    assert reward(task, np.append(task.answer, EOS)) < 1.0
    assert reward(task, task.answer[:0]) == 0.0


def test_the_two_families_use_different_tokens_and_long_tails():
    rng = np.random.default_rng(0)
    tasks = [draw_task(TasksConfig(), rng) for _ in range(400)]
    answers = {
        f: np.concatenate([t.answer[:-1] for t in tasks if t.family == f])
        for f in ("spell", "sort")
    }
    assert not set(answers["spell"]) & set(answers["sort"])
    lengths = np.array([len(t.answer) for t in tasks])
    assert np.percentile(lengths, 95) > 3 * np.median(lengths)


@given(st.lists(st.floats(0, 1), min_size=8, max_size=8))
def test_advantages_are_centred_within_each_group(rewards):
    group = np.array([0, 0, 0, 0, 5, 5, 5, 5])
    result = advantages(np.array(rewards), group)
    assert abs(result[:4].sum()) < 1e-6 and abs(result[4:].sum()) < 1e-6


def cell(*lengths: int):
    trajectories = []
    for n in lengths:
        generator = torch.Generator().manual_seed(n)
        noise = lambda g=generator, n=n: torch.rand(n - 1, generator=g)
        mask = torch.ones(n - 1)
        targets = {
            "mask": mask,
            "weight": mask,
            "old_log_probs": -noise(),
            "advantages": noise() - 0.5,
        }
        trajectories.append(
            TrainingTrajectory(tokens=torch.arange(n), routed=None, counts=None, targets=targets)
        )
    return trajectories


def test_the_loss_does_not_depend_on_how_trajectories_are_packed():
    trajectories = cell(4, 9, 5, 7)
    loss = policy_loss(normaliser=21, ratio_clip=0.2)

    def total(*cells):
        batches = [pack(0, list(c)) for c in cells]
        return sum(loss(-0.5 * torch.ones(b.num_positions), b)[0].item() for b in batches)

    a, b, c, d = trajectories
    assert total((a, b, c, d)) == pytest.approx(total((a,), (b,), (c,), (d,)), rel=1e-6)
    assert total((a, b), (c, d)) == pytest.approx(total((d, a), (b, c)), rel=1e-6)
    assert total((a, b), (c,)) != pytest.approx(total((a, b), (c, d)), rel=1e-3)


def test_the_ratio_is_clipped_where_it_helps_the_policy():
    batch = pack(0, cell(4))
    batch.targets["old_log_probs"][:] = -1.0
    batch.targets["advantages"][:] = 1.0
    low, metrics = policy_loss(3, 0.2)(torch.full((3,), -0.1), batch)
    assert low.item() == pytest.approx(-1.2)
    assert metrics["clip_fraction"] == 1
    batch.targets["advantages"][:] = -1.0
    high, metrics = policy_loss(3, 0.2)(torch.full((3,), -0.1), batch)
    assert high.item() == pytest.approx(np.exp(0.9), rel=1e-5)
    assert metrics["clip_fraction"] == 0, "the unclipped term is the larger one"


def test_the_kl_estimate_is_non_negative_and_its_mean_is_the_divergence():
    generator = torch.Generator().manual_seed(0)
    policy, reference = (0.5 * torch.randn(2, 50, generator=generator)).log_softmax(-1)
    exact = (policy.exp() * (policy - reference)).sum().item()
    estimate = low_variance_kl(policy, reference)
    assert (estimate >= 0).all()
    assert (policy.exp() * estimate).sum().item() == pytest.approx(exact, rel=1e-5)
    assert low_variance_kl(policy, policy).abs().max() == 0


def test_the_penalty_pulls_the_policy_back_to_the_reference():
    batch = pack(0, cell(4))
    batch.targets["advantages"][:] = 0.0
    batch.targets["reference_log_probs"] = torch.full((3,), -1.0)
    log_probs = torch.full((3,), -0.5, requires_grad=True)
    loss, metrics = policy_loss(3, 0.2, kl_coef=0.1)(log_probs, batch)
    expected = np.exp(-0.5) - 1 + 0.5
    assert metrics["kl"].item() == pytest.approx(expected, rel=1e-5)
    assert loss.item() == pytest.approx(0.1 * expected, rel=1e-5)
    loss.backward()
    assert (log_probs.grad > 0).all(), "more likely than under the reference: made less likely"


def test_a_short_rollout_leaves_later_steps_a_group_less():
    group = np.array([7, 7, 2, 2, 9, 9, 4])
    steps = split_steps(group, 3)
    assert [s.tolist() for s in steps] == [[0, 1, 2, 3], [4, 5], [6]]
    with pytest.raises(ValueError, match="4 groups make no 5 optimizer steps"):
        split_steps(group, 5)


def test_pack_refuses_an_empty_cell():
    with pytest.raises(ValueError, match="row 3"):
        pack(3, [])


@given(st.lists(st.floats(0.5, 2), min_size=1, max_size=20))
def test_the_interval_holds_the_median(values):
    s = spread(values)
    assert s.low <= s.median <= s.high and s.q1 <= s.median <= s.q3


def test_a_figure_that_is_not_a_number_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a\.b is nan"):
        write_figures(tmp_path / "x.json", "test", {"a.b": float("nan")})
    assert not (tmp_path / "x.json").exists()

"""What the rank processes of test_optimizer_steps.py do."""

from __future__ import annotations

import app.local.cpu_megatron  # isort: skip  # noqa: F401  before megatron

from dataclasses import replace

import numpy as np

from app.local.admit import admit
from app.local.gradients import gather_gradients, gradient_difference
from app.local.rollout import sample_window
from app.local.session import open_session
from app.local.snapshot import restore, take_snapshot
from app.local.steps import rollout_inputs
from planner.policies import COMPARED
from rollout_hooks.admission import PlannerCalls

POLICIES = COMPARED


def policies_agree(config, weights: str, variants: dict) -> dict[str, dict]:
    """By variant: gradients of every optimizer step under each policy against off.

    variants: name -> fields of `config.train` and `config.planner` to replace.
    """
    found = {}
    for name, (train, planner) in variants.items():
        changed = replace(
            config,
            train=replace(config.train, **train),
            planner=replace(config.planner, **planner),
        )
        found[name] = _one_variant(changed, weights)
    return found


def _one_variant(config, weights: str) -> dict:
    session = open_session(config, weights)
    trainer = session.trainer
    rollout = sample_window(config, session.engine, 0)
    advantage = np.random.default_rng(0).standard_normal(len(rollout.rewards))
    reference = session.reference_log_probs(rollout.trajectories)
    result: dict = {"rows": {}, "dropped": {}, "positions": {}, "moved": {}, "cells": {}}
    result["worst"] = 0.0
    if reference is not None:
        result["reference_error"] = max(
            float(np.abs(r - t.logprobs).max()) for r, t in zip(reference, rollout.trajectories)
        )

    def inputs_of(policy):
        steps = config.train.num_steps_per_rollout
        admitted = admit(config, trainer, rollout.window, policy, PlannerCalls(), num_steps=steps)
        inputs = rollout_inputs(
            config,
            rollout.trajectories,
            advantage,
            admitted.plans,
            admitted.positions,
            reference,
        )
        return admitted, inputs

    admitted, inputs = inputs_of("off")
    trainer.step(*inputs[0], update=False)
    result["gradient"] = gather_gradients(trainer)["lm_head.weight"]
    result["first_rows"] = admitted.plans[0].rows.num_rows
    for batches, loss in inputs:
        trainer.step(batches, loss)  # away from the reference, so that KL and clipping are real
    start = take_snapshot(trainer)
    gradients, losses = {}, {}
    for policy in POLICIES:
        restore(trainer, start)
        admitted, inputs = inputs_of(policy)
        steps = []
        for batches, loss in inputs:
            steps.append(trainer.step(batches, loss, update=False))
            gradients[policy, len(steps) - 1] = gather_gradients(trainer)
        losses[policy] = [step.loss for step in steps]
        result["rows"][policy] = [plan.rows.num_rows for plan in admitted.plans]
        result["dropped"][policy] = [plan.rows.num_dropped for plan in admitted.plans]
        result["positions"][policy] = [len(p) for p in admitted.positions]
        result["cells"][policy] = [plan.rows.cell.tolist() for plan in admitted.plans]
        result["moved"][policy] = admitted.commit.num_moved
        result["padded"] = [b.tokens.size(1) for batches, _ in inputs for b in batches]
        scale = [step.loss_magnitude for step in steps]
        result["kl"] = [step.kl for step in steps]
    for policy in POLICIES[1:]:
        for k, magnitude in enumerate(scale):
            worst, _ = gradient_difference(gradients["off", k], gradients[policy, k])
            loss = abs(losses["off"][k] - losses[policy][k]) / magnitude
            result["worst"] = max(result["worst"], worst, loss)
    return result

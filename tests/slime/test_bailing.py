"""Ling 2.0: Megatron <-> Hugging Face names and layouts, and its Megatron arguments."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from app.models.bailing_args import SIZES, model_args  # noqa: E402
from app.models.bailing_moe_v2 import (  # noqa: E402
    export_tensor,
    group_qkv,
    load_tensor,
    ungroup_qkv,
)

HEADS, GROUPS, CHANNEL, HIDDEN, FFN, EXPERTS = 4, 2, 8, 16, 12, 4
ARGS = SimpleNamespace(num_attention_heads=HEADS, num_query_groups=GROUPS)
CONFIG = SimpleNamespace(
    num_attention_heads=HEADS, num_key_value_heads=GROUPS, tie_word_embeddings=False
)


class Reader(dict):
    """A checkpoint in memory, with slime's reader interface."""

    def get_tensor(self, name):
        return self[name]


def checkpoint() -> Reader:
    generator = torch.Generator().manual_seed(0)
    random = lambda *shape: torch.randn(*shape, generator=generator)
    state = Reader(
        {
            "model.word_embeddings.weight": random(32, HIDDEN),
            "model.norm.weight": random(HIDDEN),
            "lm_head.weight": random(32, HIDDEN),
        }
    )
    for layer in range(2):
        p = f"model.layers.{layer}."
        state |= {
            p + "input_layernorm.weight": random(HIDDEN),
            p + "attention.query_key_value.weight": random((HEADS + 2 * GROUPS) * CHANNEL, HIDDEN),
            p + "attention.query_layernorm.weight": random(CHANNEL),
            p + "attention.key_layernorm.weight": random(CHANNEL),
            p + "attention.dense.weight": random(HIDDEN, HEADS * CHANNEL),
            p + "post_attention_layernorm.weight": random(HIDDEN),
        }
        ffns = ["mlp."] if layer == 0 else [f"mlp.experts.{e}." for e in range(EXPERTS)]
        if layer == 1:
            ffns.append("mlp.shared_experts.")
            state |= {
                p + "mlp.gate.weight": random(EXPERTS, HIDDEN),
                p + "mlp.gate.expert_bias": random(EXPERTS),
            }
        for ffn in ffns:
            state |= {
                p + ffn + "gate_proj.weight": random(FFN, HIDDEN),
                p + ffn + "up_proj.weight": random(FFN, HIDDEN),
                p + ffn + "down_proj.weight": random(HIDDEN, FFN),
            }
    return state


def megatron_names() -> list[str]:
    names = ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight"]
    names.append("output_layer.weight")
    attention = "linear_qkv.layer_norm_weight linear_qkv.weight linear_proj.weight "
    attention += "q_layernorm.weight k_layernorm.weight"
    for layer in range(2):
        names += [f"decoder.layers.{layer}.self_attention.{name}" for name in attention.split()]
    names += [f"decoder.layers.0.mlp.linear_fc1.{n}" for n in ("layer_norm_weight", "weight")]
    names.append("decoder.layers.0.mlp.linear_fc2.weight")
    moe = ["pre_mlp_layernorm.weight", "mlp.router.weight", "mlp.router.expert_bias"]
    for matrix in ("linear_fc1.weight", "linear_fc2.weight"):
        moe.append(f"mlp.shared_experts.{matrix}")
        moe += [f"mlp.experts.{matrix}{e}" for e in range(EXPERTS)]
    return names + [f"decoder.layers.1.{name}" for name in moe]


def test_loading_and_exporting_gives_every_tensor_of_the_checkpoint_back():
    source, found = checkpoint(), {}
    for name in megatron_names():
        tensor = load_tensor(f"module.module.{name}", source, CONFIG)
        found |= dict(export_tensor(ARGS, f"module.module.{name}", tensor))
    assert found.keys() == source.keys()
    assert all(torch.equal(found[name], source[name]) for name in source)


def test_grouped_attention_puts_each_groups_query_heads_beside_its_key_and_value():
    heads = torch.arange(HEADS + 2 * GROUPS).repeat_interleave(CHANNEL)[:, None].float()
    grouped = group_qkv(heads, HEADS, GROUPS)[::CHANNEL, 0].tolist()
    assert grouped == [0, 1, 4, 6, 2, 3, 5, 7]  # q0 q1 k0 v0, q2 q3 k1 v1
    assert torch.equal(ungroup_qkv(group_qkv(heads, HEADS, GROUPS), HEADS, GROUPS), heads)


@pytest.mark.parametrize(
    "name", ["decoder.layers.1.mlp.router.bias", "mtp.layers.0.eh_proj.weight"]
)
def test_unknown_parameters_are_refused_by_name(name):
    with pytest.raises(KeyError, match=name):
        load_tensor(name, checkpoint(), CONFIG)
    with pytest.raises(ValueError, match=name):
        export_tensor(ARGS, name, torch.zeros(1))


@pytest.mark.parametrize("model", sorted(SIZES))
def test_arguments_say_what_the_router_does(model):
    flags = model_args(SIZES[model])
    value = dict(pairwise(flags))
    assert value["--moe-router-num-groups"] == "8" and value["--moe-router-group-topk"] == "4"
    assert value["--rotary-percent"] == "0.5" and value["--moe-router-score-function"] == "sigmoid"
    assert value["--moe-layer-freq"].startswith("[0,1,") and "--qk-layernorm" in flags
    assert "--moe-router-enable-expert-bias" in flags


def test_sizes_of_a_configuration_win_over_the_table():
    flags = model_args({**SIZES["ling-mini-2.0"], "num_hidden_layers": 3, "rope_theta": 1e6})
    value = dict(pairwise(flags))
    assert value["--moe-layer-freq"] == "[0,1,1]" and value["--rotary-base"] == "1000000"


@pytest.mark.slime
def test_registration_reaches_slimes_own_tables():
    from slime_on_cpu.install import install

    install()
    from slime.backends.megatron_utils import hf_to_megatron, megatron_to_hf

    from app.models import register_models

    register_models()
    register_models()
    assert hf_to_megatron._LOADERS["bailing_moe_v2"] is load_tensor
    args = SimpleNamespace(vocab_size=32, q_lora_rank=None, **vars(ARGS))
    name = "module.module.decoder.layers.1.mlp.experts.linear_fc2.weight3"
    out = megatron_to_hf.convert_to_hf(args, "bailingmoev2config", name, torch.ones(2, 2))
    assert [n for n, _ in out] == ["model.layers.1.mlp.experts.3.down_proj.weight"]

"""A tiny Qwen3-MoE checkpoint, its tokenizer, and rollout dumps with skewed routed experts."""

from __future__ import annotations

import json
from pathlib import Path

import torch

NUM_LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 2, 64, 4, 2, 16
NUM_EXPERTS, TOP_K, EXPERT_FFN, VOCAB = 8, 2, 32, 256
CONFIG = dict(
    architectures=["Qwen3MoeForCausalLM"],
    model_type="qwen3_moe",
    hidden_size=HIDDEN,
    num_hidden_layers=NUM_LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    intermediate_size=128,
    moe_intermediate_size=EXPERT_FFN,
    num_experts=NUM_EXPERTS,
    num_experts_per_tok=TOP_K,
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=[],
    vocab_size=VOCAB,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    tie_word_embeddings=False,
    max_position_embeddings=4096,
    hidden_act="silu",
    attention_bias=False,
    torch_dtype="bfloat16",
    router_aux_loss_coef=0.0,
    bos_token_id=0,
    eos_token_id=1,
)


def make_checkpoint(folder: Path, num_layers: int = NUM_LAYERS) -> None:
    """Write config.json, model.safetensors and the tokenizer."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, "num_hidden_layers": num_layers}
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)

    def random(*shape):
        return (torch.randn(*shape) * 0.05).bfloat16()

    ones = lambda size: torch.ones(size).bfloat16()
    state = {
        "model.embed_tokens.weight": random(VOCAB, HIDDEN),
        "lm_head.weight": random(VOCAB, HIDDEN),
        "model.norm.weight": ones(HIDDEN),
    }
    for layer in range(num_layers):
        p = f"model.layers.{layer}."
        state |= {
            p + "self_attn.q_proj.weight": random(HEADS * HEAD_DIM, HIDDEN),
            p + "self_attn.k_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
            p + "self_attn.v_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
            p + "self_attn.o_proj.weight": random(HIDDEN, HEADS * HEAD_DIM),
            p + "self_attn.q_norm.weight": ones(HEAD_DIM),
            p + "self_attn.k_norm.weight": ones(HEAD_DIM),
            p + "input_layernorm.weight": ones(HIDDEN),
            p + "post_attention_layernorm.weight": ones(HIDDEN),
            p + "mlp.gate.weight": random(NUM_EXPERTS, HIDDEN),
        }
        for e in range(NUM_EXPERTS):
            state |= {
                p + f"mlp.experts.{e}.gate_proj.weight": random(EXPERT_FFN, HIDDEN),
                p + f"mlp.experts.{e}.up_proj.weight": random(EXPERT_FFN, HIDDEN),
                p + f"mlp.experts.{e}.down_proj.weight": random(HIDDEN, EXPERT_FFN),
            }
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    _make_tokenizer(folder)


def _make_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<bos>": 0, "<eos>": 1, **{f"t{i}": i for i in range(2, VOCAB)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<bos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<eos>"
    ).save_pretrained(folder)


def make_rollouts(
    folder: Path,
    num_rollouts: int = 4,
    num_samples: int = 16,
    num_layers: int = NUM_LAYERS,
    num_experts: int = NUM_EXPERTS,
    top_k: int = TOP_K,
    num_siblings: int = 0,
    balanced_layers: slice = slice(0),
) -> None:
    """Write `rollout_{i}.pt` as slime's --save-debug-rollout-data does; experts 0 and 1 are hot.

    num_siblings: further samples, siblings of the first ones by `rollout_id`.
    balanced_layers: there each token goes to e and to E/2 + e, so that nothing is gained by a move.
    """
    from slime.utils.types import Sample

    generator = torch.Generator().manual_seed(1)
    weights = torch.tensor([8.0, 6] + [1] * (num_experts - 2))
    for rollout_id in range(num_rollouts):
        samples = []
        for i in range(num_samples + num_siblings):
            num_prompt = 4
            num_new = int(torch.randint(6, 40, (1,), generator=generator))
            total = num_prompt + num_new
            tokens = torch.randint(2, VOCAB, (total,), generator=generator).tolist()
            rows = weights.expand((total - 1) * num_layers, num_experts)
            routed = torch.multinomial(rows, top_k, generator=generator)
            routed = routed.reshape(total - 1, num_layers, top_k).to(torch.int32)
            at_random = routed[:, balanced_layers, :1] % (num_experts // 2)
            routed[:, balanced_layers] = at_random + torch.arange(top_k) * (num_experts // 2)
            sample = Sample(
                group_index=i % num_samples // 4,
                index=rollout_id * (num_samples + num_siblings) + i,
                rollout_id=i % num_samples if num_siblings else None,
                prompt="t2 t3",
                tokens=tokens,
                response="x",
                response_length=num_new,
                reward=float(tokens[-1] % 2),
                loss_mask=[1] * num_new,
                rollout_log_probs=[-5.5] * num_new,
                rollout_routed_experts=routed.numpy(),
                status=Sample.Status.COMPLETED,
                metadata={},
            )
            samples.append(sample.to_dict())
        torch.save(
            {"rollout_id": rollout_id, "samples": samples}, folder / f"rollout_{rollout_id}.pt"
        )


def make_prompts(folder: Path) -> None:
    """Write prompts.jsonl, and hard.jsonl: 4 is slow, 5, 7, 8 are dull (`slime_on_cpu.engine`)."""
    from slime_on_cpu.engine import DULL, SLOW

    hard = {4: SLOW, 5: DULL, 7: DULL, 8: DULL}
    for name, last in (("prompts", {}), ("hard", hard)):
        lines = [{"text": f"t5 t{10 + i} t{last.get(i, 30 + i)}"} for i in range(40)]
        text = "\n".join(json.dumps(line) for line in lines)
        (folder / f"{name}.jsonl").write_text(text + "\n")


def recorded(folder: Path) -> str:
    """Flags of a job that trains on the dumps, without any engine."""
    return (
        "--rollout-num-gpus 0 --debug-train-only --disable-rollout-global-dataset "
        f"--load-debug-rollout-data {folder}/rollout_{{rollout_id}}.pt"
    )


def generated(folder: Path, num_engine_gpus: int) -> str:
    """Flags of a job with one stand-in engine and slime's own rollout function."""
    return (
        f"--rollout-num-gpus {num_engine_gpus} --rollout-num-gpus-per-engine {num_engine_gpus} "
        f"--prompt-data {folder}/prompts.jsonl --input-key text --rollout-max-response-len 64 "
        "--custom-rm-path slime_on_cpu.rewards.reward"
    )


def arguments(
    folder: Path, *, num_gpus: int = 2, ep: int = 2, rollouts: str | None = None
) -> list[str]:
    """slime's command line for the tiny model on `num_gpus` CPU ranks."""
    return f"""
--train-backend megatron --actor-num-nodes 1 --actor-num-gpus-per-node {num_gpus}
--num-gpus-per-node {num_gpus} {rollouts or recorded(folder)}
--hf-checkpoint {folder}/hf --load {folder}/hf --ref-load {folder}/hf
--num-rollout 2 --rollout-batch-size 4 --n-samples-per-prompt 4
--global-batch-size 8 --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.01
--kl-loss-type low_var_kl --eps-clip 0.2 --use-dynamic-batch-size --max-tokens-per-gpu 128
--data-pad-size-multiplier 16 --spec slime_on_cpu.layer_spec get_spec --transformer-impl local
--distributed-backend gloo --num-layers 2 --hidden-size 64 --num-attention-heads 4
--group-query-attention --num-query-groups 2 --kv-channels 16 --qk-layernorm
--ffn-hidden-size 128 --moe-ffn-hidden-size 32 --num-experts 8 --moe-router-topk 2
--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none
--moe-router-dtype fp32 --moe-grouped-gemm --expert-model-parallel-size {ep}
--tensor-model-parallel-size 1 --normalization RMSNorm --norm-epsilon 1e-6 --swiglu
--disable-bias-linear --position-embedding-type rope --rotary-base 10000 --vocab-size 256
--make-vocab-size-divisible-by 1 --untie-embeddings-and-output-weights --no-rope-fusion
--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm
--no-bias-swiglu-fusion --no-bias-dropout-fusion --attention-dropout 0 --hidden-dropout 0
--optimizer adam --lr 1e-3 --lr-decay-style constant --weight-decay 0.0
--accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32 --seed 1234
--use-rollout-routing-replay
""".split()

"""Families with recurrent or convolution states, or with indexed attention; all of them verify trees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.model.families.families_with_trees import LATENT, ROUTED
from tests.model.families.family import Family

MIXED_LAYERS = ["linear_attention", "full_attention"]
DELTA = {
    "layer_types": MIXED_LAYERS,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
STATE_SPACE = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1}
LATENT_OF_ALL = {
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}


def with_state(
    name: str,
    config: str,
    options: Mapping[str, Any],
    note: str,
    in_4: str = "",
    without: tuple[str, ...] = (),
) -> Family:
    """Return a family that keeps states."""
    return Family(name, config, options, note=note, outcome_in_4=in_4, without=without)


STATES = [
    with_state("Mamba", "MambaConfig", {"state_size": 4}, "states alone"),
    with_state("Falcon Mamba", "FalconMambaConfig", {"state_size": 4}, "states alone"),
    with_state(
        "Mamba 2",
        "Mamba2Config",
        {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1, "expand": 2},
        "states alone",
    ),
    with_state(
        "Jamba",
        "JambaConfig",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "use_mamba_kernels": False,
            "mamba_d_state": 4,
            "num_experts": 2,
        },
        "Mamba beside attention",
        in_4="chains",
    ),
    with_state(
        "Bamba",
        "BambaConfig",
        {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_state": 4, "mamba_n_groups": 1},
        "Mamba 2 beside attention",
    ),
    with_state(
        "Falcon-H1",
        "FalconH1Config",
        {"mamba_d_ssm": 64, **STATE_SPACE},
        "Mamba 2 and attention in every layer",
    ),
    with_state(
        "Nemotron-H",
        "NemotronHConfig",
        {
            "num_hidden_layers": 4,
            "hybrid_override_pattern": "M-*-",
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 4,
            "n_groups": 1,
            "chunk_size": 16,
        },
        "Mamba 2 beside attention",
        in_4="absent",
    ),
    with_state(
        "Granite 4 hybrid",
        "GraniteMoeHybridConfig",
        {
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 48,
            **STATE_SPACE,
        },
        "Mamba 2 beside attention",
    ),
    with_state(
        "Zamba",
        "ZambaConfig",
        {
            "layers_block_type": ["mamba", "hybrid"],
            "use_mamba_kernels": False,
            "attention_hidden_size": 64,
            "attention_head_dim": 16,
            "n_mamba_heads": 2,
            "mamba_d_state": 4,
        },
        "Mamba in every layer, attention in some",
        in_4="chains",
    ),
    with_state(
        "Zamba 2",
        "Zamba2Config",
        {
            "layers_block_type": ["mamba", "hybrid"],
            "mamba_headdim": 8,
            "n_mamba_heads": 8,
            "mamba_d_state": 4,
            "mamba_ngroups": 1,
            "num_mem_blocks": 1,
        },
        "Mamba 2 in every layer, attention in some",
        in_4="chains",
    ),
    with_state("Qwen3-Next", "Qwen3NextConfig", {**DELTA, **MOE}, "gated delta rule"),
    with_state("Qwen3.5", "Qwen3_5TextConfig", DELTA, "gated delta rule", in_4="absent"),
    with_state(
        "Qwen3.5-MoE", "Qwen3_5MoeTextConfig", {**DELTA, **MOE}, "gated delta rule", in_4="absent"
    ),
    with_state("OLMo hybrid", "OlmoHybridConfig", DELTA, "gated delta rule", in_4="absent"),
    with_state(
        "Kimi Linear",
        "KimiLinearConfig",
        {
            "layer_types": MIXED_LAYERS,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            **LATENT_OF_ALL,
        },
        "delta rule with a decay a channel",
        in_4="absent",
        without=("head_dim",),
    ),
    with_state(
        "Ling 2.5",
        "BailingHybridConfig",
        {
            "layer_group_size": 2,
            "num_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 0,
            **LATENT_OF_ALL,
        },
        "delta rule with a decay a channel",
        in_4="absent",
        without=("head_dim",),
    ),
    with_state("LFM2", "Lfm2Config", {"layer_types": ["conv", "full_attention"]}, "convolutions"),
    with_state(
        "LFM2-MoE",
        "Lfm2MoeConfig",
        {
            "layer_types": ["conv", "full_attention"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "num_dense_layers": 1,
        },
        "convolutions",
        in_4="absent",
    ),
    with_state("Zaya", "ZayaConfig", {}, "convolutions within attention", in_4="absent"),
    with_state(
        "MiniMax",
        "MiniMaxConfig",
        {"layer_types": MIXED_LAYERS, "num_local_experts": 2},
        "lightning attention, in a cache class of its own",
    ),
    with_state(
        "DeepSeek-V3.2",
        "DeepseekV32Config",
        # With few index heads many keys are equally good, and any of them may be chosen.
        {**LATENT, **ROUTED, "index_topk": 8, "index_n_heads": 16, "index_head_dim": 8},
        "no states: indexed attention",
        in_4="absent",
        without=("head_dim",),
    ),
]

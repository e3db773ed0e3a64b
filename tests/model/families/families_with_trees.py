"""Families whose models verify trees: attention over keys and values, with positions from outside."""

from __future__ import annotations

from typing import Any

from tests.model.families.family import VOCAB, Family

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "num_key_value_heads": 4,
}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
MIXED_LAYERS = ["sliding_attention", "full_attention"]


def rope(kind: str, **options: Any) -> dict[str, Any]:
    """Return a rope setting that transformers 4.57 and 5.x both read."""
    return {"rope_scaling": {"rope_type": kind, "rope_theta": 10000.0, **options}}


LONGROPE = {
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 2.5, 3.0, 4.0],
    },
    "original_max_position_embeddings": 48,
    "max_position_embeddings": 192,
    "sliding_window": None,
}

TREES = [
    Family("Llama, grouped heads", "LlamaConfig"),
    # Texts stay within its window: beyond it, each pass drops other keys.
    Family(
        "Doge, short window",
        "DogeConfig",
        {"keep_window_size": 44},
        outcome_in_4="refused",
        note="refused before 5.18, whose passes see later tokens",
        right_since=18,
    ),
    Family(
        "Llama, yarn rope",
        "LlamaConfig",
        rope("yarn", factor=4.0, original_max_position_embeddings=32),
    ),
    Family(
        "Llama, llama3 rope",
        "LlamaConfig",
        rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    Family("Llama, linear rope", "LlamaConfig", rope("linear", factor=2.0)),
    Family("Qwen2", "Qwen2Config"),
    Family(
        "Qwen2, sliding window",
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        note="window of 8 in one of two layers",
    ),
    Family("Qwen3", "Qwen3Config"),
    Family("Qwen3-MoE", "Qwen3MoeConfig", MOE),
    Family("Mistral, sliding window", "MistralConfig", {"sliding_window": 8}, note="window of 8"),
    Family("Ministral", "MinistralConfig", {"sliding_window": 8, "layer_types": MIXED_LAYERS}),
    Family("Mixtral", "MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Family("Gemma", "GemmaConfig"),
    Family("Gemma 2", "Gemma2Config", {"sliding_window": 8, "query_pre_attn_scalar": 8}),
    Family(
        "Gemma 3 text",
        "Gemma3TextConfig",
        {"sliding_window": 8, "query_pre_attn_scalar": 8, "layer_types": MIXED_LAYERS},
    ),
    Family(
        "Gemma 3n text",
        "Gemma3nTextConfig",
        {
            "sliding_window": 8,
            "num_hidden_layers": 4,
            "layer_types": MIXED_LAYERS * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "laurel_rank": 4,
            "altup_num_inputs": 2,
            "intermediate_size": [48] * 4,
            "activation_sparsity_pattern": [0.0] * 4,
        },
        note="two layers share the cache of others",
    ),
    Family("Phi", "PhiConfig", {"num_key_value_heads": 4}),
    Family("Phi 3", "Phi3Config", {"sliding_window": None}),
    Family("Phi 3, sliding window", "Phi3Config", {"sliding_window": 8}),
    Family(
        "Phi 3, longrope",
        "Phi3Config",
        LONGROPE,
        note="read again at the border, as by transformers",
    ),
    Family("OLMo 2", "Olmo2Config"),
    Family("OLMo 3", "Olmo3Config", {"sliding_window": 8, "layer_types": MIXED_LAYERS}),
    Family(
        "SmolLM3", "SmolLM3Config", {"no_rope_layers": [1, 0]}, note="a layer without positions"
    ),
    Family("GPT-NeoX", "GPTNeoXConfig", {"rotary_pct": 0.5}),
    Family("GPT-2", "GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}),
    Family(
        "GPT-J",
        "GPTJConfig",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "rotary_dim": 4},
    ),
    Family(
        "CodeGen",
        "CodeGenConfig",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "rotary_dim": 4},
    ),
    Family("OPT", "OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    Family("StableLM", "StableLmConfig"),
    Family("Granite", "GraniteConfig"),
    Family(
        "GPT-OSS",
        "GptOssConfig",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "layer_types": MIXED_LAYERS,
            "rope_scaling": None,
        },
        note="attention sinks; eager attention",
    ),
    Family("DeepSeek-V2", "DeepseekV2Config", LATENT | ROUTED, note="latent attention"),
    Family(
        "DeepSeek-V3",
        "DeepseekV3Config",
        LATENT | ROUTED,
        without=("head_dim",),
        note="latent attention",
    ),
    Family("Cohere", "CohereConfig"),
    Family("Cohere 2", "Cohere2Config", {"sliding_window": 8, "layer_types": MIXED_LAYERS}),
    Family("StarCoder 2", "Starcoder2Config", {"sliding_window": 8}),
    Family("Falcon, rotary", "FalconConfig", {"alibi": False}, without=("head_dim",)),
    Family(
        "GPT-BigCode",
        "GPTBigCodeConfig",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512},
    ),
    Family("GLM-4", "Glm4Config"),
    Family("GLM-4 MoE", "Glm4MoeConfig", ROUTED | {"num_key_value_heads": 2}),
    Family(
        "EXAONE 4",
        "Exaone4Config",
        {"sliding_window": 8, "sliding_window_pattern": 2, "layer_types": MIXED_LAYERS},
    ),
    Family("Nemotron", "NemotronConfig"),
    Family("Seed-OSS", "SeedOssConfig"),
    Family("OLMoE", "OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    Family(
        "Llama 4 text",
        "Llama4TextConfig",
        {
            "attention_chunk_size": 8,
            "num_hidden_layers": 4,
            "num_local_experts": 2,
            "intermediate_size_mlp": 48,
            "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
            "no_rope_layers": [1, 1, 1, 0],
        },
        note="chunks of 8 positions; a layer without positions",
    ),
    Family(
        "Llama, dynamic rope",
        "LlamaConfig",
        rope("dynamic", factor=2.0) | {"max_position_embeddings": 48},
        note="plain steps beyond max_position_embeddings",
    ),
    Family(
        "Gemma 4 text",
        "Gemma4TextConfig",
        {
            "sliding_window": 8,
            "num_hidden_layers": 4,
            "layer_types": MIXED_LAYERS * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "global_head_dim": 16,
        },
        note="two layers share the cache of others",
        outcome_in_4="absent",
    ),
    Family("Arcee", "ArceeConfig"),
    Family("Persimmon", "PersimmonConfig"),
    Family("BitNet", "BitNetConfig"),
    Family("Apertus", "ApertusConfig"),
    Family("ERNIE 4.5", "Ernie4_5Config"),
    Family("Hunyuan dense", "HunYuanDenseV1Config"),
    Family(
        "JetMoe",
        "JetMoeConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8},
    ),
    Family("DiffLlama", "DiffLlamaConfig"),
    Family("BioGPT", "BioGptConfig"),
    Family("PhiMoE", "PhimoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Family("Granite MoE", "GraniteMoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Family("MiniCPM3", "MiniCPM3Config", LATENT, note="latent attention", outcome_in_4="absent"),
    Family("Ministral 3", "Ministral3Config", {"sliding_window": 8}, outcome_in_4="absent"),
    Family("BERT, as decoder", "BertConfig", {"is_decoder": True}, outcome_in_4="chains"),
    Family(
        "XGLM",
        "XGLMConfig",
        {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4},
        outcome_in_4="chains",
    ),
    Family(
        "CTRL",
        "CTRLConfig",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 48, "n_positions": 512},
        outcome_in_4="chains",
    ),
]

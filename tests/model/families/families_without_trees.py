"""Families whose models verify chains only, and families that are refused."""

from __future__ import annotations

from tests.model.families.family import Family

CHAINS = [
    Family(
        "BLOOM",
        "BloomConfig",
        {"n_head": 4, "n_layer": 2},
        "chains",
        "position_ids",
        note="alibi: positions follow the key index",
    ),
    Family(
        "MPT",
        "MptConfig",
        {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 512, "expansion_ratio": 2},
        "chains",
        "position_ids",
        note="alibi: positions follow the key index",
    ),
    Family(
        "Falcon, alibi",
        "FalconConfig",
        {"alibi": True},
        "chains",
        "alibi",
        without=("head_dim",),
        note="alibi: positions follow the key index",
    ),
    Family(
        "GPT-Neo",
        "GPTNeoConfig",
        {
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 8,
        },
        "chains",
        "windows of its local layers",
        note="window over key indices",
    ),
]
REFUSED = [
    Family(
        "RWKV",
        "RwkvConfig",
        {"attention_hidden_size": 32},
        "refused",
        "takes no past_key_values",
        note="its recurrent state is in no cache",
    ),
    Family(
        "RecurrentGemma",
        "RecurrentGemmaConfig",
        {"lru_width": 32, "num_hidden_layers": 3},
        "refused",
        "in an unknown way|past_key_values",
        note="its recurrent state is in its modules, where only one text has room",
    ),
    Family(
        "GPT (2018)",
        "OpenAIGPTConfig",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512},
        "refused",
        "takes no past_key_values",
        note="its forward takes no KV cache",
    ),
    Family(
        "T5",
        "T5Config",
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
        "refused",
        "encoder-decoder",
        without=("head_dim",),
        note="an encoder-decoder",
    ),
    Family(
        "BERT, as encoder",
        "BertConfig",
        {"is_decoder": False},
        "refused",
        "sees later tokens|chain is not lossless",
        note="sees the text after a token",
    ),
    Family(
        "RoBERTa, as encoder",
        "RobertaConfig",
        {"is_decoder": False},
        "refused",
        "sees later tokens|chain is not lossless",
        note="sees the text after a token",
    ),
]

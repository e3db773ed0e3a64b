"""A tiny Llama with a tokenizer of bytes, as a GGUF file and as the folder with the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType
from gguf.quants import quantize
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaForCausalLM

from tests.random_llama import random_llama

SPECIAL = ("<|endoftext|>", "<s>", "</s>")
TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
HEADS, KV_HEADS, LAYERS, HIDDEN, MLP, CONTEXT = 4, 2, 2, 32, 64, 2048
ROPE_BASE = 10000.0  # the default of LlamaConfig
LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def tokens() -> list[str]:
    """The vocabulary: special tokens, a token for each byte, spelt as GPT-2 does, and two pairs."""
    return [*SPECIAL, *sorted(ByteLevel.alphabet()), "ea", "th"]


def tiny_llama() -> LlamaForCausalLM:
    """A random Llama, of which few tokens win, so that texts repeat themselves."""
    model = random_llama(
        len(tokens()),
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=CONTEXT,
    )
    with torch.no_grad():
        winners = torch.zeros(len(tokens()), 1)
        winners[60:80] = 1
        model.lm_head.weight.mul_(winners)
    return model


def write_gguf(
    file: Path,
    model: LlamaForCausalLM,
    *,
    architecture: str = "llama",
    left_out: str | None = None,
    kind: str = "F32",
) -> Path:
    """Write a model as a GGUF file, its matrices in a type of llama.cpp's; `left_out` names a tensor that it is
    to lack.
    """
    writer = GGUFWriter(str(file), architecture)
    config = model.config
    writer.add_name("tiny")
    writer.add_file_type(LlamaFileType.MOSTLY_F16 if kind == "F16" else LlamaFileType.ALL_F32)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    add_tokenizer(writer)
    for name, tensor in model.state_dict().items():
        if (gguf_name := _gguf_name(name)) != left_out:
            numbers = _as_stored(name, tensor).contiguous().numpy()
            of_tensor = GGMLQuantizationType[kind if numbers.ndim == 2 else "F32"]
            writer.add_tensor(gguf_name, quantize(numbers, of_tensor), raw_dtype=of_tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def add_tokenizer(writer: Any) -> None:
    kinds = [TokenType.CONTROL] * len(SPECIAL) + [TokenType.NORMAL] * (len(tokens()) - len(SPECIAL))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens())
    writer.add_token_types(kinds)
    writer.add_token_merges(["e a", "t h"])  # transformers 4.57 takes no list of one
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)


def _gguf_name(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    _, _, layer, *part, kind = name.split(".")
    return f"blk.{layer}.{LAYER_NAMES['.'.join(part)]}.{kind}"


def _as_stored(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Interleave the two halves of each head's rotary dimensions, as llama.cpp stores a Llama."""
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    halves = tensor.view(heads, 2, -1, tensor.shape[1])
    return halves.transpose(1, 2).reshape(tensor.shape)

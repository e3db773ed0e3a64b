r"""Make a Llama model larger without changing its output.

Writes (or builds in memory) a model of a larger shape whose float32 logits equal the small model's,
so its greedy tokens are the same, while its forward pass costs what that shape costs. Speed-up depends
on that cost: end-to-end speed can be measured at the size of 150M, 1B or 7B parameters on any
machine, with no download.

With H0, H the old and new width, d0, d1 the old and new head size:
  - the residual stream is padded with zeros: whatever writes to the new channels is zero;
  - RMSNorm sees a mean square H0/H as large, so eps shrinks by H0/H and weights by sqrt(H0/H);
  - Hugging Face rotates channels (i, i + d/2) by theta^(-2i/d): old pair i goes to new pair
    i * d1/d0, whose frequency is the same; queries grow by sqrt(d1/d0) because scores are divided
    by sqrt(d1) now; new channels of an old query are zero;
  - new layers, heads, channels and feed-forward units are random, but their way out (`o_proj`,
    `down_proj`) is zero.
Making a model takes the memory that loading it takes.

Example:
    python -m scripts.enlarge --model-path data/demo/model --shape 150m --out demo-150m
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from model.commands.command_line import OptionParser, run_command, user_errors

# H width, A query heads, K key-value heads, d head size, V vocabulary.

NOISE_STD = 0.02  # Llama's own initialisation
# Random numbers are taken from one bank: drawing 6.5 billion would take minutes. The prime length
# keeps rows from repeating at a power of two.
NOISE_LENGTH = 1_048_573
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
COPIED_FILES = ("tokenizer*", "special_tokens_map.json", "*.jinja", "generation_config.json")
SHARD_BYTES = 1_000_000_000
# What writes to the residual stream, and the embedding.
ZERO_ELSEWHERE = ("o_proj", "down_proj", "embed_tokens")


def shape_of(
    layers: int, hidden: int, heads: int, intermediate: int, kv_heads: int
) -> dict[str, int]:
    """Return the sizes of a Llama by their names in its config."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": intermediate,
        "num_key_value_heads": kv_heads,
    }


SHAPES = {
    "150m": shape_of(layers=11, hidden=1024, heads=16, intermediate=2816, kv_heads=16),
    "1b": shape_of(layers=22, hidden=2048, heads=32, intermediate=5632, kv_heads=4),  # TinyLlama
    "7b": shape_of(layers=32, hidden=4096, heads=32, intermediate=11008, kv_heads=32),  # Vicuna-7B
}


def scale_config(config: LlamaConfig, shape: Mapping[str, int]) -> LlamaConfig:
    """Return the enlarged model's config.

    Raises:
        ValueError: if the small model is not a plain Llama, or the shape cannot hold it.
    """
    hidden = shape["hidden_size"]
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if (
        config.model_type != "llama"
        or getattr(config, "attention_bias", False)
        or getattr(config, "mlp_bias", False)
        or rope.get("rope_type", "default") != "default"
        or config.head_dim != config.hidden_size // config.num_attention_heads
    ):
        raise ValueError(
            f"model type: got {config.model_type}; allowed: llama without biases, with the default "
            "rope and heads of hidden / heads channels"
        )
    head_dim = hidden // shape["num_attention_heads"]
    large = LlamaConfig(
        **config.to_dict()
        | shape
        | {"head_dim": head_dim, "rms_norm_eps": config.rms_norm_eps * config.hidden_size / hidden}
    )
    for name in shape:
        least = getattr(config, name)
        if name == "num_key_value_heads":
            least *= _kv_copies(config, large)
        if shape[name] < least:
            raise ValueError(
                f"{name}: got {shape[name]}; allowed for this model: {least} or more; give a larger shape"
            )
    if head_dim % config.head_dim != 0:
        raise ValueError(
            f"head_dim: got {head_dim}; allowed for this model: multiples of {config.head_dim}"
        )
    return large


def _kv_copies(old: LlamaConfig, new: LlamaConfig) -> int:
    """Count the new key-value heads that one old one needs for all its query heads to find a place."""
    old_group, group = (one.num_attention_heads // one.num_key_value_heads for one in (old, new))
    return -(-old_group // group)


class Enlarger:
    """Makes the tensors of the large model, whose config is from `scale_config`, from those of the small one."""

    def __init__(self, old: LlamaConfig, new: LlamaConfig, dtype: torch.dtype) -> None:
        self.new, self.dtype, self.copies = new, dtype, _kv_copies(old, new)
        self.old_kv_heads = old.num_key_value_heads
        generator = torch.Generator().manual_seed(0)
        self.bank = (torch.randn(NOISE_LENGTH, generator=generator) * NOISE_STD).to(dtype)
        self.norm_scale = (old.hidden_size / new.hidden_size) ** 0.5
        self.query_scale = (new.head_dim / old.head_dim) ** 0.5
        # Channel of each old channel inside a new head, for what is rotated.  # [d0]
        half = torch.arange(old.head_dim // 2) * (new.head_dim // old.head_dim)
        rotary = torch.cat((half, half + new.head_dim // 2))
        heads = torch.arange(old.num_attention_heads)
        old_group, group = (
            one.num_attention_heads // one.num_key_value_heads for one in (old, new)
        )
        # The query heads of an old key-value head stand side by side, before those of its last copy that are new.
        self.query_heads = heads // old_group * self.copies * group + heads % old_group  # [A0]
        kv_heads = torch.arange(old.num_key_value_heads * self.copies)
        self.query_channels, self.kv_channels = (
            (places[:, None] * new.head_dim + rotary).flatten()
            for places in (self.query_heads, kv_heads)
        )

    def tensor(self, name: str, shape: torch.Size, small: Tensor | None) -> Tensor:
        """Return a parameter of the large model, which holds the small model's one of that name, if it has one."""
        kind = name.split(".")[-2]
        if kind.endswith("norm"):
            result = torch.full(shape, self.norm_scale)
            if small is not None:
                result[: len(small)] *= small.float()
            return result.to(self.dtype)
        if kind in ZERO_ELSEWHERE:
            result = torch.zeros(shape, dtype=self.dtype)
        else:
            result = self.bank.repeat(-(-shape.numel() // NOISE_LENGTH))[: shape.numel()].view(
                shape
            )
        if small is None:
            return result
        rows, columns = map(torch.arange, small.shape)
        if kind == "q_proj":
            result.view(-1, self.new.head_dim, self.new.hidden_size)[self.query_heads] = 0
            rows, small = self.query_channels, small * self.query_scale
        elif kind in ("k_proj", "v_proj"):  # values are not rotated: for them any place would do
            by_head = small.view(self.old_kv_heads, -1, small.shape[1])
            rows, small = self.kv_channels, by_head.repeat_interleave(self.copies, 0).flatten(0, 1)
        elif kind == "o_proj":
            columns = self.query_channels
        result[rows[:, None], columns] = small.to(self.dtype)
        return result


@torch.no_grad()
def scaled_model(
    model: LlamaForCausalLM, shape: Mapping[str, int], dtype: torch.dtype = torch.float32
) -> LlamaForCausalLM:
    """Build the enlarged model in memory, in evaluation mode on the small model's device.

    Args:
        model: the small one.
        shape: the new sizes.
        dtype: of the new model; only float32 promises the same logits to 1e-4.

    Raises:
        ValueError: if the shape cannot hold the model.
    """
    config = scale_config(model.config, shape)
    with torch.device("meta"):
        large = LlamaForCausalLM(config)
    # Made on the meta device so that nothing is drawn at random twice; the rotary table is no part
    # of the state dict and must be computed again.
    large = large.to(dtype).to_empty(device=model.device)
    large.model.rotary_emb = type(large.model.rotary_emb)(config).to(model.device)
    large.tie_weights()
    state = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    enlarger = Enlarger(model.config, config, dtype)
    for name, parameter in large.named_parameters():
        parameter.copy_(enlarger.tensor(name, parameter.shape, state.get(name)))
    large.generation_config = model.generation_config
    return large.eval()


def write_scaled(
    source: Path, out: Path, shape: Mapping[str, int], dtype: torch.dtype = torch.bfloat16
) -> int:
    """Write the enlarged model's folder, which must be new; return the number of parameters.

    Raises:
        ValueError: if `out` exists, or the shape cannot hold the model.
        OSError: if `source` holds no model, or `out` cannot be written.
    """
    if out.exists():
        raise ValueError(f"out: got {out}, which exists; allowed: a new folder; remove it first")
    small = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    large = scaled_model(small, shape, dtype)
    temporary = out.with_name(out.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    large.save_pretrained(temporary, max_shard_size=SHARD_BYTES)
    for pattern in COPIED_FILES:
        for path in source.glob(pattern):
            shutil.copy(path, temporary / path.name)
    for path in temporary.glob("*.safetensors"):
        path.chmod(0o644)  # safetensors writes files that only their owner can read
    os.replace(temporary, out)
    return large.num_parameters()


def main(argv: Sequence[str] | None = None) -> int:
    parser = OptionParser(prog="python -m scripts.enlarge", description=__doc__)
    add = parser.add_argument
    add("--model-path", "--model", type=Path, required=True, help="folder of the small model")
    add("--out", type=Path, required=True, help="folder to write; must not exist")
    add("--shape", choices=SHAPES, required=True, help="size of the large model")
    add("--dtype", choices=DTYPES, default="bfloat16", help="(default: bfloat16)")
    options = parser.parse_args(argv)
    with user_errors(OSError, SafetensorError):
        if not (options.model_path / "config.json").is_file():
            raise ValueError(
                f"model_path: got {options.model_path}; allowed: a folder with config.json; "
                "train one with scripts.demo_model"
            )
        shape, dtype = SHAPES[options.shape], DTYPES[options.dtype]
        num_parameters = write_scaled(options.model_path, options.out, shape, dtype)
    print(f"{options.out}: {num_parameters:,} parameters, {options.dtype}")
    return 0


if __name__ == "__main__":
    run_command(main)

r"""Make a Llama model larger without changing its output.

Writes (or builds in memory) a model of any larger shape whose float32 logits equal the small model's,
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
    python -m scripts.enlarge --model-path data/demo/model --layers 8 --hidden 512 --heads 8 \
        --intermediate 1408 --kv-heads 4 --out demo-wide
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from model.commands.command_line import OptionParser, run_command, user_errors

# D layers, H width, A query heads, K key-value heads, d head size, F feed-forward, V vocabulary.

NOISE_STD = 0.02  # Llama's own initialisation
# Random numbers are taken from one bank: drawing 6.5 billion would take minutes. The prime length
# keeps rows from repeating at a power of two.
NOISE_LENGTH = 1_048_573
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
COPIED_FILES = ("tokenizer*", "special_tokens_map.json", "*.jinja", "generation_config.json")
SHARD_BYTES = 1_000_000_000


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Size of a Llama model.

    Raises:
        ValueError: if no Llama has these sizes.
    """

    layers: int
    hidden: int  # width of the residual stream
    heads: int  # query heads
    intermediate: int  # width of the feed-forward part
    kv_heads: int | None = None  # None: as many as `heads`

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "intermediate", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}; allowed: 1 or more")
        if self.hidden % (2 * self.heads) != 0:
            raise ValueError(
                f"hidden: got {self.hidden}; allowed: multiples of 2 x heads ({2 * self.heads}); "
                "change --hidden or --heads"
            )
        if self.heads % self.num_kv_heads != 0:
            raise ValueError(
                f"kv_heads: got {self.num_kv_heads}; allowed: divisors of heads ({self.heads})"
            )

    @property
    def num_kv_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def group(self) -> int:
        """Query heads that share one key-value head."""
        return self.heads // self.num_kv_heads


SHAPES = {
    "150m": ModelShape(layers=11, hidden=1024, heads=16, intermediate=2816),
    "1b": ModelShape(layers=22, hidden=2048, heads=32, intermediate=5632, kv_heads=4),  # TinyLlama
    "7b": ModelShape(layers=32, hidden=4096, heads=32, intermediate=11008),  # Vicuna-7B
}


def shape_of(config: LlamaConfig) -> ModelShape:
    return ModelShape(
        config.num_hidden_layers,
        config.hidden_size,
        config.num_attention_heads,
        config.intermediate_size,
        config.num_key_value_heads,
    )


def scale_config(config: LlamaConfig, shape: ModelShape) -> LlamaConfig:
    """Return the enlarged model's config.

    Raises:
        ValueError: if the small model is not a plain Llama, or the shape cannot hold it.
    """
    _check_source(config)
    old = shape_of(config)
    _check_fits(old, shape)
    values = config.to_dict()
    values.update(
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate,
        rms_norm_eps=config.rms_norm_eps * old.hidden / shape.hidden,
    )
    return LlamaConfig(**values)


def _check_fits(old: ModelShape, new: ModelShape) -> None:
    for name in ("layers", "hidden", "heads", "intermediate"):
        if getattr(new, name) < getattr(old, name):
            raise ValueError(
                f"{name}: got {getattr(new, name)}; allowed: {getattr(old, name)} (the model's "
                f"own) or more; raise --{name}"
            )
    if new.head_dim % old.head_dim != 0:
        raise ValueError(
            f"head size hidden/heads: got {new.head_dim}; allowed: multiples of {old.head_dim} (the "
            "model's own); change --hidden or --heads"
        )
    needed = old.num_kv_heads * _kv_copies(old, new)
    if new.num_kv_heads < needed:
        raise ValueError(
            f"kv_heads: got {new.num_kv_heads}; allowed: {needed} or more for this model; "
            "raise --kv-heads"
        )


def _check_source(config: LlamaConfig) -> None:
    if config.model_type != "llama":
        raise ValueError(f"model type: got {config.model_type}; allowed: llama")
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        raise ValueError("model: got biases; allowed: none in attention and feed-forward")
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"rope type: got {rope['rope_type']}; allowed: default")
    head_dim = config.hidden_size // config.num_attention_heads
    if (getattr(config, "head_dim", None) or head_dim) != head_dim:
        raise ValueError(f"head_dim: got {config.head_dim}; allowed: hidden / heads ({head_dim})")


def _kv_copies(old: ModelShape, new: ModelShape) -> int:
    """Count the new key-value heads that one old one needs for all its query heads to find a place."""
    return -(-old.group // new.group)


class Enlarger:
    """Makes the tensors of the large model, whose config is from `scale_config`, from those of the small one."""

    def __init__(self, old: LlamaConfig, new: LlamaConfig, dtype: torch.dtype) -> None:
        self.old, self.new, self.dtype = shape_of(old), shape_of(new), dtype
        self.is_tied = old.tie_word_embeddings
        generator = torch.Generator().manual_seed(0)
        self.bank = (torch.randn(NOISE_LENGTH, generator=generator) * NOISE_STD).to(dtype)
        self.norm_scale = (self.old.hidden / self.new.hidden) ** 0.5
        self.query_scale = (self.new.head_dim / self.old.head_dim) ** 0.5
        self.copies = _kv_copies(self.old, self.new)
        # Channel of each old channel inside a new head, for what is rotated.  # [d0]
        half = torch.arange(self.old.head_dim // 2) * (self.new.head_dim // self.old.head_dim)
        self.rotary = torch.cat((half, half + self.new.head_dim // 2))

    def noise(self, *shape: int) -> Tensor:
        size = torch.Size(shape).numel()
        return self.bank.repeat(-(-size // NOISE_LENGTH))[:size].view(shape)

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype)

    def query_head(self, head: int) -> int:
        """Return the new index of an old query head."""
        kv_head, member = divmod(head, self.old.group)
        copy, place = divmod(member, self.new.group)
        return (kv_head * self.copies + copy) * self.new.group + place

    def query(self, weight: Tensor) -> Tensor:
        """Enlarge a query projection, [A0*d0, H0] to [A*d1, H]."""
        old, new = self.old, self.new
        result = self.noise(new.heads, new.head_dim, new.hidden)
        for head, block in enumerate(weight.view(old.heads, old.head_dim, old.hidden)):
            target = result[self.query_head(head)]
            target.zero_()
            target[self.rotary, : old.hidden] = (block * self.query_scale).to(self.dtype)
        return result.view(-1, new.hidden)

    def key_or_value(self, weight: Tensor) -> Tensor:
        """Enlarge a key or value projection, [K0*d0, H0] to [K*d1, H].

        Values are placed like keys; they are not rotated, so any place would do.
        """
        old, new = self.old, self.new
        result = self.noise(new.num_kv_heads, new.head_dim, new.hidden)
        for head, block in enumerate(weight.view(old.num_kv_heads, old.head_dim, old.hidden)):
            for copy in range(self.copies):
                target = result[head * self.copies + copy]
                target[self.rotary, : old.hidden] = block.to(self.dtype)
        return result.view(-1, new.hidden)

    def attention_output(self, weight: Tensor) -> Tensor:
        """Enlarge attention's output projection, [H0, A0*d0] to [H, A*d1]."""
        old, new = self.old, self.new
        result = self.zeros(new.hidden, new.heads, new.head_dim)
        blocks = weight.view(old.hidden, old.heads, old.head_dim).to(self.dtype)
        for head in range(old.heads):
            result[: old.hidden, self.query_head(head), self.rotary] = blocks[:, head]
        return result.view(new.hidden, -1)

    def rows_and_columns(self, weight: Tensor, base: Tensor) -> Tensor:
        """Write a matrix into the corner of a larger one."""
        base[: weight.shape[0], : weight.shape[1]] = weight.to(self.dtype)
        return base

    def norm(self, weight: Tensor) -> Tensor:
        """Enlarge an RMSNorm weight, [H0] to [H]."""
        result = torch.full((self.new.hidden,), self.norm_scale)
        result[: self.old.hidden] = weight.float() * self.norm_scale
        return result.to(self.dtype)

    def layer(self, state: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
        """Return the tensors of one layer: an old layer enlarged, or a random one with a zero way out."""
        new, prefix = self.new, f"model.layers.{index}."
        small = {
            name.removeprefix(prefix).removesuffix(".weight"): tensor
            for name, tensor in state.items()
            if name.startswith(prefix)
        } or self.silent_layer()
        wide = (new.intermediate, new.hidden)
        tall = self.zeros(new.hidden, new.intermediate)
        result = {
            "input_layernorm": self.norm(small["input_layernorm"]),
            "post_attention_layernorm": self.norm(small["post_attention_layernorm"]),
            "self_attn.q_proj": self.query(small["self_attn.q_proj"]),
            "self_attn.k_proj": self.key_or_value(small["self_attn.k_proj"]),
            "self_attn.v_proj": self.key_or_value(small["self_attn.v_proj"]),
            "self_attn.o_proj": self.attention_output(small["self_attn.o_proj"]),
            "mlp.gate_proj": self.rows_and_columns(small["mlp.gate_proj"], self.noise(*wide)),
            "mlp.up_proj": self.rows_and_columns(small["mlp.up_proj"], self.noise(*wide)),
            "mlp.down_proj": self.rows_and_columns(small["mlp.down_proj"], tall),
        }
        return {f"{prefix}{name}.weight": tensor for name, tensor in result.items()}

    def silent_layer(self) -> dict[str, Tensor]:
        """Return a layer of the small shape that adds nothing to the residual stream."""
        old = self.old
        query, key = old.heads * old.head_dim, old.num_kv_heads * old.head_dim
        sizes = {"q": query, "k": key, "v": key}
        layer = {f"self_attn.{n}_proj": self.noise(size, old.hidden) for n, size in sizes.items()}
        for name in ("mlp.gate_proj", "mlp.up_proj"):
            layer[name] = self.noise(old.intermediate, old.hidden)
        for name in ("input_layernorm", "post_attention_layernorm"):
            layer[name] = torch.ones(old.hidden)
        layer["self_attn.o_proj"] = self.zeros(old.hidden, query)
        layer["mlp.down_proj"] = self.zeros(old.hidden, old.intermediate)
        return layer

    def tensors(self, state: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Yield the large model's tensors, a layer at a time, from the small model's state dict."""
        new = self.new
        embedding = state["model.embed_tokens.weight"]
        padded = self.zeros(len(embedding), new.hidden)
        yield {"model.embed_tokens.weight": self.rows_and_columns(embedding, padded)}
        for index in range(new.layers):
            yield self.layer(state, index)
        yield {"model.norm.weight": self.norm(state["model.norm.weight"])}
        if not self.is_tied:
            base = self.noise(len(embedding), new.hidden)
            yield {"lm_head.weight": self.rows_and_columns(state["lm_head.weight"], base)}


@torch.no_grad()
def scaled_model(
    model: LlamaForCausalLM, shape: ModelShape, dtype: torch.dtype = torch.float32
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
    parameters = dict(large.named_parameters())
    state = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    for group in Enlarger(model.config, config, dtype).tensors(state):
        for name, tensor in group.items():
            parameters[name].copy_(tensor)
    large.generation_config = model.generation_config
    return large.eval()


def write_scaled(
    source: Path, out: Path, shape: ModelShape, dtype: torch.dtype = torch.bfloat16
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


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = OptionParser(prog="python -m scripts.enlarge", description=__doc__)
    parser.add_argument(
        "--model-path", "--model", type=Path, required=True, help="folder of the small model"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
    parser.add_argument("--shape", help=f"named size: {', '.join(SHAPES)}")
    parser.add_argument("--layers", type=int, help="decoder layers")
    parser.add_argument("--hidden", type=int, help="width of the residual stream")
    parser.add_argument("--heads", type=int, help="query heads")
    parser.add_argument("--intermediate", type=int, help="width of the feed-forward part")
    parser.add_argument("--kv-heads", type=int, help="key-value heads (default: --heads)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="(default: bfloat16)")
    return parser.parse_args(argv)


def chosen_shape(options: argparse.Namespace) -> ModelShape:
    """Return the shape that the options ask for.

    Raises:
        ValueError: if neither or both ways to give a shape are used, or the sizes are impossible.
    """
    sizes = (options.layers, options.hidden, options.heads, options.intermediate)
    if options.shape is not None:
        if any(size is not None for size in (*sizes, options.kv_heads)):
            raise ValueError("shape: got --shape and single sizes; allowed: one way; drop one")
        if options.shape not in SHAPES:
            raise ValueError(f"shape: got {options.shape!r}; allowed: {', '.join(SHAPES)}")
        return SHAPES[options.shape]
    if any(size is None for size in sizes):
        raise ValueError(
            f"shape: got no full size; allowed: --shape {', '.join(SHAPES)}; "
            "or give --layers --hidden --heads --intermediate"
        )
    return ModelShape(*sizes, kv_heads=options.kv_heads)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_arguments(argv)
    with user_errors(OSError, SafetensorError):
        if not (options.model_path / "config.json").is_file():
            raise ValueError(
                f"model_path: got {options.model_path}; allowed: a folder with config.json; "
                "train one with scripts.demo_model"
            )
        shape = chosen_shape(options)
        num_parameters = write_scaled(options.model_path, options.out, shape, DTYPES[options.dtype])
    print(f"{options.out}: {num_parameters:,} parameters, {options.dtype}")
    return 0


if __name__ == "__main__":
    run_command(main)

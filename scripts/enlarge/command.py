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
Tensors are made one by one and written shard by shard, so the 7B needs far less memory to make
than to load.

Example:
    python -m scripts.enlarge --model-path data/demo/model --shape 150m --out demo-150m
    python -m scripts.enlarge --model-path data/demo/model --layers 8 --hidden 512 --heads 8 \
        --intermediate 1408 --kv-heads 4 --out demo-wide
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from model.commands.command_line import OptionParser, user_errors
from model.machine.timing import progress
from scripts.enlarge.arithmetic import SHAPES, Enlarger, ModelShape, scale_config

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
COPIED_FILES = ("tokenizer*", "special_tokens_map.json", "*.jinja", "generation_config.json")
SHARD_BYTES = 1_000_000_000


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


def _shards(groups: Iterable[dict[str, Tensor]], limit: int) -> Iterator[dict[str, Tensor]]:
    """Join groups of tensors into shards of about `limit` bytes."""
    shard: dict[str, Tensor] = {}
    size = 0
    for group in groups:
        group_size = sum(tensor.nbytes for tensor in group.values())
        if shard and size + group_size > limit:
            yield shard
            shard, size = {}, 0
        shard |= group
        size += group_size
    yield shard


def write_scaled(
    source: Path,
    out: Path,
    shape: ModelShape,
    dtype: torch.dtype = torch.bfloat16,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write the enlarged model's folder, one shard in memory at a time; return the number of parameters.

    Args:
        source: folder of the small model.
        out: folder to write; must not exist.
        shape: the new sizes.
        dtype: of the weights.
        shard_bytes: most bytes of a shard (one layer at least).

    Raises:
        ValueError: if `out` exists, or the shape cannot hold the model.
        OSError: if `source` holds no model, or `out` cannot be written.
    """
    if out.exists():
        raise ValueError(f"out: got {out}, which exists; allowed: a new folder; remove it first")
    small_config = AutoConfig.from_pretrained(source)
    config = scale_config(small_config, shape)
    small = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    temporary = out.with_name(out.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    groups = Enlarger(small_config, config, dtype).tensors(small.state_dict())
    num_parameters = _write_shards(temporary, groups, config, shard_bytes)
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = str(dtype).removeprefix("torch.")
    config.save_pretrained(temporary)
    for pattern in COPIED_FILES:
        for path in source.glob(pattern):
            shutil.copy(path, temporary / path.name)
    os.replace(temporary, out)
    return num_parameters


def _write_shards(
    folder: Path, groups: Iterator[dict[str, Tensor]], config: LlamaConfig, shard_bytes: int
) -> int:
    """Write the shards and their index; return the number of parameters."""
    names: list[list[str]] = []
    num_bytes = num_parameters = 0
    layers = progress(groups, desc="layers", total=config.num_hidden_layers + 2)
    for number, shard in enumerate(_shards(layers, shard_bytes), start=1):
        save_file(shard, folder / f"part-{number}.safetensors", metadata={"format": "pt"})
        names.append(list(shard))
        num_bytes += sum(tensor.nbytes for tensor in shard.values())
        num_parameters += sum(tensor.numel() for tensor in shard.values())
    weight_map: dict[str, str] = {}
    for number, shard_names in enumerate(names, start=1):
        # The final names carry the number of shards, known only now.
        final = f"model-{number:05d}-of-{len(names):05d}.safetensors"
        os.replace(folder / f"part-{number}.safetensors", folder / final)
        (folder / final).chmod(0o644)  # safetensors writes files that only their owner can read
        weight_map |= dict.fromkeys(shard_names, final)
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return num_parameters


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

"""MTP layers of a model's own checkpoint: loaded and read as by transformers, and the text stays the model's.

Run: pytest tests/model/methods/heads/mtp/test_guesser.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from model.backends.target import TargetModel
from model.engine.budget import DraftBudget
from model.engine.loop import generate
from model.methods.heads.mtp import guesser
from model.methods.heads.mtp.guesser import DEPTH, WIDTH, MtpGuesser, MtpText, check_mtp
from model.methods.hybrid.drafter import HybridConfig, HybridDrafter
from tests.model.decoded import known, random_ids, referee, target_of
from tests.model.families.families_with_trees import LATENT, MIXED_LAYERS, MOE, ROUTED
from tests.model.families.family import VOCAB, WEIGHT_STD, Family

try:
    MtpModel, MtpCache = guesser._mtp_classes()
except ValueError as error:
    pytest.skip(str(error), allow_module_level=True)

CPU = torch.device("cpu")
WINDOW = 8  # of attention, in the MTP layer too
MELLUM = Family(
    "Mellum",
    "MellumConfig",
    MOE | {"sliding_window": WINDOW, "layer_types": MIXED_LAYERS, "num_mtp_layers": 1},
)
DEEPSEEK = Family(
    "DeepSeek-V3",
    "DeepseekV3Config",
    LATENT | ROUTED | {"num_mtp_layers": 3},
    without=("head_dim",),
)
# Names of a Mellum checkpoint for what transformers calls otherwise.
PUBLISHED = {
    "layers.0.eh_proj": "mtp.fc",
    "layers.0.enorm": "mtp.pre_fc_norm_embedding",
    "layers.0.hnorm": "mtp.pre_fc_norm_hidden",
    "layers.0.post_norm": "mtp.norm",
}
PROMPT = random_ids(3, 20)


def random_mtp(model: Any, num_layers: int) -> Any:
    """Return random MTP layers for a model."""
    mtp = MtpModel(model, num_layers).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in mtp.layers.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, WEIGHT_STD)
    return mtp


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model whose checkpoint ships an MTP layer under its published names."""
    return shipped(tmp_path_factory.mktemp("mellum"), MELLUM)


def shipped(folder: Path, family: Family) -> Path:
    """Write a model of a family with an MTP layer."""
    model = family.build()
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in random_mtp(guesser._counted(model), 1).state_dict().items():
        if name.startswith("layers."):
            stem, _, part = name.rpartition(".")
            published = PUBLISHED.get(stem, f"mtp.{stem}").replace(".mtp_block", "")
            tensors[f"{published}.{part}"] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def target(folder: Path) -> TargetModel:
    return TargetModel(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


@torch.inference_mode()
def final_states(target: TargetModel, text: Sequence[int]) -> torch.Tensor:
    """Return the final hidden states [T, D] of a plain pass of transformers."""
    found = target.model(torch.tensor([text]), output_hidden_states=True)
    states: torch.Tensor = found.hidden_states[-1][0]
    return states


def with_mtp(target: TargetModel, **options: Any) -> HybridDrafter:
    config = HybridConfig(**{"budget": "fixed", "head": "mtp", "num_nodes": 7} | options)
    drafter = HybridDrafter(config, target.vocab_size, CPU)
    drafter.check_target(target)
    return drafter


def test_the_text_is_that_of_generate(target: TargetModel) -> None:
    wanted, first, drafter = referee(target, PROMPT, 40), None, with_mtp(target)
    with_their_loop = target.model.generate(
        torch.tensor([PROMPT]), do_sample=False, max_new_tokens=40, use_mtp=True
    )
    assert with_their_loop[0, len(PROMPT) :].tolist() == wanted, "the checkpoint is one of theirs"
    for _ in range(2):
        drafter.reset()
        found = generate(target, drafter, PROMPT, max_new_tokens=40)
        assert found.token_ids == wanted
        assert first is None or found.accept_lengths == first.accept_lengths
        first = found
    assert first is not None
    assert "guide" in {name for step in first.steps for name in (step.tree.sources or ())}


@torch.inference_mode()
def test_siblings_have_rows_of_their_own_text(target: TargetModel) -> None:
    first = with_mtp(target)
    second = first.sibling()
    texts = [(first, PROMPT), (second, random_ids(12, 2))]
    for drafter, prompt in texts:
        assert generate(target, drafter, prompt, max_new_tokens=5).token_ids == referee(
            target, prompt, 5
        )
    found = [drafter._head.guesses([0], DraftBudget(9)) for drafter, _ in texts]  # type: ignore[union-attr]
    assert found[0] != found[1]


def reference(mtp: Any, text: Sequence[int], hidden: torch.Tensor, depth: int) -> Any:
    """Return tokens and logits [depth, V] of transformers' own chain of guesses, without any kept row."""
    _, logits, _ = mtp(
        input_ids=torch.tensor([text[1:]]),
        last_hidden_states=hidden[None, : len(text) - 1],
        attention_mask=None,
        position_ids=torch.arange(1, len(text))[None],
        mtp_cache=MtpCache(config=mtp.config),
    )
    return logits[0, :depth]


def check_guesses(found: Any, logits: torch.Tensor) -> None:
    wanted = logits.log_softmax(-1).topk(WIDTH)
    assert torch.equal(found[0][: len(logits)], wanted.indices)
    assert torch.allclose(found[1][: len(logits)], wanted.values, atol=1e-5)


@torch.inference_mode()
def test_the_first_guess_is_that_of_transformers_however_the_text_is_read(
    target: TargetModel,
) -> None:
    text, own = MtpText(target), MtpModel.from_pretrained(target.model).eval()
    assert text._model.rotary_emb is not target.model.get_decoder().rotary_emb, (
        "some change with the longest text"
    )
    tokens = random_ids(5 * WINDOW, 4)
    hidden = final_states(target, tokens)
    assert text.guesses(3, WIDTH) is None, "nothing is read yet"
    for begin, end in ((0, 13), (13, 14), (14, 30), (30, 39)):
        text.read(tokens[begin + 1 : end + 1], hidden[begin:end])
        for depth in (1, DEPTH):  # a draft leaves no row
            found = text.guesses(depth, WIDTH)
            check_guesses(found, reference(own, tokens[: end + 1], hidden, 1))


@torch.inference_mode()
def test_one_layer_goes_on_with_its_own_state(target: TargetModel) -> None:
    text, own = MtpText(target), MtpModel.from_pretrained(target.model).eval()
    tokens, hidden = list(PROMPT), final_states(target, PROMPT)[:-1]
    text.read(tokens[1:], hidden)
    found = text.guesses(3, WIDTH)
    assert found is not None
    for level in range(3):
        read = own.forward_layer(
            *(0, hidden[None], torch.arange(1, len(tokens))[None], MtpCache(config=own.config)),
            input_ids=torch.tensor([tokens[1:]]),
        )[0]
        check_guesses([part[level:] for part in found], own._project_to_logits(read[-1:]))
        hidden = torch.cat((hidden, read[-1:]))
        tokens.append(int(found[0][level, 0]))


@torch.inference_mode()
@pytest.mark.parametrize("length", [2, 3, 4, 20])
def test_several_layers_join_tokens_further_on(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = TargetModel(DEEPSEEK.build())
    own = random_mtp(target.model, 3)
    monkeypatch.setattr(guesser, "_load", lambda target: own)
    text, tokens = MtpText(target), random_ids(length + 9, 6)
    hidden = final_states(target, tokens)
    for end in (length - 1, length + 1, length + 8):
        begin = 0 if end < length else (length - 1 if end == length + 1 else length + 1)
        text.read(tokens[begin + 1 : end + 1], hidden[begin:end])
        for depth in (3, 5):
            found = text.guesses(depth, WIDTH)
            check_guesses(found, reference(own, tokens[: end + 1], hidden, 3))


def test_what_ships_no_layers_is_refused(target: TargetModel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="head mtp: model type llama has no MTP layers"):
        check_mtp(target_of("Llama, grouped heads").config)
    MELLUM.build().save_pretrained(tmp_path)
    bare = TargetModel(AutoModelForCausalLM.from_pretrained(tmp_path).eval())
    with pytest.raises(ValueError, match=r"head mtp: the layers of .* cannot be loaded: .*missing"):
        MtpGuesser(VOCAB, CPU).for_target(bare)


@pytest.mark.parametrize("name", ["Qwen3-Next", "Qwen3.5", "Qwen3.5-MoE"])
def test_layers_that_transformers_leaves_out_are_read(name: str, tmp_path: Path) -> None:
    family = known(name)
    config = getattr(transformers, family.config)
    options = {**family.options, guesser.COUNTS[config.model_type]: 1}
    folder = shipped(tmp_path, replace(family, options=options))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    target = TargetModel(model)
    drafter = with_mtp(target)
    found = generate(target, drafter, PROMPT, max_new_tokens=24)
    assert found.token_ids == referee(target, PROMPT, 24)
    assert "guide" in {one for step in found.steps for one in (step.tree.sources or ())}
    own = load_file(folder / "model.safetensors")
    layer = drafter._head._text._model.layers[0]  # type: ignore[attr-defined]
    assert torch.equal(layer.eh_proj.weight, own["mtp.fc.weight"])
    assert not hasattr(model.config, "num_mtp_layers"), "the model's own config stays as it is"

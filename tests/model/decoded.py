"""Shared by tests of decoding: a checked target of a family, a drafter, and the referee's tokens."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from model.backends.proofs.self_test import self_test
from model.backends.proofs.support import UnsupportedModelError
from model.backends.target import TargetModel
from model.engine.drafter import Drafter
from model.engine.tree import DraftTree
from model.methods import METHODS, drafter_class
from model.methods.rest.datastore import Datastore
from tests.model.families.families import FAMILIES
from tests.model.families.family import VOCAB, Family
from tests.pairs import pairs

BY_NAME = {family.name: family for family in FAMILIES}


@cache  # building and checking one takes longer than most tests
@torch.inference_mode(mode=False)
def target_of(name: str) -> TargetModel:
    """Return the checked target of a family; skip the test where `known` does."""
    target = TargetModel(known(name).build())
    self_test(target)
    return target


def known(name: str) -> Family:
    """Return a family; skip the test where the installed transformers lacks it or computes it wrong."""
    family = BY_NAME[name]
    if not family.is_known:
        pytest.skip(f"{family.config} is not in this version of transformers")
    if family.is_broken:
        pytest.skip(f"its passes are right since transformers 5.{family.right_since}")
    return family


# Methods whose sampled texts are plain decoding's with the same seed: not those whose drafts are drawn, too.
SEEDED = [method for method in METHODS if not drafter_class(method).needs.draws]


def drafter_for(method: str, target: TargetModel, **options: Any) -> Drafter:
    """Return a fresh drafter of a method.

    Skips the test where the family does not show the hidden states that the method reads.
    """
    cls = drafter_class(method)
    config = cls.config_class(**{**required_options(method, target.config), **options})
    drafter = cls(config, target.vocab_size, target.device)
    try:
        drafter.check_target(target)
    except UnsupportedModelError as error:
        pytest.skip(str(error))
    return drafter


def required_options(method: str, config: Any) -> dict[str, Any]:
    """Return the options without which a method cannot run on a model with this config."""
    config = config.get_text_config(decoder=True)
    if drafter_class(method).drafts_with() == "heads":
        return {"heads": heads_folder(method, config)}
    if drafter_class(method).drafts_with() == "datastore":
        return {"datastore": datastore_file(config.vocab_size)}
    has_model = drafter_class(method).drafts_with() == "draft_model"
    return {"draft_model": draft_folder(config.vocab_size).name} if has_model else {}


def option_names(config_class: Any) -> set[str]:
    """Return the options of a method as its command spells them: "--num-nodes"."""
    return {f"--{item.name.replace('_', '-')}" for item in dataclasses.fields(config_class)}


_HEADS: dict[tuple[str, str], tempfile.TemporaryDirectory[str]] = {}


def heads_folder(method: str, config: Any) -> str:
    """Return a folder with random heads of a method; it goes when the tests end.

    Skips the test where the method has no heads for this family.
    """
    key = (method, config.to_json_string(use_diff=False))
    if key not in _HEADS:
        folder = tempfile.TemporaryDirectory(prefix=f"{method}-heads-")
        try:
            drafter_class(method).write_untrained_heads(Path(folder.name), config)
        except ValueError as error:
            pytest.skip(str(error))
        _HEADS[key] = folder
    return _HEADS[key].name


def with_methods(names: Sequence[str], heads: int = 1, others: int = 1) -> list[tuple[str, str]]:
    """Return pairs of a name and a method: each name has recycling, and some with and without heads.

    Those with heads read hidden states, the others keep texts; recycling's tree is the widest. Every
    method has as many of the names as any other of its kind.

    Args:
        names: of families, or of settings.
        heads: methods with heads for each name.
        others: methods without for each name, beside recycling.
    """
    with_heads = [method for method in METHODS if drafter_class(method).drafts_with() == "heads"]
    without = [method for method in METHODS if method not in (*with_heads, "recycling")]
    found = [
        *((name, "recycling") for name in names),
        *pairs(names, with_heads, heads),
        *pairs(names, without, others),
    ]
    return sorted(found, key=lambda pair: names.index(pair[0]))


def methods_of(config: Any) -> list[str]:
    """Return the methods that can draft for a model with this config."""
    found = []
    for method in METHODS:
        with suppress(pytest.skip.Exception):
            required_options(method, config)
            found.append(method)
    return found


@lru_cache
def draft_folder(vocab_size: int) -> tempfile.TemporaryDirectory[str]:
    """Return a folder with a random one-layer draft model; it goes when the tests end."""
    folder = tempfile.TemporaryDirectory(prefix="draft-model-")
    options = {"vocab_size": vocab_size, "num_hidden_layers": 1}
    Family("draft", "LlamaConfig", options).build(seed=1).save_pretrained(folder.name)
    return folder


def datastore_file(vocab_size: int) -> str:
    """Return a datastore of random tokens."""
    file = Path(datastore_folder(vocab_size).name, "datastore.npy")
    if not file.exists():
        Datastore.build([random_ids(5000, vocab_size=vocab_size)]).save(file)
    return str(file)


@lru_cache
def datastore_folder(vocab_size: int) -> tempfile.TemporaryDirectory[str]:
    """Return a folder for the datastore of a vocabulary; it goes when the tests end."""
    return tempfile.TemporaryDirectory(prefix="datastore-")


def referee(
    target: TargetModel, prompt: Sequence[int], max_new_tokens: int, eos_id: int | None = None
) -> list[int]:
    """Return the new tokens of transformers' own greedy generation."""
    ids = torch.tensor([list(prompt)], device=target.device)
    # Without a mask, generate hides prompt tokens that equal the padding token.
    output = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=eos_id,
    )
    return output[0, len(prompt) :].tolist()


def random_ids(length: int, seed: int = 0, vocab_size: int = VOCAB) -> list[int]:
    """Return random token ids, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (length,), generator=generator).tolist()


def drafted_paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """Return the tokens of every drafted node's path, without the root, in the order of nodes."""
    tokens = tree.token_ids.tolist()
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], tree.topology.parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]

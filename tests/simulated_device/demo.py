"""The demo model, the settings of all methods, and texts decoded with them on any device."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from model.compiled.target import StaticTarget
from model.engine.drafter import Drafter
from model.engine.loop import decode, generate
from model.engine.target import TargetModel
from model.methods.registry import METHODS, drafter_class
from model.methods.rest.datastore import Datastore
from scripts.gpu_check.simulated.accounts import Accounts

DEMO = Path(__file__).resolve().parents[2] / "data/demo"
KINDS = {"eager": TargetModel, "static": StaticTarget}
FIRST_TEXT = "USER: Tell me about the sea and its animals. ASSISTANT:"
TEXT = "USER: Write a list of ten animals and tell me about the sea. ASSISTANT:"
FIRST_TOKENS, NUM_TOKENS = 12, 20
END = 2


@dataclass(frozen=True)
class Setting:
    """A method with options."""

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The method and its options, as tables name them."""
        return " ".join([self.method, *(f"{key}={self.options[key]}" for key in self.options)])

    def runs_on(self, kind: str) -> bool:
        """Whether a kind of target model shows what the method reads."""
        return kind == "eager" or not drafter_class(self.method).drafts_with_heads()

    def drafter(self, target: TargetModel) -> Drafter:
        """Return a fresh drafter for a target model."""
        cls = drafter_class(self.method)
        config = cls.config_class(**_files_of(self.method), **self.options)
        drafter = cls(config, target.vocab_size, target.device)
        drafter.check_target(target)
        return drafter


SETTINGS = [
    *(Setting(method) for method in METHODS),
    Setting("recycling", {"tree_version": "auto"}),
    Setting("hybrid", {"budget": "fixed", "num_nodes": 31}),
    Setting("hybrid", {"budget": "fixed", "num_nodes": 63}),
]


def _files_of(method: str) -> dict[str, Any]:
    """Return the options that name what a method drafts with."""
    cls = drafter_class(method)
    if cls.drafts_with_heads():
        return {"heads": str(DEMO / (cls.heads_of or method))}
    if cls.drafts_from_datastore():
        return {"datastore": str(Path(_datastore().name, "datastore.npy"))}
    if cls.drafts_with_model():
        return {"draft_model": str(DEMO / "draft"), "draft_dtype": "float32"}
    return {}


@lru_cache
def _datastore() -> TemporaryDirectory[str]:
    """Return a folder with the datastore of the project's own README; it goes when the tests end."""
    folder = TemporaryDirectory(prefix="datastore-")
    text = (DEMO / "README.md").read_text()
    Datastore.build([prompt_of(text), prompt_of(TEXT)]).save(Path(folder.name, "datastore.npy"))
    return folder


def prompt_of(text: str) -> list[int]:
    """Return the token ids of a text."""
    ids: list[int] = _tokenizer()(text).input_ids
    return ids


@lru_cache
def _tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO / "model")


@lru_cache
@torch.inference_mode(mode=False)
def demo_model() -> PreTrainedModel:
    """Return the demo model on the CPU."""
    return AutoModelForCausalLM.from_pretrained(DEMO / "model", dtype=torch.float32).eval()


@torch.inference_mode(mode=False)
def demo_target(kind: str, device: str, **options: Any) -> TargetModel:
    """Return the demo model as a target of a kind; on every device it computes as transformers does."""
    model = copy.deepcopy(demo_model()).to(device)
    return KINDS[kind](model, use_kernels=False, **options)


class Decoded(NamedTuple):
    """A text, decoded after another one.

    Attributes:
        tokens: its tokens.
        accept_lengths: tokens of each step.
    """

    tokens: list[int]
    accept_lengths: list[int]


def decoded(target: TargetModel, setting: Setting) -> Decoded:
    """Decode a text, with what the drafter learned from a first one."""
    drafter = setting.drafter(target)
    generate(target, drafter, prompt_of(FIRST_TEXT), max_new_tokens=FIRST_TOKENS, eos_ids={END})
    found = generate(target, drafter, prompt_of(TEXT), max_new_tokens=NUM_TOKENS, eos_ids={END})
    return Decoded(found.token_ids, found.accept_lengths)


@dataclass
class StepCosts:
    """What steps after the first one cost.

    Attributes:
        launches: most in a step.
        waits: most in a step, by kind and place.
    """

    launches: int = 0
    waits: Counter[str] = field(default_factory=Counter)

    def add(self, accounts: Accounts) -> None:
        """Add a step."""
        self.launches = max(self.launches, accounts.num_launches)
        self.waits |= Counter({" at ".join(key): count for key, count in accounts.waits.items()})


def step_costs(target: TargetModel, setting: Setting, accounts: Accounts) -> StepCosts:
    """Return what the steps of a text cost that comes after two others."""
    drafter, costs = setting.drafter(target), StepCosts()
    for text in (FIRST_TEXT, TEXT):
        generate(target, drafter, prompt_of(text), max_new_tokens=NUM_TOKENS, eos_ids={END})
    steps = decode(target, drafter, prompt_of(TEXT), max_new_tokens=NUM_TOKENS, eos_ids={END})
    next(steps)  # reads the prompt, too
    accounts.clear()
    for _ in steps:
        costs.add(accounts)
        accounts.clear()
    return costs

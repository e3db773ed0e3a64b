"""The short import path of the callables for transformers' `generate`, which exported folders use."""

from .api.accelerate import Speculative, generate_from_folder, recycling, speculative

__all__ = ["Speculative", "generate_from_folder", "recycling", "speculative"]

"""The short import path of the callables for transformers' `generate`."""

from .api.custom_generate import Speculative, generate_from_folder, recycling, speculative

__all__ = ["Speculative", "generate_from_folder", "recycling", "speculative"]

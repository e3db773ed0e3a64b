"""The short import path of the callables for transformers' `generate`."""

from .api.accelerate import generate_from_folder
from .api.custom_generate import Speculative, recycling, speculative

__all__ = ["Speculative", "generate_from_folder", "recycling", "speculative"]

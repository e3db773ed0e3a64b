"""Settings of the tests of `model/`."""

from __future__ import annotations

import os

import torch
import transformers

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tiny models: a second thread costs more than it brings.
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()

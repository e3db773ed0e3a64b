"""SGLang's own registry, n-gram worker and tree links: bash integrations/sglang/test.sh.

SGLang's compiled parts are stand-ins here, and its engine is not run.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import types
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

sglang = pytest.importorskip(
    "sglang", reason="SGLang is not installed: bash integrations/sglang/test.sh"
)
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"

from token_recycling_sglang import plugin  # noqa: E402
from token_recycling_sglang.trees import RecycledTrees  # noqa: E402


class StandIns:
    """Finds empty modules in place of compiled ones."""

    names = ("sgl_kernel", "torch_memory_saver", "flashinfer", "torchvision")

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        class Empty(types.ModuleType):
            __path__: list[str] = []  # noqa: RUF012

            def __getattr__(self, name):
                if name.startswith("__"):
                    raise AttributeError(name)
                return MagicMock(name=f"{spec.name}.{name}")

        return Empty(spec.name)

    def exec_module(self, module):
        pass


@pytest.fixture(scope="module", autouse=True)
def stand_ins():
    finder = StandIns()
    sys.meta_path.insert(0, finder)
    yield
    sys.meta_path.remove(finder)


def test_the_algorithm_is_in_the_registry():
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    plugin.register()
    plugin.register()
    algorithm = SpeculativeAlgorithm.from_string(plugin.NAME)
    assert algorithm.is_ngram() and not algorithm.has_draft_kv() and algorithm.is_speculative()


def test_the_worker_extends_the_ngram_worker_and_learns_after_verification(monkeypatch):
    from sglang.srt.speculative.ngram_worker import NGRAMWorker

    worker_class = plugin.make_worker_class()
    assert issubclass(worker_class, NGRAMWorker)
    worker = worker_class.__new__(worker_class)
    worker.draft_token_num, worker.enable_overlap, worker.max_trie_depth = 6, False, 8
    worker.ngram_corpus = RecycledTrees(50, 4, 6)
    requests = [
        SimpleNamespace(rid=name, output_ids=output, origin_input_ids_unpadded=prompt)
        for name, output, prompt in (("a", [3], [1, 2]), ("b", [], [7]))
    ]
    batch = SimpleNamespace(
        reqs=requests,
        grammar_needs_sync=lambda: False,
        forward_mode=SimpleNamespace(is_decode=lambda: True),
    )
    tokens, _ = worker._prepare_draft_tokens(batch)
    assert tokens[0] == 3 and tokens[6] == 7

    logits = torch.zeros(12, 50)
    logits[0, 9], logits[6, 8] = 5.0, 5.0
    result = SimpleNamespace(
        logits_output=SimpleNamespace(next_token_logits=logits),
        next_token_ids=torch.tensor([9, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0]),
        accept_lens=torch.tensor([1, 1]),
    )
    monkeypatch.setattr(NGRAMWorker, "forward_batch_generation", lambda *a, **k: result)
    assert worker.forward_batch_generation(batch) is result
    tokens, _ = worker._prepare_draft_tokens(batch)
    assert 9 in tokens[1:6] and 8 in tokens[7:]


def test_sglangs_tree_links_are_those_of_our_parents():
    from sglang.srt.speculative.ngram_worker import _derive_tree_links

    trees = RecycledTrees(50, 4, 8)
    rng = np.random.default_rng(0)
    trees._successors[:] = rng.integers(0, 50, (50, 4))
    trees._shares[:] = np.sort(rng.dirichlet(np.ones(4), 50), axis=1)[:, ::-1]
    _, mask = trees.batch_get(["a", "b"], [[3], [9]], [1, 1])
    first_child, next_sibling = _derive_tree_links(mask, 2, 8)
    for index, parents in enumerate(trees._parents):
        for node in range(8):
            children = [child for child in range(8) if parents[child] == node]
            assert first_child[index, node] == (children[0] if children else -1)
            siblings = [n for n in range(node + 1, 8) if parents[n] == parents[node] and node]
            assert next_sibling[index, node] == (siblings[0] if siblings else -1)


def test_another_worker_is_refused():
    with pytest.raises(RuntimeError, match=r"does not fit SGLang .*no _prepare_draft_tokens"):
        plugin.check_worker(
            type("Worker", (), {"forward_batch_generation": lambda self, batch: None})
        )

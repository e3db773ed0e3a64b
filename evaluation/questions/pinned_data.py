"""The benchmarks whose question files are fetched, each pinned to a commit and a hash.

A turn is the text as published: no instruction is added. `reference` is the published solution, and ids count from
1 in the file's order.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlparse

_RAW = "https://raw.githubusercontent.com"
_SPEC_BENCH = f"{_RAW}/hemingkx/Spec-Bench/fd2c1cd7d2201ef71db4c5f4e455008f017967bf"
_TOKEN_RECYCLING = f"{_RAW}/Luowaterbi/TokenRecycling/1b4c05cc642d111f12c61d4a99950d737121d9fe"
_HUMAN_EVAL = f"{_RAW}/openai/human-eval/6d43fb980f9fee3c892a914eda09951f772ad10d"
_GSM8K = f"{_RAW}/openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c"
# In Git LFS: a file's hash is the one that the repository's pointer names.
_PRM800K = "https://media.githubusercontent.com/media/openai/prm800k/7ecc794703b2877f63226f2477a49b34f9b25163"


@dataclass(frozen=True, slots=True)
class PinnedFile:
    """One benchmark's question file and what it must be."""

    name: str  # benchmark name, also the folder under `data/`
    url: str  # address at a fixed commit (for a derived file: its parent's address)
    sha256: str  # hash of the file as it lies in `data/<name>/question.jsonl`
    num_rows: int
    licence: str
    source: str
    # Benchmark whose first `num_rows` rows make up this one, if it is derived.
    parent: str | None = None
    # Where question.jsonl is made from another form: the published file's hash, and the conversion.
    published_sha256: str | None = None
    convert: Callable[[bytes], bytes] | None = None

    @property
    def published_name(self) -> str:
        return urlparse(self.url).path.rpartition("/")[2]


def _converted(content: bytes, category: str, turn: str, reference: str) -> bytes:
    """Return question.jsonl; the turn and the reference of a published row have these keys."""
    if content.startswith(b"\x1f\x8b"):
        content = gzip.decompress(content)
    # Not splitlines: it would cut at separators that JSON strings may hold.
    lines = [line for line in content.decode("utf-8").split("\n") if line]
    rows = []
    for question_id, line in enumerate(lines, start=1):
        found = json.loads(line)
        row = {"question_id": question_id, "category": category, "turns": [found[turn]]}
        rows.append(json.dumps(row | {"reference": [found[reference]]}, ensure_ascii=False) + "\n")
    return "".join(rows).encode("utf-8")


_ALL = (
    PinnedFile(
        name="spec_bench",
        url=f"{_SPEC_BENCH}/data/spec_bench/question.jsonl",
        sha256="4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04",
        num_rows=480,
        licence="Apache-2.0 (repository)",
        source="github.com/hemingkx/Spec-Bench",
    ),
    PinnedFile(
        name="mt_bench",
        url=f"{_SPEC_BENCH}/data/spec_bench/question.jsonl",
        sha256="119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
        num_rows=80,
        licence="Apache-2.0 (repository)",
        source="the first 80 rows of spec_bench",
        parent="spec_bench",
    ),
    PinnedFile(
        name="mbpp",
        url=f"{_TOKEN_RECYCLING}/data/mbpp/question.jsonl",
        sha256="4ef443d46893b3c806247b8b074da1f4f2d04cd97f64b7934549dad16d292399",
        num_rows=399,
        licence="CC-BY-4.0 (MBPP)",
        source="github.com/Luowaterbi/TokenRecycling",
    ),
    PinnedFile(
        name="humaneval",
        url=f"{_HUMAN_EVAL}/data/HumanEval.jsonl.gz",
        sha256="13314dfbb0fc31fec557c6f40218be4adc84b752a42bd81a28d1371731ad18ec",
        num_rows=164,
        licence="MIT (repository)",
        source="github.com/openai/human-eval",
        published_sha256="b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
        # Signature and docstring of a function to write.
        convert=partial(_converted, category="code", turn="prompt", reference="canonical_solution"),
    ),
    PinnedFile(
        name="gsm8k",
        url=f"{_GSM8K}/grade_school_math/data/test.jsonl",
        sha256="e1b4fc646202ced3ea96894acfc981282b6ab9a6f4c048a35fdacb36aec37f41",
        num_rows=1319,
        licence="MIT (repository)",
        source="github.com/openai/grade-school-math, the test split",
        published_sha256="3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
        convert=partial(_converted, category="math_reasoning", turn="question", reference="answer"),
    ),
    PinnedFile(
        name="math500",
        url=f"{_PRM800K}/prm800k/math_splits/test.jsonl",
        sha256="2f7f6b26e31822b1cc66b9446584c27ff252f72861187cdef303b05dbf420db4",
        num_rows=500,
        licence="MIT (repository)",
        source="github.com/openai/prm800k, the test split of MATH",
        published_sha256="35dc41080a3680858b27fa7e0533d2d547825316fc5dafe5d316f4ccc5a06132",
        convert=partial(
            _converted, category="math_reasoning", turn="problem", reference="solution"
        ),
    ),
)
PINNED: dict[str, PinnedFile] = {pinned.name: pinned for pinned in _ALL}
# Benchmarks that cannot be downloaded, and where they come from.
ELSEWHERE = {
    "speed_bench": (
        "comes under its owners' licence and is put together by their own script "
        "(github.com/NVIDIA/Model-Optimizer, examples/specdec_bench); give its questions as JSON lines "
        "with --question-file"
    )
}


def download_command(bench: str) -> str | None:
    """Return the command that downloads a benchmark's questions, None if there is none."""
    return f"python -m scripts.download_data {bench}" if bench in PINNED else None

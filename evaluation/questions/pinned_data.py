"""The benchmarks whose question files are fetched, each pinned to a commit and a hash."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlparse

from evaluation.questions.source_forms import gsm8k, human_eval, math500

_RAW = "https://raw.githubusercontent.com"
_SPEC_BENCH_COMMIT = "fd2c1cd7d2201ef71db4c5f4e455008f017967bf"
_TOKEN_RECYCLING_COMMIT = "1b4c05cc642d111f12c61d4a99950d737121d9fe"
_HUMAN_EVAL_COMMIT = "6d43fb980f9fee3c892a914eda09951f772ad10d"
_GSM8K_COMMIT = "3101c7d5072418e28b9008a6636bde82a006892c"
_PRM800K_COMMIT = "7ecc794703b2877f63226f2477a49b34f9b25163"


@dataclass(frozen=True, slots=True)
class SourceForm:
    """The form in which a benchmark is published, where it is not question.jsonl.

    `sha256` is the published file's, `convert` makes question.jsonl of its content.
    """

    sha256: str
    convert: Callable[[bytes], bytes]


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
    form: SourceForm | None = None  # the form in which it is published; None: as question.jsonl

    @property
    def published_name(self) -> str:
        return urlparse(self.url).path.rpartition("/")[2]


_SPEC_BENCH = PinnedFile(
    name="spec_bench",
    url=f"{_RAW}/hemingkx/Spec-Bench/{_SPEC_BENCH_COMMIT}/data/spec_bench/question.jsonl",
    sha256="4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04",
    num_rows=480,
    licence="Apache-2.0 (repository)",
    source="github.com/hemingkx/Spec-Bench",
)
_MT_BENCH = PinnedFile(
    name="mt_bench",
    url=_SPEC_BENCH.url,
    sha256="119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
    num_rows=80,
    licence=_SPEC_BENCH.licence,
    source="the first 80 rows of spec_bench",
    parent="spec_bench",
)
_MBPP = PinnedFile(
    name="mbpp",
    url=f"{_RAW}/Luowaterbi/TokenRecycling/{_TOKEN_RECYCLING_COMMIT}/data/mbpp/question.jsonl",
    sha256="4ef443d46893b3c806247b8b074da1f4f2d04cd97f64b7934549dad16d292399",
    num_rows=399,
    licence="CC-BY-4.0 (MBPP)",
    source="github.com/Luowaterbi/TokenRecycling",
)
_HUMAN_EVAL = PinnedFile(
    name="humaneval",
    url=f"{_RAW}/openai/human-eval/{_HUMAN_EVAL_COMMIT}/data/HumanEval.jsonl.gz",
    sha256="13314dfbb0fc31fec557c6f40218be4adc84b752a42bd81a28d1371731ad18ec",
    num_rows=164,
    licence="MIT (repository)",
    source="github.com/openai/human-eval",
    form=SourceForm("b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef", human_eval),
)
_GSM8K = PinnedFile(
    name="gsm8k",
    url=f"{_RAW}/openai/grade-school-math/{_GSM8K_COMMIT}/grade_school_math/data/test.jsonl",
    sha256="e1b4fc646202ced3ea96894acfc981282b6ab9a6f4c048a35fdacb36aec37f41",
    num_rows=1319,
    licence="MIT (repository)",
    source="github.com/openai/grade-school-math, the test split",
    form=SourceForm("3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14", gsm8k),
)
_MATH500 = PinnedFile(
    name="math500",
    # In Git LFS: the hash is the one that the repository's pointer names.
    url=f"https://media.githubusercontent.com/media/openai/prm800k/{_PRM800K_COMMIT}/prm800k/math_splits/test.jsonl",
    sha256="2f7f6b26e31822b1cc66b9446584c27ff252f72861187cdef303b05dbf420db4",
    num_rows=500,
    licence="MIT (repository)",
    source="github.com/openai/prm800k, the test split of MATH",
    form=SourceForm("35dc41080a3680858b27fa7e0533d2d547825316fc5dafe5d316f4ccc5a06132", math500),
)
_ALL = (_SPEC_BENCH, _MT_BENCH, _MBPP, _HUMAN_EVAL, _GSM8K, _MATH500)
PINNED: dict[str, PinnedFile] = {pinned.name: pinned for pinned in _ALL}
# Benchmarks that cannot be downloaded, and where they come from.
ELSEWHERE = {
    "speed_bench": (
        "comes under its owners' licence and is put together by their own script "
        "(github.com/NVIDIA/Model-Optimizer, examples/specdec_bench); give its questions as JSON lines "
        "with --question-file"
    ),
}


def download_command(bench: str) -> str | None:
    """Return the command that downloads a benchmark's questions, None if there is none."""
    return f"python -m scripts.download_data {bench}" if bench in PINNED else None

"""The benchmarks whose question files are fetched, each pinned to a commit and a hash."""

from __future__ import annotations

from dataclasses import dataclass

_RAW = "https://raw.githubusercontent.com"
_SPEC_BENCH_COMMIT = "fd2c1cd7d2201ef71db4c5f4e455008f017967bf"
_TOKEN_RECYCLING_COMMIT = "1b4c05cc642d111f12c61d4a99950d737121d9fe"


@dataclass(frozen=True, slots=True)
class PinnedFile:
    """One benchmark's question file and what it must be.

    Attributes:
        name: Benchmark name, also the folder under ``data/``.
        url: Address at a fixed commit (for a derived file: its parent's address).
        sha256: Hash of the file as it lies in ``data/<name>/question.jsonl``.
        num_rows: Number of questions.
        licence: Licence the questions come under.
        source: Where they come from, in words.
        parent: Benchmark whose first ``num_rows`` rows make up this one, if it is derived.
    """

    name: str
    url: str
    sha256: str
    num_rows: int
    licence: str
    source: str
    parent: str | None = None


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
PINNED: dict[str, PinnedFile] = {pinned.name: pinned for pinned in (_SPEC_BENCH, _MT_BENCH, _MBPP)}


def download_command(bench: str) -> str | None:
    """Return the command which brings a benchmark's questions, None if none is known."""
    return f"python -m scripts.download_data {bench}" if bench in PINNED else None

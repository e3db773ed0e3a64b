"""How much is measured: on a GPU, and on the simulated device, where only the code is tried."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of what the blocks measure.

    Attributes:
        num_launches: empty kernels.
        copy_bytes: of the copy whose bandwidth is measured.
        methods: names of demo settings that block 1 decodes with; (): all.
        queries, keys: of attention; keys are followed by lengths never seen.
        num_new_lengths: of these.
        heads: query heads, key heads where they are grouped, and their size.
        nodes, contexts: of passes.
        num_timed: calls that a time is the median of.
        num_texts, num_tokens: decoded, and tokens of each.
        num_profiled: steps under the profiler.
        num_questions, num_repetitions: of the interleaved comparison.
    """

    num_launches: int = 10_000
    copy_bytes: int = 2**28
    methods: tuple[str, ...] = ()
    queries: tuple[int, ...] = (1, 11, 81)
    keys: tuple[int, ...] = (512, 1024, 2048)
    num_new_lengths: int = 8
    heads: tuple[int, int, int] = (32, 8, 128)
    nodes: tuple[int, ...] = (1, 8, 16, 32, 64, 81, 88, 128)
    contexts: tuple[int, ...] = (512, 1536)
    num_timed: int = 20
    num_texts: int = 4
    num_tokens: int = 128
    num_profiled: int = 10
    num_questions: int = 60
    num_repetitions: int = 3


ON_GPU = Sizes()
SIMULATED = Sizes(
    num_launches=20,
    copy_bytes=2**16,
    methods=("vanilla", "recycling", "sps", "eagle", "hybrid"),
    queries=(1, 5),
    keys=(32,),
    num_new_lengths=2,
    heads=(4, 2, 8),
    nodes=(1, 8, 81),
    contexts=(40,),
    num_timed=1,
    num_texts=1,
    num_tokens=8,
    num_profiled=2,
    num_questions=2,
    num_repetitions=1,
)

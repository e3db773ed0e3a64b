"""Random cases against transformers' own `generate`, for as long as you like.

Examples:
    python -m tests.fuzz --minutes 10
    python -m tests.fuzz --minutes 60 --seed 7 --families Qwen3 "Gemma 2"
    python -m tests.fuzz --seed 0 --case 17                                   # a case again
    python -m tests.fuzz --walk 12                                            # random changes of a model again
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence

from model.machine.timing import progress
from tests.fuzz.cases import Case, family_names
from tests.fuzz.running import Runner, temporary_folder
from tests.fuzz.scene import Finding, Inapplicable
from tests.fuzz.surroundings import surroundings


def main(words: Sequence[str] | None = None) -> int:
    """Run cases; return 1 if one was a finding."""
    parser = argparse.ArgumentParser(
        "python -m tests.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to draw new cases")
    parser.add_argument("--seed", type=int, default=0, help="of all cases")
    parser.add_argument("--case", type=int, help="run this case alone")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--walk", type=int, help="run this random walk of changes alone")
    parser.add_argument(
        "--families",
        nargs="+",
        default=(),
        choices=family_names(),
        metavar="FAMILY",
        help="names of families, as in docs/models.md",
    )
    given = parser.parse_args(words)
    with temporary_folder() as costs, surroundings(costs):
        if given.walk is not None:
            from tests.fuzz.walks import NUM_CHANGES_OF_A_WALK, walked

            print(walked(given.walk, NUM_CHANGES_OF_A_WALK).counts)
            return 0
        if given.case is not None:
            runner = Runner(Case.drawn(given.seed, given.case, given.families))
            try:
                runner.run()
            finally:
                print(runner.case, *runner.log, sep="\n  ")
            return 0
        return fuzz(given.seed, given.first, given.minutes * 60, given.families)


def fuzz(seed: int, first: int, seconds: float, families: Sequence[str]) -> int:
    """Run cases for some seconds; print findings as they come, then a table."""
    texts: Counter[str] = Counter()
    methods: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    begin, number = time.monotonic(), first
    with progress(total=int(seconds), unit="s") as bar:
        while (now := time.monotonic() - begin) < seconds:
            bar.update(int(now) - bar.n)
            runner = Runner(Case.drawn(seed, number, families))
            number += 1
            try:
                runner.run()
            except Inapplicable:
                counts["inapplicable"] += 1
                continue
            except Finding as finding:
                counts["findings"] += 1
                print(f"FINDING {finding}", flush=True)
            counts["cases"] += 1
            counts["near-ties"] += runner.near_ties
            methods[runner.case.method] += 1
            texts.update(runner.counts)
    print(f"seed {seed}, cases {first} to {number - 1}: {dict(counts)}")
    for title, table in (("texts by door", texts), ("cases by method", methods)):
        print(f"{title}: " + ", ".join(f"{name} {count}" for name, count in table.most_common()))
    return int(bool(counts["findings"]))


if __name__ == "__main__":
    sys.exit(main())

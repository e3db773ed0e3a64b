"""Every family that the tests decode and `docs/models.md` lists."""

from __future__ import annotations

from tests.model.families.families_with_trees import TREES
from tests.model.families.families_without_trees import CHAINS, REFUSED

FAMILIES = [*TREES, *CHAINS, *REFUSED]

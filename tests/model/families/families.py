"""Every family that the tests decode and `docs/models.md` lists."""

from __future__ import annotations

from tests.model.families.families_with_states import STATES
from tests.model.families.families_with_trees import TREES as OTHER_TREES
from tests.model.families.families_without_trees import CHAINS, REFUSED

TREES = [*OTHER_TREES, *STATES]
FAMILIES = [*TREES, *CHAINS, *REFUSED]

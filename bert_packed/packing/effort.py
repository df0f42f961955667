"""How much a search has worked so far, in steps that are the same on every machine.

A clock in the place of these steps would end a search elsewhere on a slower machine, and equal seeds would
give different packs.
"""

import math


class Effort:
    """Counts steps, about a nanosecond each on two cores of 2024, and says when they are used up.

    Attributes:
        steps: Steps taken so far, a whole number.
        limit: Where to stop; math.inf for never. May be moved.
    """

    def __init__(self, limit=math.inf):
        self.steps = 0
        self.limit = limit

    def take(self, steps):
        """Count steps just taken."""
        self.steps += int(steps)

    @property
    def left(self):
        """Steps left before the limit, at least 0; math.inf without one."""
        return max(0, self.limit - self.steps)

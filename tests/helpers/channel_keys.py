"""Of the cells of one test process and of what it forks."""

from cluster.channel_keys import CellKeys

KEYS = CellKeys.make()

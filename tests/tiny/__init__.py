"""Tiny random models of every family, one module for each group of families: the one table of the family tests.

A case that cannot be built at the installed version is skipped with the reason, which is listed at the end of the run.
"""

from tiny.byo import CASES as BYO
from tiny.case import Tiny, randomised
from tiny.depth import CASES as DEPTH
from tiny.gated import CASES as GATED
from tiny.plain import CASES as PLAIN
from tiny.post_norm import CASES as POST_NORM
from tiny.streams import CASES as STREAMS

TINY: list[Tiny] = [*PLAIN, *POST_NORM, *BYO, *DEPTH, *GATED, *STREAMS]

__all__ = ["TINY", "Tiny", "randomised"]

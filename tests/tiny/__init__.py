"""Tiny random models of every family, one module for each group of families: the one table of the family tests.

A case that cannot be built at the installed version is skipped with the reason, which is listed at the end of the run.
"""

from tiny.case import Tiny, randomised
from tiny.plain import CASES as PLAIN

TINY: list[Tiny] = [*PLAIN]

__all__ = ["TINY", "Tiny", "randomised"]

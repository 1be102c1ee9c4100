"""Models that no file of their own describes: one small probe shows how their residual is formed."""

from resinspect.families.generic.following import followed, probing_once, why_not
from resinspect.families.generic.layout import layout_of
from resinspect.families.generic.residual import Residual

__all__ = ["Residual", "followed", "layout_of", "probing_once", "why_not"]

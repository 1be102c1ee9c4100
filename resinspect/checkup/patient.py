"""Whom the doctor examines: a trace, and the model behind it where there is one."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xarray as xr

from resinspect.checkup.rows import NotApplicable


@dataclass(frozen=True)
class Patient:
    """What checks look at.

    Attributes:
        trace: Its routing map.
        model: The model itself, without wrappers; None if only its trace is known.
        layout: What its family says about it.
        prompts: Token ids of every prompt.
        refused: Why capture refuses the map, empty if it does not.
    """

    trace: xr.Dataset
    model: Any = None
    layout: Any = None
    prompts: list[list[int]] = field(default_factory=list)
    refused: str = ""

    @property
    def scheme(self) -> tuple[str, str]:
        """Family and scheme."""
        return str(self.trace.attrs.get("family", "")), str(self.trace.attrs.get("scheme", ""))

    def need_model(self) -> None:
        """Leave the check if there is only a trace.

        Raises:
            NotApplicable: If there is no model.
        """
        if self.model is None:
            raise NotApplicable("only a trace was given; this needs the model")

    def native(self, name: str) -> np.ndarray:
        """A native ``(token, site, ...)`` as float64.

        Raises:
            NotApplicable: If the trace does not hold it.
        """
        if f"native_{name}" not in self.trace:
            raise NotApplicable(f'the trace holds no native {name!r}; capture it by replay with keep=("natives", ...)')
        return self.trace[f"native_{name}"].values.astype(np.float64)

    @property
    def sites(self) -> list[str]:
        """Names of sites, for natives."""
        return [str(name) for name in self.trace.coords["site"].values]

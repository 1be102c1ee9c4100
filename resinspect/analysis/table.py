"""The one table of measures, and all of them on one trace."""

import warnings
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr


@dataclass(frozen=True, slots=True)
class Measure:
    """Where a measure lives and what of it belongs in a short summary.

    Attributes:
        module: Module of this package that holds the function of the measure's name.
        value: Column of its table that holds the value; measures per token become tables by ``summarise``.
        headline: Which rows a summary shows, as a pandas query; all of them if empty, none if None.
        by: Columns that name a row in a summary.
    """

    module: str
    value: str = "mean"
    headline: str | None = None
    by: tuple[str, ...] = ()


MEASURES: dict[str, Measure] = {
    "contribution_share": Measure("dilution"),
    "magnitude_share": Measure("dilution"),
    "effective_sources": Measure("dilution"),
    "dilution_index": Measure("dilution", headline=""),
    "write_persistence": Measure("persistence"),
    "persistence_fit": Measure("persistence", "value", "", ("quantity",)),
    "update_ratio": Measure("dilution"),
    "write_alignment": Measure("dilution"),
    "residual_norms": Measure("geometry"),
    "norm_growth": Measure("geometry", "slope", "axis == 'log depth'", ("quantity", "axis")),
    "novelty": Measure("geometry"),
    "reader_cosine": Measure("geometry"),
    "angular_distance": Measure("geometry"),
    "block_influence": Measure("geometry"),
    "massive_activations": Measure("activations"),
    "collective_rank": Measure("activations"),
    "reading_profile": Measure("profiles"),
    "readership": Measure("profiles"),
    "locality": Measure("profiles"),
    "embedding_share": Measure("profiles"),
    "expected_lag": Measure("profiles"),
    "profile_entropy": Measure("profiles"),
    "attention_mlp_contrast": Measure("specialization", "contrast", "", ("quantity",)),
    "ends_against_middle": Measure("specialization", "excess", "reader == 'all'", ("part",)),
    "semiseparable_rank": Measure("specialization"),
    "profile_groups": Measure("groups"),
    "profile_clusters": Measure("groups"),
    "profile_map": Measure("groups"),
    "variance_of_routing": Measure("variance", "r2", "reader == 'all'", ("component",)),
    "staticness": Measure("staticness", "staticness", "", ("variable",)),
    "routing_drift": Measure("drift", "divergence", "reader == 'all'", ("between",)),
    "class_information": Measure("class_information", "information", "reader == 'all'"),
    "routing_deviation": Measure("difficulty"),
    "routing_and_loss": Measure("difficulty", "rho", "reader == 'all'", ("quantity",)),
    "stream_gain": Measure("streams"),
    "least_stream_gain": Measure("streams"),
    "stream_deviation": Measure("streams"),
    "second_singular_value": Measure("streams"),
    "stream_distance": Measure("streams"),
    "stream_coefficients": Measure("stream_routing"),
    "cancellation_index": Measure("stream_routing"),
    "stream_specific_routing": Measure("stream_routing"),
    "stream_specificity": Measure("stream_routing"),
    "logit_lens": Measure("lens"),
    "lens_profile": Measure("lens"),
    "direct_logit_attribution": Measure("lens"),
    "gradient_norms": Measure("lens"),
}


def measure(name: str) -> Any:
    """The function of a measure."""
    return getattr(import_module(f"resinspect.analysis.{MEASURES[name].module}"), name)


def analyze(trace: "xr.Dataset", *, drop_first: int = 0) -> "tuple[dict[str, pd.DataFrame], dict[str, str]]":
    """All measures of a trace, as tidy tables.

    Args:
        trace: Any; what it does not hold is left out.
        drop_first: Leading tokens of every document to leave out of all measures, such as 1 for attention sinks.

    Returns:
        Name to table, and name to the reason for each measure that the trace has too little for.

    Raises:
        OptionError: If no token is left.
    """
    from resinspect.analysis.summary import summarise
    from resinspect.errors import TraceError

    tables, left_out = {}, {}
    for name in MEASURES:
        function = measure(name)
        options = {"drop_first": drop_first} if "drop_first" in signature(function).parameters else {}
        try:
            with warnings.catch_warnings():
                # What is NaN shows in the tables, with how many tokens it leaves.
                warnings.simplefilter("ignore", RuntimeWarning)
                result = function(trace, **options)
        except TraceError as error:
            left_out[name] = str(error)
            continue
        if hasattr(result, "columns"):
            tables[name] = result
        elif "token" in result.dims:
            tables[name] = summarise(result, drop_first=drop_first)
        else:
            tables[name] = result.to_dataframe(name="mean").reset_index()
    return tables, left_out


def headlines(tables: "dict[str, pd.DataFrame]") -> "pd.DataFrame":
    """The few rows of ``analyze`` that belong in a short summary, as far as they have a value.

    Returns:
        Columns ``measure``, ``of``, ``value``, ``low``, ``high``, ``null_low``, ``null_high``, ``documents``. The null
        is one value in both, or what permutations give: a band, or its upper end alone (``null_low`` NaN).
    """
    import pandas as pd

    rows = []
    for name, table in tables.items():
        row = MEASURES[name]
        if row.headline is None:
            continue
        for _, line in (table.query(row.headline) if row.headline else table).iterrows():
            of = ", ".join(str(line[column]) for column in row.by)
            null = line.get("null", table.attrs.get("null"))
            bounds = (null, null) if null is not None else (line.get("null_low"), line.get("null_high"))
            rows.append((name, of, line[row.value], line["low"], line["high"], *bounds, line["documents"]))
    columns = ["measure", "of", "value", "low", "high", "null_low", "null_high", "documents"]
    return pd.DataFrame(rows, columns=columns).dropna(subset="value").astype({"null_low": float, "null_high": float})

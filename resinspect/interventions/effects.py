"""What an edit does to a model's predictions: change of next-token loss, and KL from the clean run."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
import xarray as xr
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from resinspect.analysis.summary import summarise
from resinspect.errors import OptionError
from resinspect.hooks.geometry import chunks
from resinspect.hooks.prompts import Batch, Prompts
from resinspect.interventions.edits import Edit
from resinspect.interventions.session import Downstream, Session, session, targets_of

ROUTING = {
    "recomputed": "routers of the edited run see the edited writes",
    "frozen": "every reader keeps the routing weights of the clean run",
}
MEASURES = {
    "loss_change": ("change of next-token loss", "nats", "loss(edited) - loss(clean)"),
    "kl": ("KL of the clean from the edited prediction", "nats", "sum_y p_clean log(p_clean / p_edited)"),
}


def intervene(
    model: nn.Module,
    prompts: Prompts,
    edits: Edit | Sequence[Edit],
    *,
    downstream: Downstream,
    tokenizer: PreTrainedTokenizerBase | None = None,
    batch_size: int = 8,
    truncate: bool = False,
) -> xr.Dataset:
    """Run a model under edits of what its readers get, and say how its predictions change.

    At a reader ``h' = h + sum_s (m_s - 1) c_rs``, with c_rs the contribution of source s in the edited run and m the
    edit; edits of W put another row in its place: ``h' = h + sum_s (W'_rs - W_rs) v_s``. The model's own forward runs,
    once clean and once for each edit; edits propagate.

    Args:
        model: A model of a known family.
        prompts: As for ``capture``.
        edits: One or several, each run on its own.
        downstream: ``"recomputed"``: later routing weights are what the model computes in the edited run. ``"frozen"``:
            every reader, edited or not, gets ``sum_s W_rs v_s`` with W (or the natives) of the clean run and the writes
            of the edited one.
        tokenizer: Encodes texts and labels tokens.
        batch_size: Prompts per forward pass.
        truncate: Cut prompts that are longer than the model's context.

    Returns:
        ``loss (token)`` of the clean run, ``loss_change (edit, token)`` in nats (NaN at each prompt's last token; both
        missing where the model is no decoder), ``kl (edit, token)`` in nats, at least 0, and ``missed (edit, reader)``:
        the median over tokens of what the edited run misses of its own map (rounding if the edit did what it says; the
        largest of all batches). Null value of every effect: 0.

    Raises:
        CaptureError: If an edit is refused, in one sentence.
        OptionError: If an edit names what the model does not have.
    """
    given = session(model, prompts, tokenizer=tokenizer, batch_size=batch_size, truncate=truncate)
    return measure(given, [edits] if isinstance(edits, Edit | str) else list(edits), downstream)


def measure(given: Session, edits: Sequence[Edit], downstream: Downstream) -> xr.Dataset:
    """As ``intervene``, of a model that is ready."""
    if wrong := [edit for edit in edits if not isinstance(edit, Edit)]:
        raise OptionError(f"edits hold {wrong[0]!r}; make edits with functions such as ri.ablate_edge.")
    names = [edit.name for edit in edits]
    if not edits or len({*names}) < len(names):
        raise OptionError(f"edits are {names}; give at least one, each only once.")
    for edit in edits:
        given.check(edit, downstream)
    means = given.mean_rows() if any(edit.mean for edit in edits) else None
    losses, parts, missed = [], [], np.zeros((len(edits), len(given.layout.anatomy.readers)))
    for batch in given.batches:
        clean = given.run(batch)
        losses.append(_loss(batch, clean.logits))
        runs = []
        for i, edit in enumerate(edits):
            done = given.edited(batch, clean, edit, downstream, means)
            missed[i] = np.maximum(missed[i], done.editor.missed)
            runs.append(torch.stack([_loss(batch, done.logits) - losses[-1], divergence(clean.logits, done.logits)]))
        parts.append(torch.stack(runs))
    values = torch.cat(parts, dim=-1).cpu().numpy()
    variables = {"kl": (("edit", "token"), values[:, 1]), "missed": (("edit", "reader"), missed)}
    if given.causal:
        variables["loss"] = ("token", torch.cat(losses).cpu().numpy())
        variables["loss_change"] = (("edit", "token"), values[:, 0])
    return _labelled(given, variables, names, downstream)


def effects(result: xr.Dataset, *, drop_first: int = 0, resamples: int = 1000, level: float = 0.95) -> pd.DataFrame:
    """Mean and median effect of each edit, with a bootstrap interval of the mean over documents.

    Args:
        result: Of ``intervene``.
        drop_first: Leading tokens of every document to leave out.
        resamples: Bootstrap resamples.
        level: Of the interval.

    Returns:
        One row per measure and edit: ``measure``, ``edit``, ``mean``, ``median``, ``low``, ``high`` (NaN with one
        document), ``tokens``, ``documents``. Null value 0.

    Raises:
        OptionError: If ``result`` is not of ``intervene``, or no token is left.
    """
    frames = []
    if not (names := [name for name in MEASURES if name in result and "edit" in result[name].dims]):
        raise OptionError(f"the result has {', '.join(map(str, result)) or 'nothing'}; give what ri.intervene returns.")
    for name in names:
        frame = summarise(result[name], drop_first=drop_first, resamples=resamples, level=level)
        frames.append(frame.assign(measure=name)[["measure", *frame.columns]])
    table = pd.concat(frames, ignore_index=True)
    table.attrs = {**result.attrs, "units": "nats", "drop_first": drop_first, "level": level}
    return table


def divergence(clean: Tensor, edited: Tensor) -> Tensor:
    """``KL(clean || edited)`` in nats of logits ``(token, vocab)``, in float64: ``(token)``."""
    parts = []
    for part in chunks(clean[:, None], copies=4):
        p, q = (logits[part].double().log_softmax(-1) for logits in (clean, edited))
        parts.append((p.exp() * (p - q)).sum(-1).clamp_min(0.0))
    return torch.cat(parts)


def _loss(batch: Batch, logits: Tensor) -> Tensor:
    """Next-token loss ``(token)`` in float64, NaN where there is no next token."""
    targets, known = targets_of(batch)
    parts = [
        torch.nn.functional.cross_entropy(logits[part].double(), targets[part].to(logits.device), reduction="none")
        for part in chunks(logits[:, None], copies=2)
    ]
    return torch.cat(parts).masked_fill(~known.to(logits.device), torch.nan)


def _labelled(given: Session, variables: dict, names: list[str], downstream: Downstream) -> xr.Dataset:
    anatomy = given.layout.anatomy
    coords = given.tokens() | {"edit": names, "reader": [reader.name for reader in anatomy.readers]}
    attrs = {
        "model": getattr(getattr(given.model, "config", None), "name_or_path", "") or type(given.model).__name__,
        "family": given.layout.family,
        "scheme": given.layout.scheme,
        "write_definition": given.layout.write_definition,
        "downstream": downstream,
        "routing": ROUTING[downstream],
    }
    result = xr.Dataset(variables, coords, attrs)
    for name, (long_name, units, formula) in MEASURES.items():
        if name in result:
            result[name].attrs = {"long_name": long_name, "units": units, "formula": formula, "downstream": downstream}
    result["missed"].attrs = {"long_name": "share of a reader's input that the map misses", "units": "1"}
    if "loss" in result:
        result["loss"].attrs = {"long_name": "loss of predicting the next token, clean run", "units": "nats"}
    return result

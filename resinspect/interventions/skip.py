"""Skipping a sublayer: what later sublayers and the prediction owe to its write (Csordas et al., arXiv 2505.13898)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from resinspect.errors import OptionError
from resinspect.hooks.prompts import Prompts
from resinspect.interventions.editor import can_put
from resinspect.interventions.edits import Edit, Tokens
from resinspect.interventions.effects import ROUTING
from resinspect.interventions.session import Downstream, Pass, Session, session

VARIANTS = ("all", "future")
STEP, TAIL = 8, 4
"""Cuts of the future variant are multiples of 8, at least 4 tokens before the end, as in the paper."""


@dataclass(frozen=True)
class Cut:
    """Tokens of each prompt between two positions.

    Attributes:
        low: First position.
        high: Per prompt, the position to stop before; a prompt not listed has no such tokens. None for the end.
        above: Whether instead the tokens from ``high`` on are meant.
    """

    low: int
    high: dict[int, int] | None = None
    above: bool = False

    def __call__(self, tokens: Tokens) -> Tensor:
        """Bool ``(token)``."""
        if self.high is None:
            return tokens.position >= self.low
        cut = torch.tensor([self.high.get(s, -1) for s in tokens.sample.tolist()], device=tokens.position.device)
        side = tokens.position >= cut if self.above else (tokens.position < cut) & (tokens.position >= self.low)
        return side & (cut >= 0)


@dataclass(frozen=True)
class Window:
    """At which tokens a write is zero, and at which the effect is measured: bool functions of the tokens."""

    skips: Cut
    measures: Cut


def skip_effects(
    model: nn.Module,
    prompts: Prompts,
    *,
    downstream: Downstream,
    variant: Literal["all", "future"] = "all",
    cuts: int = 4,
    seed: int = 0,
    first: int = 1,
    tokenizer: PreTrainedTokenizerBase | None = None,
    batch_size: int = 8,
    truncate: bool = False,
) -> xr.Dataset:
    """Replace one sublayer's write by zero, and see how later writes and the prediction change.

    The paper skips layers of a plain residual; here it is one sublayer, of any scheme: its write is zero for readers,
    routers and carry alike (with ``downstream="frozen"`` readers keep their clean routing weights). The first tokens
    are never skipped.

    Args:
        model: A model of a known family.
        prompts: As for ``capture``.
        downstream: As for ``intervene``.
        variant: ``"all"`` skips at all tokens. ``"future"`` skips only before a cut and measures only from it on: what
            is left is what later tokens owe to the sublayer.
        cuts: Of the future variant, random cuts per prompt (multiples of 8, at least 4 tokens before its end); the
            largest effect of all cuts counts.
        seed: Of the cuts, with the prompt's number.
        first: Position of the first token that is skipped.
        tokenizer: Encodes texts and labels tokens.
        batch_size: Prompts per forward pass.
        truncate: Cut prompts that are longer than the model's context.

    Returns:
        ``write_change (skipped, source, token)``: ``|v' - v| / |v|`` of every later write, and ``output_change
        (skipped, token)``: ``|softmax(y') - softmax(y)|_2``, 0 to the root of 2. Both 0 without an effect; NaN where
        nothing is measured. The paper's numbers are maxima over tokens: ``.max("token")``; ``summarise`` gives means
        with intervals.

    Raises:
        OptionError: If an option has a value that is not allowed.
        CaptureError: If the model refuses the edit.
    """
    if variant not in VARIANTS or cuts < 1:
        raise OptionError(f"variant is {variant!r} with {cuts} cuts; choose one of {', '.join(VARIANTS)}, cuts from 1.")
    given = session(model, prompts, tokenizer=tokenizer, batch_size=batch_size, truncate=truncate)
    given.check(Edit("skip"), downstream)
    skipped = list(_skippable(given))
    windows = [Window(Cut(first), Cut(first))] if variant == "all" else list(_windows(given, cuts, seed, first))
    parts = []
    for batch in given.batches:
        clean = given.run(batch)
        done = []
        for index in skipped:
            name = given.layout.anatomy.sources[index].name
            runs = []
            for window in windows:
                edit = Edit(f"skip {name}", sources=(name,), zeroed=(name,), when=window.skips)
                runs.append(_change(clean, given.edited(batch, clean, edit, downstream), index, window))
            done.append(_largest(runs))
        parts.append(torch.stack(done))
    values = torch.cat(parts, dim=-1).cpu().numpy()
    return _labelled(given, values, skipped, {"variant": variant, "downstream": downstream})


def _change(clean: Pass, edited: Pass, skipped: int, window: Window) -> Tensor:
    """``(source + 1, token)``: relative change of each later write, and last that of the prediction."""
    before, after = (run.editor.writes.double() for run in (clean, edited))
    change = (after - before).norm(dim=-1) / before.norm(dim=-1)
    change[:, : skipped + 1] = torch.nan
    p, q = (run.logits.double().softmax(-1) for run in (clean, edited))
    output = (p - q).norm(dim=-1).to(change.device)
    measured = window.measures(clean.editor.tokens).to(change.device)
    return torch.cat([change, output[:, None]], dim=1).masked_fill(~measured[:, None], torch.nan).mT


def _largest(runs: list[Tensor]) -> Tensor:
    largest = runs[0]
    for run in runs[1:]:
        largest = torch.fmax(largest, run)
    return largest


def _skippable(given: Session) -> Iterator[int]:
    """What sublayers write, without constants that come with it and writes that cannot be taken away."""
    taps = {tap.event.index: tap for tap in given.layout.taps if tap.event and tap.event.what == "source"}
    anatomy = given.layout.anatomy
    for site in anatomy.sites:
        if site.views:
            written = anatomy.sources_of(site)
            yield from (i for i in written if can_put(taps[i]) and anatomy.sources[i].kind != "bias")


def _windows(given: Session, cuts: int, seed: int, first: int) -> Iterator[Window]:
    """One window for each cut of all prompts; short prompts have fewer cuts, or none."""
    lengths = {}
    for batch in given.batches:
        lengths |= {batch.first_sample + i: n for i, n in enumerate(batch.mask.sum(-1).tolist())}
    places = {
        number: np.random.default_rng((seed, number)).permutation(np.arange(STEP, length - TAIL + 1, STEP))[:cuts]
        for number, length in lengths.items()
    }
    for i in range(cuts):
        at = {number: int(cut[i]) for number, cut in places.items() if i < len(cut)}
        if at:
            yield Window(Cut(first, at), Cut(first, at, above=True))


def _labelled(given: Session, values: np.ndarray, skipped: list[int], attrs: dict[str, str]) -> xr.Dataset:
    names = [source.name for source in given.layout.anatomy.sources]
    coords = given.tokens() | {"skipped": [names[i] for i in skipped], "source": names}
    variables = {
        "write_change": (("skipped", "source", "token"), values[:, :-1]),
        "output_change": (("skipped", "token"), values[:, -1]),
    }
    result = xr.Dataset(variables, coords, attrs | {"routing": ROUTING[attrs["downstream"]]})
    result["write_change"].attrs = {"long_name": "relative change of a later write", "units": "1", **attrs}
    result["output_change"].attrs = {"long_name": "change of the predicted probabilities", "units": "1", **attrs}
    return result

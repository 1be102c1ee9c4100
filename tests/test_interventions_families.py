"""Edits of other people's models: what can be put back, what is refused, and that nothing else is reached."""

import inspect
from dataclasses import replace

import pytest
import torch
from test_families import PROMPTS, built
from tiny import TINY

from resinspect.errors import CaptureError
from resinspect.families import find_layout
from resinspect.families.forward import call, evaluating
from resinspect.hooks.prompts import batches
from resinspect.hooks.taps import attached
from resinspect.interventions.editor import Editor, can_put
from resinspect.interventions.edits import Edit, recency_only

every_tiny = pytest.mark.parametrize("tiny", TINY, ids=str)
BY_NAME = {str(tiny): tiny for tiny in TINY}


def parts(tiny):
    model = built(tiny)
    pad = "attention_mask" in inspect.signature(model.forward).parameters
    (batch,) = batches(PROMPTS if pad else PROMPTS[:1], 8, pad=pad, device=torch.device("cpu"))
    return model, find_layout(model), batch


def forward(model, taps, receive, batch, second=None):
    """Whatever tensor the model gives, run with two sets of hooks: the second sees what the first put in."""
    arguments = {"use_cache": False, "return_dict": True}
    if batch.padded:
        arguments |= {"attention_mask": batch.mask.long(), "position_ids": batch.positions}
    with evaluating(model), attached(taps, receive), attached(taps, second or (lambda *_: None)):
        output = call(model, batch.ids, **arguments)
    first = output if isinstance(output, torch.Tensor) else next(v for v in output.values() if v is not None)
    return batch.real(first)


def halved(layout, readers=None):
    """Half of the embedding at some readers, all that can be edited by default."""
    taps = {tap.event.index: tap for tap in layout.taps if tap.event and tap.event.what == "reader"}
    free = [r.name for i, r in enumerate(layout.anatomy.readers) if not taps[i].carried and can_put(taps[i])]

    def form(place, row):
        factors = torch.ones(len(place.sources), dtype=torch.float64)
        factors[0] = 0.5
        return place.scaled(row, factors)

    return Edit("half", form, tuple(free if readers is None else readers))


@every_tiny
def test_what_is_seen_can_be_put_back_unchanged(tiny):
    """A ``put`` that is not the counterpart of its ``pick``: m = 1 would not reproduce the model bit for bit."""
    model, layout, batch = parts(tiny)
    taps = {tap.event: tap for tap in layout.taps if tap.event and tap.event.what != "native"}
    can = {event for event, tap in taps.items() if can_put(tap)}
    assert sum(event.what == "reader" for event in can) == len(layout.anatomy.readers)
    plain = forward(model, layout.taps, lambda *_: None, batch)
    again = forward(model, layout.taps, lambda event, value: value.clone() if event in can else None, batch)
    # What a block adds is a difference, and a write times a number is divided again.
    exact = tiny.family != "scaled" and not str(tiny).endswith("blocks")
    torch.testing.assert_close(again, plain, rtol=0, atol=0 if exact else 1e-4)


@every_tiny
@pytest.mark.parametrize("frozen", [False, True], ids=["recomputed", "frozen"])
def test_readers_get_the_edit_and_nothing_else_is_reached(tiny, frozen):
    """An edit put in the wrong place, lost, or one that leaks into the carry: then the map of later readers is off."""
    model, layout, batch = parts(tiny)
    clean = Editor(layout, batch, Edit("clean"))
    plain = forward(model, layout.taps, clean.receive, batch)
    if frozen and any(tap.carried for tap in layout.taps):
        pytest.skip("some readers cannot be edited, so routing cannot be frozen at all of them")
    edit, got = halved(layout), {}
    natives = clean.natives if frozen else None
    editor = Editor(layout, batch, edit, frozen=natives, keep_rows=True)

    def look(event, value):
        if event.what == "reader":
            got[event.index] = batch.real(value.reshape(*batch.ids.shape, -1)).clone()

    edited = forward(model, layout.taps, editor.receive, batch, look)
    assert (edited - plain).abs().max() > 1e-4
    assert max(editor.missed) < 1e-5
    other = clean.natives if frozen else editor.natives
    rows = editor._own.__class__(layout, editor.writes, other)
    for index, reader in enumerate(layout.anatomy.readers):
        row = rows.at(index)
        if reader.name in edit.readers:
            factors = torch.ones(reader.prefix, dtype=torch.float64)
            factors[0] = 0.5
            row = row * factors.to(row.dtype).reshape(-1, *(1,) * (row.ndim - 2))
        expected = rows.total(row)
        error = (got[index] - expected).norm(dim=-1) / (rows.size(row) + 1e-30)
        assert error.max() < 1e-4, reader.name


@every_tiny
def test_readers_that_are_the_carry_are_refused_and_would_leak(tiny):
    """A family that declares a reader branch-only where the model carries on from it, or the other way round."""
    model, layout, batch = parts(tiny)
    carried = [tap for tap in layout.taps if tap.carried]
    if not carried:
        pytest.skip("all of its readers are branch-only")
    if str(tiny) == "bloom_post_norm_residual":
        pytest.skip("refused without need: its attention module adds a residual that it gets as another argument")
    name = layout.anatomy.readers[carried[0].event.index].name
    with pytest.raises(CaptureError, match="cannot be edited: the model also carries on"):
        forward(model, layout.taps, Editor(layout, batch, halved(layout, [name])).receive, batch)
    forced = replace(layout, taps=tuple(replace(tap, carried=False) for tap in layout.taps))
    for tap in carried:
        edit = halved(layout, [layout.anatomy.readers[tap.event.index].name])
        with pytest.raises(CaptureError, match="reached more of the model than what is read"):
            forward(model, forced.taps, Editor(forced, batch, edit).receive, batch)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@every_tiny
def test_every_write_that_can_be_taken_away_is_gone(tiny):
    """A write zeroed where only one of its consumers reads it, so that the carry still has it."""
    model, layout, batch = parts(tiny)
    taps = [tap for tap in layout.taps if tap.event and tap.event.what == "source" and can_put(tap)]
    names = [layout.anatomy.sources[tap.event.index].name for tap in taps]
    assert len(names) >= len({site.name for site in layout.anatomy.sites if site.views}) - 1
    for name in (names[0], names[len(names) // 2]):
        editor = Editor(layout, batch, Edit("zero", sources=(name,), zeroed=(name,)))
        forward(model, layout.taps, editor.receive, batch)
        assert max(editor.missed) < 1e-5, name


@pytest.mark.parametrize("name", ["llama", "gpt2", "deepseek_v4", "hy_v4"])
def test_half_precision_edits_stay_within_its_rounding(name):
    """A leak test that calls rounding a leak."""
    model, layout, batch = parts(BY_NAME[name])
    model = model.bfloat16()
    editor = Editor(layout, batch, recency_only(2))
    forward(model, find_layout(model).taps, editor.receive, batch)
    assert max(editor.missed) < 0.05

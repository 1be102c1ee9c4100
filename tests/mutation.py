"""Deliberate mistakes in a family's linear program, and what the capture says about them."""

import warnings
from dataclasses import replace

from test_families import built, captured
from tiny import TINY as CASES

import resinspect as ri
from resinspect.errors import CaptureError
from resinspect.families import find_layout

TINY = {tiny.name: tiny for tiny in CASES}


def verdict_of(model, layout, monkeypatch):
    """The verdict of a map with a changed layout; a refusal is one, too."""
    monkeypatch.setattr("resinspect.hooks.capture.find_layout", lambda _: layout)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            return ri.fidelity_summary(captured(model))["verdict"]
        except CaptureError:
            return "refused"


def broken(name, change, monkeypatch):
    """The verdict once ``change(connection, layout)`` made a mistake."""
    model = built(TINY[name])
    layout = find_layout(model)
    assert verdict_of(model, layout, monkeypatch) == "exact"
    connection = change(layout.connection, layout)
    return verdict_of(model, replace(layout, connection=connection), monkeypatch)


def as_kind(connection, kind):
    """The connection with the verbs of a subclass."""
    connection.__class__ = kind
    return connection

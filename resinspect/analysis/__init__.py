"""Measures: from a trace to labelled numbers."""

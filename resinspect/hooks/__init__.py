"""Capture: run a model once and record its routing map as it goes."""

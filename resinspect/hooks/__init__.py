"""Capture: run a model once and record its routing map as it goes."""

from resinspect.hooks.capture import KEEP, capture, capture_batches

__all__ = ["KEEP", "capture", "capture_batches"]

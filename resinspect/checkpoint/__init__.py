"""Checkpoints: from a Hugging Face folder to a model and its tokenizer, or one sentence that says why not."""

from resinspect.checkpoint.loading import load

__all__ = ["load"]

"""Sandwich norm (CogView, Gemma): a second norm on each write, then the plain sum, W = 1."""

from resinspect.models.connections.pre_ln import PreLN


class Sandwich(PreLN):
    """``h' = h + norm(f(norm(h)))``; the write is the output of the second norm, so W is 1 for every earlier source."""

    post_norm = True

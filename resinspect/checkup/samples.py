"""What a model is examined on when no prompts are given."""

import random

TEXTS = (
    "In the beginning was the Word, and the Word was with God, and the Word was God. The same was in the beginning "
    "with God. All things were made by him; and without him was not any thing made that was made.",
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, it "
    "was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the season of "
    "Darkness.",
    "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse, and "
    "nothing particular to interest me on shore, I thought I would sail about a little and see the watery part of "
    "the world.",
    "To Sherlock Holmes she is always the woman. I have seldom heard him mention her under any other name. In his "
    "eyes she eclipses and predominates the whole of her sex.",
    "The Nellie, a cruising yawl, swung to her anchor without a flutter of the sails, and was at rest. The flood had "
    "made, the wind was nearly calm, and being bound down the river, the only thing for it was to come to.",
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a "
    "wife. However little known the feelings or views of such a man may be on his first entering a neighbourhood.",
)
"""English prose in the public domain: the Gospel of John, Dickens, Melville, Conan Doyle, Conrad, Austen."""

_PROMPTS, _TOKENS = 6, 32


def random_ids(vocabulary: int, context: int | None, *, seed: int = 0) -> list[list[int]]:
    """Token ids drawn evenly, for a model without a tokenizer."""
    generator = random.Random(seed)
    length = min(_TOKENS, context or _TOKENS)
    return [[generator.randrange(vocabulary) for _ in range(length)] for _ in range(_PROMPTS)]

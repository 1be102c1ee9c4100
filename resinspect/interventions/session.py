"""One model, its prompts and its clean runs: what every intervention on them shares."""

import inspect
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from resinspect.errors import CaptureError, OptionError
from resinspect.families import Layout, find_layout
from resinspect.families.forward import call, context_of, evaluating, vocabulary
from resinspect.families.wrapped import bridged
from resinspect.hooks.causality import is_causal, logits_of, require_weights
from resinspect.hooks.prompts import Batch, Prompts, batches, encode_prompts, token_texts
from resinspect.hooks.taps import attached, unwrapped
from resinspect.interventions.editor import Editor, tokens_of
from resinspect.interventions.edits import Edit
from resinspect.program import COEFFICIENT

Downstream = Literal["recomputed", "frozen"]
DOWNSTREAM = ("recomputed", "frozen")
CLEAN = Edit("clean")


@dataclass(frozen=True)
class Pass:
    """One forward pass over one batch.

    Attributes:
        editor: What followed it.
        logits: Of the real tokens, ``(token, vocab)``.
    """

    editor: Editor
    logits: Tensor


@dataclass(frozen=True)
class Session:
    """A model whose scheme is known, and prompts for it.

    Attributes:
        model: The model.
        layout: Its sources, readers and program.
        batches: The prompts.
        tokenizer: Labels tokens.
        causal: Whether it is a decoder, so that it has a next-token loss.
    """

    model: nn.Module
    layout: Layout
    batches: tuple[Batch, ...]
    tokenizer: PreTrainedTokenizerBase | None
    causal: bool

    def run(self, batch: Batch, edit: Edit = CLEAN, **options: Any) -> Pass:
        """The model's own forward over one batch, under an edit; ``options`` are those of ``Editor``.

        Raises:
            CaptureError: If the edit is refused, or the model gives no logits.
        """
        editor = Editor(self.layout, batch, edit, **options)
        arguments = {"use_cache": False, "return_dict": True}
        if batch.padded:
            arguments |= {"attention_mask": batch.mask.long(), "position_ids": batch.positions}
        with evaluating(self.model), attached(self.layout.taps, editor.receive):
            logits = logits_of(call(self.model, batch.ids, **arguments))
        if logits is None or logits.shape[:2] != batch.ids.shape:
            raise CaptureError(f"{type(self.model).__name__} gives no logits, so the effect of an edit cannot be told.")
        return Pass(editor, batch.real(logits))

    def check(self, edit: Edit, downstream: str) -> None:
        """Refuse an edit that this model's scheme does not have.

        Raises:
            OptionError: If a name or ``downstream`` is unknown.
            CaptureError: If the edit needs one scalar per source and token, and there is none.
        """
        if downstream not in DOWNSTREAM:
            raise OptionError(f"downstream is {downstream!r}; choose one of {', '.join(DOWNSTREAM)}.")
        self._check_names(edit)
        if edit.scalar and self.layout.connection.carrier != COEFFICIENT:
            raise CaptureError(
                f"{edit.name!r} puts one row of W in another's place, but in scheme {self.layout.scheme!r} W is not "
                "one number per source and token; ablate_edge, ablate_source and recency_only work on any scheme."
            )

    def _check_names(self, edit: Edit) -> None:
        readers = {reader.name: reader.prefix for reader in self.layout.anatomy.readers}
        sources = [source.name for source in self.layout.anatomy.sources]
        for what, names, possible in (("reader", edit.readers or (), readers), ("source", edit.sources, sources)):
            if unknown := [name for name in names if name not in possible]:
                raise OptionError(f"{edit.name!r} names {what} {unknown[0]!r}; the model has {', '.join(possible)}.")
        for reader in edit.readers or ():
            if late := [name for name in edit.sources if name not in sources[: readers[reader]]]:
                raise OptionError(f"{edit.name!r} takes {late[0]!r} from {reader!r}, which reads before it is written.")
        if edit.given is not None:
            had, columns = edit.given
            if list(columns) != sources or not {*(edit.readers or readers)} <= {*had}:
                raise OptionError(
                    f"{edit.name!r} brings rows of other readers or sources than the model has; give a whole trace of "
                    "a model with the same ones."
                )

    def mean_rows(self) -> list[Tensor]:
        """Every reader's mean row ``(source)`` over all prompts, in the clean run."""
        sums: list[Tensor] = [torch.zeros(()) for _ in self.layout.anatomy.readers]
        count = 0
        for batch in self.batches:
            rows = self.run(batch, keep_rows=True).editor.rows
            sums = [total + row.sum(0).cpu() for total, row in zip(sums, rows, strict=True)]
            count += len(rows[0])
        return [total / count for total in sums]

    def tokens(self) -> dict[str, Any]:
        """Labels of the real tokens of all prompts, as a trace has them."""
        parts = [tokens_of(batch) for batch in self.batches]
        ids = [i for batch in self.batches for i in batch.real(batch.ids).tolist()]
        return {
            "sample": ("token", np.concatenate([part.sample.cpu().numpy() for part in parts])),
            "position": ("token", np.concatenate([part.position.cpu().numpy() for part in parts])),
            "token_id": ("token", np.array(ids)),
            "text": ("token", np.array(token_texts(ids, self.tokenizer), dtype=object)),
        }

    def edited(self, batch: Batch, clean: Pass, edit: Edit, downstream: Downstream, means: Any = None) -> Pass:
        """The run under an edit, with routing as ``downstream`` says."""
        frozen = clean.editor.natives if downstream == "frozen" else None
        return self.run(batch, edit, frozen=frozen, means=means)


def session(
    model: nn.Module,
    prompts: Prompts,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    batch_size: int = 8,
    truncate: bool = False,
) -> Session:
    """A model and prompts, ready to be run.

    Raises:
        PromptError: If the prompts cannot be run as given.
        CaptureError: If the model is of no known family.
    """
    if batch_size < 1:
        raise OptionError(f"batch_size is {batch_size}; it must be at least 1.")
    model = bridged(unwrapped(model))
    require_weights(model)
    layout = find_layout(model)
    limits = {
        "max_length": context_of(model),
        "vocab_size": vocabulary(model),
    }
    encoded = encode_prompts(prompts, tokenizer, truncate=truncate, **limits)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    pad = "attention_mask" in inspect.signature(model.forward).parameters
    ready = tuple(batches(encoded, batch_size, pad=pad, device=device))
    return Session(model, layout, ready, tokenizer, is_causal(model, encoded, device))


def targets_of(batch: Batch) -> tuple[Tensor, Tensor]:
    """The next token of each real token, and whether there is one, both ``(token)``."""
    last = ~torch.cat([batch.mask[:, 1:], torch.zeros_like(batch.mask[:, :1])], dim=1)
    return batch.real(batch.ids.roll(-1, dims=1)), ~batch.real(last)

"""Families of models: one file each, and one line here. The first that recognises a model describes it."""

from collections import Counter

from torch import nn

from resinspect.errors import UnknownFamilyError
from resinspect.families import (
    beam,
    deepseek_v4,
    denseformer_modules,
    doge,
    dory,
    gemma3n,
    gemma4,
    glm5_next,
    hrm_text,
    hy_v4,
    hyper_connections_modules,
    inkling2,
    inkling2_loop,
    longcat_flash,
    minimax,
    muse_spark,
    nanochat,
    neomme,
    open_attnres,
    plain,
    post_norm,
    qwen4_exp,
    reference,
    zaya,
)
from resinspect.families.generic import probing_once, why_not
from resinspect.families.layout import Event, Family, Layout, Seen, Tap
from resinspect.families.named import Sublayers, name_layout
from resinspect.families.wrapped import recognise_wrapped

FAMILIES: dict[str, Family] = {
    "reference": Family(
        reference.recognise, "a connection of resinspect.models", "scalar per token", "attn, mlp", 1e-5
    ),
    "inkling2_loop": Family(
        inkling2_loop.recognise,
        "block attention residuals, looped, with gated messages between passes",
        "per channel",
        "attn (q, k, v), mlp",
        3e-7,
    ),
    "open_attnres": Family(
        open_attnres.recognise, "depth attention over states, perhaps gated", "scalar per token", "attn, mlp", 2e-7
    ),
    "inkling2": Family(
        inkling2.recognise, "block attention residuals", "scalar per token", "attn (q, k, v), mlp", 2e-7
    ),
    "gemma3n": Family(
        gemma3n.recognise, "alternating updates over streams", "per channel", "attn (with laurel), mlp, ple", 5e-7
    ),
    "muse_spark": Family(muse_spark.recognise, "alpha h + beta v per channel", "per channel", "attn, mlp", 2e-7),
    "zaya": Family(zaya.recognise, "scale and bias per channel", "per channel", "attn, mlp", 2e-7),
    "gemma4": Family(gemma4.recognise, "scale (h + v)", "static scalar", "attn, mlp, ple", 2e-7),
    "minimax": Family(minimax.recognise, "alpha norm(h) + beta v", "conditional", "attn, mlp", 3e-7),
    "beam": Family(beam.recognise, "sqrt((k - 1) / k) h + sqrt(1 / k) v", "static scalar", "attn, mlp", 2e-7),
    "doge": Family(doge.recognise, "weight per channel on h, + v", "per channel", "attn, mlp", 2e-7),
    "longcat_flash": Family(
        longcat_flash.recognise, "h + v, experts two sublayers late", "static scalar", "attn, mlp (twice)", 2e-7
    ),
    "neomme": Family(neomme.recognise, "h + c v; attention also reads x0", "static scalar", "attn, mlp", 3e-7),
    "dory": Family(dory.recognise, "interpolation on the unit sphere, looped", "conditional", "attn, mlp", 3e-7),
    "hrm_text": Family(hrm_text.recognise, "two states, looped", "scalar per token", "attn, mlp", 2e-7),
    "nanochat": Family(nanochat.recognise, "h + v", "static scalar", "attn, mlp", 2e-7),
    "deepseek_v4": Family(
        deepseek_v4.recognise, "streams mixed by Sinkhorn-Knopp", "scalar per token", "attn, mlp", 2e-7
    ),
    "glm5_next": Family(
        glm5_next.recognise, "streams mixed by Sinkhorn-Knopp, mean read out", "scalar per token", "attn, mlp", 2e-7
    ),
    "hy_v4": Family(hy_v4.recognise, "streams that never mix", "scalar per token", "attn, mlp", 2e-7),
    "qwen4_exp": Family(qwen4_exp.recognise, "streams read per channel", "per channel", "attn, mlp", 3e-7),
    "denseformer_modules": Family(
        denseformer_modules.recognise, "averages of block outputs", "static scalar", "attn, mlp or block", 2e-7
    ),
    "hyper_connections_modules": Family(
        hyper_connections_modules.recognise,
        "streams folded into the batch",
        "scalar per token",
        "what each hyper-connection reads",
        6e-6,
    ),
    # From here on without a word about names: what a probe of the model shows.
    "plain": Family(plain.recognise, "h + v", "static scalar", "as found: attn, mlp, ...", 2e-7),
    "scaled": Family(plain.recognise_scaled, "alpha h + beta v", "static scalar", "as found: attn, mlp, ...", 2e-7),
    "post_norm": Family(post_norm.recognise, "norm(h + v)", "conditional", "as found: attn, mlp, ...", 4e-7),
}

__all__ = [
    "FAMILIES",
    "Event",
    "Family",
    "Layout",
    "Seen",
    "Sublayers",
    "Tap",
    "find_layout",
    "layers_of",
    "name_layout",
]


def find_layout(model: nn.Module) -> Layout:
    """The layout of a model of a known family; it may sit in wrappers, such as those of transformer_lens.

    Raises:
        UnknownFamilyError: If no family recognises it; the message says what was found and how to name sublayers.
    """
    return recognise_wrapped(model, _first_that_recognises)


def _first_that_recognises(model: nn.Module) -> Layout:
    with probing_once():
        for family in FAMILIES.values():
            if layout := family.recognise(model):
                return layout
        reason = why_not(model)
    remedy = (
        "it is an encoder and a decoder, which take different ids; capture its encoder alone: model.get_encoder()."
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        else 'Name its sublayers yourself: method="solve", sublayers=[("layers.*.attn", "layers.*.norm1"), ...], '
        'final="norm", each pair a module whose output is written and the module that reads.'
    )
    raise UnknownFamilyError(
        f"{type(model).__name__} belongs to no known family, and a probe of it does not show one: {reason}; "
        f"{layers_of(model)}. {remedy[0].upper()}{remedy[1:]}",
        reason,
    )


def layers_of(model: nn.Module) -> str:
    """The longest list of modules, which are a model's layers, and what is in the first of them, as a clause."""
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    # Lists inside of layers are experts and the like.
    outer = [(n, m) for n, m in lists.items() if not any(n.startswith(f"{other}.") for other in lists)]
    if not outer:
        return "it has no list of layers"
    name, layers = max(outer, key=lambda item: len(item[1]))
    children = ", ".join(f"{child} ({type(module).__name__})" for child, module in layers[0].named_children())
    kinds = Counter(type(layer).__name__ for layer in layers)
    counts = " and ".join(f"{count} {kind}" for kind, count in kinds.items())
    return f"its list {name!r} holds {counts} with {children or 'no children'}"

"""Modules that nobody described: one probe finds how their residual is formed, or says where it got lost."""

import copy

import numpy as np
import pytest
import torch
from test_family_plain import CASES, PROMPTS
from test_others import SmallGPT
from tiny import gated, randomised
from torch import nn
from toys import (
    Biased,
    Block,
    Closed,
    Doubled,
    FromTokens,
    Gated,
    GoesOn,
    InPlace,
    Inside,
    Late,
    Noisy,
    NormsWithoutAModule,
    PassedOn,
    PassesChannels,
    PassesSome,
    PassesTokens,
    PerChannel,
    PositionsFirst,
    ReadsMore,
    ReadsMoreWrapped,
    Shrinks,
    Silent,
    Toy,
    Twins,
    toy,
)
from transformers import (
    AlbertConfig,
    AlbertModel,
    BartConfig,
    BartForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

import resinspect as ri
from resinspect.errors import CaptureError, PromptError
from resinspect.families import find_layout, generic


def hooks_of(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def weights_of(trace):
    return trace["weight"].sel(reader="final").values


@pytest.mark.parametrize("block", [Block, InPlace, PassedOn, Inside])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_however_it_is_added_the_weights_are_one(block, dtype):
    """A record that a later in-place add overwrites, an identity taken for a reader or a write, a sum hidden inside."""
    model = toy(block).to(dtype)
    trace = ri.capture(model, PROMPTS)
    assert trace.attrs["family"] == "plain"
    assert trace.sizes["source"] == 7
    assert ri.fidelity_summary(trace)["verdict"] == "exact"
    assert (weights_of(trace) == 1).all()


def test_a_write_that_holds_the_residual_is_taken_apart():
    """An exact map in which one source is the residual itself, so that every earlier weight is too small."""
    trace = ri.capture(toy(Doubled), PROMPTS, keep=("hidden",))
    assert ri.fidelity_summary(trace)["verdict"] == "exact"
    # Three layers, of which each doubles what is there before its first sublayer writes.
    assert weights_of(trace)[0].tolist() == [8, 4, 4, 2, 2, 1, 1]


@pytest.mark.parametrize("bias", [True, False])
def test_a_model_of_a_users_own_needs_no_names(bias):
    """Sublayers to be named by hand although the model shows them."""
    torch.manual_seed(0)
    model = randomised(SmallGPT(50, 16, 32, heads=2, layers=2, bias=bias))
    trace = ri.capture(model, PROMPTS)
    assert trace["reader"].values.tolist() == ["0.attn", "0.mlp", "1.attn", "1.mlp", "final"]
    assert ri.fidelity_summary(trace)["verdict"] == "exact"


def test_a_model_that_takes_its_ids_by_keyword_only():
    """Ids given by position to a forward that has none."""

    class Named(Toy):
        def forward(self, *, tokens, **_):
            return Toy.forward(self, tokens)

    torch.manual_seed(0)
    trace = ri.capture(randomised(Named()), PROMPTS)
    assert ri.fidelity_summary(trace)["verdict"] == "exact"


def test_layers_that_take_keywords_only_and_give_the_residual_first():
    """The residual looked for at one fixed place of the arguments."""

    class First(Block):
        def forward(self, *, x, mask=None):
            x = x + self.mix(self.norm_a(x))
            return x + self.turn(self.norm_b(x)), x

    class Caller(Toy):
        def forward(self, ids):
            x = self.tokens(ids)
            for block in self.blocks:
                x, _ = block(mask=None, x=x)
            return self.last(x)

    torch.manual_seed(0)
    trace = ri.capture(randomised(Caller(First)), PROMPTS)
    assert ri.fidelity_summary(trace)["verdict"] == "exact"


def test_writes_of_zero_are_found():
    """A probe that depends on the weights: what is silent now would be no source."""
    torch.manual_seed(0)
    layout = find_layout(Toy(Silent).eval())
    assert len(layout.anatomy.sources) == 7
    assert [len(site.views) for site in layout.anatomy.sites] == [1] * 7


def test_equal_outputs_are_two_sources():
    """One of two equal writes counted twice, the other lost."""
    torch.manual_seed(0)
    model = Toy(Twins).eval()
    trace = ri.capture(model, PROMPTS)
    assert trace["source"].values.tolist()[:4] == ["embed", "0.mix", "0.twin", "0.turn"]
    assert trace["reader"].values.tolist()[:2] == ["0.mix+twin", "0.turn"]
    assert (weights_of(trace) == 1).all()


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (Gated, "what 'blocks.0' gives is no weighted sum"),
        (Biased, "what 'blocks.0.norm_b' reads is no weighted sum"),
        (PerChannel, "what 'blocks.0.norm_b' reads is no weighted sum"),
        (ReadsMore, "what 'blocks.0.norm_a' reads is no weighted sum"),
        (Closed, "layer 'blocks.0' reads the residual and adds nothing to it"),
        (Late, "what 'blocks.0' gives is no weighted sum"),
        (ReadsMoreWrapped, "what 'blocks.0.norm_b' reads is no weighted sum"),
        (NormsWithoutAModule, "what 'blocks.0.turn' gives comes not only from modules that read"),
        (Noisy, "what 'blocks.0.mix' gives differs between two runs on the same input"),
    ],
)
def test_what_is_not_a_fixed_sum_is_refused_where_it_happens(block, words):
    """A gate fitted by a constant, a constant or a channel weight overlooked, a reader left out in silence."""
    model = toy(block)
    with pytest.raises(CaptureError, match="no known family") as error:
        find_layout(model)
    assert words in str(error.value)
    assert hooks_of(model) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_multipliers_have_their_closed_form(dtype):
    """A weight on the carry taken for one on the write, applied once too often, or measured with its rounding."""
    model = toy(Shrinks).to(dtype)
    trace = ri.capture(model, PROMPTS, keep=("hidden",))
    assert trace.attrs["family"] == "scaled"
    assert ri.fidelity_summary(trace)["verdict"] == "exact"
    a, b = 0.9, 0.5
    closed = [(a * b) ** 3, b * (a * b) ** 2, (a * b) ** 2, b * a * b, a * b, b, 1]
    np.testing.assert_allclose(weights_of(trace)[0], closed, rtol=3e-3 if dtype == torch.bfloat16 else 1e-6)
    layout = find_layout(model)
    assert layout.routing == tuple(f"blocks.{i}.strength" for i in range(3))
    assert layout.write_definition.startswith("output of mix times -0.31, turn times ")


def test_a_norm_of_no_known_kind_on_the_carry_is_refused():
    """Any module between two sums taken for a norm."""

    class Strange(Block):
        def forward(self, x):
            return torch.tanh(x + self.mix(x))

    with pytest.raises(CaptureError, match=r"what 'blocks\.0' gives is no weighted sum"):
        find_layout(toy(Strange))


@pytest.mark.parametrize("block", [PassesSome, PassesTokens, PassesChannels])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_share_of_the_residual_within_a_write_is_refused(block, dtype):
    """An exact map whose writes hold copies of the residual, at some tokens or in every channel in another measure."""
    with pytest.raises(CaptureError, match=r"what 'blocks\.\d\.first' gives holds the residual itself"):
        find_layout(toy(block).to(dtype))


def made(kind):
    torch.manual_seed(0)
    return randomised(kind())


def test_tokens_that_come_in_beside_the_residual_are_no_read_of_it():
    """A write from the embedding alone, for which the map says that it reads all earlier sources."""
    with pytest.raises(CaptureError, match="or tokens that come in beside it"):
        find_layout(made(FromTokens))


def test_a_block_after_the_last_layer_is_not_passed_over():
    """A readout that is none: what the head sees has two writes more than the map."""
    with pytest.raises(CaptureError, match=r"what 'last' reads after the last layer is the residual with more"):
        find_layout(made(GoesOn))


def test_of_an_encoder_and_decoder_the_encoder_can_be_captured():
    """Advice to name sublayers of a model that cannot be run on one sequence of ids."""
    sizes = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4, "vocab_size": 60}
    model = T5ForConditionalGeneration(T5Config(**sizes)).eval()
    with pytest.raises(CaptureError, match=r"capture its encoder alone: model\.get_encoder\(\)"):
        ri.capture(model, PROMPTS)
    assert ri.fidelity_summary(ri.capture(model.get_encoder(), [[1, 2, 3]]))["verdict"] == "exact"


def test_the_vocabulary_is_that_of_the_embedding_of_tokens():
    """An embedding of positions that comes first, and token ids called unknown."""
    trace = ri.capture(made(PositionsFirst), [[1, 2, 49]])
    assert ri.fidelity_summary(trace)["verdict"] == "exact"
    with pytest.raises(PromptError, match=r"outside 0\.\.49"):
        ri.capture(made(PositionsFirst), [[1, 2, 50]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_read_without_a_module_is_missed_in_no_precision_and_not_while_weights_are_zero(dtype):
    """Two sublayers in a row taken for two that read the same, since the second reads through a plain function."""
    model = toy(NormsWithoutAModule).to(dtype)
    with torch.no_grad():
        for block in model.blocks:
            block.turn[-1].weight.zero_()
    with pytest.raises(CaptureError, match=r"what 'blocks\.0\.turn' gives comes not only"):
        find_layout(model)


@pytest.mark.parametrize(
    "readout",
    [lambda states: states[-1] + 0.5 * states[0], lambda states: states[-2], lambda states: torch.tanh(states[-1])],
    ids=["with the embedding", "an earlier layer", "not linear"],
)
def test_a_readout_of_something_else_is_no_readout_of_the_last_layer(readout):
    """The final reader moved in silence to the output of the last layer, where it is exact whatever is read out."""

    class Other(Toy):
        def forward(self, ids):
            states = [self.tokens(ids)]
            for block in self.blocks:
                states.append(block(states[-1]))
            return self.last(readout(states))

    with pytest.raises(CaptureError, match="what 'last' reads after the last layer is no weighted sum"):
        find_layout(randomised(Other()))


def several_stacks():
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 97, "max_position_embeddings": 64}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    return BartForConditionalGeneration(BartConfig(**sizes, **heads))


def shared_layers():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    return AlbertModel(AlbertConfig(**sizes, embedding_size=16, vocab_size=97))


def one_block_thrice():
    model = toy()
    model.blocks = nn.ModuleList([model.blocks[0]] * 3)
    return model


class InPieces(Toy):
    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = x + block.mix(block.norm_a(x))
        return self.last(x)


class NeedsMore(Toy):
    def forward(self, ids, images):
        return super().forward(ids)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (several_stacks, "several lists of layers that run (model.encoder.layers, model.decoder.layers)"),
        (shared_layers, "layer 'encoder.albert_layer_groups.0' runs several times in one forward pass"),
        (one_block_thrice, "layer 'blocks.0' runs several times in one forward pass"),
        (lambda: toy().to("meta"), "on the meta device"),
        (NeedsMore, "does not run on token ids alone (TypeError"),
        (lambda: nn.Linear(3, 3), "it has no list of layers"),
        (InPieces, "the modules in its lists of layers (blocks) never run as a whole"),
    ],
)
def test_what_cannot_be_probed_gets_one_clause(build, words):
    """A traceback from inside someone's model."""
    with pytest.raises(CaptureError, match="no known family") as error:
        find_layout(build())
    assert words in str(error.value)


def test_weights_that_are_not_finite_do_not_matter():
    """A probe that gives up on the model whose trouble is to be looked at."""
    model = toy()
    with torch.no_grad():
        model.blocks[1].mix.weight.fill_(float("nan"))
        model.tokens.weight.fill_(float("inf"))
    assert find_layout(model).family == "plain"


@pytest.mark.parametrize("fails", [False, True])
def test_the_probe_leaves_nothing_behind(fails):
    """Hooks, flags, parameters or the random state changed by looking."""
    model = toy().train()
    model.blocks[1].mix.eval()

    def stop(*_):
        raise RuntimeError("in the middle")

    if fails:
        model.blocks[2].register_forward_hook(stop)
    before = copy.deepcopy(model.state_dict()), torch.get_rng_state(), hooks_of(model)
    if fails:
        with pytest.raises(CaptureError, match=r"RuntimeError: in the middle\)"):
            find_layout(model)
    else:
        find_layout(model)
    after = model.state_dict(), torch.get_rng_state(), hooks_of(model)
    assert all(torch.equal(value, after[0][name]) for name, value in before[0].items())
    assert torch.equal(before[1], after[1])
    assert before[2] == after[2]
    assert model.training
    assert not model.blocks[1].mix.training


def test_one_probe_serves_all_rows(monkeypatch):
    """Three forward passes to recognise one model, or one of a model that a file of its own describes."""
    probed, probe = [], generic.following.probe
    monkeypatch.setattr(generic.following, "probe", lambda model: probed.append(model) or probe(model))
    model = CASES["bert"].build()
    assert find_layout(model).family == "post_norm"
    assert probed == [model]
    find_layout(CASES["llama"].build())
    assert len(probed) == 2
    find_layout(next(case for case in gated.CASES if case.name == "minimax").build())
    assert len(probed) == 2


def test_a_changed_model_is_probed_again():
    """A layout of yesterday's multipliers."""
    model = CASES["granite"].build()
    assert find_layout(model).family == "scaled"
    for layer in model.model.layers:
        layer.residual_multiplier = 1.0
    assert find_layout(model).family == "plain"

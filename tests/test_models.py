"""The reference model as a Hugging Face model and as a transformer_lens model."""

import copy
import pickle

import pytest
import torch
from cases import CASES, NAMED, build, prompts_for
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from resinspect.errors import OptionError
from resinspect.models import ResidualConfig, ResidualLM

NATIVES = {
    "post_ln": {"attn": ("rstd", "gain"), "mlp": ("rstd", "gain")},
    "denseformer": {"attn": ("alpha",), "final": ("alpha",)},
    "attnres": {"attn": ("alpha",), "mlp": ("alpha",), "final": ("alpha",)},
    "block_attnres": {"attn": ("alpha",), "mlp": ("alpha",), "final": ("alpha",)},
    "dca": {"attn": ("gate",), "final": ("gate",)},
    "hyper_connections": {"attn": ("pre", "post", "mix"), "mlp": ("pre", "post", "mix")},
    "mhc": {"attn": ("pre", "post", "mix"), "mlp": ("pre", "post", "mix")},
    "ddl": {"attn": ("beta", "pull", "key", "write_gain"), "mlp": ("beta", "pull", "key", "write_gain")},
}
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def logits(model, ids, **options):
    with torch.no_grad():
        return model(ids, **options).logits


@every_case
def test_save_and_auto_load_are_lossless(case, tmp_path):
    """Fresh values for buffers, routing parameters or tied weights after loading (``post_init`` runs again)."""
    model = build(case, "random")
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert isinstance(loaded, ResidualLM)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.lm_head.weight is loaded.embed_tokens.weight
    ids = torch.tensor([prompts_for(model)[0]])
    for twin in (loaded.eval(), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for name, value in model.state_dict().items():
            assert torch.equal(twin.state_dict()[name], value), name
        # Not bit for bit: the memory alignment of a weight decides which kernel multiplies with it.
        torch.testing.assert_close(logits(twin, ids), logits(model, ids), rtol=1e-4, atol=1e-5)


@every_case
def test_decoding_with_a_cache_gives_the_full_forward(case):
    """Depth state that leaks between tokens, or positions that restart at every step."""
    model = build(case, "random")
    ids = torch.tensor([prompts_for(model, (12,))[0], prompts_for(model, (5, 12))[1]])
    full = logits(model, ids)
    cache = DynamicCache()
    steps = [logits(model, ids[:, :4], cache=cache)]
    steps += [logits(model, ids[:, t : t + 1], cache=cache) for t in range(4, 12)]
    torch.testing.assert_close(torch.cat(steps, 1), full, rtol=1e-4, atol=1e-4)


@every_case
def test_generate_is_the_same_with_and_without_cache(case):
    """``generate`` that never hands the cache on, or a left-padded prompt that sees its padding."""
    model = build(case, "random")
    prompts = prompts_for(model, (7, 4))
    settings = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    alone = [model.generate(torch.tensor([p]), **settings)[0, len(p) :] for p in prompts]
    uncached = model.generate(torch.tensor([prompts[0]]), use_cache=False, **settings)[0, len(prompts[0]) :]
    assert torch.equal(alone[0], uncached)
    padded = torch.tensor([prompts[0], [0] * 3 + prompts[1]])
    mask = (torch.arange(7) >= torch.tensor([[0], [3]])).long()
    together = model.generate(padded, attention_mask=mask, **settings)[:, 7:]
    assert torch.equal(together, torch.stack(alone))


@every_case
def test_hook_names_are_steady(case):
    """A renamed hook point breaks every notebook that reads the cache."""
    model = build(case, "random")
    _, cache = model.run_with_cache(torch.tensor([[1, 2, 3]]))
    expected = {"hook_embed"}
    for site in model.anatomy.sites:
        where = "final" if site.kind == "final" else f"layers.{site.layer}.{site.kind}"
        names = [f"hook_read_{view}" if view else "hook_read" for view in site.views]
        names += [f"hook_extra_{name}" for name in model.site_module(site).extra_names]
        names += [f"hook_native_{name}" for name in NATIVES.get(case.connection, {}).get(site.kind, ())]
        expected |= {f"{where}.{name}" for name in [*names, *(["hook_write"] if site.kind != "final" else [])]}
    # A native that does not exist at a site (no average due, a single source) is not emitted there.
    assert set(cache) <= expected
    missing = {name for name in expected - set(cache) if "hook_native" not in name}
    assert not missing
    assert len(expected - set(cache)) < len(expected) / 2


@every_case
def test_replacing_a_native_changes_the_forward(case):
    """Natives that are shown but not used."""
    model = build(case, "random")
    if not model.connection.natives:
        pytest.skip("no natives: W is fixed")
    name = next(n for n in model.hook_dict if n.startswith("layers.2.") and "hook_native" in n)
    ids = torch.tensor([[1, 2, 3]])
    flipped = model.run_with_hooks(ids, fwd_hooks=[(name, lambda value, hook: value.flip(-1))])
    assert (flipped.logits - logits(model, ids)).abs().max() > 1e-3


@every_case
def test_activation_checkpointing_does_not_change_gradients(case):
    """Recomputation that sees other inputs."""
    model = build(case, "random").train()
    ids = torch.tensor([prompts_for(model)[0]])
    model(ids, labels=ids).loss.backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.activation_checkpointing_enable()
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        if name in expected:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-5, atol=1e-6)
    assert len(expected) == sum(1 for _ in model.parameters()), "a parameter without gradient has no effect"


@every_case
def test_every_routing_parameter_learns_from_the_start(case):
    """An initialisation at which a gradient is exactly zero: DCA's dynamic weights behind a ReLU at zero, say."""
    model = build(case, "init").train()
    ids = torch.tensor([prompts_for(model)[0]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    start = {n: p.detach().clone() for n, p in model.named_parameters() if n.startswith("connection.")}
    for _ in range(3):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    still = [n for n, p in model.named_parameters() if n in start and torch.equal(p, start[n])]
    assert not still


def test_arguments_are_honoured_or_refused():
    """A cache under its old name ignored in silence, which gives wrong logits; a tuple asked for and not given."""
    model = build(NAMED["attnres"], "random")
    ids = torch.tensor([prompts_for(model, (6,))[0]])
    with torch.no_grad():
        first = model(ids[:, :2], use_cache=True)
    with pytest.warns(FutureWarning, match="past_key_values"):
        rest = logits(model, ids[:, 2:], past_key_values=first.cache)
    torch.testing.assert_close(rest, logits(model, ids)[:, 2:], rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        assert isinstance(model(ids, return_dict=False), tuple)
    for wrong in ({"output_hidden_states": True}, {"nonsense": 3}):
        with pytest.raises(TypeError, match=f"does not take {next(iter(wrong))}"):
            model(ids, **wrong)


def test_hyper_connections_start_with_larger_output_projections():
    """The paper's initialisation: output projections times the square root of the number of streams."""
    plain, wide = (
        ResidualLM(ResidualConfig(connection=c, hidden_size=64, num_hidden_layers=2))
        for c in ("pre_ln", "hyper_connections")
    )
    ratio = wide.layers[0]["mlp"].down.weight.std() / plain.layers[0]["mlp"].down.weight.std()
    assert float(ratio.detach()) == pytest.approx(2, rel=0.05)


def test_config_round_trip_and_refusals(tmp_path):
    """A connection that is lost when saving, or a head size that rotary positions cannot turn."""
    config = ResidualConfig(connection="hyper_connections", connection_options={"streams": 2})
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert (loaded.connection, loaded.connection_options) == ("hyper_connections", {"streams": 2})
    with pytest.raises(StrictDataclassClassValidationError, match="must be a multiple of twice"):
        ResidualConfig(hidden_size=30, num_attention_heads=4)
    with pytest.raises(OptionError, match="unknown"):
        ResidualLM(ResidualConfig(connection="resnet"))

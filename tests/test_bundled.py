"""The bundled checkpoints on real text: exact maps, solve against replay, and the recipe that made them."""

import json

import numpy as np
import pytest
import torch
from cases import CASES
from safetensors.torch import load_file

import resinspect as ri
from resinspect.models.corpus import read_documents
from resinspect.program import COEFFICIENT

DOCUMENTS = 20
SICK = [name for name in ri.bundled() if name.startswith("faulty-")]
HEALTHY = [name for name in ri.bundled() if name not in SICK]


@pytest.fixture(scope="module")
def documents(pytestconfig):
    """Every twelfth validation document: all four kinds of text."""
    path = pytestconfig.rootpath / "data" / "corpus" / "validation.jsonl.xz"
    return [document["text"] for document in read_documents(path)][::12][:DOCUMENTS]


def test_bundled_checkpoints_are_of_known_connections():
    """A bundled folder that no case of the contract covers, so that nothing tests its map."""
    covered = {case.checkpoint: (case.connection, case.options) for case in CASES}
    for name, folder in ri.bundled().items():
        config = json.loads((folder / "config.json").read_text())
        case = name if name in HEALTHY else config["connection"]
        assert covered[case] == (config["connection"], config["connection_options"])
    assert {"pre_ln", "attnres", "hyper_connections"} <= set(HEALTHY)


@pytest.mark.parametrize("name", SICK)
def test_sick_checkpoints_differ_from_the_healthy_one_in_one_tensor(name):
    """A fault that was never stored, or one that broke more than it says."""
    folder = ri.bundled()[name]
    healthy, _, done = json.loads((folder / "training.json").read_text())["damaged"].partition(": ")
    ours, theirs = (load_file(ri.bundled()[n] / "model.safetensors") for n in (name, healthy))
    different = [key for key in theirs if not torch.equal(ours[key], theirs[key])]
    assert len(different) == 1
    assert different[0] in done
    assert ours.keys() == theirs.keys()


def test_frozen_mixing_is_the_identity(documents):
    """Logits that Sinkhorn-Knopp still mixes."""
    if "faulty-mhc-frozen" not in SICK:
        pytest.skip("not bundled yet")
    mix = traced("faulty-mhc-frozen", documents[:3], "float32", keep=("natives",))["native_mix"].values[:, :-1]
    np.testing.assert_allclose(mix, np.broadcast_to(np.eye(4), mix.shape), atol=1e-6)


def scalar(name):
    """Whether one scalar per source and token says all."""
    return ri.load(name)[0].connection.carrier == COEFFICIENT


def traced(name, documents, dtype, **options):
    model, tokenizer = ri.load(name, dtype=dtype)
    with pytest.warns(UserWarning, match="was cut"):
        return ri.capture(model, documents, tokenizer=tokenizer, truncate=True, **options)


@pytest.mark.parametrize("name", ri.bundled())
@pytest.mark.parametrize(("dtype", "worst"), [("float32", 1e-5), ("float64", 1e-12)])
def test_maps_are_exact_on_validation_documents(name, documents, dtype, worst):
    """A map that closes on random weights but not where trained writes cancel."""
    assert len(documents) == DOCUMENTS
    summary = ri.fidelity_summary(traced(name, documents, dtype, keep=()))
    assert summary["verdict"] == "exact"
    assert summary["worst"] <= worst


@pytest.mark.parametrize("name", ri.bundled())
def test_solve_and_replay_agree_within_the_error_bound(name, documents):
    """An error bound that is too small to be one."""
    if not scalar(name):
        pytest.skip("not one scalar per source: nothing to solve")
    replayed = traced(name, documents, "float32", keep=())
    solved = traced(name, documents, "float32", keep=(), method="solve")
    known = ~np.isnan(solved["weight"].values)
    assert known.sum() > 0.5 * (~np.isnan(replayed["weight"].values)).sum()
    difference = np.abs(solved["weight"].values - replayed["weight"].values)[known]
    assert (difference <= solved["weight_error"].values[known]).all()


@pytest.mark.parametrize("name", HEALTHY)
def test_training_record_and_size(name):
    """A checkpoint of another recipe than the one beside it, or one too large to bundle."""
    folder = ri.bundled()[name]
    record = json.loads((folder / "training.json").read_text())
    assert record["recipe"]["tokens"] >= 3_000_000
    assert record["recipe"]["corpus"] == "train.jsonl.xz"
    assert record["loss"][-1][1] < record["loss"][0][1] - 2
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 5_000_000
    model, _ = ri.load(name)
    routing = [p for n, p in model.named_parameters() if n.startswith("connection.")]
    assert all(p.dtype == torch.float32 and bool(p.abs().sum()) for p in routing)

"""Fixtures shared by the tests of the surfaces."""

import socket

import pytest
import torch
from transformers import AutoTokenizer

from resinspect.models import ResidualConfig, ResidualLM
from resinspect.models.training import store


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory, pytestconfig):
    """A small AttnRes checkpoint with random routing and the bundled tokenizer, as training stores it."""
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}
    model = ResidualLM(ResidualConfig(connection="attnres", **sizes))
    with torch.no_grad():
        model.connection.query.normal_()
    store(model, folder)
    tokenizer = AutoTokenizer.from_pretrained(pytestconfig.rootpath / "data" / "tokenizer", local_files_only=True)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def no_network(monkeypatch):
    """Any attempt to reach another machine fails the test."""

    def refuse(*_, **__):
        pytest.fail("tried to reach the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)

"""``ri.load`` gives the stored model exactly, or refuses with one sentence that names the file and the remedy."""

import json
import pickle
import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, ViTConfig
from transformers.utils import logging

import resinspect as ri
from resinspect import bundle
from resinspect.checkpoint import load
from resinspect.errors import CheckpointError, OptionError, ResinspectError
from resinspect.models import ResidualConfig, ResidualLM
from resinspect.models.training import store

TOKENIZER = Path(__file__).resolve().parent.parent / "data" / "tokenizer"
SHARD = "model-00002-of-00003.safetensors"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
PAGE = "\n<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>\n"


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> tuple[Path, ResidualLM]:
    """A reference model with its tokenizer, stored as training stores it."""
    folder = tmp_path_factory.mktemp("stored") / "tiny"
    torch.manual_seed(0)
    config = ResidualConfig(
        connection="attnres", vocab_size=2048, hidden_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    model = ResidualLM(config).eval()
    for name, parameter in model.named_parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
        if not name.startswith("connection."):
            parameter.data = parameter.data.bfloat16().float()
    store(model, folder)
    AutoTokenizer.from_pretrained(TOKENIZER, local_files_only=True).save_pretrained(folder)
    return folder, model


@pytest.fixture(scope="module")
def sharded_source(tmp_path_factory) -> tuple[Path, LlamaForCausalLM]:
    """A Llama without a tokenizer, in three shards of bfloat16."""
    folder = tmp_path_factory.mktemp("sharded") / "llama"
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=96, **sizes)).to(torch.bfloat16).eval()
    model.save_pretrained(folder, max_shard_size="8KB")
    assert (folder / SHARD).is_file()
    return folder, model


@pytest.fixture
def folder(stored, tmp_path) -> Path:
    """A copy of the reference checkpoint to break."""
    return shutil.copytree(stored[0], tmp_path / "tiny")


@pytest.fixture
def sharded(sharded_source, tmp_path) -> Path:
    """A copy of the sharded Llama to break."""
    return shutil.copytree(sharded_source[0], tmp_path / "llama")


def write(name: str, text: str):
    """Replace a file by text."""
    return lambda folder: (folder / name).write_text(text)


def remove(*names: str):
    """Delete files."""
    return lambda folder: [(folder / name).unlink() for name in names]


def configure(**values):
    """Change values of config.json; None deletes."""

    def change(folder: Path):
        config = json.loads((folder / "config.json").read_text()) | values
        config = {key: value for key, value in config.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(config))

    return change


def resize(name: str, amount: int):
    """Cut bytes off the end of a file, or add some."""

    def change(folder: Path):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:amount] if amount < 0 else data + bytes(amount))

    return change


def rewrite(change):
    """Change the tensors of model.safetensors."""

    def apply(folder: Path):
        tensors = load_file(folder / "model.safetensors")
        save_file(change(tensors), folder / "model.safetensors", {"format": "pt"})

    return apply


def as_bin(content: bytes):
    """pytorch_model.bin with this content instead of safetensors."""

    def change(folder: Path):
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(content)

    return change


def without(tensors, name):
    return {key: value for key, value in tensors.items() if key != name}


NORM = "final.norms.0.weight"
# What to break -> words that the message must have: the file, what is wrong, and the remedy.
BROKEN = {
    "no config": (remove("config.json"), ["tiny has no config.json", "give the folder"]),
    "config empty": (write("config.json", ""), ["config.json is empty", "fetch it again"]),
    "config cut off": (resize("config.json", -20), ["config.json is not readable JSON", "fetch it again"]),
    "config a list": (write("config.json", "[1]"), ["config.json holds a JSON list", "fetch it again"]),
    "config binary": (
        lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00{"),
        ["config.json is not readable", "fetch"],
    ),
    "config LFS": (write("config.json", LFS), ["config.json is a Git LFS pointer", "git lfs pull"]),
    "config page": (write("config.json", PAGE), ["config.json is a web page", "fetch the file itself"]),
    "no model type": (configure(model_type=None), ["config.json has no model_type", "saved with the model"]),
    "unknown model type": (configure(model_type="nonesuch"), ["config.json", "'nonesuch'", "update transformers"]),
    "own code": (
        configure(model_type="nonesuch", auto_map={"AutoConfig": "code.Config"}),
        ["config.json", "'nonesuch'", "trust_remote_code=True"],
    ),
    "no language model": (
        lambda f: ViTConfig().save_pretrained(f),
        ["config.json", "'vit'", "no causal language model", "choose a decoder"],
    ),
    "heads do not divide": (configure(num_attention_heads=3), ["config.json", "hidden_size 16", "check config.json"]),
    "no heads": (configure(num_attention_heads=0), ["config.json", "check config.json"]),
    "size is a word": (configure(hidden_size="wide"), ["config.json", "check config.json"]),
    "size infinite": (configure(hidden_size=float("inf")), ["config.json", "check config.json"]),
    "size negative": (configure(hidden_size=-8), ["config.json", "use config.json and weights of one model"]),
    "NaN": (configure(rms_norm_eps=float("nan")), ["config.json", "NaN", "repair"]),
    "unknown connection": (configure(connection="nonesuch"), ["config.json", "'nonesuch'", "attnres"]),
    "unknown option": (configure(connection_options={"nonesuch": 1}), ["config.json", "nonesuch"]),
    "no weights": (remove("model.safetensors"), ["tiny has no weights", "model.safetensors", "fetch"]),
    "weights elsewhere": (configure(transformers_weights="a.safetensors"), ["no weights", "a.safetensors", "fetch"]),
    "adapter": (write("adapter_config.json", "{}"), ["adapter_config.json", "merge"]),
    "weights empty": (write("model.safetensors", ""), ["model.safetensors is empty", "fetch it again"]),
    "weights LFS": (write("model.safetensors", LFS), ["model.safetensors is a Git LFS pointer", "git lfs pull"]),
    "weights page": (write("model.safetensors", PAGE), ["model.safetensors is a web page", "fetch the file itself"]),
    "weights cut off": (resize("model.safetensors", -1), ["model.safetensors is cut off", "fetch it again"]),
    "weights in header": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:100]),
        ["model.safetensors is cut off inside its header", "fetch it again"],
    ),
    "weights too long": (resize("model.safetensors", 1), ["model.safetensors is damaged", "fetch it again"]),
    "weights text": (write("model.safetensors", "not tensors"), ["model.safetensors is not a safet", "fetch"]),
    "weights 4 bytes": (write("model.safetensors", "abcd"), ["model.safetensors is not a safet", "fetch"]),
    "header no JSON": (
        lambda f: (f / "model.safetensors").write_bytes((4).to_bytes(8, "little") + b"{{{{"),
        ["model.safetensors has a damaged header", "fetch it again"],
    ),
    "header overlaps": (
        lambda f: (f / "model.safetensors").write_bytes(
            (58).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,4]}}    ' + bytes(4)
        ),
        ["model.safetensors", "cannot be loaded", "fetch them again"],
    ),
    "bin page": (as_bin(PAGE.encode()), ["pytorch_model.bin is a web page", "fetch the file itself"]),
    "bin text": (as_bin(b"not tensors"), ["pytorch_model.bin is not a file of torch.save", "fetch it again"]),
    "bin cut off": (as_bin(b"PK\x03\x04 and no more"), ["pytorch_model.bin", "cut off", "fetch it again"]),
    "bin cut pickle": (as_bin(b"\x80\x02}"), ["pytorch_model.bin", "cannot be loaded", "fetch it again"]),
    "tensor missing": (
        rewrite(lambda t: without(t, NORM)),
        ["model.safetensors", f"it lacks {NORM};", "one and the same model"],
    ),
    "tensor too many": (
        rewrite(lambda t: t | {"extra.weight": torch.zeros(2)}),
        ["model.safetensors", "it also holds extra.weight;", "one and the same model"],
    ),
    "tensor misshapen": (
        rewrite(lambda t: t | {NORM: torch.ones(8)}),
        ["model.safetensors", f"it has the wrong shape of {NORM} (8,) instead of (16,);", "one and the same model"],
    ),
    "embedding missing": (
        rewrite(lambda t: without(t, "embed_tokens.weight")),
        ["model.safetensors", "it lacks embed_tokens.weight", "one and the same model"],
    ),
    "head not tied": (
        configure(tie_word_embeddings=False),
        ["model.safetensors", "it lacks lm_head.weight;", "one and the same model"],
    ),
    "fewer layers": (
        configure(num_hidden_layers=1),
        ["model.safetensors", "it also holds layers.1.attn.k.weight", "more", "one and the same model"],
    ),
    "no transformer": (
        rewrite(lambda _: {"conv.weight": torch.zeros(3, 3)}),
        ["model.safetensors", "it lacks", "more", "it also holds conv.weight", "one and the same model"],
    ),
    "no tensors": (rewrite(lambda _: {}), ["model.safetensors", "it lacks", "one and the same model"]),
    "tokenizer empty": (write("tokenizer.json", ""), ["tokenizer.json is empty", "fetch it again"]),
    "tokenizer LFS": (write("tokenizer.json", LFS), ["tokenizer.json is a Git LFS pointer", "git lfs pull"]),
    "tokenizer page": (write("tokenizer_config.json", PAGE), ["tokenizer_config.json is a web page", "fetch the file"]),
    "tokenizer cut off": (resize("tokenizer.json", -9), ["tokenizer.json is not readable JSON", "fetch it again"]),
    "tokenizer other": (write("tokenizer.json", '{"a": 1}'), ["tokenizer of", "fetch tokenizer.json"]),
    "tokenizer misfit": (
        write("tokenizer.json", '{"added_tokens": [], "model": {"type": "BPE"}}'),
        ["tokenizer of", "fetch tokenizer.json"],
    ),
    "half a tokenizer": (remove("tokenizer.json"), ["tokenizer of", "fetch tokenizer.json"]),
    "generation LFS": (write("generation_config.json", LFS), ["generation_config.json is a Git LFS", "git lfs pull"]),
}
BROKEN_SHARDS = {
    "shard missing": (remove(SHARD), ["model.safetensors.index.json names", SHARD, "fetch the missing shards"]),
    "shard cut off": (resize(SHARD, -3), [f"{SHARD} is cut off", "fetch it again"]),
    "shard LFS": (write(SHARD, LFS), [f"{SHARD} is a Git LFS pointer", "git lfs pull"]),
    "index cut off": (
        resize("model.safetensors.index.json", -9),
        ["model.safetensors.index.json is not readable JSON", "fetch it again"],
    ),
    "index no map": (write("model.safetensors.index.json", "{}"), ["index.json has no weight_map", "fetch"]),
    "index odd map": (write("model.safetensors.index.json", '{"weight_map": {"a": 1}}'), ["no weight_map", "fetch"]),
    "shard swapped": (
        lambda f: shutil.copy(f / "model-00001-of-00003.safetensors", f / SHARD),
        ["model.safetensors.index.json", "it lacks", "one and the same model"],
    ),
    "heads do not divide": (configure(num_attention_heads=3), ["config.json", "multiple of", "check config.json"]),
    "unknown activation": (
        configure(hidden_act="nonesuch"),
        ["config.json", "nonesuch", "use config.json and weights"],
    ),
    "tokenizer without vocabulary": (
        write("tokenizer_config.json", '{"tokenizer_class": "LlamaTokenizer"}'),
        ["tokenizer of", "no vocabulary", "fetch tokenizer.json"],
    ),
}


def check_refusal(folder: Path, words: list[str], capfd) -> None:
    capfd.readouterr()
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    message = str(caught.value)
    assert [word for word in words if word not in message] == []
    assert "\n" not in message
    assert message.endswith(".")
    assert len(message) < 500
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folder_is_refused(case, folder, no_network, capfd):
    """Catches each accident surfacing as a library's traceback, a wrong model, or a message without file or remedy."""
    breaks, words = BROKEN[case]
    breaks(folder)
    check_refusal(folder, words, capfd)


@pytest.mark.parametrize("case", BROKEN_SHARDS)
def test_broken_shards_are_refused(case, sharded, no_network, capfd):
    """Catches the same for sharded weights and for a family of transformers."""
    breaks, words = BROKEN_SHARDS[case]
    breaks(sharded)
    check_refusal(sharded, words, capfd)


def test_missing_folder_and_file_are_refused(folder, tmp_path, no_network, capfd, monkeypatch):
    """Catches a mistyped folder taken for a Hub id (a download or a long wait), and a file taken for a folder."""
    check_refusal(tmp_path / "none", [str(tmp_path / "none"), "give an existing folder"], capfd)
    check_refusal(folder / "model.safetensors", ["model.safetensors is a file", "give the folder"], capfd)
    monkeypatch.chdir(tmp_path)
    check_refusal("tiny/none", ["no folder tiny/none", "give an existing folder"], capfd)
    check_refusal("./none", ["no folder none", "give an existing folder"], capfd)


@pytest.mark.parametrize("path", ["~no-such-user-here/model", "x" * 5000], ids=["home of nobody", "too long"])
def test_what_the_system_takes_for_no_path_is_refused(path, no_network, capfd):
    """Catches the system's own error on a path, with a traceback."""
    check_refusal(path, [path[:100], "cannot be a path here", "give an existing folder"], capfd)


def test_unknown_hub_id_is_refused(monkeypatch, capfd):
    """Catches the Hub's own error, with its advice on logins and offline modes, shown for a mistyped name."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    check_refusal(
        "no-such-org/no-such-model", ["no-such-org/no-such-model is no folder", "give an existing folder"], capfd
    )


def test_stored_model_loads_exactly(stored, no_network):
    """Catches rounded routing parameters, an untied head, and a model that is bfloat16 because its file is."""
    folder, model = stored
    ours, tokenizer = load(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        expected = model(ids).logits
        for loaded in (ours, theirs):
            assert {value.dtype for value in loaded.state_dict().values()} == {torch.float32}
            assert loaded.lm_head.weight is loaded.embed_tokens.weight
            torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
            assert torch.equal(loaded(ids).logits, expected)
    assert tokenizer("a river")["input_ids"] == AutoTokenizer.from_pretrained(TOKENIZER)("a river")["input_ids"]


def test_file_holds_mixed_dtypes(stored):
    """Catches ``store`` writing everything in one dtype: weights twice as large, or routing rounded."""
    dtypes = {n.startswith("connection."): v.dtype for n, v in load_file(stored[0] / "model.safetensors").items()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [({}, torch.float32), ({"dtype": "bfloat16"}, torch.bfloat16), ({"dtype": torch.float64}, torch.float64)],
)
def test_shards_load_in_the_dtype_asked_for(dtype, expected, sharded_source, no_network):
    """Catches weights stored in bfloat16 that load as such, and a dtype that is not passed on."""
    folder, stored_model = sharded_source
    model, tokenizer = load(folder, **dtype)
    assert tokenizer is None
    assert not model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, stored_model.state_dict()[name].to(expected)), name
        assert value.dtype == expected


def test_dtype_is_checked_first(tmp_path):
    """Catches an unknown dtype reported as a broken checkpoint, or taken for the default."""
    for dtype in ("int8", "fp32", torch.int64, None):
        with pytest.raises(OptionError, match="choose one of float32, float64, bfloat16, float16"):
            load(tmp_path, dtype=dtype)


def test_bin_loads(folder, stored):
    """Catches checks that know safetensors only: older checkpoints are .bin."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    torch.testing.assert_close(load(folder)[0].state_dict(), stored[1].state_dict(), rtol=0, atol=0)


class Payload:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("how", ["legacy", "zip"])
def test_pickled_code_does_not_run(how, folder, tmp_path, capfd):
    """Catches ``torch.load`` without weights_only: a .bin that runs its own code."""
    (folder / "model.safetensors").unlink()
    mark, file = tmp_path / "ran", folder / "pytorch_model.bin"
    payload = {"embed_tokens.weight": Payload(mark)}
    file.write_bytes(pickle.dumps(payload, protocol=2)) if how == "legacy" else torch.save(payload, file)
    check_refusal(folder, ["pytorch_model.bin", "more than tensors", "fetch it again"], capfd)
    assert not mark.exists()


def test_folder_code_does_not_run(folder, tmp_path):
    """Catches Python files of the checkpoint that run though nobody asked for them."""
    mark = tmp_path / "ran"
    code = f"import pathlib; pathlib.Path({str(mark)!r}).touch()\n"
    (folder / "custom_generate").mkdir()
    for name in ("code.py", "custom_generate/generate.py"):
        (folder / name).write_text(code)
    classes = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model", "AutoTokenizer": [None, "code.Tok"]}
    configure(auto_map=classes)(folder)
    model, _ = load(folder)
    assert type(model) is ResidualLM
    assert not mark.exists()


def test_name_is_the_folder_alone(folder, monkeypatch):
    """Catches absolute paths of a machine in traces and figures, and a model called '.'."""
    monkeypatch.chdir(folder)
    for path in (folder, str(folder) + "/", "."):
        model, tokenizer = load(path)
        assert {model.config.name_or_path, model.name_or_path, tokenizer.name_or_path} == {"tiny"}


def test_transformers_talks_again_afterwards(folder, capfd):
    """Catches silence that outlasts the call, after success and after failure, or bars shown during it."""
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load(folder)
    configure(num_hidden_layers=1)(folder)
    with pytest.raises(CheckpointError):
        load(folder)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    assert capfd.readouterr().err == ""


def test_bundled_names_load(folder, tmp_path, monkeypatch, no_network):
    """Catches bundled checkpoints not found in a source tree or a wheel, or another project's data taken for ours."""
    package = tmp_path / "site" / "resinspect"
    monkeypatch.setattr(bundle, "_PACKAGE", package)
    in_source, in_wheel = package.parent / "data" / "checkpoints", package / "_data" / "checkpoints"
    shutil.copytree(folder, in_source / "from_source")
    (in_source / "unfinished").mkdir()
    assert ri.bundled() == {}
    (package.parent / "pyproject.toml").touch()
    assert ri.bundled() == {"from_source": in_source / "from_source"}
    assert load("from_source")[0].config.name_or_path == "from_source"
    shutil.copytree(folder, in_wheel / "from_wheel")
    assert ri.bundled() == {"from_wheel": in_wheel / "from_wheel"}
    assert ri.bundled("nonesuch") == {}


def test_folder_comes_before_bundled_name(folder, tmp_path, monkeypatch):
    """Catches a bundled checkpoint loaded instead of the user's folder of the same name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("resinspect.checkpoint.sources.bundled", lambda: {"tiny": Path("elsewhere")})
    assert load("tiny")[0].config.name_or_path == "tiny"


def test_app_folder(tmp_path, monkeypatch):
    """Catches an app that is not found, or missing without saying so."""
    package = tmp_path / "resinspect"
    monkeypatch.setattr(bundle, "_PACKAGE", package)
    with pytest.raises(ResinspectError, match="install resinspect again"):
        bundle.app_folder()
    (package / "_app").mkdir(parents=True)
    assert bundle.app_folder() == package / "_app"

"""Labels of tokens: the literal text of every piece, whatever the tokenizer calls it."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import resinspect as ri
from resinspect.hooks.prompts import token_texts

STRANGE = ("<s>", "$x$", "<b>", "a\nb\t", "שלום", "😀", "🧑‍🚀", "[red]", "&amp;", "‮", "[31m", " ", "`*_#|")


def sentence_pieces():
    """A tokenizer in the manner of SentencePiece: a mark for spaces, bytes for what it does not know."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "t", "h", "e", "he", "the", "▁the", "▁▁", "▁$x$", "ש"]
    merges = [("h", "e"), ("t", "he"), ("▁", "the"), ("▁", "▁")]
    bpe = models.BPE({piece: i for i, piece in enumerate(pieces)}, merges, byte_fallback=True, unk_token="<unk>")
    inner = Tokenizer(bpe)
    inner.normalizer = normalizers.Replace(" ", "▁")
    spaces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(spaces)
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def test_token_texts_of_sentence_pieces_are_literal():
    """A space in front of a word lost, since one token is decoded by itself, or bytes under another name."""
    tokenizer = sentence_pieces()
    text = " the  🌊\nthe ש"
    shown = token_texts(tokenizer(text)["input_ids"], tokenizer)
    assert shown == [" the", "  ", r"\xf0", r"\x9f", r"\x8c", r"\x8a", "\n", "the", " ", "ש"]
    special = tokenizer.convert_tokens_to_ids(["<s>", "</s>", "<unk>", "▁$x$", "▁"])
    assert token_texts(special, tokenizer) == ["<s>", "</s>", "<unk>", " $x$", " "]


def test_bytes_without_a_decoder():
    """A converted tokenizer that lost its decoder, and labels a line feed as <0x0A>."""
    tokenizer = sentence_pieces()
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()
    assert token_texts(tokenizer.convert_tokens_to_ids(["<0x0A>", "<0xF0>", "<s>"]), tokenizer) == [
        "\n",
        r"\xf0",
        "<s>",
    ]


def test_ids_beyond_the_vocabulary_are_shown_as_ids():
    """An embedding padded to a round number, whose last ids no tokenizer knows, that crashes the capture."""
    tokenizer = sentence_pieces()
    assert token_texts([5000, 1, 5000], tokenizer) == ["5000", "<s>", "5000"]


def test_word_pieces_stay_as_they_are():
    """The marks of continued words, or of special tokens, taken for markup."""
    words = ["[UNK]", "[CLS]", "play", "##ing", "."]
    inner = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", cls_token="[CLS]")
    assert token_texts([1, 2, 3, 4, 0], tokenizer) == ["[CLS]", "play", "##ing", ".", "[UNK]"]


@pytest.mark.parametrize("text", STRANGE, ids=ascii)
def test_strange_text_survives_until_it_is_read_back(text, tmp_path, pytestconfig):
    """A label that a trace, its store or a figure changes, or that turns what follows it."""
    tokenizer = AutoTokenizer.from_pretrained(pytestconfig.rootpath / "data" / "tokenizer", local_files_only=True)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=len(tokenizer))).eval()
    ri.save_trace(ri.capture(model, text, tokenizer=tokenizer), tmp_path / "t")
    trace = ri.open_trace(tmp_path / "t")
    labels = trace["text"].values.tolist()
    assert labels == token_texts(tokenizer(text)["input_ids"], tokenizer)
    parts = (s.encode().decode("unicode_escape").encode("latin-1") if r"\x" in s else s.encode() for s in labels)
    assert b"".join(parts).decode() == text
    for token, label in enumerate(labels):
        title = ri.routing_map(trace, token=token).title
        assert title.endswith(f", token {token} '{ri.visible_text(label)}'")
        assert title.isprintable()

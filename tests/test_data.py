"""The stored corpus and tokenizer are what data/manifest.json and data/README.md say they are."""

import hashlib
import json
import lzma
import re
import unicodedata
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

DATA = Path(__file__).resolve().parent.parent / "data"
SPLITS = ["train", "validation", "test"]
MANIFEST = json.loads((DATA / "manifest.json").read_text(encoding="utf-8"))
README = (DATA / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def corpus() -> dict[str, list[dict[str, str]]]:
    """Every document of every split."""
    splits = {}
    for split in SPLITS:
        with lzma.open(DATA / "corpus" / f"{split}.jsonl.xz", "rt", encoding="utf-8") as lines:
            splits[split] = [json.loads(line) for line in lines]
    return splits


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """The stored tokenizer, loaded the way users load it."""
    return AutoTokenizer.from_pretrained(DATA / "tokenizer", local_files_only=True)


def test_files_match_the_manifest():
    """Catches a corpus or tokenizer file changed, added or lost without rebuilding the manifest."""
    stored = [*(DATA / "corpus").iterdir(), *(DATA / "tokenizer").iterdir()]
    hashes = {p.relative_to(DATA).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in stored}
    assert hashes == {name: file["sha256"] for name, file in MANIFEST["files"].items()}
    assert all((DATA / name).stat().st_size == file["bytes"] for name, file in MANIFEST["files"].items())


@pytest.mark.parametrize("key", ["id", "text"])
def test_no_document_is_in_the_corpus_twice(corpus, key):
    """Catches leakage: the same document in train and test, or two documents under one id."""
    counts = Counter(document[key] for documents in corpus.values() for document in documents)
    assert [value for value, count in counts.items() if count > 1] == []


def test_the_split_follows_from_the_id(corpus):
    """Catches a split drawn at random or by order, which would move documents at the next rebuild."""
    names = {0: "validation", 1: "test"}
    for split, documents in corpus.items():
        for document in documents:
            bucket = int(hashlib.sha256(document["id"].encode()).hexdigest(), 16) % 20
            assert names.get(bucket, "train") == split, document["id"]


def test_texts_are_clean(corpus):
    """Catches cleaning left out: control characters, doubled spaces, decomposed accents, empty texts."""
    for document in (d for documents in corpus.values() for d in documents):
        text = document["text"]
        assert text == text.strip() != "", document["id"]
        assert unicodedata.is_normalized("NFC", text), document["id"]
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\xa0\xad\ufffd]| {2}| \n|\n |\n{3}", text), document["id"]


def test_known_texts_survive_whole(corpus):
    """Catches a source cut short or misread: lost verses, lost chapters, an entry sliced at wrong offsets."""
    by_id = {d["id"]: d["text"] for documents in corpus.values() for d in documents}
    verses = [t.split("\n\n")[1].split("\n") for i, t in by_id.items() if i.startswith("kjv/")]
    assert (len(verses), sum(map(len, verses))) == (1189, 31102)
    assert by_id["kjv/Genesis/1"].startswith("Genesis 1\n\nIn the beginning God created the heaven")
    assert by_id["devil/patience"] == "PATIENCE, n. A minor form of despair, disguised as a virtue."
    assert by_id["jargon/buffer chuck"] == "buffer chuck\nn.\n\nShorter and ruder syn. for buffer overflow."
    assert "\nArea: total: 116 sq km; land: 116 sq km; water: 0 sq km\n" in by_id["factbook/europe/je"]


def test_manifest_counts_are_true(corpus):
    """Catches sizes in the manifest that were taken from another build of the corpus."""
    for split, documents in corpus.items():
        for source in [*MANIFEST["sources"], "all"]:
            texts = [d["text"] for d in documents if source in (d["source"], "all")]
            measured = (len(texts), sum(map(len, texts)), sum(len(t.encode()) for t in texts))
            stated = MANIFEST["sizes"][split][source]
            assert measured == (stated["documents"], stated["characters"], stated["bytes"])


def test_manifest_token_counts_are_true(corpus, tokenizer):
    """Catches a tokenizer retrained without counting the tokens again (checked on the small splits)."""
    for split in ("validation", "test"):
        encoded = tokenizer([d["text"] for d in corpus[split]], verbose=False)["input_ids"]
        assert sum(map(len, encoded)) == MANIFEST["sizes"][split]["all"]["tokens"]


def test_readme_table_is_the_manifest():
    """Catches a README whose table of sizes was not updated, or lacks a row."""
    number = r"([\d,]+)"
    found = re.findall(rf"^\| (\w+) \| (\w+) \| {number} \| {number} \| {number} \| {number} \|$", README, re.M)
    table = {(split, source): [int(n.replace(",", "")) for n in numbers] for split, source, *numbers in found}
    keys = ["documents", "characters", "bytes", "tokens"]
    sizes = {
        (split, source): [row[key] for key in keys]
        for split, rows in MANIFEST["sizes"].items()
        for source, row in rows.items()
    }
    assert table == sizes
    assert len(found) == len(sizes)


def test_readme_names_the_packages_of_the_manifest():
    """Catches a rebuild from other package versions that the README still credits to the old ones."""
    for source in MANIFEST["sources"].values():
        for package, version in source["packages"].items():
            assert re.search(rf"`{re.escape(package)}`[^|]* {re.escape(version)} \|", README), package


def test_tokenizer_settings(tokenizer):
    """Catches a wrong vocabulary size or special token, which would change the models' embedding tables."""
    assert (len(tokenizer), tokenizer.vocab_size) == (2048, 2048)
    assert sorted(tokenizer.get_vocab().values()) == list(range(2048))
    specials = [tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token]
    assert (specials, tokenizer.eos_token_id) == (["<|endoftext|>"] * 3, 0)
    assert tokenizer.model_max_length == 256


@settings(max_examples=300, deadline=None)
@given(text=st.text())
def test_tokenizer_round_trip(tokenizer, text):
    """Catches a prefix space, normalisation, clean-up of spaces, an unknown token or an added end token."""
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("text", ["", " ", " a  b ", "it 's n't , .", "\r\n\t", "e\u0301 ﬁ 🜁", "a<|endoftext|>b"])
def test_tokenizer_round_trip_of_awkward_texts(tokenizer, text):
    """Catches the same as above on texts that random search seldom draws."""
    assert tokenizer.decode(tokenizer.encode(text)) == text

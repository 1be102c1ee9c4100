"""What a full capture costs beside the plain forward and beside transformer_lens, measured in one run.

``make bench`` prints the times with their ratio to the fastest in brackets, then the peak memory. Nothing is asserted:
compare ratios, never seconds, and run it on an idle machine.
"""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

BATCH, TOKENS, HIDDEN, LAYERS = 4, 256, 512, 12
ROUNDS = {"rounds": 9, "warmup_rounds": 2}


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=1376,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        vocab_size=2048,
        max_position_embeddings=TOKENS,
    )
    return LlamaForCausalLM(config).eval()


def ids():
    return torch.randint(0, 2048, (BATCH, TOKENS), generator=torch.Generator().manual_seed(0))


def plain_forward():
    model, tokens = llama(), ids()

    def run():
        with torch.no_grad():
            model(tokens, use_cache=False)

    return run


def full_capture(method="replay"):
    from resinspect.hooks.capture import capture

    model, tokens = llama(), ids()
    return lambda: capture(model, tokens, batch_size=BATCH, method=method)


def lens_cache(folder):
    """transformer_lens with the four residual activations of every layer and nothing computed from them."""
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoTokenizer

    model = llama()
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained("data/tokenizer", local_files_only=True)
    bridge = TransformerBridge.boot_transformers(str(folder), hf_model=model, tokenizer=tokenizer)
    kept = ("hook_resid_pre", "hook_resid_mid", "hook_attn_out", "hook_mlp_out")
    tokens = ids()

    def run():
        with torch.no_grad():
            _, cache = bridge.run_with_cache(tokens, names_filter=lambda name: name.endswith(kept))
        assert len(cache) >= 4 * LAYERS

    return run


@pytest.mark.benchmark(group="capture")
def test_plain_forward(benchmark):
    benchmark.pedantic(plain_forward(), **ROUNDS)


@pytest.mark.benchmark(group="capture")
def test_full_capture(benchmark):
    benchmark.pedantic(full_capture(), **ROUNDS)


@pytest.mark.benchmark(group="capture")
def test_solve(benchmark):
    benchmark.pedantic(full_capture("solve"), **ROUNDS)


@pytest.mark.benchmark(group="capture")
def test_lens_cache(benchmark, tmp_path):
    benchmark.pedantic(lens_cache(tmp_path), **ROUNDS)


def peaks_mib(runs):
    """Peak resident memory while each of ``runs`` runs once more, in a process of its own (Linux, glibc)."""
    code = (
        f"import sys; sys.path.insert(0, {str(__file__).rpartition('/')[0]!r}); import bench_capture as b\n"
        f"runs = [{', '.join(f'b.{name}()' for name in runs)}]\n"
        "for run in runs: run()\n"
        "print(b.peak_while(lambda: None), *(b.peak_while(run) for run in runs))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return map(float, done.stdout.split())


def peak_while(run):
    """Freed memory is handed back first, so that it does not hide what the run needs."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    run()
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


def test_peak_memory(capsys):
    buffer = BATCH * TOKENS * (2 * LAYERS + 1) * HIDDEN * 4 / 2**20
    idle, forward, capture = peaks_mib(["plain_forward", "full_capture"])
    with capsys.disabled():
        print(
            f"\npeak memory: idle {idle:.0f} MiB, plain forward {forward:.0f} MiB, full capture {capture:.0f} MiB "
            f"= plain + {(capture - forward) / buffer:.2f} x the write buffer ({buffer:.0f} MiB)"
        )

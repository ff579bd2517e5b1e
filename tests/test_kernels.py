"""Every kernel against `kernels.reference`, over the same pages; memory that holds nothing is filled with NaN.

Triton runs on a GPU, or interpreted where there is none."""
import random
import subprocess
import sys
from array import array
from pathlib import Path

import numpy as np
import pytest
import torch

from llmserve.kernels import cpu, reference, split_kv
from llmserve.kvcache import KVCache, LayerCache, allocate_pages, kv_format, pack, page_shape
from llmserve.models import ModelSpec

GPU = torch.cuda.is_available()
BACKENDS = {"numba": (cpu, "cpu"), "triton": (split_kv, "cuda" if GPU else "cpu")}
FORMATS = ["auto", "fp8_e4m3", "fp8_e5m2", "int8", "int4"]
LENGTHS = [1, 15, 16, 17, 257]
SHAPES = [(1, 1, 64), (3, 1, 80), (8, 1, 128), (6, 2, 64), (2, 2, 256)]  # query heads, KV heads, head_dim


def random_tree(r, nodes):
    "Parents of a random tree; ancestors as bits, depths."
    parents = [-1] + [r.randrange(i) for i in range(1, nodes)]
    bits, depth = [1], [0]
    for i in range(1, nodes):
        bits.append(bits[parents[i]] | 1 << i)
        depth.append(depth[parents[i]] + 1)
    return [b - (b >> 63 << 64) for b in bits], depth


def make_step(queries, contexts, heads, kv_heads, dim, device, size=16, dtype=torch.float32, format="auto", tree=False, seed=0):
    "q and batch of a step; K and V of the context and of the step are in the pages, everything else is NaN."
    r, g, f = random.Random(seed), torch.Generator().manual_seed(seed), kv_format(format, dtype)
    need = [-(-(n + c) // size) for n, c in zip(queries, contexts)]
    free = np.random.default_rng(seed).permutation(sum(need) + 2).tolist()
    tables = [array("i", [free.pop() for _ in range(n)]) for n in need]
    cache = LayerCache(allocate_pages(page_shape(sum(need) + 2, 2, kv_heads, dim, size, f), device).fill_(0xFF), 1, 0, f, size, dim)
    positions = ancestors = None
    if tree:
        trees = [random_tree(r, n) if tree is True or i % 2 == 0 else ([0] * n, range(n)) for i, n in enumerate(queries)]
        positions = [c + d for (_, depth), c in zip(trees, contexts) for d in depth]
        ancestors = [b for bits, _ in trees for b in bits]
    batch = pack([[0] * n for n in queries], contexts, [tables], size, positions, ancestors)
    whole = pack([[0] * (n + c) for n, c in zip(queries, contexts)], [0] * len(queries), [tables], size)
    reference.write_kv(*(torch.randn(whole.num_tokens, kv_heads, dim, generator=g).to(device, dtype) for _ in range(2)), cache, whole)
    return torch.randn(sum(queries), heads, dim, generator=g).to(device, dtype), cache, batch


def compare(backend, queries, contexts, shape, window=None, softcap=None, sinks=False, **settings):
    module, device = BACKENDS[backend]
    heads, kv_heads, dim = shape
    q, cache, batch = make_step(queries, contexts, heads, kv_heads, dim, device, **settings)
    args = dim**-0.5, window, softcap, torch.linspace(-2, 2, heads).to(device) if sinks else None
    expected = reference.paged_attention(q, cache, batch, *args)
    batch.scratch.clear()
    got = module.paged_attention(q, cache, batch, *args)
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got, expected, **reference.TOLERANCE[q.dtype])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_decode_and_chunks(backend, shape, format):
    compare(backend, [1] * 5 + [7, 20], [n - 1 for n in LENGTHS] + [17, 0], shape, format=format)


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("backend", BACKENDS)
def test_trees_beside_chunks(backend, window):
    "Sequences with a tree and without one in the same step: prompts longer than a tree may be, short chunks, decodes."
    compare(backend, [5, 90, 30, 20, 64, 1], [33, 17, 0, 200, 70, 40], (6, 2, 64), window, tree="mixed")


@pytest.mark.parametrize("features", [dict(window=20), dict(softcap=4.0), dict(sinks=True), dict(window=40, softcap=4.0, sinks=True)], ids=str)
@pytest.mark.parametrize("format", ["auto", "int8", "int4"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_features(backend, format, features):
    compare(backend, [1, 1, 9, 30], [257, 15, 60, 0], (6, 2, 64), format=format, **features)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("format", ["auto", "fp8_e4m3", "int4"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_trees(backend, format, seed):
    r = random.Random(seed)
    compare(backend, [64, 1, r.randint(2, 40)], [r.randint(0, 40), r.randint(0, 90), r.randint(0, 300)], (3, 1, 64), format=format, tree=True, seed=seed, window=[None, 25, None][seed])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision(backend, format, dtype):
    if backend == "numba" and dtype == torch.float16: pytest.skip("the CPU kernels compute in float32 or bfloat16")
    compare(backend, [1, 1, 5], [16, 256, 3], (4, 2, 64), format=format, dtype=dtype)


@pytest.mark.parametrize("size", [1, 4, 32, 128])
@pytest.mark.parametrize("backend", BACKENDS)
def test_block_sizes(backend, size):
    compare(backend, [1, 6], [150, 3], (4, 2, 32), size=size)
    compare(backend, [1, 6], [150, 3], (4, 2, 32), size=size, format="int8")


@pytest.mark.parametrize("backend", BACKENDS)
def test_context_cut_and_merged(backend):
    compare(backend, [1, 1, 3], [3000, 10, 700], (4, 2, 32), sinks=True)
    compare(backend, [1, 16], [2100, 1500], (2, 1, 64), format="int8", window=1800)


@pytest.mark.parametrize("backend", BACKENDS)
def test_shared_prefix(backend, monkeypatch):
    module, device = BACKENDS[backend]
    monkeypatch.setattr(module, "CASCADE", (4, 2))
    if backend == "numba": monkeypatch.setattr(cpu, "cascade_pays", lambda *shape: True)
    f = kv_format("int8", torch.float32)
    tables = [array("i", [7, 2, 9, 4, 11, i]) for i in (0, 1, 3)] + [array("i", [5])]
    cache = LayerCache(allocate_pages(page_shape(12, 1, 2, 64, 16, f), device).fill_(0xFF), 0, 0, f, 16, 64)
    lengths = [90, 83, 96, 4]
    fill = pack([[0] * n for n in lengths], [0] * 4, [tables], 16)
    reference.write_kv(*(torch.randn(fill.num_tokens, 2, 64).to(device) for _ in range(2)), cache, fill)
    batch = pack([[0] * n for n in (1, 3, 1, 1)], [89, 80, 95, 3], [tables], 16)
    q = torch.randn(6, 4, 64).to(device)
    expected = reference.paged_attention(q, cache, batch, 0.1)
    batch.scratch.clear()
    if backend == "triton": split_kv.prepare(batch, cache, 4, None, 4, q.device, cascade=(4, 2))
    torch.testing.assert_close(module.paged_attention(q, cache, batch, 0.1), expected, **reference.TOLERANCE[q.dtype])
    work = next(v for k, v in batch.scratch.items() if k[0] in ("cpu", "triton"))
    tasks = np.asarray(work[0].tasks if backend == "numba" else work[1].cpu())
    assert (tasks[:, 2] == 5).any()  # one task for the five tokens behind the prefix


@pytest.mark.parametrize("format", ["float32", "bfloat16", *FORMATS[1:]])
@pytest.mark.parametrize("backend", BACKENDS)
def test_written_bytes(backend, format):
    "The bytes are those of `KVFormat.encode`; slot −1 and everything around stay as they are."
    module, device = BACKENDS[backend]
    for dim, size in ((64, 16), (80, 16), (128, 4), (8, 1)):
        g, f, pages = torch.Generator().manual_seed(dim), kv_format(format, torch.float32), []
        k, v = (torch.randn(22, 2, dim, generator=g) for _ in range(2))
        k[1] = 0
        k[2] *= 1e-6
        v[3] *= 1e4
        k[4, :, 1] = 300
        tables = [array("i", np.random.default_rng(0).permutation(24)[:-(-20 // size)].tolist()), array("i", [-1] * -(-3 // size) if size > 1 else [-1, -1, -1])]
        batch = pack([[0] * 20, [0] * 2], [0, 1], [tables], size)
        for write, where in ((reference.write_kv, "cpu"), (module.write_kv, device)):
            cache = LayerCache(allocate_pages(page_shape(24, 2, 2, dim, size, f), where).fill_(0xFF), 1, 0, f, size, dim)
            batch.scratch.clear()
            dtype = torch.bfloat16 if format == "bfloat16" else torch.float32
            write(k.to(where, dtype), v.to(where, dtype), cache, batch)
            pages.append(cache.pages.cpu())
        assert torch.equal(*pages)


def test_pages_on_a_gpu_move_as_on_a_cpu():
    from llmserve.kernels.page_copy import copy_on_gpu, move_on_gpu
    r = random.Random(0)
    for format in ("float32", "bfloat16", "fp8_e5m2", "int4"):
        spec = ModelSpec("toy", "Toy", 3, 4, 2, 48, 32, 100, 1024, windows=(None,) * 3)
        a, b = (KVCache(spec, [12], 16, kv_format(format, torch.bfloat16), d) for d in ("cpu", "cuda" if GPU else "cpu"))
        a.pages[0].copy_(torch.randint(0, 256, a.pages[0].shape, dtype=torch.uint8))
        b.pages[0].copy_(a.pages[0])
        blocks = r.sample(range(12), 8)
        pairs = list(zip(blocks[:4], blocks[4:]))
        a.copy_blocks(0, pairs)
        copy_on_gpu(b.pages[0], b.pages[0], pairs)
        moves = []
        for first in (0, 64, 128):  # three sequences, each with a tree of some nodes whose accepted ones move down
            kept = sorted(r.sample(range(1, 40), 5))
            moves.append([(first + k, first + i + 1) for i, k in enumerate(kept)])
        a.move_rows(0, moves)
        move_on_gpu(b, 0, moves)
        assert torch.equal(a.pages[0], b.pages[0].cpu())


# ---- what a kernel cannot take is refused before anything is launched

def test_refusals():
    f = kv_format("auto", torch.float32)
    make = lambda dim=64, size=16: LayerCache(allocate_pages(page_shape(2, 1, 1, dim, size, f), "cpu"), 0, 0, f, size, dim)
    step = lambda size=16: pack([[0]], [0], [[array("i", [0])]], size)
    q = torch.zeros(1, 1, 64)
    with pytest.raises(ValueError, match="int3.*|got 'int3'"): kv_format("int3", torch.float32)
    with pytest.raises(ValueError, match="even head_dim, got 63"): kv_format("int4", torch.float32, 63)
    with pytest.raises(ValueError, match="at most 256.*got 320"): split_kv.paged_attention(torch.zeros(1, 1, 320), make(320), step(), 1.0)
    with pytest.raises(ValueError, match="power of two.*got 24"): split_kv.paged_attention(q, make(size=24), step(24), 1.0)
    with pytest.raises(ValueError, match="one device.*meta"): split_kv.write_kv(q.to("meta"), q.to("meta"), make(), step())
    with pytest.raises(ValueError, match="that of the pages, 64, got 32"): split_kv.write_kv(q[..., :32], q[..., :32], make(), step())
    with pytest.raises(ValueError, match="float64"): split_kv.write_kv(q.double(), q.double(), make(), step())
    with pytest.raises(ValueError, match="float16"): cpu.write_kv(q.half(), q.half(), make(), step())


# ---- compiled for cards that are not there

def compile_kernels(*args):
    import os
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, "-m", "llmserve.kernels.compile", *args], capture_output=True, text=True, env=env, cwd=Path(__file__).parents[1])


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_compiles(target):
    done = compile_kernels("--targets", target, "--head-dims", "128", "--formats", "bfloat16,int4")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"built for {target}; 0 beyond" in done.stdout


@pytest.mark.slow
def test_compiles_everything():
    done = compile_kernels()
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_unknown_target_is_refused():
    done = compile_kernels("--targets", "sm_42")
    assert done.returncode == 2 and "sm_42" in done.stderr

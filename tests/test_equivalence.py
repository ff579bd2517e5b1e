"""Greedy tokens of every fast path equal those of transformers' own `generate`, in float32.

The oracle runs one prompt at a time, with eager attention and its own cache. Prompt lengths sit around multiples of the block size."""
import functools
import random

import pytest
import torch
from conftest import TINY, make_engine, run

from llmserve.core import SamplingParams
from llmserve.models import find

REQUIRED = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "mixtral"]
PATHS = {  # engine settings, and whether requests come one by one
    "one by one": (dict(), True),
    "batched": (dict(), False),
    "chunks of 7": (dict(long_prefill_token_threshold=7), False),
    "chunks of 64": (dict(max_num_batched_tokens=64), False),
    "no prefix cache": (dict(enable_prefix_caching=False), False),
    "not fused": (dict(fuse=False), False),
    "reference attention": (dict(attention_backend="reference"), False),
}


@functools.lru_cache(None)
def oracle_model(folder):
    import transformers
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@functools.lru_cache(None)
def oracle(folder, prompt, new_tokens):
    "Greedy answer of transformers, token by token."
    ids = torch.tensor([prompt])
    out = oracle_model(folder).generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, pad_token_id=0, eos_token_id=None)
    return out[0, len(prompt):].tolist()


def prompts_of(lengths, vocab, shared=20, seed=0):
    "Random prompts of given lengths; those long enough begin alike, so that prefixes are shared."
    r = random.Random(seed)
    beginning = [r.randrange(3, vocab) for _ in range(shared)]
    return [(beginning + [r.randrange(3, vocab) for _ in range(n - shared)]) if n > shared else [r.randrange(3, vocab) for _ in range(n)] for n in lengths]


def check(folder, prompts, new_tokens, settings, one_by_one=False, twice=True, pressure=False):
    engine = make_engine(folder, **{"max_model_len": max(map(len, prompts)) + new_tokens, **settings})
    if pressure: preempt_often(engine)
    expected = [[oracle(str(folder), tuple(p), new_tokens)] for p in prompts]
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    assert run(engine, prompts, params, one_by_one) == expected
    if twice and engine.config.enable_prefix_caching:  # again, now that every prefix is known
        assert run(engine, prompts, params) == expected
    return engine


def tight(prompts, new_tokens):
    "As few blocks as the longest request can live with."
    return dict(num_gpu_blocks_override=-(-(max(map(len, prompts)) + new_tokens) // 16) + 1, max_num_batched_tokens=48)


def preempt_often(engine):
    "Throw a random sequence out before most steps, besides those that give way because the pool is full."
    scheduler, r = engine.scheduler, random.Random(0)
    schedule = scheduler.schedule

    def harsh():
        thrown = type("Thrown", (), dict(preempted=[]))()
        if len(scheduler.running) > 1 and r.random() < 0.9:
            victim = r.choice(scheduler.running)
            scheduler.running.remove(victim)
            scheduler._preempt(victim, thrown)
        order = schedule()
        order.preempted.extend(thrown.preempted)
        return order

    scheduler.schedule = harsh


def preempted_share(engine):
    "Share of the steps with more than one sequence in which somebody was thrown out."
    crowded = [r for r in engine.records if len(r.scheduled) + len(r.preempted) > 1]
    return sum(bool(r.preempted) for r in crowded) / len(crowded)


LENGTHS = [15, 16, 17, 31, 32, 33, 47, 48, 49, 1, 2, 80, 81, 64, 5, 30]


@pytest.mark.parametrize("name", list(TINY))
def test_tiny(tiny, name):
    "Every architecture: batched, in pieces, twice, and under pressure."
    folder, prompts = tiny(name), prompts_of(LENGTHS, 160)
    check(folder, prompts, 12, dict())
    check(folder, prompts, 12, dict(long_prefill_token_threshold=7))
    check(folder, prompts, 12, tight(prompts, 12))
    engine = check(folder, prompts, 12, dict(max_num_batched_tokens=96), twice=False, pressure=True)
    assert preempted_share(engine) > 0.5


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", REQUIRED)
def test_tiny_every_path(tiny, name, path):
    settings, one_by_one = PATHS[path]
    check(tiny(name), prompts_of(LENGTHS, 160), 12, settings, one_by_one)


def test_block_sizes(tiny):
    for size in (1, 4, 32): check(tiny("gemma3"), prompts_of(LENGTHS, 160), 12, dict(block_size=size))


def real_prompts(name, count, longest):
    "Text prompts of a real model, cut to lengths around multiples of 16."
    from llmserve.models import load_tokenizer
    tok = load_tokenizer(find(name))
    text = ("The history of the bicycle begins in the early nineteenth century, when a German baron built a wooden machine with two wheels and no pedals. "
            "Riders pushed themselves along with their feet. Fifty years later two Frenchmen added cranks to the front wheel, and the machine became fast, "
            "uncomfortable and popular. In 1885 the safety bicycle, with a chain and two wheels of equal size, made it a vehicle for everyone. ") * 12
    ids = tok(text).input_ids
    lengths = [15, 16, 17, 33, 63, 64, 65, 100, 127, 128, 129, 200, 255, 256, 257, 40]
    if longest > 512: lengths[-6:] = [511, 512, 513, 543, 576, longest]
    start = lambda i: 0 if i % 2 else 7 * i  # half of them begin alike
    return [ids[:1] + ids[1 + start(i):start(i) + lengths[i]] for i in range(16)][:count] if count == 16 else [ids[:n] for n in lengths[-count:]]


REAL = {"smollm2-135m": 257, "gemma3-270m": 600}


@pytest.mark.parametrize("name", REAL)
def test_real_slice(name):
    "A few prompts of the real models, in pieces and with prefixes shared; Gemma's beyond its window of 512."
    prompts = real_prompts(name, 3, REAL[name])
    folder = find(name)
    check(folder, prompts, 8, dict(max_num_batched_tokens=192, kv_cache_memory="256MiB"))


@pytest.mark.slow
@pytest.mark.parametrize("path", [*PATHS, "tight"])
@pytest.mark.parametrize("name", REAL)
def test_real(name, path):
    "Sixteen prompts of each real model over every path."
    prompts, folder = real_prompts(name, 16, REAL[name]), find(name)
    settings, one_by_one = PATHS.get(path, (None, False))
    if path == "tight":
        engine = check(folder, prompts, 24, tight(prompts, 24), twice=False)
        assert any(r.preempted for r in engine.records)
        engine = check(folder, prompts, 24, dict(max_num_batched_tokens=256), twice=False, pressure=True)
        assert preempted_share(engine) > 0.5
    else: check(folder, prompts, 24, {**settings, "kv_cache_memory": "512MiB"}, one_by_one)


# ---- Triton, interpreted where there is no GPU

@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "gpt_oss"])
def test_triton(name, tiny):
    folder = tiny(name)
    prompts = prompts_of([1, 16, 33, 50], 160)
    engine = check(folder, prompts, 4, dict(attention_backend="triton", device="cuda" if torch.cuda.is_available() else "cpu", max_num_batched_tokens=40, kv_cache_memory="1MiB"))
    assert engine.runner.backend.name == "triton"


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_triton_decode_graphs(name, tiny):
    "The buffers of recorded decode steps: where nothing can be recorded, the step is run again at each replay."
    from llmserve.runner import DecodeGraphs

    def again(run):
        out = run()

        @torch.inference_mode()
        def replay(): out.copy_(run())
        return replay, out

    folder = tiny(name)
    prompts = prompts_of([1, 17, 31], 160)
    engine = make_engine(folder, attention_backend="triton", device="cuda" if torch.cuda.is_available() else "cpu", max_model_len=64, kv_cache_memory="1MiB")
    if engine.runner.device == "cpu": engine.runner.graphs = DecodeGraphs(engine.runner, (2, 4, 8), again)
    expected = [[oracle(str(folder), tuple(p), 3 + i)] for i, p in enumerate(prompts)]
    requests = [engine.add(p, SamplingParams(temperature=0, max_tokens=3 + i, ignore_eos=True)) for i, p in enumerate(prompts)]
    sequences = [r.sequences[0] for r in requests]
    while engine.has_work: engine.step()
    assert [[s.output_token_ids] for s in sequences] == expected
    assert len(engine.runner.graphs.recorded) >= 2


# ---- quantized KV: the fast kernels give what the reference gives over the same format

@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2", "int8", "int4"])
def test_quantized(format, tiny):
    prompts = prompts_of([1, 16, 33, 70], 160)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for name in ("llama", "gemma3"):
        def answers(**settings): return run(make_engine(tiny(name), kv_cache_dtype=format, max_model_len=96, **settings), prompts, params)
        expected = answers(attention_backend="reference")
        assert answers(max_num_batched_tokens=24) == expected
        assert answers(num_gpu_blocks_override=12, max_num_batched_tokens=48) == expected
    few, brief = [prompts[0], prompts[2]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    settings = dict(kv_cache_dtype=format, max_model_len=48, kv_cache_memory="1MiB")
    assert run(make_engine(tiny("llama"), attention_backend="triton", **settings), few, brief) == run(make_engine(tiny("llama"), **settings), few, brief)

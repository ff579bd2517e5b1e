"""The command line, in process: what is printed where, and the exit code."""
import io
import json
import sys

import pytest

from llmserve import __version__
from llmserve.cli import main

SMALL = ["--kv-cache-memory", "32MiB", "--max-model-len", "128"]
COUNT = "1, 2, 3, 4, 5, 6,"  # how it goes on is beyond doubt, in any dtype

def greedy(*prompts: str, max_tokens: int = 6) -> list: return ["generate", *prompts, "--temperature", "0", "--max-tokens", str(max_tokens), *SMALL]

class Pieces(io.StringIO):
    "A standard output that keeps each write."
    def __init__(self): super().__init__(); self.pieces = []
    def write(self, text): self.pieces.append(text); return super().write(text)

def one_line(err: str) -> str:
    "The only line on standard error."
    assert err.count("\n") == 1 and err.startswith("llmserve: "), err
    return err

# generate

def test_one_prompt_streams(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", out := Pieces())
    assert main(greedy(COUNT)) == 0
    assert out.getvalue() == " 7, 8,\n", "the answer alone"
    assert len([p for p in out.pieces if p.strip()]) >= 3, "piece by piece"
    err = capsys.readouterr().err
    assert "smollm2-135m" in err and "Traceback" not in err

def test_several_prompts_keep_their_order(capsys):
    assert main(greedy(COUNT, "a b c d e f g h i", "11, 12, 13, 14, 15, 16,", max_tokens=3)) == 0
    assert capsys.readouterr().out == f"{COUNT} 7,\n\na b c d e f g h i j k l\n\n11, 12, 13, 14, 15, 16, 17\n\n"

def test_one_prompt_a_line_from_standard_input(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{COUNT}\n\n   \na b c d e f g h i\n"))
    assert main([*greedy(max_tokens=6), "--stop", "l"]) == 0
    assert capsys.readouterr().out == f"{COUNT} 7, 8,\n\na b c d e f g h i j k \n\n"

def test_a_prompt_that_is_too_long_does_not_stop_the_others(capsys):
    with pytest.warns(UserWarning, match="1 of 2"): assert main(greedy("word " * 200, COUNT)) == 1
    captured = capsys.readouterr()
    assert captured.out == f"{COUNT} 7, 8,\n\n"
    assert [line for line in captured.err.splitlines() if line.startswith("error: ")] == [line for line in captured.err.splitlines() if "max_model_len=128" in line] != []

def test_too_little_memory_is_one_line_with_numbers(capsys):
    assert main(["generate", "a", "--kv-cache-memory", "1KiB"]) == 1
    assert any(c.isdigit() for c in one_line(capsys.readouterr().err))

def test_no_prompt(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n\n"))
    assert main(["generate"]) == 1
    assert "prompt" in one_line(capsys.readouterr().err)

def test_chat_answers_until_an_empty_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is the capital of France?\n\nnever read"))
    assert main(["chat", "--temperature", "0", "--max-tokens", "12", *SMALL]) == 0
    assert "Paris" in capsys.readouterr().out and sys.stdin.read() == "never read"

# bad values

@pytest.mark.parametrize("flag, value, name", [
    ("--temperature", "-1", "temperature"), ("--temperature", "nan", "temperature"), ("--temperature", "inf", "temperature"), ("--top-p", "0", "top_p"), ("--top-p", "1.5", "top_p"), ("--top-k", "-2", "top_k"),
    ("--min-p", "2", "min_p"), ("--repetition-penalty", "0", "repetition_penalty"), ("--presence-penalty", "3", "presence_penalty"), ("--max-tokens", "0", "max_tokens"), ("--min-tokens", "100", "min_tokens"),
    ("--n", "0", "n must"), ("--stop", "", "stop"), ("--sampling-seed", str(2**63), "seed"),
    ("--model", "nosuch", "nosuch"), ("--model", "/no/such/folder", "/no/such/folder"), ("--tokenizer", "nosuch", "nosuch"), ("--dtype", "float8", "dtype"), ("--device", "tpu", "device"), ("--device", "cpuu:1", "device"),
    ("--block-size", "17", "block_size"), ("--block-size", "0", "block_size"), ("--gpu-memory-utilization", "1.1", "gpu_memory_utilization"), ("--kv-cache-memory", "lots", "memory"), ("--kv-cache-memory", "-1", "memory"),
    ("--max-model-len", "0", "max_model_len"), ("--max-num-seqs", "0", "max_num_seqs"), ("--max-num-batched-tokens", "-5", "max_num_batched_tokens"), ("--scheduling-policy", "sjf", "scheduling_policy"),
    ("--attention-backend", "flash", "attention_backend"), ("--kv-cache-dtype", "int3", "kv_cache_dtype")])
def test_bad_value_is_one_line_that_names_it(flag, value, name, capsys):
    assert main(["generate", "a", f"{flag}={value}"]) == 1
    captured = capsys.readouterr()
    assert name in one_line(captured.err) and captured.out == ""

@pytest.mark.parametrize("command", [["chat"], ["demo"], ["bench", "throughput"], ["bench", "memory"], ["bench", "floor"]], ids=" ".join)
def test_every_command_refuses_an_unknown_model(command, capsys):
    assert main([*command, "--model", "nosuch"]) == 1
    assert "nosuch" in one_line(capsys.readouterr().err)

@pytest.mark.parametrize("argv", [[], ["nosuch"], ["bench"], ["generate", "a", "--nosuch"], ["generate", "a", "--max-tokens", "many"], ["bench", "throughput", "--repeat", "1.5"]], ids=" ".join)
def test_what_cannot_be_parsed_shows_the_usage(argv, capsys):
    with pytest.raises(SystemExit) as e: main(argv)
    assert e.value.code == 2 and capsys.readouterr().err.startswith("usage: llmserve")

def test_version(capsys):
    with pytest.raises(SystemExit) as e: main(["--version"])
    assert e.value.code == 0 and capsys.readouterr().out == f"llmserve {__version__}\n"

# models

def test_models_says_what_is_in_the_cache(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LLMSERVE_CACHE", str(tmp_path / "cache"))
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert out.count("not fetched") == 2 and "in the cache" not in out and str(tmp_path / "cache") in out
    folder = tmp_path / "cache" / "converted" / "smollm2-135m-0123"
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    assert main(["models"]) == 0
    line, = [line for line in capsys.readouterr().out.splitlines() if "in the cache" in line]
    assert line.startswith("smollm2-135m ")

# bench

def test_throughput_prints_one_json_object_a_run(capsys):
    assert main(["bench", "throughput", "--num-prompts", "3", "--input-len", "5", "--output-len", "4", "--repeat", "2", "--json", "--kv-cache-memory", "32MiB"]) == 0
    captured = capsys.readouterr()
    rows = [json.loads(line) for line in captured.out.splitlines()]
    assert len(rows) == 2 and captured.err == ""
    for row in rows:
        assert {k: row[k] for k in ("engine", "batch", "prompt", "gen", "steps", "padding_tokens")} == dict(engine="llmserve", batch=3, prompt=5, gen=4, steps=4, padding_tokens=0)
        assert row["seconds"] > 0 and row["tok_s"] > 0

@pytest.mark.parametrize("flag, name", [("--output-len", "output_len"), ("--input-len", "input_len")])
def test_throughput_of_nothing_is_refused(flag, name, capsys):
    assert main(["bench", "throughput", "--json", flag, "0"]) == 1
    assert name in one_line(capsys.readouterr().err)

@pytest.mark.parametrize("flag, value", [("--repeat", "0"), ("--num-prompts", "0"), ("--num-prompts", "-1")])
def test_throughput_refuses_counts_below_one(flag, value, capsys):
    assert main(["bench", "throughput", flag, value, "--output-len", "2"]) == 1
    assert any(flag[2:] in line or flag[2:].replace("-", "_") in line for line in capsys.readouterr().err.splitlines())

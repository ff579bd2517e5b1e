"The front door: outputs, streams, log-probabilities, seeds, stops, cancelling, and bad input."
import gc
import random
import warnings

import pytest
import torch
from conftest import loaded, make_engine

from llmserve import LLM, SamplingParams
from llmserve.core import InvalidRequest, OutOfMemory


@pytest.fixture(scope="module")
def llm(): return LLM(engine=make_engine("smollm2-135m", max_model_len=512, kv_cache_memory="192MiB", max_num_batched_tokens=128), quiet=True)


@pytest.fixture(autouse=True)
def nothing_left(llm):
    yield
    gc.collect()
    assert not llm.engine.has_work and not llm.engine.requests and llm.engine.blocks.num_used == [0]
    llm.engine.scheduler.check_integrity()


def ask(llm, prompts, **params): return llm.generate(prompts, SamplingParams(**{"temperature": 0, "max_tokens": 12, **params}), use_tqdm=False)


def full_logits(ids):
    "Logits of every position by a plain forward of the model as transformers has it."
    import transformers
    model = transformers.AutoModelForCausalLM.from_pretrained(loaded("smollm2-135m").folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode(): return model(torch.tensor([ids])).logits[0]


def test_text_is_the_decoded_tokens(llm):
    for out in ask(llm, ["Hello, my name is", "日本の首都は", "def add(a, b):"], max_tokens=20):
        assert out.outputs[0].text == llm.tokenizer.decode(out.outputs[0].token_ids, skip_special_tokens=True)
        assert out.finished and out.outputs[0].finish_reason == "length" and len(out.outputs[0].token_ids) == 20


def test_order_is_kept(llm):
    "Outputs come in the order of the prompts, whichever ends first."
    prompts, params = ["One", "Two", "Three"], [SamplingParams(temperature=0, max_tokens=n) for n in (30, 2, 9)]
    outs = llm.generate(prompts, params, use_tqdm=False)
    assert [o.prompt for o in outs] == prompts and [len(o.outputs[0].token_ids) for o in outs] == [30, 2, 9]


def test_stream_joins_to_generate(llm):
    prompts = ["Once upon a time", "The three colours of the flag are"]
    texts = ["", ""]
    for delta in llm.stream(prompts, SamplingParams(temperature=0, max_tokens=25)): texts[delta.prompt_index] += delta.text
    assert texts == [o.outputs[0].text for o in ask(llm, prompts, max_tokens=25)]


def test_leaving_a_stream_frees_everything(llm):
    for n in (1, 3, 10):
        stream = llm.stream(["Count to one hundred: 1, 2,"] * 3, SamplingParams(max_tokens=60, n=2))
        for _, _ in zip(range(n), stream): pass
        stream.close()
        assert not llm.engine.has_work and llm.engine.blocks.num_used == [0]


@pytest.mark.parametrize("chunk", [128, 5])
def test_logprobs_are_those_of_the_model(llm, chunk):
    "Of the answer and of the prompt, also when the prompt is computed in pieces or is in the cache."
    llm.engine.scheduler.chunk = chunk
    try:
        prompt = llm.tokenizer("The quick brown fox jumps over the lazy dog and runs away").input_ids
        ask(llm, [prompt])
        out = ask(llm, [prompt], max_tokens=4, logprobs=5, prompt_logprobs=3)[0]
    finally: llm.engine.scheduler.chunk = 128
    answer = out.outputs[0]
    logprobs = full_logits(prompt + answer.token_ids).log_softmax(-1)
    for i, (token, found) in enumerate(zip(answer.token_ids, answer.logprobs)):
        row = logprobs[len(prompt) - 1 + i]
        assert set(found) >= set(row.topk(5).indices.tolist()) and token in found and len(found) in (5, 6)
        for t, lp in found.items():
            assert lp.logprob == pytest.approx(float(row[t]), abs=1e-3)
            assert lp.rank == int((row > row[t]).sum()) + 1 and lp.decoded_token == llm.tokenizer.decode([t])
    assert out.prompt_logprobs[0] is None and len(out.prompt_logprobs) == len(prompt) and out.num_cached_tokens == 0
    for i in range(1, len(prompt)):
        found, row = out.prompt_logprobs[i], logprobs[i - 1]
        assert prompt[i] in found and len(found) in (3, 4)
        for t, lp in found.items(): assert lp.logprob == pytest.approx(float(row[t]), abs=1e-3)


def test_seeds(llm):
    "A seed fixes the answer, whoever is in the batch and however the prompt is cut; another seed gives another; n samples are n requests with seed + i."
    params = dict(temperature=1.0, max_tokens=10)
    alone = ask(llm, "My favourite animal is", seed=5, **params)[0].outputs[0].token_ids
    r = random.Random(0)
    others = [[r.randrange(100, 40000) for _ in range(r.randint(1, 60))] for _ in range(6)]
    mixed = llm.generate([*others, "My favourite animal is"], [SamplingParams(temperature=1.3, max_tokens=20)] * 6 + [SamplingParams(seed=5, **params)], use_tqdm=False)[-1].outputs[0].token_ids
    assert alone == mixed != ask(llm, "My favourite animal is", seed=6, **params)[0].outputs[0].token_ids
    three = ask(llm, "My favourite animal is", seed=5, n=3, **params)[0].outputs
    assert [o.token_ids for o in three] == [ask(llm, "My favourite animal is", seed=5 + i, **params)[0].outputs[0].token_ids for i in range(3)]


def test_stops(llm):
    "A stop text found inside the greedy answer cuts it there; stop tokens and min_tokens do as they say."
    whole = ask(llm, "Here is a list of fruits: apple,", max_tokens=30)[0].outputs[0]
    for start in range(3, 30, 4):
        stop = whole.text[start:start + 4]
        at = whole.text.find(stop)
        cut = ask(llm, "Here is a list of fruits: apple,", max_tokens=30, stop=[stop])[0].outputs[0]
        assert cut.text == whole.text[:at] and cut.finish_reason == "stop" and cut.stop_reason == stop
        kept = ask(llm, "Here is a list of fruits: apple,", max_tokens=30, stop=[stop], include_stop_str_in_output=True)[0].outputs[0]
        assert kept.text == whole.text[:at + len(stop)] and kept.token_ids == cut.token_ids == whole.token_ids[:len(cut.token_ids)]
    token = whole.token_ids[6]
    cut = ask(llm, "Here is a list of fruits: apple,", max_tokens=30, stop_token_ids=[token])[0].outputs[0]
    assert cut.token_ids == whole.token_ids[:whole.token_ids.index(token) + 1] and cut.stop_reason == token
    late = ask(llm, "Here is a list of fruits: apple,", max_tokens=30, stop_token_ids=[token], min_tokens=15)[0].outputs[0]
    assert len(late.token_ids) >= 15 and token not in late.token_ids[:14]


def test_eos(llm):
    chat = llm.chat_prompt([{"role": "user", "content": "Say hello."}])
    ended = ask(llm, chat, max_tokens=100)[0].outputs[0]
    assert ended.finish_reason == "stop" and ended.stop_reason is None and "<|im_end|>" not in ended.text
    assert len(ask(llm, chat, max_tokens=100, ignore_eos=True)[0].outputs[0].token_ids) == 100


def test_penalties_and_bias_change_the_answer(llm):
    plain = ask(llm, "la la la la la", max_tokens=12)[0].outputs[0].token_ids
    assert len(set(plain)) < 12
    assert len(set(ask(llm, "la la la la la", max_tokens=12, presence_penalty=2, frequency_penalty=2, repetition_penalty=1.5)[0].outputs[0].token_ids)) > len(set(plain))
    assert ask(llm, "la la", max_tokens=3, logit_bias={77: 100})[0].outputs[0].token_ids == [77] * 3
    assert plain[0] not in ask(llm, "la la la la la", max_tokens=1, logit_bias={plain[0]: -100})[0].outputs[0].token_ids


def test_bad_words_do_not_occur(llm):
    prompt, words = "Once upon a time, in a small village by the sea,", []
    for _ in range(4):  # each answer's words are forbidden in the next
        text = ask(llm, [prompt], bad_words=words or None)[0].outputs[0].text
        assert not any(w in text.split() for w in words)
        words += [w for w in text.split() if w.isalpha()][:3]
    assert len(words) >= 9
    drafting = LLM(engine=make_engine("smollm2-135m", max_model_len=512, kv_cache_memory="64MiB", speculative_config=dict(method="ngram", num_speculative_tokens=4, prompt_lookup_min=1)), quiet=True)
    asked = "Say it again: red green blue red green blue red green blue red green"
    assert ask(drafting, [asked], bad_words=["blue"])[0].outputs[0].token_ids == ask(llm, [asked], bad_words=["blue"])[0].outputs[0].token_ids


def test_allowed_tokens(llm):
    ids = [i for w in (" red", " green", " blue") for i in llm.tokenizer(w).input_ids]
    for t in (0.0, 1.5): assert set(ask(llm, ["Colours:"], allowed_token_ids=ids, temperature=t)[0].outputs[0].token_ids) <= set(ids)
    with pytest.raises(InvalidRequest, match="allowed_token_ids has token id 60000"): ask(llm, ["a"], allowed_token_ids=[60000])


def test_one_bad_prompt_among_many(llm):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outs = ask(llm, ["Hello", "", [3, 10**9], [1, -5], "word " * 2000, {"prompt_token_ids": []}, 5.0, "Goodbye"])
    assert [bool(o.error) for o in outs] == [False, True, True, True, True, True, True, False] and len(caught) == 1
    assert all(len(o.outputs[0].token_ids) == 12 for o in outs if not o.error)
    for o, words in zip(outs[1:5], [["empty"], ["1000000000", "49,151"], ["-5"], ["max_model_len=512"]]): assert all(w in o.error for w in words), o.error
    with pytest.raises(InvalidRequest, match="empty"): ask(llm, "")


def test_prompt_that_fills_the_model(llm):
    "One token less than max_model_len is answered with one token; as many are refused."
    assert len(ask(llm, [[5] * 511], max_tokens=50)[0].outputs[0].token_ids) == 1
    with pytest.raises(InvalidRequest, match="512"): ask(llm, [[5] * 512])


def test_pool_too_small(tiny):
    with pytest.raises(OutOfMemory, match="max_model_len=256"): make_engine(tiny("llama"), max_model_len=256, num_gpu_blocks_override=15)
    with pytest.raises(OutOfMemory, match="MiB"): make_engine(tiny("llama"), max_model_len=512, kv_cache_memory="100KiB")
    shorter = make_engine(tiny("llama"), kv_cache_memory="100KiB")  # no length was asked for: the pool decides
    assert 0 < shorter.plan.max_model_len < 512 and shorter.plan.concurrency(shorter.plan.max_model_len) >= 1


def test_a_failing_step_ends_only_its_sequences(tiny):
    "An exception inside a step reaches the caller, and the engine stays usable."
    engine = make_engine(tiny("llama"), max_model_len=64, max_num_seqs=1)
    engine.add([1, 2, 3]), engine.add([4, 5, 6])
    execute = engine.runner.execute
    def fail(step): raise MemoryError("boom")
    engine.runner.execute = fail
    with pytest.raises(MemoryError): engine.step()
    engine.runner.execute = execute
    engine.scheduler.check_integrity()
    while engine.has_work: engine.step()
    assert engine.blocks.num_used == [0] and not engine.requests and len(engine.records) > 0


def test_windowed_group_gives_blocks_back(tiny):
    "With a window of 24, a sequence of 400 tokens holds a few blocks in that group and all in the other."
    engine = make_engine(tiny("gemma3"), max_model_len=500, max_num_batched_tokens=32)
    engine.add(list(range(3, 153)) * 2, SamplingParams(max_tokens=100, ignore_eos=True, temperature=0))
    while engine.has_work:
        engine.step()
        full, windowed = engine.blocks.num_used
        assert windowed <= -(-(24 + 32) // 16) + 1 and (full >= windowed)
    assert max(r.used_blocks[0] for r in engine.records) == 25


def test_records_add_up(llm):
    "Every token of a run is in the records once: nothing is padded, nothing computed twice without need."
    llm.engine.records.clear()
    llm.engine.blocks.reset_prefix_cache()
    prompts = [[100 + i + 13 * j for j in range(n)] for i, n in enumerate((3, 40, 77, 150))]
    outs = ask(llm, prompts, max_tokens=9, ignore_eos=True)
    records = list(llm.engine.records)
    assert sum(r.num_tokens for r in records) == sum(len(p) + 8 for p in prompts)
    assert sorted(f for r in records for f in r.finished) == sorted(o.request_id for o in outs) and records[-1].num_running == 0

"""Forks: n answers to one prompt share its blocks until they write, and are the answers that n single requests would give."""
import dataclasses
import functools
import random

import pytest
from conftest import make_engine, matrix

from llmserve.core import InvalidRequest, SamplingParams
from llmserve.fork import watch_blocks

SAMPLED = SamplingParams(temperature=1.0, max_tokens=20, seed=11, ignore_eos=True)


def prompt_of(n, seed=0, vocab=160):
    r = random.Random(seed)
    return [r.randrange(3, vocab) for _ in range(n)]


def finish(engine, requests):
    sequences = [list(r.sequences) for r in requests]
    while engine.has_work:
        engine.step()
        engine.scheduler.check_integrity()
    assert all(n == 0 for n in engine.blocks.num_used)
    return [[s.output_token_ids for s in some] for some in sequences]


def singles(folder, prompt, params, **settings):
    engine = make_engine(folder, max_model_len=256, **settings)
    return [finish(engine, [engine.add(prompt, dataclasses.replace(params, n=1, seed=params.seed + i))])[0][0] for i in range(params.n)]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 70])
def test_equal_to_single_requests(name, length, tiny):
    params = dataclasses.replace(SAMPLED, n=5)
    expected = singles(tiny(name), prompt_of(length), params)
    assert len({tuple(e) for e in expected}) > 1
    for settings in (dict(), dict(enable_prefix_caching=False), dict(max_num_batched_tokens=9), dict(max_num_seqs=3), dict(max_num_seqs=1), dict(kv_cache_dtype="int8")):
        engine = make_engine(tiny(name), max_model_len=256, **settings)
        wanted = singles(tiny(name), prompt_of(length), params, kv_cache_dtype="int8") if "kv_cache_dtype" in settings else expected
        assert finish(engine, [engine.add(prompt_of(length), params)]) == [wanted], settings


def test_preempted_at_most_steps(tiny):
    "Sequences are thrown out while they share a block that is not full."
    params = dataclasses.replace(SAMPLED, n=4)
    prompts = [prompt_of(n, n) for n in (17, 40, 9)]
    expected = [singles(tiny("llama"), p, params) for p in prompts]
    engine = make_engine(tiny("llama"), max_model_len=256, num_gpu_blocks_override=16)
    thrown = harshly(engine)
    assert finish(engine, [engine.add(p, params) for p in prompts]) == expected
    assert len(thrown) > 10


def test_memory_and_work(tiny):
    "n = 8 over 488 tokens: at most 1.15 × the prompt's blocks + 8 answers', and the prompt is computed once."
    engine = make_engine(tiny("llama"), max_model_len=512, max_num_batched_tokens=4096)
    prompt = prompt_of(488)
    _, refs = watch_blocks(engine, [prompt], dataclasses.replace(SAMPLED, n=8))
    assert max(map(len, refs)) <= 1.15 * -(-488 // 16) + 8 * -(-20 // 16)
    assert sum(x.num_tokens for x in engine.records) == 488 + 8 * 19


@pytest.mark.parametrize("when", range(0, 12))
def test_abort_in_every_state(when, tiny):
    "Whole requests and single answers, before the fork, at it and after it; the others go on unchanged."
    params = dataclasses.replace(SAMPLED, n=4)
    engine = make_engine(tiny("llama"), max_model_len=256, max_num_batched_tokens=16)
    expected = singles(tiny("llama"), prompt_of(40, 1), params)
    doomed, kept = engine.add(prompt_of(37), params), engine.add(prompt_of(40, 1), params)
    sequences = list(kept.sequences)
    for _ in range(when): engine.step()
    if when % 2: engine.abort(doomed.id)
    else:
        for s in doomed.sequences[:2]: engine.finish(s, "abort")  # the first carries the others before the fork
    engine.scheduler.check_integrity()
    others = list(doomed.sequences)
    while engine.has_work:
        engine.step()
        engine.scheduler.check_integrity()
    assert [s.output_token_ids for s in sequences] == expected
    assert all(s.finished for s in others) and all(n == 0 for n in engine.blocks.num_used)
    if not when % 2: assert all(len(s.output_token_ids) == 20 for s in others[2:])


def test_logprobs_come_with_each_answer(tiny):
    from llmserve.llm import LLM
    llm = LLM(engine=make_engine(tiny("llama"), max_model_len=128), quiet=True)
    llm.tokenizer = None
    out, = llm.generate([prompt_of(20)], dataclasses.replace(SAMPLED, n=3, logprobs=2, max_tokens=5, detokenize=False), use_tqdm=False)
    assert [len(o.token_ids) for o in out.outputs] == [5] * 3
    for o in out.outputs: assert len(o.logprobs) == 5 and all(t in line for t, line in zip(o.token_ids, o.logprobs))


def test_too_many_answers_are_refused():
    with pytest.raises(InvalidRequest, match="n must be.*4096.*5000"): SamplingParams(n=5000)


# Beam search

def hf_beams(model, prompt, width, n, new, **rules):
    import torch
    out = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), num_beams=width, num_return_sequences=n, max_new_tokens=new, do_sample=False,
                         return_dict_in_generate=True, output_scores=True, pad_token_id=0, **rules)
    ends = rules.get("eos_token_id", model.generation_config.eos_token_id)
    answers = []
    for tokens in out.sequences[:, len(prompt):].tolist():
        at = next((i for i, t in enumerate(tokens) if t in (ends if isinstance(ends, list) else [ends])), None)
        answers.append(tokens if at is None else tokens[:at + 1])
    return answers, out.sequences_scores.tolist()


@functools.lru_cache(None)
def hf_model(folder):
    import transformers
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()


def beams_of(engine, prompts, params):
    requests = [engine.add(p, params) for p in prompts]
    finish(engine, requests)
    return [([s.output_token_ids for s in r.sequences[:params.n]], [h.rank for h in r.sequences[0].search.finished[:params.n]]) for r in requests]


BEAM_RULES = [dict(), dict(length_penalty=0.0), dict(length_penalty=2.0), dict(length_penalty=-1.0), dict(early_stopping=True), dict(early_stopping="never"),
              dict(early_stopping="never", length_penalty=2.0), dict(repetition_penalty=1.3), dict(min_new_tokens=6)]

ENDS = list(range(5, 160, 12))


def ours(rules):
    rules = dict(rules)
    if "min_new_tokens" in rules: rules["min_tokens"] = rules.pop("min_new_tokens")
    return rules


@pytest.mark.parametrize("name, width", matrix(["llama", "gemma2", "gemma3", "mixtral"], [2, 4, 7], keep=4))
def test_beams_equal_transformers(name, width, tiny):
    "Tokens and ranks of all beams, for each rule; with many end tokens, so that beams end."
    engine, model = make_engine(tiny(name), max_model_len=256), hf_model(tiny(name))
    prompts = [prompt_of(n, n) for n in (1, 16, 31, 70)]
    ended = 0
    for rules in BEAM_RULES:
        found = beams_of(engine, prompts, SamplingParams(n=width, beam_width=width, max_tokens=24, temperature=0, stop_token_ids=ENDS, **ours(rules)))
        for prompt, (tokens, ranks) in zip(prompts, found):
            expected, scores = hf_beams(model, prompt, width, width, 24, eos_token_id=[2, *ENDS], **rules)
            assert tokens == expected, (rules, len(prompt))
            assert ranks == pytest.approx(scores, rel=1e-5, abs=1e-4)
            ended += sum(len(t) < 24 for t in tokens)
    assert ended > 10


@pytest.mark.parametrize("settings", [dict(max_num_batched_tokens=9), dict(enable_prefix_caching=False), dict(max_num_seqs=7), dict(block_size=4), dict(num_gpu_blocks_override=30), dict(attention_backend="reference")])
def test_beams_in_company(settings, tiny):
    "Beside other searches, samples and plain requests, in small steps and small pools."
    rules = SamplingParams(n=3, beam_width=4, max_tokens=20, temperature=0, ignore_eos=True)
    prompts = [prompt_of(n, n) for n in (5, 33, 64, 17)]
    for name in ("llama", "gemma3"):
        expected = [beams_of(make_engine(tiny(name), max_model_len=128), [p], rules)[0][0] for p in prompts]
        plain = singles(tiny(name), prompt_of(40), dataclasses.replace(SAMPLED, n=2))
        engine = make_engine(tiny(name), max_model_len=128, **settings)
        requests = [engine.add(p, rules) for p in prompts] + [engine.add(prompt_of(40), dataclasses.replace(SAMPLED, n=2))]
        finish(engine, requests)
        assert [[s.output_token_ids for s in r.sequences[:3]] for r in requests[:4]] == expected, name
        assert [s.output_token_ids for s in requests[4].sequences] == plain


def harshly(engine, seed=0, share=0.8):
    "Make the scheduler throw out a random running sequence (with its search) before most steps."
    scheduler, schedule, r, thrown = engine.scheduler, engine.scheduler.schedule, random.Random(seed), []

    def harsh():
        step = type("Step", (), dict(preempted=thrown))()
        if len(scheduler.running) > 1 and r.random() < share:
            victim = r.choice(scheduler.running)
            for gone in victim.search.beams if victim.search else [victim]: scheduler.running.remove(gone)
            scheduler._preempt(victim, step)
        return schedule()
    scheduler.schedule = harsh
    return thrown


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_beams_preempted_at_most_steps(name, tiny):
    rules = SamplingParams(n=4, beam_width=4, max_tokens=20, temperature=0, ignore_eos=True)
    prompts = [prompt_of(n, n) for n in (17, 40, 9)]
    expected = [beams_of(make_engine(tiny(name), max_model_len=128), [p], rules)[0][0] for p in prompts]
    for settings in (dict(), dict(max_num_batched_tokens=11), dict(enable_prefix_caching=False)):
        engine = make_engine(tiny(name), max_model_len=128, **settings)
        thrown = harshly(engine, share=0.6)
        assert [b[0] for b in beams_of(engine, prompts, rules)] == expected
        assert len(thrown) > 6


@pytest.mark.parametrize("when", range(0, 12, 2))
def test_abort_a_search(when, tiny):
    "Before the prompt is done, at the first fork, in the middle, and while preempted; the other search is unchanged."
    rules = SamplingParams(n=2, beam_width=4, max_tokens=20, temperature=0, ignore_eos=True)
    expected = beams_of(make_engine(tiny("llama"), max_model_len=128), [prompt_of(40, 1)], rules)[0][0]
    for preempt in (False, True):
        engine = make_engine(tiny("llama"), max_model_len=128, max_num_batched_tokens=16)
        doomed, kept = engine.add(prompt_of(37), rules), engine.add(prompt_of(40, 1), rules)
        for _ in range(when): engine.step()
        if preempt: harshly(engine, share=1.0); engine.scheduler.schedule()
        engine.abort(doomed.id)
        assert all(s.finished for s in doomed.sequences)
        engine.scheduler.check_integrity()
        if preempt: engine.scheduler.schedule = type(engine.scheduler).schedule.__get__(engine.scheduler)
        if not preempt:
            finish(engine, [kept])
            assert [s.output_token_ids for s in kept.sequences[:2]] == expected


def test_beams_on_a_real_model():
    from transformers import AutoTokenizer  # noqa: F401
    engine = make_engine("smollm2-135m", max_model_len=512)
    tok, model = engine.runner.loaded.tokenizer, hf_model(str(engine.runner.loaded.folder)) if hasattr(engine.runner.loaded, "folder") else engine.runner.loaded.model
    prompts = [tok(t).input_ids for t in ("The capital of France is", "Write one sentence about rain.\n", "1, 2, 3,")]
    params = SamplingParams(n=4, beam_width=4, max_tokens=24, temperature=0)
    for prompt, (tokens, ranks) in zip(prompts, beams_of(engine, prompts, params)):
        expected, scores = hf_beams(model, prompt, 4, 4, 24)
        assert tokens == expected and ranks == pytest.approx(scores, abs=1e-3)


def test_what_a_search_cannot_have(tiny):
    engine = make_engine(tiny("llama"), max_model_len=128, max_num_seqs=8, num_gpu_blocks_override=20)
    for params, message in [(dict(beam_width=9), "beam_width=9 is more than max_num_seqs=8"), (dict(beam_width=8, max_tokens=100), "in 8 beams need .* blocks of 16 tokens, the pool has 20"),
                            (dict(beam_width=200), "vocabulary has 160"), (dict(beam_width=4, allowed_token_ids=[5, 6, 7]), "3 of them may come")]:
        with pytest.raises(InvalidRequest, match=message): engine.add(prompt_of(20), SamplingParams(**{"max_tokens": 4, **params}))
    with pytest.raises(InvalidRequest, match="n must be at most beam_width=2, got 3"): SamplingParams(n=3, beam_width=2)
    assert not engine.has_work


def test_a_failed_step_ends_whole_requests(tiny):
    "Of several answers none is left alone behind a step that failed; others go on, and nothing is held."
    engine = make_engine(tiny("llama"), max_model_len=64, max_num_batched_tokens=32)
    own, work = engine.runner.execute, [engine.add(prompt_of(20, 1), dataclasses.replace(SAMPLED, n=3)), engine.add(prompt_of(30, 2), SAMPLED)]

    def fail(step): raise RuntimeError("planted")
    engine.runner.execute = fail
    with pytest.raises(RuntimeError, match="planted"): engine.step()
    engine.runner.execute = own
    left = [r for r in work if r.id in engine.requests]
    assert work[0] not in left and all(s.finished for s in work[0].sequences)
    later = engine.add(prompt_of(20, 1), SAMPLED)
    while engine.has_work:
        engine.step()
        engine.scheduler.check_integrity()
    assert later.sequences[0].finish_reason == "length" and engine.blocks.num_used == [0]

"""Forks: n answers to one prompt share its blocks until they write, and are the answers that n single requests would give."""
import dataclasses
import random

import pytest
from conftest import make_engine

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
    engine, r = make_engine(tiny("llama"), max_model_len=256, num_gpu_blocks_override=16), random.Random(0)
    scheduler, schedule, thrown = engine.scheduler, engine.scheduler.schedule, 0

    def harsh():
        nonlocal thrown
        out = type("Out", (), dict(preempted=[]))()
        if len(scheduler.running) > 1 and r.random() < 0.8:
            victim = r.choice(scheduler.running)
            scheduler._preempt(victim, scheduler.running.index(victim), out)
            thrown += 1
        return schedule()
    scheduler.schedule = harsh
    assert finish(engine, [engine.add(p, params) for p in prompts]) == expected
    assert thrown > 10


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

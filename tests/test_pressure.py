"""Under pressure: sequences give way by swapping or computing again, pools are compacted and resized while they run, and no token changes."""
import dataclasses
import gc
import random
import time

import psutil
import pytest
from conftest import make_engine, matrix
from test_fork import beams_of, finish, prompt_of

from llmserve.core import EngineConfig, InvalidRequest, SamplingParams, Status

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SAMPLES = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=20, ignore_eos=True)
BEAMS = SamplingParams(n=3, beam_width=4, temperature=0, max_tokens=20, ignore_eos=True)
WORK = [(prompt_of(37, 1), GREEDY), (prompt_of(16, 2), BEAMS), (prompt_of(50, 3), SAMPLES), (prompt_of(31, 4), GREEDY), (prompt_of(40, 5), BEAMS), (prompt_of(5, 6), dataclasses.replace(SAMPLES, max_tokens=30))]


def throw_out(scheduler, victim, thrown):
    for gone in victim.search.beams if victim.search else [victim]: scheduler.running.remove(gone)
    scheduler._preempt(victim, type("Step", (), dict(preempted=thrown))())


def answers(requests): return [[s.output_token_ids for s in r.sequences[:r.params.n]] for r in requests]


def expected(folder, **settings):
    engine = make_engine(folder, max_model_len=128, **settings)
    out = []
    for prompt, params in WORK:
        request = engine.add(prompt, params)
        while engine.has_work: engine.step()
        out += answers([request])
    return out


@pytest.mark.parametrize("name, mode, settings", matrix(["llama", "gemma3"], ["recompute", "swap", "auto"], [dict(), dict(enable_prefix_caching=False), dict(max_num_batched_tokens=11), dict(offload_prefixes=True), dict(kv_cache_dtype="int8")], keep=4))
def test_preempted_at_most_steps(name, mode, settings, tiny):
    wanted = expected(tiny(name), **{k: v for k, v in settings.items() if k == "kv_cache_dtype"})
    engine, r, thrown = make_engine(tiny(name), max_model_len=128, num_gpu_blocks_override=40, preemption_mode=mode, **settings), random.Random(1), []
    requests = [engine.add(p, q) for p, q in WORK]
    while engine.has_work:
        if len(engine.scheduler.running) > 1 and r.random() < 0.6: throw_out(engine.scheduler, r.choice(engine.scheduler.running), thrown)
        engine.scheduler.check_integrity()
        engine.step()
        engine.scheduler.check_integrity()
    assert answers(requests) == wanted
    assert len(thrown) > 8 and engine.blocks.num_used == [0] * len(engine.blocks.pools) and all(p.num_used == 0 for p in engine.blocks.host_pools)
    swapped = sum(x.swapped_out for x in engine.records), sum(x.swapped_in for x in engine.records)
    if mode == "swap": assert min(swapped) > 10
    if mode == "recompute" and "offload_prefixes" not in settings: assert swapped == (0, 0)


def test_a_pool_that_is_too_small_for_all(tiny):
    "Nobody is thrown out by hand: the pool itself forces it, in both ways."
    wanted = expected(tiny("llama"))
    for mode in ("recompute", "swap"):
        engine = make_engine(tiny("llama"), max_model_len=128, num_gpu_blocks_override=18, preemption_mode=mode)
        requests = [engine.add(p, q) for p, q in WORK]
        finish(engine, requests)
        assert answers(requests) == wanted and sum(len(x.preempted) for x in engine.records) > 3


def test_host_memory_that_is_too_small(tiny):
    "Who finds no room in the swap space is computed again."
    wanted = expected(tiny("llama"))
    engine = make_engine(tiny("llama"), max_model_len=128, num_gpu_blocks_override=18, preemption_mode="swap", swap_space="70kB")
    assert engine.blocks.host_pools[0].num_blocks in range(1, 6)
    requests = [engine.add(p, q) for p, q in WORK]
    finish(engine, requests)
    assert answers(requests) == wanted


@pytest.mark.parametrize("state", ["waiting", "chunked", "running", "swapped", "preempted", "forked", "beam", "beam swapped"])
def test_abort_returns_every_block(state, tiny):
    engine = make_engine(tiny("llama"), max_model_len=128, max_num_batched_tokens=16 if state == "chunked" else 64, preemption_mode="swap" if "swapped" in state else "recompute", max_num_seqs=4 if state == "waiting" else 16)
    params = BEAMS if "beam" in state else SAMPLES if state == "forked" else GREEDY
    other = engine.add(prompt_of(20, 9), dataclasses.replace(BEAMS, max_tokens=40) if state == "waiting" else GREEDY)
    engine.step()
    doomed = engine.add(prompt_of(45, 8), params)
    for _ in range({"waiting": 2, "chunked": 2}.get(state, 6)): engine.step()
    seq = doomed.sequences[0]
    if "swapped" in state or state == "preempted": throw_out(engine.scheduler, seq, [])
    wanted = {"waiting": Status.WAITING, "swapped": Status.SWAPPED, "beam swapped": Status.SWAPPED, "preempted": Status.PREEMPTED}.get(state, Status.RUNNING)
    assert seq.status is wanted
    if state == "chunked": assert 0 < seq.num_computed_tokens < 45
    if state == "forked": assert any(n > 1 for n in engine.blocks.pools[0].refs)
    engine.scheduler.check_integrity()
    assert engine.abort(doomed.id) and all(s.finished for s in doomed.sequences)
    engine.scheduler.check_integrity()
    assert all(p.num_used == 0 for p in engine.blocks.host_pools)
    finish(engine, [other])
    assert not engine.requests


@pytest.mark.parametrize("name, seed", matrix(["llama", "gemma3"], list(range(4)), keep=3))
def test_compact_and_resize_at_random_steps(name, seed, tiny):
    wanted = expected(tiny(name))
    engine, r = make_engine(tiny(name), max_model_len=128, num_gpu_blocks_override=60, preemption_mode=r_mode(seed)), random.Random(seed)
    requests, moved, sizes = [engine.add(p, q) for p, q in WORK], 0, set()
    while engine.has_work:
        engine.step()
        engine.scheduler.check_integrity()
        what = r.random()
        if what < 0.3: moved += engine.compact()
        elif what < 0.7:
            engine.resize(num_blocks=[r.randint(24, 60) for _ in engine.blocks.pools])
            sizes.add(tuple(engine.blocks.num_blocks))
        engine.scheduler.check_integrity()
    assert answers(requests) == wanted and moved > 5 and len(sizes) > 5


def r_mode(seed): return ("swap", "recompute")[seed % 2]


def test_shrinking_waits_or_refuses(tiny):
    engine = make_engine(tiny("llama"), max_model_len=128, num_gpu_blocks_override=40)
    requests = [engine.add(prompt_of(60, i), GREEDY) for i in range(5)]
    engine.step()
    with pytest.raises(ValueError, match="in use.*wait=True"): engine.resize(num_blocks=7, wait=False)
    assert not engine.resize(num_blocks=7) and engine.blocks.num_used[0] > 7
    with pytest.raises(InvalidRequest, match="the pool has 7"): engine.add(prompt_of(100), dataclasses.replace(GREEDY, max_tokens=28))
    with pytest.raises(ValueError, match="could never serve"): engine.resize(num_blocks=3)
    finish(engine, requests)
    assert engine.blocks.num_blocks == [7] and not engine.shrinking
    with pytest.raises(ValueError, match="at most 40"): engine.resize(num_blocks=41)
    assert engine.resize(num_blocks=40) and engine.blocks.num_blocks == [40]


def test_the_second_level_brings_prefixes_back(tiny):
    prompts = [prompt_of(65, i) for i in range(8)]
    engine = make_engine(tiny("gemma3"), max_model_len=128, num_gpu_blocks_override=12, offload_prefixes=True)
    runs = []
    for _ in range(2):
        engine.records.clear()
        out = []
        for p in prompts:
            request = engine.add(p, dataclasses.replace(GREEDY, max_tokens=4))
            while engine.has_work: engine.step()
            engine.scheduler.check_integrity()
            out.append(request.sequences[0].output_token_ids)
        runs.append((out, sum(x.num_cached_tokens for x in engine.records), sum(x.swapped_in for x in engine.records)))
    assert runs[0][0] == runs[1][0] and runs[0][1] == 0 and runs[1][1] == 8 * 64 and runs[1][2] > 20


def rss(): gc.collect(); return psutil.Process().memory_info().rss


@pytest.mark.parametrize("how", ["elastic", "resize", "sleep"])
def test_memory_returns_to_the_system(how):
    "64 requests fill most of the pool; then there is nothing to do, and the process is smaller by at least 85 % of what the pool had taken."
    engine = make_engine("smollm2-135m", max_model_len=512, kv_cache_memory="330MiB", elastic=how == "elastic", swap_space=0)
    peak, prompts = 0, [prompt_of(90, i, 40000) for i in range(64)]
    for p in prompts: engine.add(p, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    while engine.has_work:
        engine.step()
        if engine.has_work: peak = max(peak, rss())
    if how == "resize": engine.resize(num_blocks=32)
    if how == "sleep": engine.sleep()
    assert peak - rss() >= 0.85 * engine.plan.num_bytes
    engine.add(prompts[0], GREEDY)
    while engine.has_work: engine.step()
    assert not engine.is_sleeping


def test_shrinking_while_four_requests_run():
    prompts = [prompt_of(100 + 30 * i, i, 40000) for i in range(4)]
    engine = make_engine("smollm2-135m", max_model_len=512)
    requests = [engine.add(p, GREEDY) for p in prompts]
    finish(engine, requests)
    engine = make_engine("smollm2-135m", max_model_len=512)
    again = [engine.add(p, GREEDY) for p in prompts]
    for i in range(12):
        engine.step()
        if i in (3, 6, 9): assert engine.resize(num_blocks=engine.blocks.num_used[0] + 5)
        engine.scheduler.check_integrity()
    finish(engine, again)
    assert answers(again) == answers(requests)


def test_sleep_and_wake(tiny):
    from llmserve.engine import Engine
    engine = Engine(EngineConfig(model=str(tiny("llama")), dtype="float32", kv_cache_memory="4MiB", sleep_when_idle=0.2, sleep_level=2))
    first = engine.add(prompt_of(30), GREEDY)
    while engine.has_work: engine.step()
    deadline = time.monotonic() + 20
    while not engine.is_sleeping and time.monotonic() < deadline: time.sleep(0.02)
    assert engine.is_sleeping and engine.runner.model is None
    with pytest.raises(ValueError, match="wake_up"): engine.resize(num_blocks=8)
    with pytest.raises(InvalidRequest): engine.add([], GREEDY)
    assert engine.is_sleeping  # a refused request wakes nobody
    again = engine.add(prompt_of(30), GREEDY)
    assert not engine.is_sleeping
    with pytest.raises(ValueError, match="1 requests"): engine.sleep()
    while engine.has_work: engine.step()
    assert answers([first]) == answers([again])


def test_what_cannot_be(tiny):
    with pytest.raises(ValueError, match="swap_space.*more than the memory of this machine"): make_engine(tiny("llama"), max_model_len=128, swap_space=1e6)
    for bad in (dict(swap_space=-1), dict(swap_space="much"), dict(preemption_mode="maybe"), dict(sleep_when_idle=-1), dict(sleep_level=3)):
        with pytest.raises(ValueError, match=next(iter(bad)) if bad.get("swap_space") != "much" else "memory size"): make_engine(tiny("llama"), max_model_len=128, **bad)
    assert beams_of(make_engine(tiny("llama"), max_model_len=128, swap_space=0, preemption_mode="swap"), [prompt_of(9)], BEAMS)

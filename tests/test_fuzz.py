"""Random operations: memory always adds up, every run ends, nothing leaks.

2,000 operations on pools and prefix caches; 300 mixes of requests through the scheduler with a runner that makes up tokens; a few of them through a real model, compared with the same requests alone."""
import random

import pytest
from conftest import make_engine

from llmserve.core import EngineConfig, InvalidRequest, Request, SamplingParams, Sequence
from llmserve.prefix import BlockManager
from llmserve.scheduler import Scheduler, StepResult


@pytest.mark.parametrize("seed", range(10))
def test_memory_operations(seed):
    "200 random operations a seed (2,000 in all) on one or two groups: grow, compute, commit, share by prefix, fork, copy on write, release, reset."
    r = random.Random(seed)
    windows = [[None], [None, 24], [24], [None, 8]][seed % 4]
    size = r.choice([1, 4, 16])
    manager = BlockManager(windows, [r.randint(8, 40) for _ in windows], size)
    alive, forks = [], []
    beginnings = [[r.randrange(5) for _ in range(3 * size)] for _ in range(3)]
    done = dict.fromkeys(["new", "grow", "release", "fork", "write", "reset"], 0)
    for i in range(200):
        operation = r.choice(["new", "new", "grow", "grow", "grow", "release", "fork", "write", "reset" if r.random() < 0.1 else "grow"])
        if operation == "new":
            tokens = r.choice(beginnings)[:r.randint(1, 3 * size)] + [r.randrange(5) for _ in range(r.randint(1, 60))]
            seq = Sequence(Request(str(i), tokens, cache_salt=r.choice([None, "a"])), num_groups=len(windows))
            hit = manager.lookup(seq)
            assert hit * size < len(tokens)
            manager.take(seq, hit)
            alive.append(seq)
        elif operation == "grow" and alive:
            seq = r.choice(alive)
            upto = min(seq.num_computed_tokens + r.randint(1, 20), len(seq.tokens))
            held = [list(t) for t in seq.tables]
            if manager.grow(seq, upto):
                seq.num_computed_tokens = upto
                manager.commit(seq)
                if r.random() < 0.3: seq.tokens += [r.randrange(5) for _ in range(3)]
                for table, window in zip(seq.tables, windows):  # everything that can still be seen is there
                    first = 0 if window is None else max(upto - window + 1, 0) // size
                    assert all(b >= 0 for b in table[first:-(-upto // size)])
            else: assert sum(b >= 0 for t in seq.tables for b in t) <= sum(b >= 0 for t in held for b in t)
        elif operation == "release" and alive: manager.release(alive.pop(r.randrange(len(alive))))
        elif operation == "fork" and alive:
            seq, g = r.choice(alive), r.randrange(len(windows))
            forks.append((g, manager.pools[g].fork(list(seq.tables[g]))))
        elif operation == "write" and forks:
            g, table = r.choice(forks)
            live = [j for j, b in enumerate(table) if b >= 0]
            if live and manager.pools[g].num_free:
                at = r.choice(live)
                manager.pools[g].make_writable(table, at)
                assert manager.pools[g].refs[table[at]] == 1
        elif operation == "reset": manager.reset_prefix_cache()
        else: continue
        done[operation] += 1
        for g, (pool, cache) in enumerate(zip(manager.pools, manager.caches)):
            pool.check_integrity([s.tables[g] for s in alive] + [t for h, t in forks if h == g])
            cache.check_integrity()
        if len(forks) > 4: g, table = forks.pop(0); manager.pools[g].release_all(table)
    assert min(done[k] for k in ("new", "grow", "release", "fork", "write")) > 3, done
    for seq in alive: manager.release(seq)
    for g, table in forks: manager.pools[g].release_all(table)
    assert manager.num_used == [0] * len(windows)
    manager.check_integrity([])


def mix(r, n, vocab=50):
    "n random requests that often begin alike."
    beginning = [r.randrange(3, vocab) for _ in range(40)]
    for i in range(n):
        prompt = beginning[:r.choice([0, 8, 16, 33])] + [r.randrange(3, vocab) for _ in range(r.randint(1, 50))]
        yield dict(prompt=prompt, priority=r.randint(0, 3), salt=r.choice([None, None, "s"]), params=SamplingParams(
            n=r.choice([1, 1, 1, 2, 3]), temperature=r.choice([0, 1.0]), seed=r.randrange(100), max_tokens=r.randint(1, 30), ignore_eos=r.random() < 0.5, min_tokens=r.choice([0, 0, 1]), stop_token_ids=r.choice([[], [5, 9]]),
            repetition_penalty=r.choice([1, 1, 1.3]), logprobs=r.choice([None, None, 2]), prompt_logprobs=r.choice([None, None, None, 1])))


@pytest.mark.parametrize("block", range(30))
def test_request_mixes(block):
    "Ten mixes a block (300 in all): arrivals, aborts in every state, tiny pools, both policies."
    for seed in range(block * 10, block * 10 + 10):
        r = random.Random(seed)
        windows, size = r.choice([[None], [None, 24], [24]]), r.choice([1, 4, 16])
        config = EngineConfig(max_num_seqs=r.randint(1, 8), max_num_batched_tokens=r.choice([1, 7, 32, 256]), long_prefill_token_threshold=r.choice([0, 5]), scheduling_policy=r.choice(["fcfs", "priority"]),
                              block_size=size, enable_prefix_caching=r.random() < 0.8)
        blocks = BlockManager(windows, [r.randint(60, 130) // size + 2 for _ in windows], size, config.enable_prefix_caching)
        scheduler = Scheduler(config, blocks, 120)
        todo, everything, refused, steps = list(mix(r, r.randint(3, 14))), [], 0, 0
        while todo or scheduler.has_work:
            if todo and (not scheduler.has_work or r.random() < 0.4):
                one = todo.pop()
                try: everything += scheduler.add(Request(str(len(everything)), one["prompt"], one["params"], priority=one["priority"], cache_salt=one["salt"], eos_token_ids=frozenset([2])))
                except InvalidRequest: refused += 1
            if everything and r.random() < 0.05: scheduler.finish(r.choice(everything), "abort")
            scheduler.check_integrity()
            order = scheduler.schedule()
            assert order or not scheduler.has_work, "there is work, and nothing is scheduled"
            assert sum(order.num_tokens) <= config.max_num_batched_tokens and len(order.sequences) <= config.max_num_seqs
            assert len({id(s) for s in order.sequences}) == len(order.sequences) and all(n > 0 for n in order.num_tokens)
            for s, n in zip(order.sequences, order.num_tokens): assert s.num_computed_tokens + n <= s.capacity
            if order.sequences and r.random() < 0.03: scheduler.finish(r.choice(order.sequences), "abort")  # while the step runs
            scheduler.update(order, StepResult([[r.randrange(50)] if d else [] for d in order.samples]))
            scheduler.check_integrity()
            steps += 1
            assert steps < 20_000, "the run does not end"
        assert blocks.num_used == [0] * len(windows) and all(s.finished for s in everything)
        for s in everything:
            assert s.finish_reason in ("stop", "length", "abort")
            if s.finish_reason == "length": assert len(s.tokens) == s.max_len
            if s.finish_reason == "stop": assert s.tokens[-1] in s.end_tokens


@pytest.mark.parametrize("name,seed", [("llama", 0), ("gemma3", 1), ("mistral", 2), ("qwen3", 3)])
def test_mixes_through_a_model(tiny, name, seed):
    "With a real forward, a tiny pool and aborts, each request's tokens are those it gets alone in a large pool."
    r = random.Random(seed)
    small = make_engine(tiny(name), max_model_len=128, num_gpu_blocks_override=12, max_num_batched_tokens=32, max_num_seqs=6)
    large = make_engine(tiny(name), max_model_len=128, kv_cache_memory="32MiB", enable_prefix_caching=False)
    work, requests, aborted = list(mix(r, 16)), {}, set()
    todo = list(enumerate(work))
    while todo or small.has_work:
        if todo and (not small.has_work or r.random() < 0.5):
            i, one = todo.pop(0)
            requests[i] = small.add(one["prompt"], one["params"], priority=one["priority"], cache_salt=one["salt"])
        if requests and r.random() < 0.02:
            i = r.choice(list(requests))
            if small.abort(requests[i].id): aborted.add(i)
        small.step()
        small.scheduler.check_integrity()
    assert small.blocks.num_used == [0] * len(small.blocks.pools)
    for i, one in enumerate(work):
        if i in aborted: continue
        alone = large.add(one["prompt"], one["params"])
        while large.has_work: large.step()
        assert [s.tokens for s in requests[i].sequences] == [s.tokens for s in alone.sequences], f"request {i}: {one}"

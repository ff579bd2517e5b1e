"Adaptive drafting against a simulated engine: steps and drafts take as long as a clock says, and drafts are right by chance."
import random
import statistics
from types import SimpleNamespace

import pytest

from llmserve import adaptive
from llmserve.draft import Drafted, Drafter
from llmserve.runner import rounded
from llmserve.tree import TokenTree

MACHINES = dict(slow=(0.034, 0.00036), fast=(0.011, 0.0003))  # seconds of a step, and of a row
CHAIN = [1] * 5
METHODS = {  # rows by depth, seconds of drafting and for each sequence more, chances of a draft (a sequence has one of them), how often there are drafts
    "ngram": (CHAIN, 0.0, 5e-5, [0.1, 0.3, 0.6, 0.8], 0.4), "bad ngram": (CHAIN, 0.0, 5e-5, [0.1], 0.6), "chain": (CHAIN, 0.012, 0.0004, [0.35, 0.45, 0.55, 0.65], 1.0),
    "bad chain": (CHAIN, 0.012, 0.0004, [0.25], 1.0), "tree": ([4, 5, 5, 3, 3], 0.015, 0.002, [0.5, 0.6, 0.7], 1.0), "medusa": ([8, 6, 4, 2], 0.002, 0.0005, [0.35, 0.5], 1.0)}


class Inner(Drafter):
    def __init__(self, dice, clock, rows, fixed, each, found): self.dice, self.clock, self.rows, self.fixed, self.each, self.found = dice, clock, rows, fixed, each, found

    def propose(self, news, batch):
        asked = [n.wants_drafts for n in news]
        if any(asked): self.clock.now += self.fixed + self.each * sum(asked)
        return [self.tree(n) if a and self.dice.random() < self.found else None for n, a in zip(news, asked)]

    def tree(self, n):
        parents, last = [], [-1]
        for rows in self.rows:
            at = len(parents)
            parents += [last[min(j, len(last) - 1)] for j in range(rows)]
            last = list(range(at, at + rows))
        return TokenTree([7] * len(parents), parents).cut(64, n.seq.max_len - len(n.seq.tokens) - len(n.tokens) - 1)


def serve(monkeypatch, machine, method, batch, num, seed, drafting=True):
    "Seconds for a token while all places are taken; answers of 48 tokens, prompts of 100."
    (a, b), (rows, fixed, each, chances, found) = MACHINES[machine], METHODS[method]
    dice, clock = random.Random(seed), SimpleNamespace(now=0.0)
    monkeypatch.setattr(adaptive, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    drafter = adaptive.AdaptiveDrafter(Inner(dice, clock, rows, fixed, each, found))
    drafter.rounded = rounded
    waiting, running, made = list(range(num)), [], 0
    while len(running) == batch or waiting:
        new = [SimpleNamespace(seq=SimpleNamespace(id=waiting.pop(0), tokens=[1] * 100, max_len=148, end_tokens=(), search=None), chance=dice.choice(chances), tree=None) for _ in range(min(batch - len(running), len(waiting)))]
        wanted, others = sum(1 + len(r.tree or ()) for r in running) + len(new), 99 * len(new)
        seconds = (a + b * (rounded(wanted) + others)) * dice.lognormvariate(0, 0.05)
        clock.now += seconds
        for r in (running := running + new):
            depth, path = max(r.tree.depths(), default=0) if r.tree else 0, []
            while len(path) < depth and dice.random() < r.chance: path.append(len(path))
            r.news = Drafted(r.seq, [5] * (len(path) + 1), 0, r.tree, path)
        trees = [None] * len(running)
        if drafting:
            drafter.observe(wanted, others, seconds)
            trees = drafter.propose([r.news for r in running], SimpleNamespace(num_tokens=wanted + others))
        for r, r.tree in zip(running, trees):
            r.seq.tokens = r.seq.tokens + r.news.tokens
            made += len(r.news.tokens)
        running = [r for r in running if len(r.seq.tokens) < r.seq.max_len]
    return clock.now / made


@pytest.mark.parametrize("batch, num", [(1, 12), (4, 32), (16, 96)])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("machine", MACHINES)
def test_drafting_never_costs_much(machine, method, batch, num, monkeypatch):
    gains = [serve(monkeypatch, machine, method, batch, num, seed, False) / serve(monkeypatch, machine, method, batch, num, seed) for seed in range(3)]
    assert statistics.mean(gains) > 0.96, gains
    if batch == 1 and machine == "slow" and not method.startswith("bad"): assert statistics.mean(gains) > 1.08, gains

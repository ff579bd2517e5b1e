"""χ² tests: what the verifier lets through is distributed as the target says, for chains that were drawn and trees that were chosen; planted mistakes are caught."""
import numpy as np
import pytest
import torch

import llmserve.verify as verify_module
from llmserve.core import SamplingParams
from llmserve.sampling import SamplingRow, draw, target_probs, uniform
from llmserve.tree import TokenTree
from llmserve.verify import verify

V, N = 7, 12_000
P_LOGITS = torch.tensor([[2.0, 1.2, 0.4, 0.0, -0.5, -1.0, -2.0], [-1.0, 2.0, 0.0, 0.5, 0.5, 1.5, -3.0], [0.0, 0.0, 0.1, 1.0, -1.0, 0.2, 0.3]])
QS = {"equal": None, "far": torch.tensor([0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.3]), "near": torch.tensor([0.4, 0.25, 0.15, 0.1, 0.05, 0.03, 0.02]), "one-hot": torch.eye(V)[1]}
PARAMS = {"plain": SamplingParams(), "cold": SamplingParams(temperature=0.6), "hot, top-k": SamplingParams(temperature=1.7, top_k=4), "top-p": SamplingParams(top_p=0.7), "min-p, penalties": SamplingParams(min_p=0.05, presence_penalty=0.5, logit_bias={2: 1.0})}


def rows_for(params): return [SamplingRow(params, seed, [3], 1) for seed in range(N)]


def exact(params, line, before): return target_probs(_penalized(params, line, before), [SamplingRow(params, 0, before, 1)])[0].double().numpy()


def _penalized(params, line, before):
    from llmserve.sampling import penalize
    logits = line[None].clone()
    penalize(logits, [SamplingRow(params, 0, before, 1)])
    return logits


def chi2(tokens, p):
    "χ² per degree of freedom, as standard deviations from its mean."
    counts, p = np.bincount(tokens, minlength=len(p)), np.asarray(p, float)
    assert counts[p == 0].sum() == 0, "a token that has probability zero"
    n, p, counts = counts.sum(), p[p > 0], counts[p > 0]
    if len(p) == 1: return 0.0
    x = ((counts - n * p) ** 2 / (n * p)).sum()
    return (x - (len(p) - 1)) / (2 * (len(p) - 1)) ** 0.5


def run_chain(params, q, k=2, told=None):
    "Chains of k tokens drawn from q (p itself if None), of which the verifier is `told` another distribution; returns all answers."
    rows = rows_for(params)
    q = torch.as_tensor(exact(params, P_LOGITS[0], [3])).float() if q is None else q
    drafts = np.stack([draw(q.expand(N, V), uniform(range(N), [1 + i] * N, stream=3)).numpy() for i in range(k)], 1)
    trees = [TokenTree.chain(d.tolist(), (q if told is None else told).expand(k, V)) for d in drafts]
    return verify(P_LOGITS[:k + 1].repeat(N, 1), list(range(0, (k + 1) * N, k + 1)), trees, rows)


def check(found, params, limit=5.0):
    assert chi2([t[0] for _, t, _ in found], exact(params, P_LOGITS[0], [3])) < limit
    second = {}
    for path, tokens, _ in found:
        if len(tokens) > 1: second.setdefault(tokens[0], []).append(tokens[1])
    for first, some in second.items():
        if len(some) > 300: assert chi2(some, exact(params, P_LOGITS[1], [3, first])) < limit


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("q", QS)
def test_chains_that_were_drawn(q, params):
    found = run_chain(PARAMS[params], QS[q])
    check(found, PARAMS[params])
    if q == "equal":
        assert np.mean([len(path) > 0 for path, _, _ in found]) > 0.999


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("tree", [TokenTree([0], [-1]), TokenTree([1, 0, 4], [-1, -1, -1]), TokenTree([0, 1, 5, 1, 3], [-1, -1, 0, 1, 0])], ids=str)
def test_trees_that_were_chosen(tree, params):
    "Every node's logits are those of its depth here, so that what follows a path is known."
    lines = torch.stack([P_LOGITS[d] for d in [0, *tree.depths()]])
    found = verify(lines.repeat(N, 1), list(range(0, len(lines) * N, len(lines))), [tree] * N, rows_for(PARAMS[params]))
    check(found, PARAMS[params])
    p = exact(PARAMS[params], P_LOGITS[0], [3])
    hits, expected = np.mean([len(path) > 0 for path, _, _ in found]), sum(p[t] for t, parent in zip(tree.tokens, tree.parents) if parent == -1)
    assert abs(hits - expected) < 0.02


def test_greedy_follows_the_largest():
    tree = TokenTree([1, 0, 1, 5], [-1, -1, 1, 1])
    (path, tokens, _), = verify(torch.stack([P_LOGITS[d] for d in [0, *tree.depths()]]), [0], [tree], [SamplingRow(SamplingParams(temperature=0), 0, [3], 1)])
    assert path == [1, 2] and tokens == [0, 1, 3]


def test_a_planted_mistake_is_caught(monkeypatch):
    real = verify_module.target_probs
    for q in ("far", "near"):
        with monkeypatch.context() as m:  # p and q swapped: accepted with q / p, the rest drawn from q − p
            m.setattr(verify_module, "target_probs", lambda logits, rows, own=False: QS[q].expand(len(rows), V).clone())
            found = run_chain(SamplingParams(), QS[q], told=real(P_LOGITS[:1], rows_for(SamplingParams())[:1])[0])
            assert 0 < sum(len(path) == 0 for path, _, _ in found) < N, "some are accepted, some are not"
            with pytest.raises(AssertionError): check(found, SamplingParams())
    with monkeypatch.context() as m:  # what is left is not made smaller: p instead of p − q
        m.setattr(torch.Tensor, "clamp", lambda self, *a, **k: real(P_LOGITS[:1].expand(len(self), V), rows_for(SamplingParams())[:len(self)]) if self.shape[-1] == V and k == dict(min=0) else torch.clamp(self, *a, **k))
        found = run_chain(SamplingParams(), QS["near"])
        with pytest.raises(AssertionError): check(found, SamplingParams())


@pytest.mark.parametrize("right", [True, False])
def test_siblings_without_renormalizing_are_caught(monkeypatch, right):
    "The rule that the papers warn of: the second sibling accepted with p(x) instead of p(x) / (1 − p(first))."
    decide, tree, r = verify_module._decide, TokenTree([1, 0], [-1, -1]), np.random.default_rng(0)

    def one_by_one(logits, at, rows, drafted, argmax):
        if rows[0].position > 1: return decide(logits, at, rows, drafted, argmax)
        out, p = [], exact(SamplingParams(), P_LOGITS[0], [3])
        for _ in rows:
            rest = p.copy()
            for x in tree.tokens:
                if r.random() < rest[x]: break
                rest[x] = 0
                if right: rest /= rest.sum()
            else: x = r.choice(V, p=rest / rest.sum())
            out.append(x)
        return out, [None] * len(out)
    monkeypatch.setattr(verify_module, "_decide", one_by_one)
    found = verify(P_LOGITS[[0, 1, 1]].repeat(N, 1), list(range(0, 3 * N, 3)), [tree] * N, rows_for(SamplingParams()))
    if right: check(found, SamplingParams())
    else:
        with pytest.raises(AssertionError): check(found, SamplingParams())


def test_typical_is_lossy_and_says_so():
    tree = TokenTree([2], [-1])
    found = verify(P_LOGITS[:2].repeat(N, 1), list(range(0, 2 * N, 2)), [tree] * N, rows_for(SamplingParams()), typical=(0.09, 0.3))
    assert chi2([t[0] for _, t, _ in found], exact(SamplingParams(), P_LOGITS[0], [3])) > 5
    some = verify(P_LOGITS[:2].repeat(50, 1), list(range(0, 100, 2)), [tree] * 50, [SamplingRow(SamplingParams(logprobs=2), i, [3], 1) for i in range(50)], typical=(0.09, 0.3))
    assert all(len(tokens) == len(lps) and all(t in lp for t, lp in zip(tokens, lps)) for _, tokens, lps in some) and max(len(t) for _, t, _ in some) == 2
    cold = verify(P_LOGITS[:2], [0], [TokenTree([0], [-1])], [SamplingRow(SamplingParams(temperature=0), 0, [3], 1)], typical=(0.09, 0.3))
    assert cold[0][1] == [0, 1]  # greedy stays exact

"""Speculation changes the number of steps and nothing else: every drafter, with everything else switched on."""
import dataclasses
import functools
import json
import pathlib
import random

import pytest
from conftest import loaded, make_engine, matrix
from test_fork import hf_model, prompt_of
from test_pressure import BEAMS, GREEDY, SAMPLES, answers, throw_out

from llmserve.core import EngineConfig, SamplingParams
from llmserve.draft import Drafter
from llmserve.engine import Engine
from llmserve.models import load
from llmserve.runner import Runner
from llmserve.tree import TokenTree

REPEATING = [(prompt_of(12, i) * 3)[:n] for i, n in enumerate((15, 16, 17, 31, 33, 36))]
LOGPROBS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=3)
PENALTIES = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2, min_tokens=4, logit_bias={7: 3.0})
SEEDED = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, seed=5, max_tokens=24, ignore_eos=True)
ENDING = SamplingParams(temperature=0, max_tokens=40, stop_token_ids=list(range(3, 160, 9)))


class Oracle(Drafter):
    "Knows the answer, and hides it among wrong drafts in random trees; for tests of everything behind a drafter."
    def __init__(self, known, seed=0, honest=0.8): self.known, self.r, self.honest = known, random.Random(seed), honest

    def propose(self, news, batch):
        out = []
        for n in news:
            tokens = n.seq.tokens + n.tokens
            answer = self.known.get((tuple(n.seq.request.prompt_token_ids), n.seq.seed), [])
            if not n.wants_drafts or self.r.random() < 0.15: out.append(None); continue
            rest, tree, at = answer[len(tokens) - n.seq.num_prompt_tokens:], TokenTree([], []), -1
            for k in range(self.r.randint(1, 8)):
                right = rest[k] if k < len(rest) and self.r.random() < self.honest else self.r.randrange(3, 160)
                siblings = [right, *(self.r.randrange(3, 160) for _ in range(self.r.randint(0, 3)))]
                self.r.shuffle(siblings)
                first = len(tree)
                tree.tokens += siblings
                tree.parents += [at] * len(siblings)
                at = first + siblings.index(right) if self.r.random() < 0.9 else first
            out.append(tree)
        return out


def go(engine, work, harsh=None, known=None):
    r, thrown = random.Random(harsh or 0), []
    requests = [engine.add(p, q) for p, q in work]
    while engine.has_work:
        if harsh is not None and engine.scheduler.running and r.random() < 0.5: throw_out(engine.scheduler, r.choice(engine.scheduler.running), thrown)
        engine.step()
        engine.scheduler.check_integrity()
    assert engine.blocks.num_used == [0] * len(engine.blocks.pools)
    assert harsh is None or thrown, "nobody had to give way"
    return answers(requests)


def accepted(engine): return sum(a for x in engine.records for _, _, a in x.drafted)


def with_oracle(folder, work, plain, honest=0.8, **settings):
    engine = make_engine(folder, max_model_len=128, **settings)
    known = {}
    for (prompt, params), outs in zip(work, plain):
        for i, out in enumerate(outs): known[tuple(prompt), (params.seed or 0) + i if params.seed is not None else None] = out
    requests_known = {}
    for (p, seed), out in known.items():
        requests_known[p, seed] = out
    drafter = Oracle({}, honest=honest)
    drafter.known = _AnySeed(requests_known)
    engine.runner.drafter = drafter
    return engine


class _AnySeed(dict):
    "Looks an answer up by prompt and seed; a request without a seed has one answer."
    def get(self, key, default=None): return super().get(key) or super().get((key[0], None)) or default


WORK = [(prompt_of(37, 1), GREEDY), (prompt_of(16, 2), BEAMS), (prompt_of(50, 3), SAMPLES), (prompt_of(31, 4), PENALTIES), (prompt_of(40, 5), SEEDED), (prompt_of(5, 6), LOGPROBS), (prompt_of(15, 7), ENDING), (prompt_of(33, 8), GREEDY)]


TROUBLE = [dict(), dict(enable_prefix_caching=False), dict(max_num_batched_tokens=24), dict(num_gpu_blocks_override=44, preemption_mode="swap", harsh=3), dict(num_gpu_blocks_override=44, preemption_mode="recompute", harsh=4), dict(kv_cache_dtype="int8")]


@pytest.mark.parametrize("name, settings", matrix(["llama", "gemma3", "gpt_oss", "mixtral"], [*TROUBLE, dict(attention_backend="reference"), dict(block_size=4)], keep=5))
def test_random_trees_change_nothing(name, settings, tiny):
    "Plain, penalized, seeded, n samples, beams, early ends, log-probabilities; under pressure of every kind."
    harsh = settings.get("harsh")
    settings = {k: v for k, v in settings.items() if k != "harsh"}
    same = {k: v for k, v in settings.items() if k in ("kv_cache_dtype",)}
    plain = go(make_engine(tiny(name), max_model_len=128, **same), WORK)
    engine = with_oracle(tiny(name), WORK, plain, **settings)
    assert go(engine, WORK, harsh) == plain
    assert accepted(engine) > 30 and any(a < n for x in engine.records for _, n, a in x.drafted)


def test_logprobs_with_drafts(tiny):
    from llmserve.llm import LLM
    outs = []
    for drafting in (False, True):
        engine = make_engine(tiny("llama"), max_model_len=128)
        if drafting: engine = with_oracle(tiny("llama"), [(prompt_of(20), LOGPROBS)], [[[t for t in outs[0][0]]]])
        llm = LLM(engine=engine, quiet=True)
        llm.tokenizer = None
        out, = llm.generate([prompt_of(20)], dataclasses.replace(LOGPROBS, detokenize=False), use_tqdm=False)
        outs.append((out.outputs[0].token_ids, [{t: lp.logprob for t, lp in line.items()} for line in out.outputs[0].logprobs]))
    assert outs[0][0] == outs[1][0] and accepted(engine) > 3
    for a, b in zip(outs[0][1], outs[1][1]): assert a == pytest.approx(b, abs=1e-3)


@pytest.mark.slow
def test_triton_interpreted(tiny):
    work = WORK[:1] + WORK[3:5]
    plain = go(make_engine(tiny("llama"), max_model_len=128), work)
    engine = with_oracle(tiny("llama"), work, plain, attention_backend="triton")
    assert go(engine, work) == plain and accepted(engine) > 8


@pytest.mark.parametrize("method", ["medusa", "eagle3"])
def test_heads_hear_recorded_steps(method, tiny):
    "A replayed graph calls no hooks. Every second step is plain and comes from one; the trees are the same as without."
    import torch

    from llmserve.runner import DecodeGraphs

    def record(run):
        out, heard = run(), engine.runner.heard
        seen = dict(heard)

        @torch.inference_mode()
        def replay():
            out.copy_(run())
            for i, x in seen.items(): x.copy_(heard[i])
            heard.clear()
        return replay, out

    found = []
    for graphs in (False, True):
        engine = make_engine(tiny("llama"), max_model_len=64, attention_backend="triton", speculative_config=dict(CONFIGS[method], model=head_for(CONFIGS[method]["method"], tiny("llama"))))
        engine.runner.graphs = DecodeGraphs(engine.runner, (1, 2), record) if graphs else None
        trees, propose = [], engine.runner.drafter.propose
        def every_second(news, batch):
            out = propose(news, batch)
            trees.append([t and t.tokens for t in out])
            return out if len(trees) % 2 == 0 else [None] * len(news)
        engine.runner.drafter.propose = every_second
        go(engine, [(REPEATING[0], dataclasses.replace(GREEDY, max_tokens=6))])
        found.append(trees)
        if graphs: assert engine.runner.graphs.recorded
    assert found[0] == found[1] and any(t for step in found[0] for t in step)


CONFIGS = {"ngram": dict(method="ngram", num_speculative_tokens=6), "suffix": dict(method="suffix", num_speculative_tokens=12, suffix_decoding_max_spec_factor=2.0), "draft": dict(method="draft_model", num_speculative_tokens=3),
           "medusa": dict(method="medusa", num_speculative_tokens=10), "eagle": dict(method="eagle", num_speculative_tokens=4), "eagle2": dict(method="eagle", num_speculative_tokens=14, tree="dynamic", tree_depth=4, tree_width=3),
           "eagle static": dict(method="eagle", num_speculative_tokens=12, tree="static"), "eagle3": dict(method="eagle3", num_speculative_tokens=14, tree="dynamic", tree_depth=4, tree_width=3)}


def head_for(method, folder):
    "A random head for a tiny model."
    import torch

    from llmserve.eagle import EagleConfig, EagleHead
    from llmserve.medusa import MedusaHeads, output_rows
    model = loaded(str(folder), "float32").model
    torch.manual_seed(3)
    if method == "medusa":
        heads = MedusaHeads(64, 3, out=[output_rows(model)] * 3)
        for parameter in heads.parameters(): torch.nn.init.normal_(parameter, std=0.1)
        return heads
    head = EagleHead(EagleConfig(3, 64, 96, 4, 2, 16, 80, 64, layers=(1, 2, 3)) if method == "eagle3" else EagleConfig(1, 64, 96, 4, 2, 16, 80, 64, num_layers=2))
    head.d2t = torch.arange(80) * 2 + 1
    head.out = output_rows(model, head.d2t)
    return head.eval()


@pytest.mark.parametrize("method, settings", matrix(list(CONFIGS), [*TROUBLE, dict(num_gpu_blocks_override=14), dict(attention_backend="triton")], keep=5))
def test_methods_change_nothing(method, settings, tiny):
    harsh = settings.get("harsh")
    settings = {k: v for k, v in settings.items() if k != "harsh"}
    work = [(p, q) for p, q in zip(REPEATING, (GREEDY, SEEDED, PENALTIES, GREEDY, SAMPLES, ENDING))] + WORK[:3]
    if settings.get("num_gpu_blocks_override") == 14: work = [(p, GREEDY) for p in REPEATING]
    length = 24 if method in ("ngram", "suffix") else 8  # those wait for a repetition
    if "attention_backend" in settings: work = [(p, dataclasses.replace(q, max_tokens=length)) for p, q in zip(REPEATING[2:4], (GREEDY, SEEDED))]  # interpreted
    same = {k: v for k, v in settings.items() if k == "kv_cache_dtype"}
    for name in ("llama", "qwen3")[:1 if "attention_backend" in settings else 2]:
        plain = go(make_engine(tiny(name), max_model_len=128, **same), work)
        config = dict(CONFIGS[method])
        if method == "ngram" and "attention_backend" in settings: config["prompt_lookup_min"] = 1
        if method == "draft": config["model"] = str(tiny("qwen2") if name == "qwen3" else tiny(name))
        elif method not in ("ngram", "suffix"): config["model"] = head_for(config["method"], tiny(name))
        engine = make_engine(tiny(name), max_model_len=128, speculative_config=config, **settings)
        assert go(engine, work, harsh) == plain
        assert any(x.drafted for x in engine.records)
        if name == "llama" and method == "draft": assert accepted(engine) > (5 if "attention_backend" in settings else 20 if harsh else 40)


def naive_eagle(model, head, tokens, config):
    "The drafts of an EAGLE head, everything computed anew and densely for each node."
    import torch

    from llmserve.tree import grow_tree
    layers = head.config.layers
    with torch.inference_mode():
        seen = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        features = head.fuse(torch.cat([seen[i][0] for i in layers], -1) if head.config.version == 3 else seen[-1][0])  # the last one is behind the final norm
        entered = torch.cat([torch.zeros(1, features.shape[1]), features[:-1]])  # of the entries

        def after(path):  # path: drafted tokens; → the head's feature at its end
            hidden, ids = entered, list(tokens)
            for step in range(len(path) + 1):
                x = model.get_input_embeddings()(torch.tensor(ids))
                cos, sin = model.model.rotary_emb(x, torch.arange(len(ids))[None])
                out = head(x, hidden, cos[0], sin[0], lambda layer, *qkv: torch.nn.functional.scaled_dot_product_attention(*(t.transpose(0, 1)[None] for t in qkv), is_causal=True, enable_gqa=True)[0].transpose(0, 1).flatten(1))
                if step < len(path): ids, hidden = ids + [path[step]], torch.cat([hidden, out[-1:]])
            values, places = head.logits(out[-1:]).log_softmax(-1)[0].topk(width)
            return list(zip(head.d2t[places].tolist(), values.tolist()))

        width, paths = config.get("tree_width", 1), {}

        def expand(nodes):
            out = []
            for i, token, parent in nodes:
                paths[i] = paths.get(parent, []) + [token]
                out.append(after(paths[i]))
            return out
        return grow_tree(after([]), expand, config["num_speculative_tokens"], config.get("tree_depth", config["num_speculative_tokens"]), width)


def paths_of(tree):
    paths = []
    for token, parent in zip(tree.tokens, tree.parents): paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return set(paths)


@pytest.mark.parametrize("method", ["eagle", "eagle2", "eagle3"])
def test_eagle_drafts_what_a_dense_head_would(method, tiny):
    "Through pages, chunks, a prefix hit, accepted and refused drafts, swap and recomputation, for samples of one prompt, and for a prompt that was searched with beams before."
    folder, config = tiny("llama"), dict(CONFIGS[method])
    head = config["model"] = head_for(config["method"], folder)
    model = hf_model(folder)
    for settings in (dict(), dict(max_num_batched_tokens=24), dict(preemption_mode="swap", harsh=5), dict(preemption_mode="recompute", harsh=6)):
        harsh = settings.pop("harsh", None)
        engine, r, checked = make_engine(folder, max_model_len=128, speculative_config=config, **settings), random.Random(harsh), 0
        own, prompts = engine.runner.drafter.propose, [(prompt_of(37, 1), GREEDY), (prompt_of(48, 8), BEAMS), (prompt_of(37, 1)[:34] + [9, 9], GREEDY), (prompt_of(16, 3), GREEDY), (prompt_of(29, 5), dataclasses.replace(GREEDY, n=3)), (prompt_of(48, 8), GREEDY)]

        def propose(news, batch):
            nonlocal checked
            out = own(news, batch)
            for n, tree in zip(news, out):
                if not tree or r.random() < 0.4: continue
                expected = naive_eagle(model, head, n.seq.tokens + n.tokens, config)
                expected = expected.cut(64, n.seq.max_len - len(n.seq.tokens) - len(n.tokens) - 1)
                if n.seq.max_len - len(n.seq.tokens) - len(n.tokens) - 1 >= 6:
                    assert paths_of(tree) == paths_of(expected), (n.seq, settings)
                    checked += 1
            return out
        engine.runner.drafter.propose = propose
        for p, params in prompts:
            engine.add(p, params)
            for _ in range(4): engine.step()
        while engine.has_work:
            if harsh is not None and len(engine.scheduler.running) > 1 and r.random() < 0.4: throw_out(engine.scheduler, r.choice(engine.scheduler.running), [])
            engine.step()
            engine.scheduler.check_integrity()
        assert checked > 10


@pytest.mark.parametrize("method", ["eagle", "draft"])
def test_samples_and_drafts_in_the_smallest_pools(method, tiny):
    "Where a fork must copy its last block and drafts hold the block behind it, with no block free."
    folder, config = tiny("llama"), dict(CONFIGS[method])
    config["model"] = str(folder) if method == "draft" else head_for(config["method"], folder)
    for length in (28, 31):
        work = [(prompt_of(length, 1), dataclasses.replace(GREEDY, n=4)), (prompt_of(13, 2), GREEDY)]
        plain = go(make_engine(folder, max_model_len=64), work)
        for blocks in range(5, 14): assert go(make_engine(folder, max_model_len=64, num_gpu_blocks_override=blocks, speculative_config=config), work) == plain, blocks


def test_a_draft_model_in_step_with_its_target(tiny):
    "The target as its own draft model: each draft is right, also behind a prefix hit, a swap and a second request."
    engine = make_engine(tiny("llama"), max_model_len=128, speculative_config=dict(method="draft_model", model=str(tiny("llama")), num_speculative_tokens=4), preemption_mode="swap")
    first = engine.add(prompt_of(40), GREEDY)
    for _ in range(3): engine.step()
    second = engine.add(prompt_of(40), dataclasses.replace(GREEDY, max_tokens=30))
    for _ in range(2): engine.step()
    throw_out(engine.scheduler, first.sequences[0], [])
    while engine.has_work: engine.step()
    assert second.sequences[0].num_cached_tokens == 32
    drafted = [(n, a) for x in engine.records for _, n, a in x.drafted]
    assert sum(a for _, a in drafted) >= 0.9 * sum(n for n, _ in drafted) and len(drafted) >= 9


def test_drawn_drafts_keep_the_distribution(tiny):
    "probabilistic drafts of another model, on a real engine: the second and third token over many seeds, against plain sampling."
    import numpy as np
    params = SamplingParams(temperature=1.0, top_k=6, max_tokens=4, ignore_eos=True)
    counts = []
    for config in (None, dict(method="draft_model", model=str(tiny("qwen2")), num_speculative_tokens=3, draft_sample_method="probabilistic")):
        engine = make_engine(tiny("qwen3"), max_model_len=64, speculative_config=config)
        requests = [engine.add([5, 6, 7], dataclasses.replace(params, seed=s + (10_000 if config else 0))) for s in range(1500)]
        while engine.has_work: engine.step()
        counts.append([np.bincount([r.sequences[0].output_token_ids[i] for r in requests], minlength=160) for i in (1, 2)])
    assert accepted(engine) > 20
    for plain, drafted in zip(*counts):
        seen = (plain + drafted) > 20
        a, b = plain[seen], drafted[seen]
        chi2 = (((a - b) ** 2) / (a + b)).sum()
        assert chi2 < seen.sum() + 5 * (2 * seen.sum()) ** 0.5, (chi2, seen.sum())


def test_a_draft_model_shares_the_rows_of_its_target(tiny, tmp_path):
    "As train-head writes it: without an embedding; refused alone and beside a target of another size."
    import torch

    from llmserve.core import InvalidModel
    from llmserve.train import TrainConfig, Trainer
    target = hf_model(tiny("llama"))
    trainer = Trainer(TrainConfig("draft", minutes=0, draft_layers=(0, 1, 2, 3)), target, [dict(tokens=[1] * 20, start=4)], tmp_path)
    trainer.export(dtype=torch.float32)
    engine = make_engine(tiny("llama"), max_model_len=128, speculative_config=dict(method="draft_model", model=str(tmp_path), num_speculative_tokens=4))
    go(engine, [(prompt_of(20), GREEDY)])
    drafted = [(n, a) for x in engine.records for _, n, a in x.drafted]
    assert drafted and all(n == a for n, a in drafted)  # all layers, untrained: the target itself
    draft = engine.runner.drafter.loaded.model
    assert draft.get_input_embeddings() is loaded(str(tiny("llama"))).model.get_input_embeddings()
    with pytest.raises(InvalidModel, match="beside its target only"): load(tmp_path)
    with pytest.raises(InvalidModel, match=r"made for a target with an embedding of \[160, 64\]; this one has \[49152, 576\]"): load(tmp_path, target=loaded("smollm2-135m"))
    with pytest.raises(ValueError, match="of the target's 4 layers"): Trainer(TrainConfig("draft", draft_layers=(0, 9)), target, [], tmp_path / "b")


def test_rows_of_a_packed_output_layer(tiny):
    "In bf16 the engine packs the output layer; a head shares its rows, and not the embedding's, which only tied models have in common."
    import torch

    from llmserve.medusa import output_rows
    rows = hf_model(tiny("llama")).lm_head.weight.detach().bfloat16()
    runner = make_engine(tiny("llama"), "bfloat16", max_model_len=64).runner
    assert not hasattr(runner.model.get_output_embeddings(), "weight"), "the output layer is not packed here"
    assert torch.equal(output_rows(runner.model), rows) and torch.equal(output_rows(runner.model, torch.tensor([5, 3])), rows[[5, 3]])
    assert not torch.equal(rows, runner.model.get_input_embeddings().weight)


def test_layouts_of_published_eagle_heads(tiny, tmp_path):
    "speculators nest the layer's config and norm before the residual, NVIDIA nests the layers that are fused, and positions are the head's own."
    import torch

    from llmserve.eagle import EagleConfig, EagleHead, load_eagle, rotary_for
    from llmserve.medusa import save_heads
    target = hf_model(tiny("llama"))
    torch.manual_seed(0)
    head = EagleHead(EagleConfig(3, 64, 96, 4, 2, 16, 160, 64))
    for part in (head.layers[0].o_proj, head.layers[0].down_proj): torch.nn.init.zeros_(part.weight)
    state = {k.replace("midlayer.", "layers.0."): v for k, v in head.published().items()}  # both names are in use

    def load_with(**config):
        save_heads(tmp_path, state | {"lm_head.weight": target.lm_head.weight}, config)
        return load_eagle(tmp_path, target, 3)
    layer = dict(num_attention_heads=4, head_dim=16, rms_norm_eps=1e-3, rope_theta=500.0)
    made = load_with(speculators_model_type="eagle3", transformer_layer_config=layer, eagle_config=dict(eagle_aux_hidden_state_layer_ids=[0, 1, 3]))
    assert made.config.norm_before_residual and made.config.layers == (0, 1, 3) and made.config.eps == 1e-3 and made.config.rope == dict(rope_theta=500.0)
    x, at = torch.randn(3, 64), torch.arange(3)[None]
    cos, sin = rotary_for(made.config, target)(x, at)
    assert torch.allclose(cos[0, 1, 1], torch.tensor(500.0 ** (-2 / 16)).cos())
    past = lambda head: head(x, x, cos[0], sin[0], lambda layer, q, k, v: q.flatten(1))  # what runs past attention and MLP, for these give nothing
    assert torch.equal(past(made), made.layers[0].hidden_norm(x))
    plain = load_with(**layer | dict(rope_theta=None))
    assert torch.equal(past(plain), x)
    assert torch.allclose(rotary_for(plain.config, target)(x, at)[0][0, 1, 1], torch.tensor(10_000.0 ** (-2 / 16)).cos()), "a published head that says nothing means base 10,000"
    assert load_with(**layer | dict(rope_theta=None, training={})).config.rope is None  # trained here: the target's
    with pytest.raises(ValueError, match="norm_before_fc"): load_with(norm_before_fc=True, **layer)
    wide = dataclasses.replace(made.config, rope=None, head_dim=32)
    with pytest.raises(ValueError, match="attention heads of 32 numbers, the target rotates 16"): rotary_for(wide, target)


def test_drafts_in_blocks_that_were_taken_away(tiny):
    "What a draft model has computed behind the text is gone with its block."
    from llmserve.draft import ModelDrafter, _Progress
    engine = make_engine(tiny("llama"), max_model_len=64)
    seq = engine.add(prompt_of(15), GREEDY).sequences[0]
    engine.step()
    assert engine.blocks.grow(seq, 20) is not None and len(seq.tables[0]) == 2
    seq.drafting, tokens = _Progress(16, [7, 8], 0, 0), seq.tokens[:16] + [7, 8, 9]
    assert ModelDrafter._done(None, seq, tokens, 16) == 18
    assert engine.blocks.trim(seq) and seq.num_trims == 1
    assert ModelDrafter._done(None, seq, tokens, 16) == 16


@pytest.mark.parametrize("how", ["greedy", "probabilistic"])
def test_a_draft_model_with_fewer_rows(how, tiny, tmp_path, monkeypatch):
    "Qwen2.5's sizes pad one vocabulary to different lengths; a token of the padding, forced by a client, ends nobody."
    import transformers
    from conftest import TINY, common
    config = getattr(transformers, TINY["llama"][0])(**{**common, "vocab_size": 150})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    monkeypatch.setattr("llmserve.draft.check_same_vocabulary", lambda *models: None)
    engine = make_engine(tiny("llama"), max_model_len=128, speculative_config=dict(method="draft_model", model=str(tmp_path), num_speculative_tokens=3, draft_sample_method=how))
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=12, ignore_eos=True, logit_bias={158: 4.0})
    found = go(engine, [([5, 159, 7], params), (prompt_of(9), params)])
    assert all(len(tokens) == 12 for (tokens,) in found)


def test_training_goes_on_for_those_who_are_not_done(tiny, tmp_path):
    "Methods that learn together may have been trained for different times before."
    from llmserve.train import TrainConfig, Trainer, train_together
    target, lessons = hf_model(tiny("llama")), [dict(tokens=prompt_of(24, i), start=6) for i in range(8)]
    done, new = (Trainer(TrainConfig(m, minutes=0.02, batch=2, draft_vocab=64, steps=2), target, lessons, tmp_path / m) for m in ("eagle3", "medusa"))
    done.seconds = 1.2
    train_together([done, new], progress=False)
    assert done.step == 0 and done.seconds == 1.2 and new.step > 0 and new.seconds >= 1.2


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_pools_leave_room_for_a_drafter(name, tiny):
    from llmserve.kvcache import kv_format, plan_memory
    spec, config = loaded(tiny(name)).spec, EngineConfig(max_model_len=256, max_num_seqs=1000)
    alone = plan_memory(spec, config, kv_format("auto", "float32", 16), 8 << 20)
    for share in (0.5, 1, 4):
        extra = int(share * sum(alone.block_bytes))
        plan = plan_memory(spec, config, kv_format("auto", "float32", 16), 8 << 20, extra)
        full = max(plan.num_blocks)
        taken = sum(n * b for n, b in zip(plan.num_blocks, plan.block_bytes)) + full * extra
        assert 0.95 * (8 << 20) < taken <= 8 << 20, (share, taken)


HEADS = pathlib.Path(__file__).parents[1] / "data/heads"
REAL = {"ngram": CONFIGS["ngram"], "suffix": CONFIGS["suffix"], "draft": dict(method="draft_model", model="draft", num_speculative_tokens=4), "medusa": dict(method="medusa", model="medusa", num_speculative_tokens=20),
        "eagle1 chain": dict(method="eagle", model="eagle1", num_speculative_tokens=5), "eagle1 static": dict(method="eagle", model="eagle1", num_speculative_tokens=20, tree="static"),
        "eagle2 tree": dict(method="eagle", model="eagle1", num_speculative_tokens=20, tree="dynamic"), "eagle3 chain": dict(method="eagle3", model="eagle3", num_speculative_tokens=5),
        "eagle3 tree": dict(method="eagle3", model="eagle3", num_speculative_tokens=20, tree="dynamic"), "adaptive": dict(method="eagle3", model="eagle3", num_speculative_tokens=20, tree="dynamic", adaptive=True)}
REAL = {name: config for name, config in REAL.items() if "model" not in config or (HEADS / f"smollm2-135m-{config['model']}").exists()}
REAL_TROUBLE = [dict(), dict(enable_prefix_caching=True, again=True), dict(max_num_batched_tokens=48), dict(num_gpu_blocks_override=60, preemption_mode="swap", harsh=3), dict(num_gpu_blocks_override=60, preemption_mode="recompute", harsh=4), dict(kv_cache_dtype="int8")]


@functools.lru_cache(None)
def real_answers(format, each, length, batch=1):
    "The held-out prompts and what the model says to them without drafts, so many at a time (with int8 K and V, products of other shapes round some element the other way)."
    from llmserve.bench import spec_prompts
    prompts = [p for _, p in spec_prompts(loaded("smollm2-135m").tokenizer, HEADS.parent / "prompts", each)]
    engine, out = make_engine("smollm2-135m", max_model_len=512, kv_cache_dtype=format), []
    for a in range(0, len(prompts), batch): out += go(engine, [(p, SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)) for p in prompts[a:a + batch]])
    return prompts, out


def is_tie(prompt, one, two):
    "Whether two answers part where the model could not tell: another rounding of some K or V in int8 is enough for that."
    at = next(j for j, (x, y) in enumerate(zip(one, two)) if x != y)
    engine = make_engine("smollm2-135m", max_model_len=512, kv_cache_dtype="int8")
    request = engine.add(prompt + one[:at], SamplingParams(temperature=0, max_tokens=1, logprobs=2))
    while engine.has_work: (update,) = engine.step() or [None]
    best = {t: lp.logprob for t, lp in update.logprobs[0].items()}
    return {one[at], two[at]} <= set(best) and abs(best[one[at]] - best[two[at]]) < 0.02


def check_real(method, batch, settings, each, length):
    settings, config = dict(settings), dict(REAL[method])
    harsh, again = settings.pop("harsh", None), settings.pop("again", False)
    prompts, plain = real_answers(settings["kv_cache_dtype"], each, length, batch) if "kv_cache_dtype" in settings else real_answers("auto", each, length)
    if "model" in config: config["model"] = str(HEADS / f"smollm2-135m-{config['model']}")
    engine = make_engine("smollm2-135m", max_model_len=512, **{"kv_cache_memory": "256MiB", "swap_space": "64MiB", "speculative_config": config, **settings})
    params, others = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True), 0
    for _ in range(1 + again):
        for a in range(0, len(prompts), batch):
            found = go(engine, [(p, params) for p in prompts[a:a + batch]], harsh)
            other = [i for i, x in enumerate(found) if x != plain[a + i]]
            others += len(other)
            assert not other or "kv_cache_dtype" in settings and others <= max(len(prompts) // 4, 1), (method, a, other)
            for i in other: assert is_tie(prompts[a + i], found[i][0], plain[a + i][0]), (method, a + i)
    assert accepted(engine) > each


@pytest.mark.slow
@pytest.mark.parametrize("method", REAL)
@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("settings", REAL_TROUBLE, ids=str)
def test_all_held_out_prompts(method, batch, settings): check_real(method, batch, settings, each=12, length=48)


@pytest.mark.parametrize("method, batch, settings", [(m, (1, 8)[i % 2], REAL_TROUBLE[i % len(REAL_TROUBLE)]) for i, m in enumerate(REAL)], ids=str)
def test_held_out_prompts(method, batch, settings):
    "One prompt of each kind by each method, each under something else."
    check_real(method, batch, settings, each=1, length=24)


def test_drafts_take_nothing_from_others(tiny):
    "A step of 24 tokens, eight sequences with trees of up to 32: each goes on in each step."
    work = [(prompt_of(5, i), dataclasses.replace(GREEDY, max_tokens=32)) for i in range(8)]
    plain = go(make_engine(tiny("llama"), max_model_len=128), work)
    engine = with_oracle(tiny("llama"), work, plain, max_num_batched_tokens=24)
    requests = [engine.add(p, q) for p, q in work]
    while engine.has_work:
        running = {s.id for s in engine.scheduler.running}
        engine.step()
        assert running <= {name for name, _, _ in engine.records[-1].scheduled}
    assert answers(requests) == plain and accepted(engine) > 30


def test_stop_texts_end_drafted_answers():
    "Texts that end an answer are seen in the middle of what a step brought."
    from llmserve.llm import LLM
    outs = {}
    for name, config in dict(plain=None, drafting=dict(method="ngram", num_speculative_tokens=8, prompt_lookup_min=1)).items():
        llm = LLM(engine=make_engine("smollm2-135m", max_model_len=256, speculative_config=config), quiet=True)
        outs[name] = [(o.outputs[0].text, o.outputs[0].token_ids, o.outputs[0].finish_reason, o.outputs[0].stop_reason) for stop in (["four"], [" fi"], ["no such text"]) for o in llm.generate("one two three four five one two three four five one two three four five one two", SamplingParams(temperature=0, max_tokens=24, stop=stop), use_tqdm=False)]
    assert outs["plain"] == outs["drafting"] and accepted(llm.engine) > 8 and [o[2] for o in outs["plain"]] == ["stop", "stop", "length"]


def test_heads_that_do_not_fit(tiny, tmp_path):
    import torch

    from llmserve.eagle import EagleConfig, EagleHead, load_eagle
    from llmserve.medusa import MedusaHeads, load_medusa, save_heads
    target = hf_model(tiny("llama"))

    def eagle(change=None, config=None, **shape):
        head = EagleHead(dataclasses.replace(EagleConfig(3, 64, 96, 4, 2, 16, 160, 64), **shape))
        save_heads(tmp_path, {**head.state_dict(), **(change or {}), "lm_head.weight": target.lm_head.weight}, dict(num_attention_heads=4, head_dim=16) | (config or {}))
        return load_eagle(tmp_path, target)
    assert eagle().config.version == 3
    for words, more in (("works on 32 numbers", dict(hidden_size=32)), ("of another shape", dict(change={"layers.0.q_proj.weight": torch.zeros(64, 65)})), ("listens to layers", dict(config=dict(eagle_aux_hidden_state_layer_ids=[1, 2, 99]))), ("listens to layers", dict(config=dict(eagle_aux_hidden_state_layer_ids=[1, 2])))):
        with pytest.raises(ValueError, match=words): eagle(**more)
    heads = MedusaHeads(64, 2, 2)
    weights = {k.removeprefix("blocks."): v for k, v in heads.state_dict().items()}
    save_heads(tmp_path, weights, {})
    assert len(load_medusa(tmp_path, target).blocks[0]) == 2, "as many layers as there are weights of"
    save_heads(tmp_path, {k: v for k, v in weights.items() if not k.startswith("1.1")}, {})
    with pytest.raises(ValueError, match="of another shape"): load_medusa(tmp_path, target)
    config = dict(method="medusa", model=head_for("medusa", tiny("llama")), acceptance="typical")
    with pytest.raises(ValueError, match="typical acceptance"): make_engine(tiny("llama"), max_model_len=64, speculative_config=config).add(prompt_of(5), LOGPROBS)


@pytest.mark.parametrize("kind", ["eagle1", "medusa"])
def test_published_files_of_pickled_weights(kind, tiny, tmp_path):
    "EAGLE-1's `pytorch_model.bin` with its layer and an embedding, Medusa's `medusa_lm_head.pt` with output rows."
    import torch

    from llmserve.eagle import EagleConfig, EagleHead, load_eagle
    from llmserve.medusa import MedusaHeads, load_medusa
    target = hf_model(tiny("llama"))
    torch.manual_seed(0)
    if kind == "eagle1":
        head = EagleHead(EagleConfig(1, 64, 96, 4, 2, 16, 160, 64))
        state = head.state_dict()
        torch.save(head.published() | {"embed_tokens.weight": target.model.embed_tokens.weight}, tmp_path / "pytorch_model.bin")
        (tmp_path / "config.json").write_text(json.dumps(dict(num_attention_heads=4, head_dim=16)))
        made = load_eagle(tmp_path, target, 1)
        assert torch.equal(made.out, target.lm_head.weight), "its output rows are the target's"
    else:
        head = MedusaHeads(64, 3)
        state, rows = head.blocks.state_dict(), torch.randn(3, 160, 64)
        torch.save(state | {f"{k}.1.weight": rows[k] for k in range(3)}, tmp_path / "medusa_lm_head.pt")
        (tmp_path / "config.json").write_text(json.dumps(dict(medusa_num_heads=3, medusa_num_layers=1)))
        made = load_medusa(tmp_path, target).blocks
        assert all(torch.equal(a, b) for a, b in zip(load_medusa(tmp_path, target).out, rows))
    assert all(torch.equal(v, made.state_dict()[k]) for k, v in state.items())


def test_what_cannot_draft(tiny):
    with pytest.raises(ValueError, match="another tokenizer"):
        config = EngineConfig(model="smollm2-135m", kv_cache_memory="64MiB", max_model_len=256, speculative_config=dict(method="draft_model", model="gemma3-270m"))
        Engine(config, Runner(config, load("smollm2-135m")))
    for name, config, words in [("llama", dict(method="guess"), "method must be one of"), ("llama", dict(method="ngram", num_speculative_tokens=0), r"num_speculative_tokens must be an integer in \[1, 63\], got 0"), ("llama", dict(method="ngram", tokens=3), "ngram has no key tokens"),
                                ("mistral", dict(method="draft_model", model=str(tiny("mistral"))), "no layer that sees the whole sequence")]:
        with pytest.raises(ValueError, match=words): make_engine(tiny(name), max_model_len=128, speculative_config=config)


def test_suffixes_remember_answers_once_and_at_their_end(tiny):
    "A sequence that adaptive drafting leaves out for a while has not ended."
    from llmserve.draft import Drafted, SuffixDrafter
    drafter, seq = SuffixDrafter(8), make_engine(tiny("llama"), max_model_len=64).add(prompt_of(5), GREEDY).sequences[0]
    going = Drafted(seq, [7], 0, None, [])
    assert going.wants_drafts and drafter.propose([dataclasses.replace(going, silent=True)]) == [None]
    assert drafter.num_cached == 0
    seq.max_len = 6
    assert drafter.propose([going]) == [None] and drafter.num_cached == 1


@pytest.mark.parametrize("settings", [dict(), dict(max_num_batched_tokens=24), dict(preemption_mode="swap", harsh=5), dict(preemption_mode="recompute", harsh=6)])
def test_a_draft_model_catches_up(settings, tiny):
    "Nothing is computed for sequences that nobody drafts for; whoever shares their blocks computes it, and a target that drafts for itself is always right."
    settings, r = dict(settings), random.Random(0)
    harsh = settings.pop("harsh", None)
    engine = make_engine(tiny("llama"), max_model_len=128, speculative_config=dict(method="draft_model", model=str(tiny("llama")), num_speculative_tokens=3), **settings)
    drafter, rows, asleep = engine.runner.drafter, [], [True]
    own, forward = drafter.propose, drafter.forward
    drafter.propose = lambda news, batch: own([dataclasses.replace(n, silent=asleep[0] or r.random() < 0.4) for n in news], batch)
    drafter.forward = lambda seqs, tokens, contexts: rows.append(sum(map(len, tokens))) or forward(seqs, tokens, contexts)
    work = [(prompt_of(50, k % 2)[:34 + k], GREEDY) for k in range(4)]
    go(engine, work)
    assert not rows
    asleep[0] = False
    engine.records.clear()
    go(engine, work + [(prompt_of(50, 2), dataclasses.replace(GREEDY, n=2)), (prompt_of(50, 2), BEAMS), (prompt_of(50, 2), GREEDY)], harsh)
    drafted = [d for x in engine.records for d in x.drafted]
    assert rows and len(drafted) > 10 and all(nodes == accepted for _, nodes, accepted in drafted), drafted

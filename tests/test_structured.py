"Answers that have a form parse and validate, whoever drafts them, at any temperature; and drafts change nothing."
import json
import re

import jsonschema
import pytest
from conftest import loaded

from llmserve.core import EngineConfig, InvalidRequest, SamplingParams, StructuredOutputsParams
from llmserve.engine import Engine
from llmserve.llm import LLM
from llmserve.runner import Runner

text, number = dict(type="string", maxLength=12), dict(type="integer", minimum=0, maximum=999)
closed = lambda **properties: dict(type="object", properties=properties, required=list(properties), additionalProperties=False)
SCHEMAS = [
    closed(a=number), closed(name=text), closed(name=text, age=number), closed(ok=dict(type="boolean")), closed(kind=dict(enum=["red", "green", "blue"])),
    closed(kind=dict(const="fixed")), closed(xs=dict(type="array", items=number, maxItems=3)), closed(xs=dict(type="array", items=dict(type="boolean"), minItems=2, maxItems=3)), closed(inner=closed(x=number, y=number)),
    closed(choice=dict(anyOf=[number, dict(type="null")])), closed(code=dict(type="string", pattern="^[A-Z]{3}-[0-9]{2}$")), closed(when=dict(type="string", format="date")), closed(p=dict(type="number", minimum=0, maximum=1)),
    dict(type="array", items=closed(k=dict(enum=["a", "b"])), minItems=1, maxItems=2), dict(enum=["yes", "no", 3, None]), closed(a=dict(type="null"), b=dict(type="boolean"), c=number),
    dict(type="object", properties=dict(x=number, y=text), required=["x"], additionalProperties=False), {"$defs": {"point": closed(x=number, y=number)}, **closed(at={"$ref": "#/$defs/point"})},
    closed(tags=dict(type="array", items=dict(enum=["new", "old", "used"]), minItems=1, maxItems=3)), closed(who=closed(name=text, admin=dict(type="boolean")), level=dict(enum=[1, 2, 3])),
]
DRAFTERS = {"plain": None, "ngram": dict(method="ngram", num_speculative_tokens=4), "suffix": dict(method="suffix", num_speculative_tokens=6)}
heads = {}


def make(drafter, dtype="float32", **settings):
    config = EngineConfig(model="smollm2-135m", dtype=dtype, speculative_config=drafter, **{"kv_cache_memory": "256MiB", "max_model_len": 512, **settings})
    return LLM(engine=Engine(config, Runner(config, loaded("smollm2-135m", dtype))), quiet=True)


def drafters():
    "All that need no files, and a draft model and heads with random weights in their published formats."
    return [*DRAFTERS, "draft_model", "medusa", "eagle", "eagle3"]


@pytest.fixture(scope="module")
def config_of(tmp_path_factory):
    import torch
    import transformers

    from llmserve.train import TrainConfig, make_student
    target = loaded("smollm2-135m", "float32")
    folder = tmp_path_factory.mktemp("draft")

    def config(name):
        if name in DRAFTERS: return DRAFTERS[name]
        if name == "draft_model":
            c = transformers.AutoConfig.from_pretrained(target.folder)
            c.num_hidden_layers = 2
            torch.manual_seed(0)
            transformers.AutoModelForCausalLM.from_config(c, dtype=torch.float32).save_pretrained(folder)
            return dict(method="draft_model", model=str(folder), num_speculative_tokens=3)
        plain = transformers.AutoModelForCausalLM.from_pretrained(target.folder, dtype=torch.float32)
        head = make_student(TrainConfig(name.replace("eagle", "eagle1") if name == "eagle" else name, draft_vocab=1024), plain, [])
        return dict(method=name, model=head.eval(), num_speculative_tokens=5, **({} if name == "medusa" else dict(tree="dynamic")))
    return config


@pytest.mark.parametrize("drafter", [d if d in ("plain", "ngram", "eagle3") else pytest.param(d, marks=pytest.mark.slow) for d in drafters()])
def test_answers_validate_and_drafts_change_nothing(drafter, config_of):
    "Twenty schemas at T = 0 and T = 1; the same tokens as without drafts."
    prompts = [f"A JSON object that fits {json.dumps(s)}: " for s in SCHEMAS for _ in range(2)]
    params = [SamplingParams(temperature=t, seed=i, max_tokens=90, structured_outputs=StructuredOutputsParams(json=s)) for i, s in enumerate(SCHEMAS) for t in (0, 1)]
    if "plain" not in heads: heads["plain"] = make(None).generate(prompts, params, use_tqdm=False)
    outs = heads["plain"] if drafter == "plain" else make(config_of(drafter)).generate(prompts, params, use_tqdm=False)
    ended = 0
    for out, p, reference in zip(outs, params, heads["plain"]):
        answer = out.outputs[0]
        assert answer.finish_reason == "stop" or "number" in str(p.structured_outputs.json), (answer.text, p.structured_outputs.json)  # digits of a fraction may go on
        if answer.finish_reason == "stop":
            jsonschema.validate(json.loads(answer.text), p.structured_outputs.json)
            ended += 1
        if drafter != "draft_model" or p.temperature == 0: assert answer.token_ids == reference.outputs[0].token_ids  # drawn chains are equal in distribution only
    assert ended >= 36


def test_other_forms():
    llm = make(DRAFTERS["ngram"])
    ask = lambda n=4, **form: [o.text for o in llm.generate("Say it: ", SamplingParams(n=n, temperature=1, seed=1, max_tokens=40, structured_outputs=form), use_tqdm=False)[0].outputs]
    assert all(re.fullmatch(r"\d{3}-\d{4}", t) for t in ask(regex=r"\d{3}-\d{4}"))
    assert set(ask(choice=["yes", "yesterday", "no"])) <= {"yes", "yesterday", "no"}
    assert all(re.fullmatch(r"[ab]+c", t) for t in ask(grammar='start: ("a" | "b")+ "c"', n=2) if t.endswith("c"))
    assert all(re.fullmatch(r"(ab|cd)e", t) for t in ask(grammar='root ::= ("ab" | "cd") "e"'))


def test_with_everything_else():
    "Penalties, biases, min_tokens and log-probabilities beside a form; preemption and chunks do not lose its place."
    llm = make(None, max_num_batched_tokens=32, num_gpu_blocks_override=12, max_model_len=160)
    form = StructuredOutputsParams(json=SCHEMAS[2])
    params = [SamplingParams(temperature=t, seed=i, max_tokens=60, structured_outputs=form, **more) for i, (t, more) in enumerate([(0, {}), (1, {}), (0, dict(frequency_penalty=1.0)), (1, dict(logprobs=2)), (0, dict(min_tokens=40)), (1, dict(logit_bias={5: 10.0}))])]
    outs = llm.generate(["A person as JSON, with a name and an age, please: " * 2] * len(params), params, use_tqdm=False)
    for o in outs: jsonschema.validate(json.loads(o.outputs[0].text), SCHEMAS[2])
    assert sum(len(r.preempted) for r in llm.engine.records) > 0, "the pool was large enough"
    llm.engine.scheduler.check_integrity()
    alone = make(None).generate("A person as JSON, with a name and an age, please: " * 2, params[1], use_tqdm=False)[0]
    assert alone.outputs[0].token_ids == outs[1].outputs[0].token_ids


def test_many_choices_and_too_many_properties():
    "Thousands of choices are one token class; a form that meets a limit of the matcher ends its own answer with an error, and no other."
    llm = make(None)
    many = [f"number {i}" for i in range(3000)]
    assert llm.generate("Say it: ", SamplingParams(temperature=1, seed=1, max_tokens=12, structured_outputs=dict(choice=many)), use_tqdm=False)[0].outputs[0].text in many
    wide = dict(type="object", properties={f"p{i}": dict(type="null") for i in range(4000)}, required=["p3999"], additionalProperties=False)
    params = [SamplingParams(temperature=0, max_tokens=20, structured_outputs=dict(json=wide)), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)]
    broken, fine = (o.outputs[0] for o in llm.generate(["JSON: ", "The sea is"], params, use_tqdm=False))
    assert broken.finish_reason == "error" and "too complex" in broken.stop_reason
    assert fine.finish_reason == "length" and len(fine.token_ids) == 20
    assert not llm.engine.has_work and llm.engine.blocks.num_used == [0]


def test_refused():
    llm = make(None)
    for form, word in ((dict(json='{"type":'), "grammar"), (dict(regex="("), "grammar"), (dict(grammar="x"), "grammar"), (dict(json={"type": "wrong"}), "grammar"), (dict(), "exactly one"), (dict(regex="a", choice=["b"]), "exactly one"), (dict(choice=[]), "not empty|exactly one"), (dict(choice=[1]), "texts"), (dict(regex=3), "text")):
        with pytest.raises(InvalidRequest, match=word): llm.generate("a", SamplingParams(structured_outputs=form))
    with pytest.raises(InvalidRequest, match="beams"): SamplingParams(beam_width=2, temperature=0, structured_outputs=dict(regex="a"))
    assert not llm.engine.has_work

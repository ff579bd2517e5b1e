# Every target makes and fills .venv when it has to; the second run starts at once.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
HAS_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU && echo yes)
PIP := $(BIN)/python -m pip --disable-pip-version-check
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test test-all serve lab notebooks bench gpu-check clean help
help:
	@echo "make demo       eight prompts answered at once"
	@echo "make test       every chapter and every test (make test-all: the long matrices too)"
	@echo "make serve      OpenAI endpoints on http://127.0.0.1:8000"
	@echo "make lab        JupyterLab on the chapters"
	@echo "make notebooks  run the chapters and store their outputs"
	@echo "make bench      throughput, step against its floor, attention, scheduler, memory"
	@echo "make gpu-check  on a machine with a GPU: tests on the device, then kernel benchmarks"
	@echo "make clean      remove .venv and build files"

$(READY): settings.ini setup.py constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
ifeq ($(HAS_GPU),yes)
	$(PIP) install -q "$$(grep '^torch==' constraints.txt)"
	grep -v '^triton' constraints.txt > .venv/constraints.txt
else
	$(BIN)/python -c "import torch" 2>/dev/null \
	  || $(PIP) install -q --retries 0 --timeout 10 --index-url https://download.pytorch.org/whl/cpu "$$(grep '^torch==' constraints.txt)" >/dev/null 2>&1 \
	  || $(PIP) install -q "$$(grep '^torch==' constraints.txt)"
	cp constraints.txt .venv/constraints.txt
endif
	$(PIP) install -q -c .venv/constraints.txt -e ".[dev]"
	touch $@

demo: $(READY)
	$(BIN)/llmserve demo

test: $(READY)
	$(BIN)/python -m pytest -q -m "not slow" tests

test-all: $(READY)
	$(BIN)/python -m pytest -q tests

serve: $(READY)
	$(BIN)/llmserve serve

lab: $(READY)
	$(BIN)/jupyter lab nbs/index.ipynb

notebooks: $(READY)
	$(BIN)/nbdev-export
	for d in nbs kernels; do for n in $$d/*.ipynb; do echo $$n; $(BIN)/nbdev-test $$n --save || exit 1; done; done
	$(BIN)/nbdev-clean
	$(BIN)/python -c "import base64, json; print(next(o['data']['image/png'] for c in json.load(open('nbs/index.ipynb'))['cells'] for o in c.get('outputs', []) if 'image/png' in o.get('data', {})))" | base64 -d > nbs/engine.png

bench: $(READY)
	$(BIN)/llmserve bench throughput
	$(BIN)/llmserve bench floor
	$(BIN)/llmserve bench attention
	$(BIN)/llmserve bench scheduler
	$(BIN)/llmserve bench memory

# Runs in any Python that has the requirements (GPU_PYTHON), so that a borrowed card needs no install.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
OUT ?= data/gpu
gpu-check:
	mkdir -p $(OUT)
	nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | tee $(OUT)/card.txt
	PYTHONPATH=. $(GPU_PYTHON) -m pytest -q tests/test_gpu.py tests/test_kernels.py -k "not compile"
	PYTHONPATH=. $(GPU_PYTHON) -c "import json; from llmserve import bench; rows = bench.gpu_attention(); bench.show(rows, False); json.dump(rows, open('$(OUT)/kernels.json', 'w'), indent=1)"

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .hypothesis .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

"""An LLM serving engine written as a book. `from llmserve import LLM, SamplingParams`."""
__version__ = "0.1.0"

_lazy = {
    "LLM": "llm", "SamplingParams": "core", "BeamSearchParams": "core", "EngineConfig": "core", "RequestOutput": "core",
    "CompletionOutput": "core", "StructuredOutputsParams": "core", "Engine": "engine", "AsyncLLM": "async_llm",
}
__all__ = list(_lazy)


def __getattr__(name):  # nothing heavy is imported until it is asked for
    if name not in _lazy: raise AttributeError(f"module 'llmserve' has no attribute {name!r}")
    from importlib import import_module
    return getattr(import_module(f"llmserve.{_lazy[name]}"), name)


def __dir__(): return sorted([*globals(), *_lazy])

"""vLLM, imported before any test here is: it warns of itself and of torch, which is not ours to mend."""

from __future__ import annotations

import importlib
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    importlib.import_module("vllm.entrypoints.openai.api_server")

"""Field trial B66: what an engine says of a hash that can be made to collide."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from kvortex.vllm_plugin import connector
from tests.e2e.engine import WRITE_THROUGH, engine, prompt


@pytest.mark.parametrize("known", [{"sha256"}, connector.COLLISION_RESISTANT])
def test_an_engine_warns_of_it_once_and_serves(tiny_llama, known):
    """vLLM's unsafe ones need a package that need not be there: here a safe one is not known as such."""
    with (
        patch.object(connector, "COLLISION_RESISTANT", known),
        patch.object(connector.logger, "warning") as warning,
        engine(tiny_llama, WRITE_THROUGH, prefix_caching_hash_algo="sha256_cbor") as vllm,
    ):
        right = vllm.ask(prompt(1, 100))
        vllm.evict_vram()
        assert vllm.ask(prompt(1, 100)) == right
        assert vllm.stats()["tokens"]["ram_hit"] > 0
    said = [call.args for call in warning.call_args_list if call.args[0] == connector.UNSAFE_HASH]
    assert said == [(connector.UNSAFE_HASH, "sha256_cbor")] * ("sha256_cbor" not in known)

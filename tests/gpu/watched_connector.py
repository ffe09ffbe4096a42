"""`KVortexConnector` with its copies watched, for engines whose workers are processes of their own.

vLLM finds it by kv_connector_module_path. KVORTEX_WATCH_ZEROS=1 is the negative control.
"""

from __future__ import annotations

import os
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

from kvortex.vllm_plugin.connector import KVortexConnector
from tests.gpu.watched_engine import WatchedEngine, watched


class WatchedConnector(KVortexConnector):
    """Its worker side knows how many blocks came back wrong."""

    watch: WatchedEngine

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        with watched(zeros=os.environ.get("KVORTEX_WATCH_ZEROS") == "1") as opened:
            super().register_kv_caches(kv_caches)
        (self.watch,) = opened

    def register_cross_layers_kv_cache(self, kv_cache: Any, attn_backend: Any) -> None:
        with watched(zeros=os.environ.get("KVORTEX_WATCH_ZEROS") == "1") as opened:
            super().register_cross_layers_kv_cache(kv_cache, attn_backend)
        (self.watch,) = opened


def read_watch(worker: Any) -> dict[str, int]:
    """For `LLM.collective_rpc`: what one worker has seen."""
    connector = get_kv_transfer_group()
    assert isinstance(connector, WatchedConnector), type(connector)
    return {"loaded": connector.watch.num_loaded, "wrong": connector.watch.num_wrong}

"""The entry point of group `vllm.general_plugins`: makes the connector's name known in every vLLM process."""

from __future__ import annotations

from kvortex.vllm_plugin.last_words import record_last_words
from kvortex.vllm_plugin.parent_watch import ignore_hangup

CONNECTOR_NAME = "KVortexConnector"


def register_connector() -> None:
    """Called by vLLM, perhaps several times in a process. Imports the connector only when vLLM makes one."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR_NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, "kvortex.vllm_plugin.connector", CONNECTOR_NAME)
    record_last_words()
    ignore_hangup()

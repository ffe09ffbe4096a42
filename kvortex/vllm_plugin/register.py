"""The entry point of group `vllm.general_plugins`: makes the connector's name known in every vLLM process."""

from __future__ import annotations

CONNECTOR_NAME = "KVortexConnector"


def register_connector() -> None:
    """Called by vLLM, perhaps several times in a process. Imports the connector only when vLLM makes one."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR_NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, "kvortex.vllm_plugin.connector", CONNECTOR_NAME)

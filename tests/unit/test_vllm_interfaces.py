"""Everything of vLLM that KVortex calls, overrides or reads, looked for in vLLM's own source.

Reads text only, so that it also runs over versions that cannot run here:

    VLLM_SOURCES=/path/to/unpacked/0.26:/path/to/unpacked/0.33 pytest tests/unit/test_vllm_interfaces.py
"""

from __future__ import annotations

import ast
import importlib.util
import os
from pathlib import Path

import pytest

CONNECTOR = Path(__file__).parents[2] / "kvortex/vllm_plugin/connector.py"
BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
BLOCK_POOL = "v1/core/block_pool.py"

CLASSES_AND_MEMBERS = [
    (BASE, "KVConnectorBase_V1", ["bind_gpu_block_pool", "has_pending_push_work", "build_connector_worker_meta"]),
    (BASE, "KVConnectorBase_V1", ["on_new_request"]),
    (BASE, "SupportsHMA", ["request_finished_all_groups"]),
    (BASE, "KVConnectorWorkerMetadata", ["aggregate"]),
    (BLOCK_POOL, "BlockHashToBlockMap", ["insert", "pop", "_cache", "get_one_block"]),
    (
        BLOCK_POOL,
        "BlockPool",
        [
            *("blocks", "num_gpu_blocks", "cached_block_hash_to_block", "hash_block_size", "get_num_free_blocks"),
            *("free_block_queue", "get_new_blocks", "touch", "free_blocks", "_insert_block_hash"),
        ],
    ),
    ("v1/core/kv_cache_utils.py", "KVCacheBlock", ["block_id", "ref_cnt", "is_null", "next_free_block", "block_hash"]),
    ("v1/core/kv_cache_utils.py", "FreeKVCacheBlockQueue", ["fake_free_list_head", "fake_free_list_tail"]),
    ("v1/kv_cache_interface.py", "FullAttentionSpec", []),
    ("v1/kv_cache_interface.py", "SlidingWindowSpec", ["sliding_window"]),
    ("v1/kv_cache_interface.py", "UniformTypeKVCacheSpecs", ["kv_cache_specs"]),
    ("v1/kv_cache_interface.py", "KVCacheTensor", ["size"]),
    ("distributed/kv_transfer/kv_connector/factory.py", "KVConnectorFactory", ["_registry", "register_connector"]),
    ("config/kv_transfer.py", "KVTransferConfig", ["engine_id", "kv_connector_extra_config", "kv_load_failure_policy"]),
    ("plugins/endpoint_plugins/interface.py", "EndpointPlugin", ["attach_router", "init_state", "required_tasks"]),
    ("entrypoints/cli/serve.py", "ServeSubcommand", ["subparser_init", "validate", "cmd"]),
    (
        "v1/request.py",
        "Request",
        [
            *("skip_reading_prefix_cache", "block_hashes", "cache_salt", "num_tokens", "num_preemptions", "request_id"),
            *("kv_transfer_params", "num_computed_tokens", "num_prompt_tokens"),
        ],
    ),
    ("v1/engine/async_llm.py", "AsyncLLM", ["is_sleeping"]),
    ("v1/engine/exceptions.py", "EngineDeadError", []),
]
FUNCTIONS = [
    ("v1/core/kv_cache_utils.py", "make_block_hash_with_group_id", ["block_hash", "group_id"]),
    ("v1/core/kv_cache_utils.py", "get_request_block_hasher", ["hash_block_size", "caching_hash_fn"]),
    ("utils/hashing.py", "get_hash_fn_by_name", ["hash_fn_name"]),
    ("v1/core/kv_cache_utils.py", "resolve_block_hashes", ["block_hashes", "hash_block_size", "block_size"]),
]


def sources() -> list[Path]:
    named = [Path(p) for p in os.environ.get("VLLM_SOURCES", "").split(":") if p]
    spec = importlib.util.find_spec("vllm")
    installed = [Path(spec.origin).parent] if spec is not None and spec.origin else []
    return [p / "vllm" if (p / "vllm").is_dir() else p for p in named] + installed


pytestmark = pytest.mark.skipif(not sources(), reason="vLLM is not installed and VLLM_SOURCES names no source")
every_source = pytest.mark.parametrize("source", sources(), ids=str)


def classes_of(path: Path) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)}


def names_in(node: ast.ClassDef) -> set[str]:
    """Methods, class attributes and attributes of self."""
    names = set()
    for child in ast.walk(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(child.name)
        elif isinstance(child, ast.Attribute):
            names.add(child.attr)
        elif isinstance(child, ast.Name):
            names.add(child.id)
    return names


@every_source
@pytest.mark.parametrize(
    ("path", "name", "members"), CLASSES_AND_MEMBERS, ids=lambda v: v if isinstance(v, str) else ""
)
def test_every_class_and_member_that_is_used_exists(source, path, name, members):
    node = classes_of(source / path)[name]
    assert set(members) <= names_in(node)


@every_source
@pytest.mark.parametrize(("path", "name", "parameters"), FUNCTIONS)
def test_every_function_that_is_called_takes_the_arguments_given(source, path, name, parameters):
    tree = ast.parse((source / path).read_text())
    function = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name)
    assert [a.arg for a in function.args.args][: len(parameters)] == parameters


@every_source
def test_every_hook_that_is_overridden_takes_what_vllm_passes(source):
    base = classes_of(source / BASE)
    ours = classes_of(CONNECTOR)["KVortexConnector"]
    hooks = {
        n.name: n
        for name in ("KVConnectorBase_V1", "SupportsHMA")
        for n in base[name].body
        if isinstance(n, ast.FunctionDef)
    }
    overridden = [n for n in ours.body if isinstance(n, ast.FunctionDef) and n.name in hooks]
    assert len(overridden) >= 18
    for method in overridden:
        given = [a.arg for a in hooks[method.name].args.args]
        assert [a.arg for a in method.args.args] == given, method.name


@every_source
def test_every_abstract_hook_is_there(source):
    ours = names_in(classes_of(CONNECTOR)["KVortexConnector"])
    for name in ("KVConnectorBase_V1", "SupportsHMA"):
        for node in classes_of(source / BASE)[name].body:
            abstract = isinstance(node, ast.FunctionDef) and any(
                isinstance(d, ast.Name) and d.id == "abstractmethod" for d in node.decorator_list
            )
            assert not abstract or node.name in ours, node.name

"""`kvortex bench serve`: multi-turn load on a running server."""

from __future__ import annotations

from typing import Annotated

import typer

from kvortex_cli.bench_load import (
    LOAD,
    MAX_FAILURES,
    REQUEST_TIMEOUT,
    Add,
    AsJson,
    Concurrency,
    Conversations,
    First,
    Gen,
    Html,
    MaxFailures,
    Timeout,
    Turns,
    Vocab,
    vocabulary,
)


def bench_serve(
    url: Annotated[str, typer.Option("--url", metavar="URL", help="The running server.")] = "http://localhost:8000",
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", envvar="VLLM_API_KEY", show_envvar=True, help="The key that /v1 asks for."),
    ] = None,
    conversations: Conversations = LOAD.conversations,
    turns: Turns = LOAD.turns,
    first: First = LOAD.first,
    add: Add = LOAD.add,
    gen: Gen = LOAD.gen,
    concurrency: Concurrency = LOAD.concurrency,
    seed: Annotated[
        int, typer.Option("--seed", help="Of all token ids. The server knows the prompts of an earlier run's seed.")
    ] = LOAD.seed,
    vocab: Vocab = None,
    timeout: Timeout = REQUEST_TIMEOUT,
    max_failures: MaxFailures = MAX_FAILURES,
    as_json: AsJson = False,
    html: Html = None,
) -> None:
    """Play conversations of many turns on a running server, and measure how it answers.

    All conversations take their first turn, then all their second, and so on; each turn's prompt is all that
    was said before and something new. Measured are the turns in which the conversation goes on.

    Example: kvortex bench serve --url http://localhost:8000 --conversations 20 --first 8192 --html result.html
    """
    import asyncio

    from kvortex.bench.compare import Limits
    from kvortex.bench.documents import ServeResult, conditions_now, serve_document
    from kvortex.bench.figures import measure
    from kvortex.bench.load import play
    from kvortex.bench.report import serve_report
    from kvortex.bench.request import Endpoint
    from kvortex.bench.server_facts import check_length, read_server_facts
    from kvortex.bench.workload import Workload
    from kvortex_cli.bench_load import check_writable, say, seconds, show
    from kvortex_cli.console import report

    timeout_s = seconds("--timeout", timeout)
    check_writable(html)
    base = url.rstrip("/").removesuffix("/v1")
    facts = read_server_facts(base, api_key)
    workload = Workload(
        conversations, turns, first, add, gen, concurrency, seed, vocabulary(vocab, facts.root or facts.model)
    )
    check_length(workload, facts.max_model_len)
    conditions = conditions_now(workload, Limits(timeout_s), max_failures)
    say(f"{facts.model}: {workload.conversations} conversations of {workload.turns} turns")
    played = asyncio.run(play(Endpoint(base, facts.model, api_key), workload, timeout_s=timeout_s, say=say))
    result = ServeResult(conditions, base, facts, measure(played))
    show(serve_report(result), serve_document(result), as_json=as_json, html=html)
    if result.failed:
        requests = result.measured.requests
        report("error", f"{requests.failed} of {requests.sent} requests failed")
        raise typer.Exit(1)

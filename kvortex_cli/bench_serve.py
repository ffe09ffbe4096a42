"""`kvortex bench serve`: multi-turn load on a running server."""

from __future__ import annotations

from typing import Annotated

import typer

from kvortex.bench.think import Think
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
)
from kvortex_cli.given import is_given, refuse_without


def bench_serve(
    ctx: typer.Context,
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
    think: Annotated[
        Think | None,
        typer.Option(
            "--think",
            help="Sessions of their own pace instead: people think about 20 s between turns, agents 1 to 5 s.",
        ),
    ] = None,
    rate: Annotated[
        float, typer.Option("--rate", min=1e-6, help="--think: sessions that begin a second, at random.")
    ] = 1.0,
    hint: Annotated[
        str | None,
        typer.Option(
            "--hint",
            metavar="DURATION",
            help="--think: each session is announced so long before it goes on, to prefetch.",
        ),
    ] = None,
    for_: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="DURATION",
            help="--think: no turn begins later than so long after the first; who would go on then is gone.",
        ),
    ] = None,
    ttft_goal: Annotated[
        str, typer.Option("--ttft-goal", metavar="DURATION", help="--think: goodput's limit to the first token.")
    ] = "1s",
    tpot_goal: Annotated[
        str, typer.Option("--tpot-goal", metavar="DURATION", help="--think: goodput's limit from token to token.")
    ] = "100ms",
    as_json: AsJson = False,
    html: Html = None,
) -> None:
    """Play conversations of many turns on a running server, and measure how it answers.

    All conversations take their first turn, then all their second, and so on; each turn's prompt is all that
    was said before and something new. Measured are the turns in which the conversation goes on.

    With --think, sessions begin at random and each goes on when its user has thought: an open load, in which a server
    that is too slow gets a queue. Then goodput is told too: the requests a second that met both limits.

    Example: kvortex bench serve --url http://localhost:8000 --conversations 20 --first 8192 --html result.html

    Example: kvortex bench serve --think mixed --rate 0.5 --conversations 200 --ttft-goal 500ms
    """
    import asyncio
    from dataclasses import replace

    from kvortex.bench.compare import Limits
    from kvortex.bench.documents import ServeResult, conditions_now, serve_document
    from kvortex.bench.figures import measure
    from kvortex.bench.load import play
    from kvortex.bench.report import serve_report
    from kvortex.bench.request import Endpoint
    from kvortex.bench.server_facts import check_length, read_server_facts
    from kvortex.bench.session_figures import Goal, measure_sessions
    from kvortex.bench.session_load import SessionLoad, play_sessions
    from kvortex.bench.vocabulary import vocabulary_of_model
    from kvortex.bench.workload import Workload
    from kvortex.sizes import counted
    from kvortex_cli.bench_load import asked_vocabulary, check_writable, say, seconds, show
    from kvortex_cli.console import report

    _check_options(ctx, is_open_load=think is not None)
    vocabulary = asked_vocabulary(vocab)
    timeout_s = seconds("--timeout", timeout)
    hint_s = None if hint is None else seconds("--hint", hint)
    for_s = None if for_ is None else seconds("--for", for_)
    goal = Goal(seconds("--ttft-goal", ttft_goal), seconds("--tpot-goal", tpot_goal))
    check_writable(html)
    base = url.rstrip("/").removesuffix("/v1")
    facts = read_server_facts(base, api_key)
    vocabulary = vocabulary or vocabulary_of_model(facts.root or facts.model)
    workload = Workload(conversations, turns, first, add, gen, concurrency, seed, vocabulary)
    if think is not None:
        workload = replace(workload, concurrency=workload.conversations)  # an open load: nothing bounds it
    check_length(workload, facts.max_model_len)
    conditions = conditions_now(workload, Limits(timeout_s), max_failures)
    talks, each = counted(conversations, "conversation"), counted(turns, "turn")
    say(f"{facts.model}: {talks} of {each}")
    endpoint = Endpoint(base, facts.model, api_key)
    if think is None:
        played = asyncio.run(play(endpoint, workload, timeout_s=timeout_s, say=say))
        result = ServeResult(conditions, base, facts, measure(played))
    else:
        load = SessionLoad(workload, think, rate, hint_s, for_s)
        sessions = asyncio.run(play_sessions(endpoint, load, timeout_s=timeout_s, say=say))
        result = ServeResult(conditions, base, facts, *measure_sessions(sessions, goal))
    show(serve_report(result), serve_document(result), as_json=as_json, html=html)
    if result.failed:
        requests = result.measured.requests
        report("error", f"{requests.failed:,} of {counted(requests.sent, 'request')} failed")
        raise typer.Exit(1)


def _check_options(ctx: typer.Context, *, is_open_load: bool) -> None:
    from kvortex.errors import UsageError

    if not is_open_load:
        refuse_without(ctx, ["--rate", "--hint", "--for", "--ttft-goal", "--tpot-goal"], "--think")
    elif is_given(ctx, "--concurrency"):
        hint = "sessions begin at --rate, however many are being answered"
        raise UsageError("--concurrency does not go with --think", hint=hint)

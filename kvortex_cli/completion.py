"""What the shell completes beyond KVortex's own options: vLLM's options, and the settings of `--set`."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

# The one setting that has no default; the value is one that fits every machine.
_RAM_CACHE_SIZE = "50%"


class TakesVllmOptions(TyperCommand):
    """A command that also takes the options of `vllm serve`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # While a line is being completed, an option may still be without its value.
        return super().parse_args(ctx, [] if ctx.resilient_parsing else self.own_arguments(ctx, args))

    def own_arguments(self, ctx: Any, args: list[str]) -> list[str]:
        """What of `args` is not vLLM's; keeps the rest in `ctx.meta`."""
        raise NotImplementedError

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        own = super().shell_complete(ctx, incomplete)
        if not incomplete.startswith("--"):
            return own
        from kvortex.config.vllm_options import Kind, vllm_options

        # Typer carries click's type of item under different names over its versions.
        item = type(super().shell_complete(ctx, "--")[0])
        known = {completed.value for completed in own}
        flags = [option.flag for option in vllm_options()]
        flags += [option.no_flag for option in vllm_options() if option.kind is Kind.SWITCH]
        return own + [item(flag) for flag in flags if flag.startswith(incomplete) and flag not in known]


def complete_setting(incomplete: str) -> list[str]:
    """`kv_cache.num_streams=4`: the settings that `--set` takes, with their defaults."""
    from kvortex.config.settings import KVCacheSettings, shown
    from kvortex.config.sources import SECTION

    settings = []
    for key, field in KVCacheSettings.model_fields.items():
        if field.is_required():
            value = _RAM_CACHE_SIZE
        else:
            value = "null" if field.default is None else shown(key, field.default).replace(" ", "")
        settings.append(f"{SECTION}.{key}={value}")
    return [setting for setting in settings if setting.startswith(incomplete)]

"""KVortex: cold KV cache blocks in host RAM, back in VRAM when the conversation goes on."""

__version__ = "0.1.0.dev0"

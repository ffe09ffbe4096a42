"""A folder that a vLLM server takes for a model: a Llama shape without weights, and a tokenizer of one word a token.

    python benchmarks/dummy_model.py FOLDER --shape 8b
    kvortex bench compare FOLDER --load-format dummy --kv-cache-memory-bytes 24000000000 ...

For measuring servers over HTTP where no weights are to be had: what a model says does not change what its KV costs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dummy_engine import LLAMA, SHAPES
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def make_model(folder: Path, shape: str, layers: int | None = None) -> Path:
    """Writes `config.json` and the tokenizer's files; `layers` None keeps the shape's own."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**LLAMA, **SHAPES[shape]}
    if layers is not None:
        config["num_hidden_layers"] = layers
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    words = {f"w{token}": token for token in range(int(config["vocab_size"]))}  # type: ignore[call-overload]
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", bos_token="w1", eos_token="w2")
    fast.save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--layers", type=int, help="instead of the shape's own")
    options = parser.parse_args()
    print(make_model(options.folder, options.shape, options.layers))


if __name__ == "__main__":
    main()

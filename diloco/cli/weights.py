"""The commands that take weights out of a run: export, evaluate, generate. cli.py registers them; no torch here."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Stored(StrEnum):
    """What written weights can be."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class On(StrEnum):
    """Where to compute."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


Source = Annotated[
    Path, typer.Argument(metavar="RUN_DIR|EXPORT", help="A run's folder, or one that export has written.")
]
Island = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Whose copy of the run's global params; default: the first that is whole."),
]
Device = Annotated[On, typer.Option(help="Where to compute.")]


def export(
    source: Source,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; it must not exist.")],
    dtype: Annotated[Stored, typer.Option(help="Of the written weights.")] = Stored.float32,
    island: Island = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an export that is there.")] = False,
) -> None:
    """Write a run's global params as Hugging Face has models: safetensors, config.json, tokenizer.

    transformers loads it as a Llama (with model.qk_norm as a Qwen3) without code of ours; model.init_from=OUT begins a
    run with it.
    """
    from diloco.weights import open_weights
    from inner.huggingface.files import weights_files, weights_sha256
    from inner.huggingface.save import Export, check_target, save_model

    check_target(out.absolute(), overwrite=overwrite)
    weights = open_weights(source, island)
    wanted = Export(weights.sizes, weights.seq_len, weights.tokenizer, dtype.value)
    save_model(weights.tensors, wanted, out, overwrite=overwrite)
    num_params = sum(tensor.numel() for tensor in weights.tensors.values())
    typer.echo(f"{out}: {num_params:,} parameters as {dtype.value} in {len(weights_files(out))} file(s)")
    typer.echo(f"sha256 {weights_sha256(out)}")


def evaluate(
    source: Source,
    data: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DATA ...]",
            help="Text, .jsonl or .parquet: files, folders, patterns; default: the run's held-out text.",
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="At most about so many; default: all of DATA, or the run's evaluate.tokens."),
    ] = None,
    island: Island = None,
    device: Device = On.auto,
) -> None:
    """Print the loss of a run's global params, or of an exported model, on text: nats a token and bits per byte."""
    from diloco import weights as library
    from diloco.assemble import device_of
    from diloco.config import IslandConfig

    where = device_of(IslandConfig.model_validate({"device": device.value}))
    weights = library.open_weights(source, island)
    if data:
        corpus = library.text_in(data, weights, tokens)
        num_tokens = tokens or library.heldout_tokens(corpus)
    else:
        corpus = library.heldout_text(weights)
        num_tokens = tokens or (
            weights.run.evaluate.tokens if weights.run is not None else library.heldout_tokens(corpus)
        )
    found = library.evaluate(weights, corpus, num_tokens, where)
    text = ", ".join(data) if data else "the run's held-out text"
    typer.echo(f"loss           {found.loss:.4f} nats a token")
    typer.echo(f"bits per byte  {found.bits_per_byte:.4f}")
    typer.echo(f"tokens         {found.tokens:,} of {text}")


def generate(
    source: Source,
    prompt: Annotated[str, typer.Option(help="What to continue; default: the beginning of a document.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest text, in tokens.")] = 200,
    temperature: Annotated[float, typer.Option(help="0: always the best token; below 1 safer, above 1 wilder.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k best tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the best tokens that have this probability.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed draws the same text.")] = 0,
    count: Annotated[int, typer.Option(min=1, help="So many texts, of seed, seed + 1, ...")] = 1,
    island: Island = None,
    device: Device = On.auto,
) -> None:
    """Let a run's global params, or an exported model, write text; it is printed as it comes."""
    from diloco import weights as library
    from diloco.assemble import device_of
    from diloco.config import IslandConfig
    from inner.generate import Sampling

    wanted = library.Wanted(prompt, max_tokens, Sampling(temperature, top_k, top_p), seed)
    where = device_of(IslandConfig.model_validate({"device": device.value}))
    weights = library.open_weights(source, island)
    if max_tokens > weights.seq_len:
        typer.echo(f"note: it was trained on sequences of {weights.seq_len} tokens; longer text gets worse", err=True)
    for number, pieces in enumerate(library.write_text(weights, wanted, count, where)):
        if count > 1:
            typer.echo(f"--- seed {seed + number}")
        typer.echo(prompt, nl=False)
        for piece in pieces:
            typer.echo(piece, nl=False)
        typer.echo()

"""The commands that use the weights of a run: export, evaluate, generate. Importing this does not
import torch.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from diloco.checkpoints.weights import Weights

WeightsSource = Annotated[
    Path,
    typer.Argument(
        metavar="RUN_DIR|EXPORT", help="Folder of a run, or of a model written by `diloco export`."
    ),
]
Island = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Island whose checkpoint to read (default: the island with the latest round).",
    ),
]
RunKeyFile = Annotated[
    Path | None,
    typer.Option(
        help="The run key with which the checkpoint is signed (default: as in the run's "
        "config.yaml)."
    ),
]
AcceptUnsigned = Annotated[
    bool,
    typer.Option(
        "--accept-unsigned", help="Read the checkpoint even if it is not signed with the run key."
    ),
]
AllowImport = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATH", help="Own code in the run's config that may be imported (repeatable)."
    ),
]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Device to compute on.")]


def export(
    source: WeightsSource,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; it must not exist.")],
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Data type of the written weights.")
    ] = "float32",
    island: Island = None,
    run_key_file: RunKeyFile = None,
    accept_unsigned: AcceptUnsigned = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing export.")
    ] = False,
) -> None:
    """Export a run's global params as a Hugging Face model: safetensors, config.json, tokenizer.

    transformers loads it as a Llama (with model.qk_norm as a Qwen3, with model.qkv_bias as a
    Qwen2, with model.experts as a Mixtral, OLMoE, Qwen3-MoE or DeepSeek-V3, with model.decoder as
    the type that computes it), without any code of
    this project. A run with model.init_from=OUT starts from it.
    """
    from diloco.checkpoints.signing import SignatureOptions
    from diloco.checkpoints.weights import open_weights
    from inner.huggingface.files import weights_files, weights_sha256
    from inner.huggingface.save import check_target, save_model
    from inner.measure.param_specs import num_elements, param_specs

    check_target(out.absolute(), overwrite=overwrite)
    weights = open_weights(source, island, SignatureOptions(run_key_file, accept_unsigned))
    save_model(weights.tensors, weights.export(dtype), out, overwrite=overwrite)
    if weights.stop_text is not None:
        text = (
            f"its tokenizer has no token {weights.stop_text}: programs that use the model must "
            "stop at this text"
        )
        typer.echo(f"note: {text}", err=True)
    num_params = num_elements(param_specs(weights.sizes))
    typer.echo(f"{out}: {num_params:,} parameters as {dtype} in {len(weights_files(out))} file(s)")
    typer.echo(f"sha256 {weights_sha256(out)}")


def evaluate(
    source: WeightsSource,
    data: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DATA ...]",
            help="Text, .jsonl, .parquet or .tar files, folders or patterns (default: the run's "
            "held-out text).",
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens to read, approximately (default: all of DATA, or the run's "
            "evaluate.tokens).",
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help="Tasks of lm-eval to run, as hellaswag,arc_easy (extra: eval)."
        ),
    ] = None,
    task_folder: Annotated[
        Path | None, typer.Option(help="With --tasks: folder with YAML files of own tasks.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="With --tasks: most examples per task.")
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Tokens per window (default: the run's data.seq_len; for an export its longest, "
            "at most 4096).",
        ),
    ] = None,
    island: Island = None,
    run_key_file: RunKeyFile = None,
    accept_unsigned: AcceptUnsigned = False,
    allow_import: AllowImport = None,
    device: Device = "auto",
) -> None:
    """Print the loss of a run's global params or of an exported model, in nats per token and bits
    per byte.
    """
    from diloco.checkpoints import weights as library
    from diloco.checkpoints.signing import SignatureOptions
    from diloco.config.schema import IslandConfig
    from diloco.runtime.process_group import pick_device

    torch_device = pick_device(IslandConfig(device=device))
    if tasks:
        from diloco.checkpoints.tasks import check_harness

        check_harness()
    weights = library.open_weights(source, island, SignatureOptions(run_key_file, accept_unsigned))
    if tasks:
        print_tasks(weights, tasks.split(","), task_folder, limit, torch_device)
        return
    if data:
        corpus = library.load_text(data, weights, tokens)
    else:
        corpus = library.load_heldout_text(weights, allow_import or [])
        tokens = tokens or (weights.run.evaluate.tokens if weights.run is not None else None)
    result = library.evaluate(weights, corpus, tokens, torch_device, seq_len)
    text = ", ".join(data) if data else "the run's held-out text"
    typer.echo(f"loss           {result.loss:.4f} nats per token")
    typer.echo(f"bits per byte  {result.bits_per_byte:.4f}")
    typer.echo(f"tokens         {result.tokens:,} of {text}")


def print_tasks(
    weights: "Weights", tasks: list[str], task_folder: Path | None, limit: int | None, device: str
) -> None:
    """Print one line for each figure of each task. Raises InputError."""
    from tempfile import TemporaryDirectory

    from diloco.checkpoints.tasks import TaskRequest, evaluate_tasks

    with TemporaryDirectory() as folder:
        scores = evaluate_tasks(
            weights, TaskRequest(tasks, task_folder, limit), device, Path(folder) / "export"
        )
    for score in scores:
        error = "" if score.error is None else f"  +- {score.error:.4f}"
        typer.echo(f"{score.task}  {score.metric}  {score.value:.4f}{error}")


def generate(
    source: WeightsSource,
    prompt: Annotated[
        str, typer.Option(help="Text to continue (default: start a new document).")
    ] = "",
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum number of tokens to generate.")
    ] = 200,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature; 0 always picks the most probable token.")
    ] = 1.0,
    top_k: Annotated[
        int | None, typer.Option(help="Sample from the k most probable tokens only.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Sample from the most probable tokens with this total probability only."),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Sampling seed: the same seed generates the same text.")
    ] = 0,
    count: Annotated[
        int, typer.Option(min=1, help="Number of texts, with the seeds seed, seed + 1, ...")
    ] = 1,
    island: Island = None,
    run_key_file: RunKeyFile = None,
    accept_unsigned: AcceptUnsigned = False,
    device: Device = "auto",
) -> None:
    """Generate text with a run's global params or an exported model, and print it token by
    token.
    """
    from diloco.checkpoints import weights as library
    from diloco.checkpoints.signing import SignatureOptions
    from diloco.config.schema import IslandConfig
    from diloco.runtime.process_group import pick_device
    from inner.model.generate import Sampling

    request = library.GenerateRequest(prompt, max_tokens, Sampling(temperature, top_k, top_p), seed)
    torch_device = pick_device(IslandConfig(device=device))
    weights = library.open_weights(source, island, SignatureOptions(run_key_file, accept_unsigned))
    if max_tokens > weights.seq_len:
        text = (
            f"note: the model is for sequences of {weights.seq_len} tokens; the quality of "
            "longer text is worse"
        )
        typer.echo(text, err=True)
    for number, pieces in enumerate(library.generate_texts(weights, request, count, torch_device)):
        if count > 1:
            typer.echo(f"--- seed {seed + number}")
        typer.echo(prompt, nl=False)
        for piece in pieces:
            typer.echo(piece, nl=False)
        typer.echo()

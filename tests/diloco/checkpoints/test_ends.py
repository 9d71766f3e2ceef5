"""How texts begin and end, and how long they may be: in a run, in its export, and in what is
generated.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner

from diloco.checkpoints.weights import Weights, load_text, open_weights, weights_of_run
from diloco.cli.main import app
from diloco.config.schema import parse_config
from inner.huggingface.save import save_model
from inner.model.generate import pieces_of_text, until
from inner.model.sizes import ModelSizes, resolve_sizes
from tests.inner.folders import change_config, spread_model, tensors_of, write_folder

NAMES = ["<|endoftext|>", "<s>", "<|im_end|>", "<|im_start|>", "</s>", "<|eot_id|>"]
FIRST = 256
SPECIAL = {name: FIRST + number for number, name in enumerate(NAMES)}
SMALL = {"dim": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 16}
CHAT = ("data.source=files", "data.format=chat", "data.seq_len=64")


def write_tokenizer(folder: Path, **config: object) -> Path:
    """Bytes and special tokens, with a tokenizer_config.json if there is something in it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(
        models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[])
    )
    made.pre_tokenizer, made.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    made.add_special_tokens([AddedToken(name) for name in NAMES])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def run_of(*settings: str, **model: Any) -> Weights:
    """The weights of a run, as its checkpoint gives them."""
    config = parse_config(json.dumps({"model": SMALL | model}), settings)
    vocab_size = 260 if config.data.tokenizer == "bytes" else FIRST + len(NAMES)
    tensors = tensors_of(spread_model(resolve_sizes(config.model, vocab_size)))
    return weights_of_run(config.run, config.island, tensors, Path("a run"))


def read(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / name).read_text())


def export(weights: Weights, out: Path) -> Path:
    save_model(weights.tensors, weights.export(), out)
    return out


@pytest.mark.parametrize("template, end", [("chatml", "<|im_end|>"), ("llama3", "<|eot_id|>")])
def test_an_exported_chat_ends_with_the_end_of_a_message_that_was_learned(
    tmp_path: Path, template: str, end: str
):
    tokenizer = write_tokenizer(tmp_path / "t", eos_token="<|endoftext|>")
    out = export(
        run_of(*CHAT, f"data.tokenizer={tokenizer}", f"data.chat_template={template}"),
        tmp_path / "out",
    )
    for name in ("config.json", "generation_config.json"):
        assert read(out, name)["eos_token_id"] == [SPECIAL[end], SPECIAL["<|endoftext|>"]]
    assert open_weights(out).stop_ids == (SPECIAL[end], SPECIAL["<|endoftext|>"])


def test_a_text_model_ends_with_eos_alone(tmp_path: Path):
    tokenizer = write_tokenizer(tmp_path / "t", eos_token="</s>")
    out = export(run_of(f"data.tokenizer={tokenizer}"), tmp_path / "out")
    assert read(out, "generation_config.json")["eos_token_id"] == SPECIAL["</s>"]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model for long texts, with a bos, as others give it away."""
    sizes = ModelSizes(vocab_size=FIRST + len(NAMES), **SMALL)
    tokenizer = write_tokenizer(tmp_path / "t", eos_token="<|endoftext|>")
    folder = write_folder(tmp_path / "base", spread_model(sizes), tokenizer=str(tokenizer))
    change_config(folder, max_position_embeddings=131072, bos_token_id=SPECIAL["<s>"])
    return folder


def test_an_export_keeps_bos_and_length_of_the_model_that_the_run_began_from(
    tmp_path: Path, base: Path
):
    weights = run_of(*CHAT, f"data.tokenizer={base}", init_from=str(base))
    config = read(export(weights, tmp_path / "out"), "config.json")
    assert (config["max_position_embeddings"], config["bos_token_id"]) == (131072, SPECIAL["<s>"])
    assert weights.window == 64, "it is evaluated by the sequences of its training"
    assert open_weights(tmp_path / "out").window == 4096


def test_a_run_on_longer_sequences_than_its_beginning_is_for_those(base: Path):
    change_config(base, max_position_embeddings=16)
    assert run_of(*CHAT, f"data.tokenizer={base}", init_from=str(base)).seq_len == 64


def test_an_export_without_the_folder_that_the_run_began_from_is_possible(tmp_path: Path, caplog):
    weights = run_of(
        *CHAT, f"data.tokenizer={write_tokenizer(tmp_path)}", init_from=str(tmp_path / "gone")
    )
    assert weights.seq_len == 64 and "config.json: cannot be read" in caplog.text


def test_an_islands_own_folder_of_the_first_weights_counts(tmp_path: Path, base: Path):
    moved = base.rename(tmp_path / "moved")
    settings = [*CHAT, f"data.tokenizer={moved}", f"island.init_from={moved}"]
    assert run_of(*settings, init_from=str(base)).seq_len == 131072


def test_generation_stops_where_a_message_ends(tmp_path: Path):
    weights = run_of(*CHAT, f"data.tokenizer={write_tokenizer(tmp_path)}")
    tokenizer = weights.encoder()
    stream = iter(
        [
            *map(int, tokenizer.encode("yes")),
            SPECIAL["<|im_end|>"],
            *map(int, tokenizer.encode("no")),
        ]
    )
    assert "".join(pieces_of_text(stream, tokenizer, weights.stop_ids)) == "yes"


@pytest.mark.parametrize(
    "pieces", [["yes<|im_end|>no"], ["yes", "<|im", "_end", "|>no"], [*"yes<|im_end|>no"]]
)
def test_generation_stops_at_the_text_of_a_marker_that_is_no_token(pieces: list[str]):
    assert run_of(*CHAT, "data.tokenizer=bytes").stop_text == "<|im_end|>"
    assert "".join(until(iter(pieces), "<|im_end|>")) == "yes"


def test_what_only_begins_as_the_end_is_given_out():
    assert "".join(until(iter(["a<|im", "_x", "<<|", ""]), "<|im_end|>")) == "a<|im_x<<|"


@pytest.mark.parametrize("bos", [None, "<s>"])
def test_generation_and_evaluation_begin_as_training_did(tmp_path: Path, bos: str | None):
    (tmp_path / "text.txt").write_text("ab")
    names = [f"data.tokenizer={write_tokenizer(tmp_path / 't')}", "data.eos=</s>"]
    weights = run_of(*names, *([] if bos is None else [f"data.bos={bos}"]))
    ab, end = weights.encoder().encode("ab").tolist(), SPECIAL["</s>"]
    corpus = load_text([str(tmp_path / "text.txt")], weights, None)
    assert corpus.texts[0].heldout[:].tolist() == [
        *([] if bos is None else [SPECIAL[bos]]),
        *ab,
        end,
    ]
    assert weights.prompt("ab") == [SPECIAL[bos or "</s>"], *ab]


def test_an_export_is_read_again_with_the_eos_and_bos_of_its_training(tmp_path: Path):
    tokenizer = write_tokenizer(tmp_path / "t", eos_token="<|endoftext|>", kept="yes")
    out = export(
        run_of(f"data.tokenizer={tokenizer}", "data.eos=</s>", "data.bos=<s>"), tmp_path / "out"
    )
    told = read(out, "tokenizer_config.json")
    assert told == {"eos_token": "</s>", "kept": "yes", "bos_token": "<s>", "add_bos_token": True}
    assert open_weights(out).prompt("") == [SPECIAL["<s>"]]
    config = read(out, "config.json")
    assert (config["bos_token_id"], config["eos_token_id"]) == (SPECIAL["<s>"], SPECIAL["</s>"])


def test_the_windows_of_an_evaluation_may_be_given(tmp_path: Path, base: Path):
    (tmp_path / "text.txt").write_text("the quick brown fox " * 30)
    command = ["evaluate", str(base), str(tmp_path / "text.txt"), "--device", "cpu"]
    by_default = CliRunner().invoke(app, command, catch_exceptions=False).stdout
    short = CliRunner().invoke(app, [*command, "--seq-len", "100"], catch_exceptions=False).stdout
    assert "tokens         600 of" in by_default and "tokens         600 of" in short
    assert by_default.splitlines()[0] != short.splitlines()[0], "longer windows have other losses"

"""What is exported, in the hands of transformers; what transformers has saved, in ours."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file
from tokenizers import AddedToken, models, pre_tokenizers

from inner.data.tokenizer import BytesTokenizer, build_tokenizer
from inner.huggingface.load import read_whole
from inner.huggingface.model_config import read_model_config
from inner.huggingface.save import Export, save_model
from inner.measure.param_specs import param_specs
from inner.model.single_process import build_whole_model
from inner.model.sizes import resolve_sizes
from tests.inner.folders import BYTE_SIZES, spread_model, write_folder

pytestmark = pytest.mark.slow
TEXT = "h\u00e9llo  w\u00f6rld\n\t\x00 don't \U0001f600 \u4e16\u754c <|end_of_text|>\r\n"


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    """Imported when a test asks for it: it takes seconds."""
    import transformers

    return transformers


def tokens() -> torch.Tensor:
    return torch.randint(0, 260, (2, 32), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("qk_norm", "tied", "kv_heads"),
    [(False, False, 2), (False, True, 4), (True, False, 1), (True, True, 2)],
)
def test_an_export_gives_the_same_logits_in_transformers(
    transformers, tmp_path, qk_norm, tied, kv_heads
):
    sizes = replace(
        BYTE_SIZES,
        qk_norm=qk_norm,
        tie_embeddings=tied,
        num_kv_heads=kv_heads,
        rope_theta=700.0,
        norm_eps=1e-3,
    )
    ours = spread_model(sizes)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(write_folder(tmp_path / "out", ours))
    assert type(theirs) is (
        transformers.Qwen3ForCausalLM if qk_norm else transformers.LlamaForCausalLM
    )
    with torch.no_grad():
        assert (ours(tokens()) - theirs(tokens()).logits).abs().max() < 1e-5


def test_an_export_in_several_files_loads_in_transformers(transformers, tmp_path):
    ours = spread_model()
    folder = write_folder(tmp_path / "out", ours, shard_bytes=20_000)
    assert (
        len(list(folder.glob("model-*.safetensors"))) > 2
        and (folder / "model.safetensors.index.json").exists()
    )
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)(tokens()).logits
    assert (ours(tokens()) - theirs).abs().max() < 1e-5


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama 3.1": {
        "model_type": "llama", "rope_theta": 500000.0,
        "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 12}
    },
    "llama 3.2": {
        "model_type": "llama", "tie_word_embeddings": True,
        "rope_scaling": LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 24},
    },
    "smollm": {"model_type": "llama", "tie_word_embeddings": True, "rope_theta": 10000.0,
    "num_attention_heads": 6},
    "mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 12,
    "rms_norm_eps": 1e-5},
    "qwen2.5": {"model_type": "qwen2", "rope_theta": 1000000.0, "tie_word_embeddings": True},
    "qwen2.5 with yarn": {
        "model_type": "qwen2", "rope_scaling": {"type": "yarn", "factor": 4.0,
        "original_max_position_embeddings": 16}
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "rope_theta": 1000000.0,
    "tie_word_embeddings": True},
    "linear": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.5}},
    "dynamic": {
        "model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 3.0},
        "max_position_embeddings": 20
    },
    "yarn": {
        "model_type": "mistral", "sliding_window": None,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
        "beta_fast": 4.0,
                         "beta_slow": 0.5, "attention_factor": 1.3},
    },
}  # fmt: skip
"""What distinguishes a config.json of each family, at a tiny size. Sequences are of 32 tokens."""


def make_folder(transformers: ModuleType, out: Path, **keys: Any) -> Any:
    """A model of transformers, saved in `out`, in which every weight matters, those of biases and
    norms too.
    """
    common = {
        "vocab_size": 61, "hidden_size": 48, "intermediate_size": 50, "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**common | keys)
    ).eval()
    with torch.no_grad():
        for param in theirs.parameters():
            param.add_(0.1 * torch.randn(param.shape))
    theirs.save_pretrained(out)
    return theirs


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_transformers_saved_gives_the_same_logits_here(transformers, tmp_path, family):
    theirs = make_folder(transformers, tmp_path, **FAMILIES[family])
    sizes = resolve_sizes(read_model_config(tmp_path), 0)
    ours = build_whole_model(sizes, read_whole(tmp_path, param_specs(sizes), sizes), 32, "cpu")
    with torch.no_grad():
        assert (ours(tokens() % 61) - theirs(tokens() % 61).logits).abs().max() < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_saved_comes_back_as_the_same_model_with_the_same_bytes(
    transformers, tmp_path, family
):
    theirs = make_folder(transformers, tmp_path / "theirs", **FAMILIES[family])
    sizes = resolve_sizes(read_model_config(tmp_path / "theirs"), 0)
    weights = read_whole(tmp_path / "theirs", param_specs(sizes), sizes)
    save_model(weights, Export(sizes, 32, "bytes"), tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    stored, returned = (
        load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours")
    )
    assert stored.keys() == returned.keys()
    assert all(
        stored[name].numpy().tobytes() == returned[name].numpy().tobytes() for name in stored
    )
    with torch.no_grad():
        assert torch.equal(again(tokens() % 61).logits, theirs(tokens() % 61).logits)
    if "mistral" not in FAMILIES[family].values():  # A Mistral without a window is a Llama.
        assert type(again) is type(theirs)


def test_the_sizes_of_a_folder_are_read_whatever_the_family(transformers, tmp_path):
    make_folder(transformers, tmp_path, **FAMILIES["llama 3.2"])
    sizes = resolve_sizes(read_model_config(tmp_path), 0)
    assert (sizes.norm_eps, sizes.tie_embeddings, sizes.own_head_dim) == (1e-6, True, None)
    assert sizes.rope_scaling is not None and sizes.rope_scaling.original_length == 24


def test_the_byte_tokenizer_has_the_same_ids_in_transformers_and_as_a_file_here(
    transformers, tmp_path
):
    folder = write_folder(tmp_path / "out", spread_model())
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), BytesTokenizer()
    every = "".join(chr(code) for code in (*range(0x300), *range(0x2000, 0x2100)))
    for text in (TEXT, every, ""):
        expected = list(ours.encode(text))
        assert theirs.encode(text) == expected
        assert list(build_tokenizer(str(folder)).encode(text)) == expected
        assert theirs.decode(expected) == text
    assert (theirs.bos_token_id, theirs.eos_token_id, len(theirs)) == (
        ours.bos_id,
        ours.eos_id,
        ours.vocab_size,
    )


def word_tokenizer(path: Path) -> None:
    """A tokenizer.json whose tokens are words."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer.save(str(path))


def test_a_tokenizer_of_the_library_is_exported_with_what_lies_beside_it(transformers, tmp_path):
    word_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    folder = write_folder(
        tmp_path / "out", spread_model(), tokenizer=str(tmp_path / "tokenizer.json")
    )
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs.encode("b a c") == list(build_tokenizer(str(folder)).encode("b a c")) == [1, 0, 2]
    assert theirs.eos_token == "</s>" and theirs.eos_token_id == 3
    assert theirs.chat_template == "{{ messages }}"

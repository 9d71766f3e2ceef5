"""Text generation: the cache changes nothing, seeds decide the text, and pieces end with
characters.
"""

from dataclasses import replace

import pytest
import torch

from inner.data.tokenizer import BytesTokenizer
from inner.errors import InputError
from inner.model.generate import (
    KeyValueCache,
    Sampling,
    draw,
    generate,
    last_logits,
    pieces_of_text,
)
from tests.inner.folders import BYTE_SIZES, spread_model

GREEDY = Sampling(temperature=0)
PROMPT = [257, 104, 105]


def ids(sampling: Sampling, seed: int = 0, max_tokens: int = 24) -> list[int]:
    model = spread_model()
    return list(generate(model, PROMPT, max_tokens, sampling, torch.Generator().manual_seed(seed)))


def draws(sampling: Sampling, scores: list[float], count: int = 200) -> set[int]:
    generator = torch.Generator().manual_seed(0)
    return {draw(torch.tensor(scores), sampling, generator) for _ in range(count)}


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_scores_with_a_cache_are_those_without(kv_heads):
    model = spread_model(replace(BYTE_SIZES, num_kv_heads=kv_heads))
    tokens_BS = torch.randint(0, 260, (2, 20), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        whole_BSV = model(tokens_BS)
        for layer in model.blocks():
            layer.attention.attend = KeyValueCache(20)
        found = [last_logits(model, tokens_BS[:, :7], 0)]
        found += [last_logits(model, tokens_BS[:, at : at + 1], at) for at in range(7, 20)]
    assert torch.allclose(torch.stack(found, dim=1), whole_BSV[:, 6:], atol=1e-5)


def test_greedy_with_a_cache_equals_greedy_without():
    model, tokens = spread_model(), list(PROMPT)
    with torch.no_grad():
        for _ in range(24):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    assert ids(GREEDY) == tokens[len(PROMPT) :]


def test_the_model_is_as_it_was_afterwards():
    model = spread_model()
    before = model(torch.tensor([PROMPT]))
    texts = [list(generate(model, PROMPT, 5, GREEDY, torch.Generator())) for _ in range(2)]
    assert texts[0] == texts[1]
    assert torch.equal(model(torch.tensor([PROMPT])), before)


def test_a_seed_decides_the_text():
    assert ids(Sampling(), seed=1) == ids(Sampling(), seed=1) != ids(Sampling(), seed=2)
    assert ids(GREEDY, seed=1) == ids(GREEDY, seed=2)


def test_the_narrowest_choices_are_greedy():
    for sampling in (Sampling(top_k=1), Sampling(top_p=1e-6), Sampling(temperature=1e-30)):
        assert ids(sampling) == ids(GREEDY)


def test_top_k_and_top_p_keep_the_best():
    log_probs = torch.tensor([0.1, 0.5, 0.15, 0.25]).log().tolist()
    assert draws(Sampling(), log_probs) == {0, 1, 2, 3}
    assert draws(Sampling(top_k=2), log_probs) == {1, 3}
    assert draws(Sampling(top_p=0.4), log_probs) == {1}
    assert draws(Sampling(top_p=0.8), log_probs) == {1, 2, 3}
    # Of the two remaining tokens, the better one has probability 2/3.
    assert draws(Sampling(top_k=2, top_p=0.6), log_probs) == {1}


def test_temperature_divides_the_scores():
    generator = torch.Generator().manual_seed(0)
    scores = torch.tensor([1.0, 0.0])
    share = sum(draw(scores, Sampling(temperature=0.5), generator) == 0 for _ in range(2000)) / 2000
    assert share == pytest.approx(torch.tensor([2.0, 0.0]).softmax(0)[0].item(), abs=0.03)


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": 0.0}]
)
def test_a_sampling_that_means_nothing_is_refused(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        Sampling(**wrong)


def test_pieces_end_where_characters_do_and_text_ends_at_eos():
    tokenizer = BytesTokenizer()
    text = "a\u00e9\u4e16\U0001f600b"
    stream = [*map(int, tokenizer.encode(text)), tokenizer.eos_id, 120]
    assert list(pieces_of_text(iter(stream), tokenizer)) == list(text)
    broken = [104, 0xF0, 0x9F, 104, 0xF0]
    assert (
        "".join(pieces_of_text(iter(broken), tokenizer))
        == tokenizer.decode(broken)
        == "h\ufffdh\ufffd"
    )

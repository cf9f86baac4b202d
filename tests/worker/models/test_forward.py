"""The forward pass over the real context equals a plain forward in float64, however the work is cut up.

Largest absolute differences seen: 1.7e-5 for the tiny models (logits up to 7), 5e-5 for SmolLM2 in float32 (up to 33).
"""

from pathlib import Path

import pytest
import torch

from serving.model_files import resolve_model
from serving.tokenizer import Tokenizer
from worker.loading import Loaded
from worker.models import Model, load_model

from .reference import Reference, reference_of_folder, reference_of_gguf
from .stepping import BLOCK_SIZE, Stepper
from .tiny import ARCHITECTURES, write_tiny

TINY_DIFFERENCE = 1e-4
REAL_DIFFERENCE = 5e-4

PROMPT = [(7 * place * place + 3 * place) % 250 for place in range(45)]


@pytest.fixture(params=[*ARCHITECTURES])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Model, Reference]:
    folder = write_tiny(tmp_path / "model", request.param)
    return load_model(folder), reference_of_folder(folder)


@pytest.fixture(scope="module")
def real_pair(smollm2: Loaded) -> tuple[Model, Reference]:
    return smollm2.model, reference_of_gguf(resolve_model("smollm2"))


def assert_close(found: torch.Tensor, expected: torch.Tensor, most: float = TINY_DIFFERENCE) -> None:
    assert (found.double() - expected).abs().max().item() < most


def test_a_prompt_at_once(pair: tuple[Model, Reference]) -> None:
    model, reference = pair
    stepper = Stepper(model)
    stepper.add(stepper.request(0, PROMPT))
    stepper.step()
    assert_close(stepper.logits[0][0], reference.logits(PROMPT)[-1])


def test_a_prompt_in_chunks(pair: tuple[Model, Reference]) -> None:
    model, reference = pair
    stepper = Stepper(model)
    request = stepper.request(0, PROMPT)
    expected = reference.logits(PROMPT)
    done = 0
    for chunk in (11, 16, 2, 16):
        stepper.add(request, chunk)
        stepper.step()
        done += chunk
        assert_close(stepper.logits[0][-1], expected[done - 1])


def test_a_prompt_whose_prefix_is_cached(pair: tuple[Model, Reference]) -> None:
    model, reference = pair
    stepper = Stepper(model)
    stepper.add(stepper.request(0, PROMPT))
    stepper.step(finish=frozenset({0}))
    other = [*PROMPT[:34], 1, 2, 3, 4, 5]
    request = stepper.request(1, other)
    stepper.add(request)
    assert request.num_skipped_tokens == 34 // BLOCK_SIZE * BLOCK_SIZE
    stepper.step()
    assert_close(stepper.logits[1][0], reference.logits(other)[-1])


def test_decoding_beside_prompts_of_others(pair: tuple[Model, Reference]) -> None:
    """Rows of three ages in one batch, each as if it were alone."""
    model, reference = pair
    stepper = Stepper(model)
    texts = {0: PROMPT[:20], 1: PROMPT[5:38], 2: PROMPT[:27]}
    prompts = {number: len(ids) for number, ids in texts.items()}
    for number in texts:
        stepper.add(stepper.request(number, texts[number]))
        for _ in range(3):
            for row, token in stepper.step().items():
                texts[row] = [*texts[row], token]
    for number, ids in texts.items():
        expected = reference.logits(ids[:-1])[prompts[number] - 1 :]
        assert_close(torch.stack(stepper.logits[number]), expected)


def test_only_the_wanted_rows_are_computed_and_all_by_default(pair: tuple[Model, Reference]) -> None:
    model, reference = pair
    stepper = Stepper(model)
    stepper.add(stepper.request(0, PROMPT))
    stepper.context.initialize_attention_state()
    ids, positions = stepper.context.current_input_and_position_ids()
    everything = model.forward(ids, positions, stepper.context)
    assert everything.shape == (1, ids.shape[1], model.config.vocab)
    assert_close(everything[0, : len(PROMPT)], reference.logits(PROMPT))
    some = model.forward(ids, positions, stepper.context, torch.tensor([3, 44]))
    assert_close(some[0], reference.logits(PROMPT)[[3, 44]])


def test_bfloat16_follows_float32_as_far_as_it_goes(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "model", "llama")
    exact, rounded = (Stepper(load_model(folder, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16))
    for stepper in (exact, rounded):
        stepper.add(stepper.request(0, PROMPT))
        stepper.step()
    assert rounded.logits[0][0].dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(exact.logits[0][0], rounded.logits[0][0].float(), dim=0) > 0.99


def test_smollm2_equals_the_reference_in_chunks_from_the_cache_and_in_a_mixed_batch(
    real_pair: tuple[Model, Reference], tokenizer: Tokenizer
) -> None:
    model, reference = real_pair
    stepper = Stepper(model)
    ids = tokenizer.encode(
        "The paged cache keeps every block of sixteen tokens under the hash of all tokens before it."
    )
    expected = reference.logits(ids)
    request = stepper.request(0, ids)
    stepper.add(request, 9)
    stepper.step()
    stepper.add(request)
    stepper.step()
    assert_close(stepper.logits[0][0], expected[8], REAL_DIFFERENCE)
    assert_close(stepper.logits[0][1], expected[-1], REAL_DIFFERENCE)

    other = [*ids[:16], *tokenizer.encode(" Something else follows.")]
    again = stepper.request(1, other)
    stepper.add(again)
    assert again.num_skipped_tokens == 16
    first = int(stepper.logits[0][1].argmax())
    stepper.step()
    assert_close(stepper.logits[1][0], reference.logits(other)[-1], REAL_DIFFERENCE)
    assert_close(stepper.logits[0][2], reference.logits([*ids, first])[-1], REAL_DIFFERENCE)


def test_smollm2_knows_the_capital_of_france(real_pair: tuple[Model, Reference], tokenizer: Tokenizer) -> None:
    stepper = Stepper(real_pair[0])
    stepper.add(stepper.request(0, tokenizer.encode("The capital of France is")))
    assert tokenizer.decode([stepper.step()[0] for _ in range(2)]).startswith(" Paris")

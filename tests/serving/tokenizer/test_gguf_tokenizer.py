"""Tokenizers built from GGUF metadata."""

import os
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from serving.gguf_file import GGUFError, read_header
from serving.model_files import resolve_model
from serving.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from serving.tokenizer.pretokenizers import WORD_SPLITS

from .conftest import BYTE_TOKENS, EXPRESSIBLE, Write

EXAMPLES = int(os.environ.get("WARMROUTE_PROPERTY_EXAMPLES", "200"))
CONTROL, USER_DEFINED = 3, 4


def pieces(tokenizer: Tokenizer, text: str) -> list[bytes]:
    return [tokenizer.token_bytes(token) for token in tokenizer.encode(text)]


def test_smollm2_splits_every_digit_and_keeps_the_space_with_the_word(smollm2: Tokenizer) -> None:
    assert pieces(smollm2, "Hello world 2024!") == [b"Hello", b" world", b" ", b"2", b"0", b"2", b"4", b"!"]


def test_smollm2_recognises_its_special_tokens_in_text(smollm2: Tokenizer) -> None:
    assert smollm2.encode("<|im_start|>user\n") == [1, smollm2.encode("user")[0], smollm2.encode("\n")[0]]
    assert smollm2.encode("<|im_end|>") == [2]
    assert smollm2.special_token_ids == frozenset(range(17))


def test_smollm2_says_where_a_generation_ends(smollm2: Tokenizer) -> None:
    assert smollm2.eos_token_ids == (0, 2)  # <|endoftext|> and <|im_end|>
    assert smollm2.bos_token_id == 1
    assert smollm2.vocab_size == 49152


def test_smollm2_adds_no_first_token_because_the_file_says_so(smollm2: Tokenizer) -> None:
    assert smollm2.encode("Hi", add_special_tokens=True) == smollm2.encode("Hi")


def test_smollm2_renders_its_chat_template(smollm2: Tokenizer) -> None:
    expected = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    messages = [{"role": "user", "content": "hi"}]
    assert smollm2.render_chat(messages) == expected
    assert smollm2.encode_chat(messages) == smollm2.encode(expected)
    assert smollm2.decode(smollm2.encode_chat(messages), skip_special_tokens=False) == expected


def test_merges_apply_in_the_order_of_the_file(smollm2: Tokenizer) -> None:
    """Against merging by hand: of all neighbours, the pair that comes first in the file, until none is left."""
    header = read_header(resolve_model("smollm2"))
    ranks = {merge: rank for rank, merge in enumerate(header.metadata["tokenizer.ggml.merges"])}
    ids = {piece: token for token, piece in enumerate(header.metadata["tokenizer.ggml.tokens"])}
    for word in ("internationalization", "qwertyuiop", "thethethe", "aaaaaaaaa", "hyperparameter", "zzyzx"):
        parts = list(word)
        while True:
            ranked = [(ranks.get(f"{a} {b}", len(ranks)), at) for at, (a, b) in enumerate(pairwise(parts))]
            rank, at = min(ranked, default=(len(ranks), 0))
            if rank == len(ranks):
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        assert smollm2.encode(word) == [ids[part] for part in parts]


@settings(max_examples=EXAMPLES, deadline=None)
@given(text=st.text(EXPRESSIBLE))
def test_decode_gives_back_what_was_encoded(smollm2: Tokenizer, text: str) -> None:
    assert smollm2.decode(smollm2.encode(text), skip_special_tokens=False) == text


def test_what_the_vocabulary_has_no_byte_for_is_dropped(smollm2: Tokenizer) -> None:
    assert smollm2.encode("a\x04b") == smollm2.encode("a") + smollm2.encode("b")


def test_a_lone_surrogate_becomes_the_replacement_character(smollm2: Tokenizer) -> None:
    assert smollm2.decode(smollm2.encode("a\ud800b")) == "a\ufffdb"


def test_skipping_special_tokens_leaves_user_defined_ones(write_gguf: Write) -> None:
    tokenizer = load_tokenizer(write_gguf(added=(("<end>", CONTROL), ("<think>", USER_DEFINED))))
    ids = tokenizer.encode("a<think>b<end>")
    assert ids == [BYTE_TOKENS.index("a"), 258, BYTE_TOKENS.index("b"), 257]
    assert tokenizer.decode(ids) == "a<think>b"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<think>b<end>"


def test_a_first_token_is_added_where_the_file_asks_for_it(write_gguf: Write) -> None:
    path = write_gguf(
        added=(("<s>", CONTROL), ("</s>", CONTROL)), bos_token_id=257, eos_token_id=258, add_bos_token=True
    )
    tokenizer = load_tokenizer(path)
    letter = BYTE_TOKENS.index("a")
    assert tokenizer.encode("a", add_special_tokens=True) == [257, letter]
    assert tokenizer.encode("a") == [letter]
    assert tokenizer.eos_token_ids == (258,)


def test_token_bytes_of_ids_beyond_the_vocabulary_are_empty_and_negative_ones_refused(smollm2: Tokenizer) -> None:
    assert smollm2.token_bytes(smollm2.vocab_size) == b""
    assert smollm2.decode([smollm2.vocab_size + 10]) == ""
    with pytest.raises(ValueError, match="-1 is negative"):
        smollm2.decode([-1])


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("gpt-2", ["I", "'ll", "ĠPAY", "Ġ123456", "!", "ĊĊ", "Ġ", "Ġok"]),
        ("smollm", ["I", "'ll", "ĠPAY", "Ġ", "1", "2", "3", "4", "5", "6", "!", "ĊĊ", "Ġ", "Ġok"]),
        ("llama-bpe", ["I", "'ll", "ĠPAY", "Ġ", "123", "456", "!ĊĊ", "Ġ", "Ġok"]),
        ("qwen2", ["I", "'ll", "ĠPAY", "Ġ", "1", "2", "3", "4", "5", "6", "!ĊĊ", "Ġ", "Ġok"]),
    ],
)
def test_each_family_cuts_words_its_own_way(family: str, words: list[str]) -> None:
    cut = WORD_SPLITS[family].build().pre_tokenize_str("I'll PAY 123456!\n\n  ok")
    expected = [word for word, _ in cut]
    if family in ("gpt-2", "smollm"):
        # Their pattern takes the lines and one space less than what precedes a word as one run.
        words = [*words[: words.index("ĊĊ")], "ĊĊĠ", "Ġok"]
    assert expected == words


def test_only_the_later_families_see_contractions_in_any_case() -> None:
    def words(family: str) -> list[str]:
        return [word for word, _ in WORD_SPLITS[family].build().pre_tokenize_str("I'LL")]

    assert words("llama-bpe") == ["I", "'LL"]
    assert words("gpt-2") == ["I", "'", "LL"]


def test_qwen2_composes_characters_first(write_gguf: Write) -> None:
    tokenizer = load_tokenizer(write_gguf(pre="qwen2"))
    decomposed = "e\u0301"
    assert tokenizer.decode(tokenizer.encode(decomposed)) == normalizers.NFC().normalize_str(decomposed) == "é"


def test_llama3_takes_a_word_that_is_a_token_whole(write_gguf: Write) -> None:
    """`ab` + `c` is no merge of the file, so merging alone would give `ab`, `c`."""
    path = write_gguf(pre="llama-bpe", merges=("a b",), added=(("abc", 1),))
    tokenizer = load_tokenizer(path)
    assert pieces(tokenizer, "abc") == [b"abc"]
    assert pieces(load_tokenizer(write_gguf(pre="gpt-2", merges=("a b",), added=(("abc", 1),))), "abc") == [b"ab", b"c"]


def test_an_unknown_pre_tokenizer_is_refused_by_name(write_gguf: Write) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.pre is 'mystery'; supported are .*smollm"):
        load_tokenizer(write_gguf(pre="mystery"))


def test_a_missing_pre_tokenizer_is_refused(write_gguf: Write) -> None:
    with pytest.raises(GGUFError, match=r"no 'tokenizer\.ggml\.pre'"):
        load_tokenizer(write_gguf(pre=None))


def test_a_sentencepiece_vocabulary_is_refused_with_the_remedy(write_gguf: Write) -> None:
    with pytest.raises(TokenizerError, match=r"'llama'.*tokenizer\.json"):
        load_tokenizer(write_gguf(model="llama"))


def test_a_special_token_beyond_the_vocabulary_is_refused(write_gguf: Write) -> None:
    with pytest.raises(TokenizerError, match=r"eos_token_id is 999, but there are 257 tokens"):
        load_tokenizer(write_gguf(eos_token_id=999))


def test_a_merge_of_what_is_no_token_is_refused(write_gguf: Write) -> None:
    with pytest.raises(TokenizerError, match="merges"):
        load_tokenizer(write_gguf(merges=("a b", "zz yy")))


def test_the_fingerprint_follows_vocabulary_merges_and_template(write_gguf: Write) -> None:
    def fingerprint(**how: object) -> str:
        return load_tokenizer(write_gguf(**how)).fingerprint

    plain = fingerprint(merges=("a b", "b c"))
    assert fingerprint(merges=("a b", "b c"), name="other.gguf") == plain
    assert len({plain, fingerprint(merges=("b c", "a b")), fingerprint(merges=("a b",))}) == 3
    assert fingerprint(merges=("a b", "b c"), chat_template="{{ messages }}") != plain


def test_the_vocabulary_of_the_real_model_loads_within_two_seconds(smollm2: Tokenizer) -> None:
    # Some 0.3 s on an idle core; the bound leaves room for a busy machine and none for a slow reader.
    began = time.process_time()
    load_tokenizer(resolve_model("smollm2"))
    assert time.process_time() - began < 2.0

"""Text of a generation, token by token, in whole characters."""

import codecs

from serving.tokenizer.interface import Tokenizer

_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDecoder:
    """Decodes one generation as it comes; a character whose bytes span tokens is held back until it is whole.

    The pieces joined, `flush` included, equal `tokenizer.decode` of all ids, but for the leading space that
    sentencepiece vocabularies drop at the start of a text: a generation continues one.  Constant work a
    token.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._utf8 = _new_utf8_decoder("replace")

    def push(self, token_id: int) -> str:
        """The text that became certain with this token, often one token's, sometimes empty."""
        if token_id in self._skipped:
            return ""
        return self._utf8.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        """The end: bytes still held back form no character and become U+FFFD.  The decoder is then as new."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest

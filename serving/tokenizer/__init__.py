"""Text to token ids and back, and chat messages to text: the same code in worker and router."""

from serving.tokenizer.chat_template import ChatTemplateError
from serving.tokenizer.incremental import IncrementalDecoder
from serving.tokenizer.interface import Tokenizer, TokenizerError
from serving.tokenizer.load import load_tokenizer

__all__ = ["ChatTemplateError", "IncrementalDecoder", "Tokenizer", "TokenizerError", "load_tokenizer"]

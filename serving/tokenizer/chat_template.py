"""Chat messages to a prompt, through the model's own Jinja template."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


class ChatTemplateError(ValueError):
    """The messages cannot be rendered: no template, a refusal by the template itself, or an error in it."""


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}`, which marks the assistant's tokens for training, is plain text here."""

    tags = {"generation"}  # noqa: RUF012 - declared so by the base class

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """The templates of one model: `sources` by name; "default" counts and, when tools are given, "tool_use".

    `special_tokens` (bos_token, eos_token, ...) are visible to the template as variables.
    Raises `ChatTemplateError` when a template does not parse.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        self._special_tokens = dict(special_tokens)
        self._templates: dict[str, jinja2.Template] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
            except jinja2.TemplateSyntaxError as error:
                raise ChatTemplateError(f"chat template {name!r}, line {error.lineno}: {error.message}") from error
        self.sources = dict(sources)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any],
    ) -> str:
        """The prompt.  Raises `ChatTemplateError`."""
        variables: dict[str, Any] = {**self._special_tokens, **template_kwargs}
        variables["messages"] = [_plain_message(place, message) for place, message in enumerate(messages)]
        variables["tools"] = [dict(tool) for tool in tools] if tools else None
        variables["add_generation_prompt"] = add_generation_prompt
        try:
            return self._choose(bool(tools)).render(variables)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the model's chat template refused the messages: {error.message}") from error
        except (
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            IndexError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise ChatTemplateError(f"the model's chat template failed: {type(error).__name__}: {error}") from error

    def _choose(self, with_tools: bool) -> jinja2.Template:
        if with_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        template = self._templates.get("default")
        if template is None:
            raise ChatTemplateError("the model has no chat template; use /v1/completions with a prompt")
        return template


def _plain_message(place: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as templates expect it: content a string, the arguments of tool calls an object."""
    plain = dict(message)
    plain["content"] = _plain_content(place, message.get("content"))
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_plain_tool_call(call) for call in plain["tool_calls"]]
    return plain


def _plain_content(place: int, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ChatTemplateError(f"messages[{place}].content must be a string or a list of parts")
    texts = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(text, str):
            raise ChatTemplateError(f"messages[{place}].content[{at}] has type {kind!r}; this model takes text only")
        texts.append(text)
    return "\n".join(texts)


def _plain_tool_call(call: Any) -> Any:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    arguments = call["function"].get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments)
    except ValueError:
        return call
    return {**call, "function": {**call["function"], "arguments": parsed}} if isinstance(parsed, dict) else call

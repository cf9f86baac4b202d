"""Rendering chat templates."""

from typing import Any

import pytest

from serving.tokenizer.chat_template import ChatTemplate, ChatTemplateError

USER = [{"role": "user", "content": "hi"}]


def render(template: str, messages: list[dict[str, Any]] = USER, **options: Any) -> str:
    tools = options.pop("tools", None)
    return ChatTemplate({"default": template}, {"bos_token": "<s>"}).render(
        messages, tools=tools, add_generation_prompt=options.pop("add_generation_prompt", True), template_kwargs=options
    )


def test_block_lines_leave_no_trace() -> None:
    assert (
        render("{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}") == "hi\n"
    )


def test_the_template_sees_special_tokens_the_generation_flag_and_extra_arguments() -> None:
    template = "{{ bos_token }}{{ add_generation_prompt }}{{ enable_thinking }}{{ tools is none }}"
    assert render(template, add_generation_prompt=False, enable_thinking=False) == "<s>FalseFalseTrue"


def test_json_is_written_as_is() -> None:
    tools = [{"name": "é<b>", "z": 1, "a": [1, 2]}]
    assert render("{{ tools | tojson }}", tools=tools) == '[{"name": "é<b>", "z": 1, "a": [1, 2]}]'
    assert render("{{ tools[0] | tojson(indent=1) }}", tools=[{"a": 1}]) == '{\n "a": 1\n}'


def test_generation_marks_are_tolerated_and_loops_can_break() -> None:
    assert (
        render("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}")
        == "hi"
    )


def test_the_year_is_there_for_templates_that_want_it() -> None:
    assert render("{{ strftime_now('%Y') }}").isdigit()


def test_a_refusal_by_the_template_carries_its_message() -> None:
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "template",
    ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ messages[0].content + 1 }}", "{{ 1 / 0 }}"],
)
def test_what_a_template_must_not_or_cannot_do_is_an_error(template: str) -> None:
    with pytest.raises(ChatTemplateError):
        render(template)


def test_a_template_that_does_not_parse_says_the_line() -> None:
    with pytest.raises(ChatTemplateError, match="line 2"):
        ChatTemplate({"default": "\n{% if %}"}, {})


def test_a_model_without_template_says_what_to_use() -> None:
    with pytest.raises(ChatTemplateError, match="/v1/completions"):
        ChatTemplate({}, {}).render(USER, tools=None, add_generation_prompt=True, template_kwargs={})


def test_the_tool_template_is_for_requests_with_tools() -> None:
    chat = ChatTemplate({"default": "plain", "tool_use": "{{ tools | length }} tools"}, {})

    def rendered(tools: list[dict[str, Any]] | None) -> str:
        return chat.render(USER, tools=tools, add_generation_prompt=True, template_kwargs={})

    assert [rendered(None), rendered([]), rendered([{}])] == ["plain", "plain", "1 tools"]


def test_text_parts_become_one_string_and_other_parts_are_refused() -> None:
    text = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0]['content'] }}", [{"role": "user", "content": text}]) == "a\nb"
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(ChatTemplateError, match=r"messages\[0\]\.content\[0\] has type 'image_url'"):
        render("", [{"role": "user", "content": image}])


def test_absent_content_is_empty_text() -> None:
    assert render("{{ '[' + messages[0].content + ']' }}", [{"role": "assistant", "content": None}]) == "[]"


def test_arguments_of_tool_calls_become_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert render("{{ messages[0].tool_calls[0].function.arguments.x }}", [message]) == "1"
    assert call["function"]["arguments"] == '{"x": 1}'  # type: ignore[index]

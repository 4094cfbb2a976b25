"""Chat templates rendered by us and by transformers, for SmolLM2's own and for the well-known styles."""

from __future__ import annotations

import re
from typing import Any

import pytest
from jinja2 import TemplateError
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from ratoon.core.errors import RequestError
from ratoon.models.source import resolve_model
from ratoon.models.tokenizer import Tokenizer
from tests.real_models import needs_embedded_model

CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}"""

LLAMA2 = """{% if messages[0]['role'] == 'system' %}
{% set system = '<<SYS>>\n' ~ messages[0]['content'] ~ '\n<</SYS>>\n\n' %}{% set turns = messages[1:] %}
{% else %}
{% set system = '' %}{% set turns = messages %}
{% endif %}
{% for message in turns %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}
{{ bos_token ~ '[INST] ' ~ (system if loop.first else '') ~ message['content'] | trim ~ ' [/INST]' }}
{% elif message['role'] == 'assistant' %}
{{ ' ' ~ message['content'] | trim ~ ' ' ~ eos_token }}
{% endif %}
{% endfor %}"""

LLAMA3 = """{{- bos_token }}
{%- if tools is not none %}
    {{- '<|start_header_id|>system<|end_header_id|>\n\nTools:\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) + '\n\n' }}
    {%- endfor %}
    {{- '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' or 'tool_calls' in message %}{%- continue %}{%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}"""

MISTRAL = """{{ bos_token }}{% set ns = namespace(last='') %}{% for message in messages %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}
{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}
{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{% set ns.last = message['role'] %}{% endfor %}{% if ns.last == 'assistant' %}{{ '\n' }}{% endif %}"""

STYLES = {"chatml": CHATML, "llama2": LLAMA2, "llama3": LLAMA3, "mistral": MISTRAL}

CHATS = [
    [{"role": "user", "content": "Hello <b>you</b> & me 🙂"}],
    [
        {"role": "user", "content": " spaces "},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "ü"},
    ],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\n\nthere"}],
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}],
]
TOOLS = [
    {"type": "function", "function": {"name": "look", "description": "größer <x>", "parameters": {"type": "object"}}}
]


def both(template: str) -> tuple[Tokenizer, Any]:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    theirs = PreTrainedTokenizerFast(tokenizer_object=Backend(BPE()), **special)
    theirs.chat_template = template
    return Tokenizer(Backend(BPE()), special, {"default": template}), theirs


def compare(ours: Tokenizer, theirs: Any, chat: list[dict[str, str]], **options: Any) -> None:
    """The same text, or the same complaint."""
    try:
        wanted = theirs.apply_chat_template(chat, tokenize=False, **options)
    except TemplateError as error:
        with pytest.raises(RequestError, match=re.escape(str(error))):
            ours.apply_chat_template(chat, **options)
    else:
        assert ours.apply_chat_template(chat, **options) == wanted


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_styles_render_like_transformers(style: str, chat: list, add_generation_prompt: bool) -> None:
    ours, theirs = both(STYLES[style])
    compare(ours, theirs, chat, add_generation_prompt=add_generation_prompt)


@pytest.mark.parametrize("chat", CHATS)
def test_tools_reach_a_template_that_knows_them_as_in_transformers(chat: list) -> None:
    ours, theirs = both(LLAMA3)
    compare(ours, theirs, chat, add_generation_prompt=True, tools=TOOLS)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("begun", ["The answer", "Well,\n", " spaces  ", "</s>"])
def test_a_message_is_continued_as_in_transformers(style: str, begun: str) -> None:
    ours, theirs = both(STYLES[style])
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": begun}]
    compare(ours, theirs, chat, continue_final_message=True)


@needs_embedded_model
@pytest.mark.parametrize("chat", CHATS)
def test_smollm2_renders_like_transformers(chat: list) -> None:
    template = resolve_model("smollm2-135m").chat_template
    assert template is not None
    ours, theirs = both(template)
    compare(ours, theirs, chat, add_generation_prompt=True)
    assert "<|im_start|>assistant\n" in ours.apply_chat_template(chat)


@needs_embedded_model
def test_smollm2_takes_tool_calls_without_content_and_tools() -> None:
    tokenizer = resolve_model("smollm2-135m").load_tokenizer()
    function = {"name": "look", "arguments": '{"at": "sea"}'}
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
    chat = [CHATS[0][0], call, {"role": "tool", "tool_call_id": "1", "content": "blue"}]
    text = tokenizer.apply_chat_template(chat, tools=TOOLS)
    assert text.startswith("<|im_start|>system\n# Tools")
    calling = '<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{calling}<|im_end|>\n<|im_start|>tool\nblue<|im_end|>" in text


def test_variables_of_the_caller_reach_the_template() -> None:
    ours, theirs = both(
        "{{ messages[0].content }}{% if enable_thinking is false %} no thoughts{% endif %}{{ documents }}"
    )
    compare(ours, theirs, CHATS[0], add_generation_prompt=True, enable_thinking=False)
    assert ours.apply_chat_template(CHATS[0], enable_thinking=False).endswith("no thoughtsNone")

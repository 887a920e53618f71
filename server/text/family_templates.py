"""Chat templates of model families, for checkpoints that come without one."""

from __future__ import annotations

_GEMMA3 = """
{{- bos_token }}
{%- set ns = namespace(prefix='', turns=messages) %}
{%- if messages[0].role == 'system' %}
  {%- set ns.prefix = messages[0].content + '\\n\\n' %}
  {%- set ns.turns = messages[1:] %}
{%- endif %}
{%- for message in ns.turns %}
  {%- if message.role != ('user' if loop.index0 is even else 'assistant') %}
    {{- raise_exception('The turns of the conversation must be user, assistant, user, assistant, and so on.') }}
  {%- endif %}
  {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\\n' }}
  {{- ns.prefix if loop.first }}
  {{- message.content | trim }}
  {{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<start_of_turn>model\\n' }}
{%- endif %}
"""
"""A system text goes before the first user turn, whose role Gemma 3 does not have."""

_MIMO_V2 = """
{%- set think = enable_thinking if enable_thinking is defined else THINKS %}
{%- set keep_all = keep_all_reasoning if keep_all_reasoning is defined else true %}
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages %}
  {%- if message.role == 'user' %}
    {%- set ns.last_user = loop.index0 %}
  {%- endif %}
{%- endfor %}
{%- if messages[0].role != 'system' %}
  {{- '<|im_start|>system\\nYou are MiMo, a helpful AI assistant engineered by Xiaomi.<|im_end|>' }}
{%- endif %}
{%- for message in messages %}
  {%- if message.role == 'tool' %}
    {%- if loop.first or loop.previtem.role != 'tool' %}
      {{- '<|im_start|>tool\\n' }}
    {%- endif %}
    {{- '<tool_response>\\n' + message.content + '\\n</tool_response>\\n' }}
    {%- if loop.last or loop.nextitem.role != 'tool' %}
      {{- '<|im_end|>' }}
    {%- endif %}
  {%- elif message.role == 'assistant' %}
    {%- set reasoning = message.reasoning_content or '' %}
    {%- set content = message.content %}
    {%- if not reasoning and '</think>' in content %}
      {%- set reasoning = content.split('</think>')[0].split('<think>')[-1] %}
      {%- set content = content.split('</think>', 1)[1] %}
    {%- endif %}
    {{- '<|im_start|>assistant\\n<think>' + (reasoning if keep_all or loop.index0 > ns.last_user else '') }}
    {{- '</think>' + content }}
    {%- for call in message.tool_calls or [] %}
      {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
      {%- for name, value in call.function.arguments.items() %}
        {{- '<parameter=' + name + '>' + (value if value is string else value | tojson) + '</parameter>\\n' }}
      {%- endfor %}
      {{- '</function>\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>' }}
  {%- else %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\\n' + ('' if think else '<think></think>') }}
{%- endif %}
"""
"""ChatML without a beginning-of-sequence token and without line breaks between turns. The model opens its reasoning
itself; with thinking off, the prompt holds an empty one. Declaring tools is not part of it yet."""

_TEMPLATES = {
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "mimo_v2": _MIMO_V2.replace("THINKS", "true"),
    "mimo_v2_flash": _MIMO_V2.replace("THINKS", "false"),
}


def family_template(family: str) -> str | None:
    """The template source for a model family (`model_type` of a config, architecture of a GGUF); None if unknown."""
    return _TEMPLATES.get(family)

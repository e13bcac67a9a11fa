"""Built-in chat templates: the formats of the models' makers, as Jinja.

Each marks the assistant's text and its end-of-turn token by `{% generation %}`, which transformers supports too. BEGIN
is replaced by the tokenizer's beginning-of-text token if the tokenizer's own rules add one, and else removed.
"""

from __future__ import annotations

__all__ = ["FORMATS", "SUGGESTIONS"]

_TOOL_JSON = """\
{%- macro written(c) -%}{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}}\
{%- endmacro -%}
"""

# ChatML with tools as in Qwen2.5. SYSTEM is the system prompt of conversations without one: Qwen's, or none.
_CHATML = (
    _TOOL_JSON
    + """BEGIN
{%- set first = messages[0] if messages and messages[0].role == 'system' else none %}
{%- if first or tools or SYSTEM %}
  {{- '<|im_start|>system\\n' }}
  {{- first.content if first else SYSTEM }}
  {%- if tools %}
    {{- '\\n\\n' if first or SYSTEM else '' }}
    {{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within ' }}
    {{- '<tool_call></tool_call> XML tags:\\n<tool_call>\\n\
{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>' }}
  {%- endif %}
  {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
  {%- if m.role == 'assistant' %}
    {{- '<|im_start|>assistant\\n' }}
    {%- generation %}
      {{- m.content or '' }}
      {%- for c in m.tool_calls or [] %}
        {{- ('\\n' if m.content or not loop.first else '') + '<tool_call>\\n' + written(c) + '\\n</tool_call>' }}
      {%- endfor %}
      {{- '<|im_end|>' }}
    {%- endgeneration %}
    {{- '\\n' }}
  {%- elif m.role == 'tool' %}
    {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
    {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
    {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
  {%- elif not (loop.first and first) %}
    {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
)

# Llama 3.1: a call is bare JSON with `parameters`, and the role of a tool's result is ipython.
_LLAMA3 = """\
{%- macro written(c) -%}{"name": {{ c.function.name | tojson }}, "parameters": {{ c.function.arguments | tojson }}}\
{%- endmacro -%}
{{- bos_token }}
{%- set first = messages[0] if messages and messages[0].role == 'system' else none %}
{%- if first or tools %}
  {{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
  {%- if tools %}
    {{- 'Environment: ipython\\n\\nThese functions can be called. To call one, answer with JSON of the form ' }}
    {{- '{"name": function name, "parameters": dictionary of argument name and its value}.\\n\\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{%- endfor %}
  {%- endif %}
  {{- (first.content | trim if first else '') + '<|eot_id|>' }}
{%- endif %}
{%- for m in messages %}
  {%- if m.role == 'assistant' %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
    {%- generation %}
      {{- (m.content or '') | trim }}
      {%- for c in m.tool_calls or [] %}{{- ('\\n' if m.content or not loop.first else '') + written(c) }}{%- endfor %}
      {{- '<|eot_id|>' }}
    {%- endgeneration %}
  {%- elif not (loop.first and first) %}
    {{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\\n\\n' \
+ m.content | trim + '<|eot_id|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

# Mistral has no system role: the system message precedes the text of the first question.
_MISTRAL = (
    _TOOL_JSON
    + """{{- bos_token }}
{%- set first = messages[0] if messages and messages[0].role == 'system' else none %}
{%- set told = namespace(system=first is none) %}
{%- for m in messages %}
  {%- if m.role == 'user' %}
    {%- if tools and (loop.first or not told.system or (loop.previtem.role == 'system' and loop.index == 2)) %}
      {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
    {%- endif %}
    {{- '[INST] ' + ('' if told.system else first.content + '\\n\\n') + m.content + '[/INST]' }}
    {%- set told.system = true %}
  {%- elif m.role == 'tool' %}
    {{- '[TOOL_RESULTS] {"content": ' + m.content | tojson + '}[/TOOL_RESULTS]' }}
  {%- elif m.role == 'assistant' %}
    {%- generation %}
      {%- if m.content %}{{- ' ' + m.content }}{%- endif %}
      {%- if m.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for c in m.tool_calls %}{{- (', ' if not loop.first else '') + written(c) }}{%- endfor %}
        {{- ']' }}
      {%- endif %}
      {{- eos_token }}
    {%- endgeneration %}
  {%- elif not loop.first %}
    {{- raise_exception('a system message can only stand first') }}
  {%- endif %}
{%- endfor %}"""
)

# Gemma has neither a system role nor tools: the system message precedes the text of the first question.
_GEMMA = """{{- bos_token }}
{%- set first = messages[0] if messages and messages[0].role == 'system' else none %}
{%- set told = namespace(system=first is none) %}
{%- for m in messages %}
  {%- if m.role == 'assistant' %}
    {%- if m.tool_calls %}{{- raise_exception('this format has no tool calls') }}{%- endif %}
    {{- '<start_of_turn>model\\n' }}
    {%- generation %}{{- m.content | trim + '<end_of_turn>' }}{%- endgeneration %}
    {{- '\\n' }}
  {%- elif m.role == 'user' %}
    {{- '<start_of_turn>user\\n' + ('' if told.system else first.content | trim + '\\n\\n') \
+ m.content | trim + '<end_of_turn>\\n' }}
    {%- set told.system = true %}
  {%- elif not (loop.first and first) %}
    {{- raise_exception('this format has no role ' + m.role + ' here') }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""

# Phi-3 and Phi-4 differ in their marks alone, which `_phi` fills in.
_PHI = """{%- if tools %}{{- raise_exception('this format has no tools') }}{%- endif %}
{%- for m in messages %}
  {%- if m.tool_calls %}{{- raise_exception('this format has no tool calls') }}{%- endif %}
  {{- 'OPEN' + m.role + 'SEPARATOR' }}
  {%- if m.role == 'assistant' %}
    {%- generation %}{{- m.content + 'CLOSE' }}{%- endgeneration %}
  {%- else %}
    {{- m.content + 'CLOSE' }}
  {%- endif %}
  {{- 'AFTER' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'OPENassistantSEPARATOR' }}{%- endif %}"""

# Plain text for models without special tokens of chats: only the end of text ends a turn.
_ALPACA = """BEGIN
{%- if tools %}{{- raise_exception('this format has no tools') }}{%- endif %}
{%- for m in messages %}
  {%- if m.role == 'user' %}
    {{- '### Instruction:\\n' + m.content + '\\n\\n' }}
  {%- elif m.role == 'assistant' %}
    {%- if m.tool_calls %}{{- raise_exception('this format has no tool calls') }}{%- endif %}
    {{- '### Response:\\n' }}
    {%- generation %}{{- m.content + eos_token }}{%- endgeneration %}
    {{- '\\n\\n' if not loop.last else '' }}
  {%- elif m.role == 'system' %}
    {{- m.content + '\\n\\n' }}
  {%- else %}
    {{- raise_exception('this format has no role ' + m.role) }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '### Response:\\n' }}{%- endif %}"""

# For encoder-decoders: the question is the encoder's input and the answer the decoder's; an end of text ends each.
_T5 = """{%- if tools %}{{- raise_exception('this format has no tools') }}{%- endif %}
{%- for m in messages %}
  {%- if m.tool_calls %}{{- raise_exception('this format has no tool calls') }}{%- endif %}
  {%- if m.role == 'assistant' %}
    {%- generation %}{{- m.content + eos_token }}{%- endgeneration %}
  {%- elif m.role == 'user' %}
    {{- m.content + eos_token }}
  {%- elif m.role == 'system' %}
    {{- m.content + '\\n\\n' }}
  {%- else %}
    {{- raise_exception('this format has no role ' + m.role) }}
  {%- endif %}
{%- endfor %}"""


def _phi(opening: str, separator: str, closing: str, after: str) -> str:
    return (
        _PHI.replace("OPEN", opening).replace("SEPARATOR", separator).replace("CLOSE", closing).replace("AFTER", after)
    )


FORMATS = {
    "alpaca": _ALPACA,
    "chatml": _CHATML.replace("SYSTEM", "''"),
    "gemma": _GEMMA,
    "llama3": _LLAMA3,
    "mistral": _MISTRAL,
    "phi3": _phi("<|", "|>\\n", "<|end|>", "\\n"),
    "phi4": _phi("<|im_start|>", "<|im_sep|>", "<|im_end|>", ""),
    "qwen": _CHATML.replace("SYSTEM", "'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.'"),
    "t5": _T5,
}
"""Name -> template, with BEGIN still to be replaced. alpaca needs no special token but the tokenizer's end of text."""

SUGGESTIONS = ", ".join(sorted(FORMATS))

"""Chat templates that behave as those of the models do (what each writes where, and what it does to history), and conversations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Message = Mapping[str, Any]

LLAMA3 = """{{- bos_token }}
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools %}{{- 'Environment: ipython\n' }}{%- endif %}
{{- 'Cutting Knowledge Date: December 2023\n\n' + system + '<|eot_id|>' }}
{%- if tools %}
  {{- '<|start_header_id|>user<|end_header_id|>\n\nFunctions:\n' }}
  {%- for t in tools %}{{- t | tojson(indent=4) + '\n\n' }}{%- endfor %}
  {{- messages[0].content | trim + '<|eot_id|>' }}
  {%- set messages = messages[1:] %}
{%- endif %}
{%- for m in messages %}
  {%- if m.tool_calls %}
    {%- if m.tool_calls | length != 1 %}{{- raise_exception('one tool call at a time') }}{%- endif %}
    {%- set f = m.tool_calls[0].function %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + f.name + '", "parameters": ' + f.arguments | tojson + '}<|eot_id|>' }}
  {%- elif m.role in ('tool', 'ipython') %}
    {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content + '<|eot_id|>' }}
  {%- else %}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

_QWEN_HEAD = """{%- if tools %}
  {{- '<|im_start|>system\n' + (messages[0].content + '\n\n' if messages[0].role == 'system' else HOUSE) + '# Tools\n<tools>' }}
  {%- for t in tools %}{{- '\n' + t | tojson }}{%- endfor %}
  {{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
  {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- elif HOUSE %}
  {{- '<|im_start|>system\n' + HOUSE + '<|im_end|>\n' }}
{%- endif %}
"""

_QWEN_CALLS = """{%- for c in m.tool_calls %}
      {%- if (loop.first and content) or not loop.first %}{{- '\n' }}{%- endif %}
      {%- set c = c.function %}
      {{- '<tool_call>\n{"name": "' + c.name + '", "arguments": ' + c.arguments | tojson + '}\n</tool_call>' }}
    {%- endfor %}"""

_QWEN_TOOLS = """{%- elif m.role == 'tool' %}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
    {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

QWEN25 = (
    _QWEN_HEAD.replace("HOUSE", "'You are helpful.'")
    + """{%- for m in messages %}
  {%- set content = m.content %}
  {%- if m.role == 'user' or (m.role == 'system' and not loop.first) or (m.role == 'assistant' and not m.tool_calls) %}
    {{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}
  {%- elif m.role == 'assistant' %}
    {{- '<|im_start|>assistant' + ('\n' + content if content else '') }}
    {%- for c in m.tool_calls %}
      {%- set c = c.function %}
      {{- '\n<tool_call>\n{"name": "' + c.name + '", "arguments": ' + c.arguments | tojson + '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
  """
    + _QWEN_TOOLS
)

QWEN3 = (
    _QWEN_HEAD.replace("HOUSE", "''")
    + """{%- set ns = namespace(asked=messages | length - 1, looking=true) %}
{%- for m in messages[::-1] %}
  {%- if ns.looking and m.role == 'user' %}
    {%- set ns.looking = false %}{%- set ns.asked = messages | length - 1 - loop.index0 %}
  {%- endif %}
{%- endfor %}
{%- for m in messages %}
  {%- set content = m.content %}
  {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
    {{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}
  {%- elif m.role == 'assistant' %}
    {%- set reasoning = m.reasoning_content or '' %}
    {%- if not reasoning and '</think>' in content %}
      {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
      {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>assistant\n' }}
    {%- if loop.index0 > ns.asked and (loop.last or reasoning) %}
      {{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
    {%- else %}
      {{- content }}
    {%- endif %}
    """
    + _QWEN_CALLS
    + """{{- '<|im_end|>\n' }}
  """
    + _QWEN_TOOLS
)

MISTRAL = """{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set talk = messages[1:] %}
{%- else %}{%- set talk = messages %}{%- endif %}
{%- set asked = talk | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for m in talk %}
  {%- if m.role == 'user' %}
    {%- if tools and m == asked[-1] %}{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
    {%- if loop.last and system is defined %}{{- '[INST] ' + system + '\n\n' + m.content + '[/INST]' }}
    {%- else %}{{- '[INST] ' + m.content + '[/INST]' }}{%- endif %}
  {%- elif m.tool_calls %}
    {{- '[TOOL_CALLS] [' }}
    {%- for c in m.tool_calls %}{{- c.function | tojson + (', ' if not loop.last else '') }}{%- endfor %}
    {{- ']' + eos_token }}
  {%- elif m.role == 'assistant' %}{{- ' ' + m.content | trim + eos_token }}
  {%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS] {"content": ' + m.content | string + '}[/TOOL_RESULTS]' }}
  {%- else %}{{- raise_exception('only user, assistant and tool') }}
  {%- endif %}
{%- endfor %}"""

MISTRAL_LAST = MISTRAL.replace("loop.last and system is defined", "m == asked[-1] and system is defined")
"""As some versions of it: the system message stands in the last question, so that history is rendered otherwise."""

GEMMA = """{{- bos_token }}
{%- if messages[0].role == 'system' %}{%- set first = messages[0].content + '\n\n' %}{%- set talk = messages[1:] %}
{%- else %}{%- set first = '' %}{%- set talk = messages %}{%- endif %}
{%- for m in talk %}
  {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate user/assistant') }}{%- endif %}
  {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (first if loop.first else '') }}
  {{- m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}"""

PHI3 = """{% for m in messages %}{% if m.role == 'system' %}{{ '<|system|>\n' + m.content + '<|end|>\n' }}{% elif m.role == 'user' %}
{{ '<|user|>\n' + m.content + '<|end|>\n' }}{% elif m.role == 'assistant' %}{{ '<|assistant|>\n' + m.content + '<|end|>\n' }}
{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""

PHI4 = """{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"""

CHATML = """{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

ALPACA = """{% for m in messages %}{% if m.role == 'system' %}{{ m.content + '\n\n' }}{% elif m.role == 'user' %}
{{ '### Instruction:\n' + m.content + '\n\n' }}{% else %}{{ '### Response:\n' + m.content + eos_token + '\n\n' }}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}"""

HARMONY = """{{- '<|start|>system<|message|>Channels: analysis, final.<|end|>' }}
{%- for m in messages %}
  {%- if m.role == 'assistant' and m.tool_calls %}
    {%- set later = messages[loop.index:] | selectattr('role', 'equalto', 'assistant') | rejectattr('tool_calls', 'defined') | list %}
    {%- if m.thinking and not later %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}
    {%- set f = m.tool_calls[0].function %}
    {{- '<|start|>assistant to=functions.' + f.name + '<|channel|>commentary json<|message|>' + f.arguments | tojson + '<|call|>' }}
  {%- elif m.role == 'assistant' and loop.last and not add_generation_prompt %}
    {%- if m.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}
    {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}
  {%- elif m.role == 'assistant' %}
    {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
  {%- elif m.role == 'tool' %}
    {{- '<|start|>functions.' + m.name + ' to=assistant<|channel|>commentary<|message|>' + m.content | tojson + '<|end|>' }}
  {%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
"""As of gpt-oss: the last answer ends in <|return|> and earlier ones in <|end|>, without their reasoning."""

_ASKED = """{%- set ns = namespace(asked=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.asked = loop.index0 %}{%- endif %}{%- endfor %}
"""

GLM45 = (
    "[gMASK]<sop>"
    + _ASKED
    + """{%- for m in messages %}
  {%- if m.role == 'assistant' %}
    {{- '<|assistant|>\n<think>' + (m.reasoning_content or '' if loop.index0 > ns.asked else '') + '</think>' }}
    {%- if m.content %}{{- '\n' + m.content | trim }}{%- endif %}
    {%- for c in m.tool_calls or [] %}
      {{- '\n<tool_call>' + c.function.name + '\n' }}
      {%- for k, v in c.function.arguments.items() %}{{- '<arg_key>' + k + '</arg_key>\n<arg_value>' + v + '</arg_value>\n' }}{%- endfor %}
      {{- '</tool_call>' }}
    {%- endfor %}
  {%- elif m.role == 'tool' %}{{- '<|observation|>\n<tool_response>\n' + m.content + '\n</tool_response>' }}
  {%- else %}{{- '<|' + m.role + '|>\n' + m.content }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
)
"""No token ends an answer: the model stops at the mark of the next role."""

QWEN35 = (
    _ASKED
    + """{%- for m in messages %}
  {%- if m.role == 'assistant' and loop.index0 > ns.asked %}
    {{- '<|im_start|>assistant\n<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' + m.content + '<|im_end|>\n' }}
  {%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}"""
)
"""The generation prompt opens a <think> block, which history leaves out."""

NEMOTRON3 = (
    _ASKED
    + """{%- for m in messages %}
  {%- if m.role == 'assistant' %}
    {%- set kept = m.reasoning_content and loop.index0 > ns.asked %}
    {{- '<|im_start|>assistant\n' + ('<think>\n' + m.reasoning_content + '\n</think>\n' if kept else '<think></think>') }}
    {{- m.content + '<|im_end|>\n' }}
  {%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}"""
)
"""The generation prompt opens a <think> block, which history empties."""

EMPTIED = """{%- for m in messages %}
  {%- set last = loop.last and m.role == 'assistant' and m.reasoning_content %}
  {{- '<|im_start|>' + m.role + '\\n' }}
  {%- if m.role == 'assistant' %}
    {{- '<think>' + (m.reasoning_content if last else '') + '</think>' }}
  {%- endif %}
  {{- m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""The model generates the whole <think> block, which history empties."""

DEEPSEEK31 = """{{- bos_token }}
{%- for m in messages %}
  {%- if m.role == 'user' %}{{- '<|User|>' + m.content }}
  {%- elif m.role == 'tool' %}{{- '<|tool_output_begin|>' + m.content + '<|tool_output_end|>' }}
  {%- else %}
    {%- if messages[loop.index0 - 1].role == 'user' %}{{- '<|Assistant|></think>' }}{%- endif %}
    {{- m.content.split('</think>')[-1] }}
    {%- if m.tool_calls %}
      {{- '<|tool_calls_begin|>' + m.tool_calls[0].function.name + m.tool_calls[0].function.arguments | tojson + '<|tool_calls_end|>' }}
    {%- endif %}
    {{- '<|end_of_sentence|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role == 'user' %}{{- '<|Assistant|></think>' }}{%- endif %}"""
"""The end of an empty <think> block belongs to the generation prompt, which is left out after a tool's result."""

SPECIAL = [
    *(
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|im_sep|>",
    ),
    *("<start_of_turn>", "<end_of_turn>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    *(
        "[INST]",
        "[/INST]",
        "[TOOL_CALLS]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
    ),
]


class Kind(NamedTuple):
    """A template and what it writes of one assistant's message: (message, whether it is the last turn, end of text) -> text."""

    text: str
    written: Callable[[Message, bool, str], str]
    system: bool = True
    tools: bool = False


def _calls(m: Message, shown: Callable[[Mapping[str, Any]], str]) -> list[str]:
    return [shown(c["function"]) for c in m.get("tool_calls", [])]


def json_of(value: Any) -> str:
    import json

    return json.dumps(value, ensure_ascii=False)


def _qwen(m: Message, join: str = "\n") -> str:
    calls = _calls(
        m, lambda f: f'<tool_call>\n{{"name": "{f["name"]}", "arguments": {json_of(f["arguments"])}}}\n</tool_call>'
    )
    return join.join([*([m["content"]] if m["content"] else []), *calls])


def _qwen3(m: Message, last: bool, _: str) -> str:
    thought, _, said = m["content"].rpartition("</think>")
    reasoning = m.get("reasoning_content") or thought.split("<think>")[-1].strip("\n")
    said = said.lstrip("\n") if thought or last else said
    block = f"<think>\n{reasoning}\n</think>\n\n" if last else ""
    return block + _qwen({**m, "content": said}) + "<|im_end|>"


def _llama3(m: Message, _: bool, __: str) -> str:
    calls = _calls(m, lambda f: f'{{"name": "{f["name"]}", "parameters": {json_of(f["arguments"])}}}')
    return (calls[0] if calls else m["content"].strip()) + "<|eot_id|>"


def _mistral(m: Message, _: bool, end: str) -> str:
    calls = _calls(m, json_of)
    return (f"[TOOL_CALLS] [{', '.join(calls)}]" if calls else f" {m['content'].strip()}") + end


KINDS = {
    "llama3": Kind(LLAMA3, _llama3, tools=True),
    "qwen2.5": Kind(QWEN25, lambda m, _, __: _qwen(m) + "<|im_end|>", tools=True),
    "qwen3": Kind(QWEN3, _qwen3, tools=True),
    "mistral": Kind(MISTRAL, _mistral, tools=True),
    "mistral-last": Kind(MISTRAL_LAST, _mistral, tools=True),
    "gemma": Kind(GEMMA, lambda m, _, __: m["content"].strip() + "<end_of_turn>"),
    "phi3": Kind(PHI3, lambda m, _, __: m["content"] + "<|end|>"),
    "phi4": Kind(PHI4, lambda m, _, __: m["content"] + "<|im_end|>"),
    "chatml": Kind(CHATML, lambda m, _, __: m["content"] + "<|im_end|>"),
    "alpaca": Kind(ALPACA, lambda m, _, end: m["content"] + end),
}

TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": {"type": "object"}}}]


def said(role: str, content: str, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


TALKS: dict[str, list[Message]] = {
    "one turn": [said("user", "Two and two?"), said("assistant", "Four.")],
    "several turns": [
        *(said("user", "Say yes."), said("assistant", "yes"), said("user", "And again: yes"), said("assistant", "yes")),
        *(said("user", "yes?"), said("assistant", "No more.\n\nReally.")),
    ],
    "system": [
        *(said("system", "Answer in French."), said("user", "Hello"), said("assistant", "Bonjour")),
        *(said("user", "Good night"), said("assistant", "Bonne nuit, déjà 🙂")),
    ],
    "words of the template": [
        said("user", "What does assistant\n mean? ### Response:\nx"),
        said("assistant", "assistant\nmeans ### Response: helper [/INST"),
        said("user", "user\nassistant\n"),
        said("assistant", "### Instruction:\nnone"),
    ],
    "answer in the question": [
        said("user", "Repeat: Four. Four."),
        said("assistant", "Four."),
        said("user", "Four."),
        said("assistant", "Four."),
    ],
    "white space": [
        said("user", " a \n"),
        said("assistant", "  indented\n\ttext  \n\n"),
        said("user", "b"),
        said("assistant", "\n\nend "),
    ],
    "tools": [
        *(
            said("user", "Weather in Ulm?"),
            said("assistant", "", tool_calls=[call("weather", city="Ulm", days=[1, 2])]),
        ),
        *(said("tool", '{"celsius": 12}', name="weather"), said("assistant", "It has 12 degrees.")),
        *(said("user", "Thanks"), said("assistant", "You are welcome.")),
    ],
}

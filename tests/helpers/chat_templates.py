"""Chat templates in the manner of the families that are served, shortened to what tests look at."""

from router_service.chat_template import ChatTemplate

QWEN3 = """\
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{{- '\\n</tools><|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(last_query=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last_query = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{%- set content = m.content.split('</think>')[-1].lstrip('\\n') %}
{{- '<|im_start|>assistant\\n' }}
{%- if m.reasoning_content is string and loop.index0 > ns.last_query %}
{{- '<think>\\n' + m.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}
{{- content }}
{%- for call in m.tool_calls or [] %}
{%- if content or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

DEEPSEEK_R1 = """\
{%- if not thinking is defined %}{%- set thinking = true %}{%- endif %}
{{- bos_token }}{%- for m in messages if m.role == 'system' %}{{- m.content }}{%- endfor %}
{%- for tool in tools or [] %}
{{- '\\n### ' + tool.function.name + '\\n' + tool.function.parameters | tojson }}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<｜User｜>' + m.content }}
{%- elif m.role == 'tool' %}{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- elif m.role == 'assistant' and m.tool_calls %}
{{- '<｜Assistant｜>' + (m.content or '') + '<｜tool▁calls▁begin｜>' }}
{%- for call in m.tool_calls %}
{{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name }}
{{- '\\n```json\\n' + call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}
{%- endfor %}{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
{%- elif m.role == 'assistant' %}
{{- '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>' + ('<think>\\n' if thinking else '</think>') }}{%- endif %}"""

MISTRAL = """\
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if loop.last and tools %}{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{{- '[INST] ' + m.content + '[/INST]' }}
{%- elif m.tool_calls %}{{- '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}
{%- if call.id is not defined or call.id | length != 9 %}{{- raise_exception('ids have nine characters') }}{%- endif %}
{{- {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} | tojson }}
{{- ']</s>' if loop.last else ', ' }}
{%- endfor %}
{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}
{%- else %}{{- ' ' + (m.content | trim) + '</s>' }}{%- endif %}
{%- endfor %}"""

MISTRAL_ARGS = """\
{{- bos_token }}{%- if tools %}{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
{%- else %}{{- m.content or '' }}
{%- for call in m.tool_calls or [] %}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{%- endfor %}{{- '</s>' }}{%- endif %}
{%- endfor %}"""

NAMED = """\
{%- for m in messages %}{{- m.role + (' ' + m.name if m.name else '') + ': ' + m.content + '\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}"""


def make_template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>"})

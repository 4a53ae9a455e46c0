"""Chat templates like those of each family, written for the tests."""

LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{% set date_string = strftime_now("%Y") %}{% endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start|>system\\n\\nYear " ~ date_string ~ "\\n" + system_message + "<|stop|>" }}
{%- if tools is not none %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start|>' + message['role'] + '\\n\\n'+ message['content'] | trim + '<|stop|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + "}" }}
    {%- else %}
        {{- "<|start|>ipython\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant\\n\\n' }}{%- endif %}
"""
QWEN = """\
{%- if tools %}
    {{- '<|start|>system\\n' }}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|stop|>\\n" }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|start|>' + message.role + '\\n' + message.content + '<|stop|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- endif %}
        {{- '<|start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {{- message.content or '' }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|stop|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|stop|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>' }}{%- endif %}
{%- endif %}
"""
GEMMA = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first = messages[0]['content'] + '\n\n' -%}{%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first = "" -%}{%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (first if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}{{ item['text'] | trim }}{%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}
"""
GEMMA2 = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{%- for message in messages -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor -%}
{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}
"""
MISTRAL = """\
{%- set loop_messages = messages %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- for message in loop_messages | rejectattr("role", "equalto", "tool") %}
    {%- if message["role"] not in ["user", "assistant", "system"] %}
        {{- raise_exception("roles must alternate") }}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " + message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson(sort_keys=true, separators=(',', ':')) %}
            {{- out[:-1] }}{{- "}" if loop.last else "}, " }}
        {%- endfor %}
        {{- "]" + eos_token }}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- endif %}
{%- endfor %}
"""
PHI3 = """\
{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>
' + message['content'] + '<|stop|>
'}}{% elif message['role'] == 'user' %}{{'<|user|>
' + message['content'] + '<|stop|>
'}}{% else %}{% generation %}{% set said = message['content'] or '' %}
{{'<|assistant|>
' + said + '<|stop|>
'}}{% endgeneration %}{{ said }}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>
' }}{% else %}{{ eos_token }}{% endif %}
"""
GPT_OSS = """\
{%- macro typed(spec, required, nullable=false) -%}
    {%- if spec.type == "array" -%}
        {{- typed(spec['items'], required) + "[]" }}
    {%- elif spec.enum is defined and spec.enum is sequence -%}
        {{- '"' + spec.enum|join('" | "') + '"' }}
    {%- elif spec.type == "object" and spec.properties -%}
        {{- "{\\n" }}
        {%- for name, inner in spec.properties.items() -%}
            {{- name + ("?" if name not in (spec.required or []) else "") + ": " }}
            {{- typed(inner, spec.required or []) }}
            {%- if not loop.last -%}{{- ", " }}{%- endif -%}
        {%- endfor -%}
        {{- "}" }}
    {%- else -%}
        {{- spec.type or "any" }}
    {%- endif -%}
    {%- if nullable or spec.nullable %}{{- " | null" }}{%- endif -%}
{%- endmacro -%}
{%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{%- endif %}
{{- "<|start|>system\\nReasoning: " + reasoning_effort }}
{%- for tool in tools or [] %}
    {%- set tool = tool.function %}
    {{- "\\n// " + tool.description + "\\ntype " + tool.name + " = (_: " }}
    {{- typed(tool.parameters, []) + ") => any;" }}
{%- endfor %}
{{- "<|stop|>" }}
{%- set last_call = namespace(name=none) %}
{%- for message in loop_messages or messages -%}
    {%- if message.role == 'assistant' -%}
        {%- if "thinking" in message %}
            {{- "<|start|>analysis" + message.thinking + "<|stop|>" }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set last_call.name = call.function.name %}
            {{- "<|start|>to=functions." + call.function.name + call.function.arguments|tojson }}
            {%- continue %}
        {%- endfor %}
        {{- message.content or "" }}
    {%- elif message.role == 'tool' -%}
        {%- if last_call.name is none %}{{- raise_exception("no call") }}{%- endif %}
        {{- "<|start|>functions." + last_call.name + " " + message.content|tojson + "<|stop|>" }}
    {%- else -%}
        {{- "<|start|>" ~ message.role ~ "<|message|>" ~ message.content ~ "<|stop|>" }}
    {%- endif -%}
{%- endfor -%}
{%- if documents %}{{ documents | length }}{% endif -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""
TEMPLATES = {
    "llama3": LLAMA3,
    "qwen": QWEN,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "phi3": PHI3,
    "gpt-oss": GPT_OSS,
}

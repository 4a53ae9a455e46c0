"""Chat templates with the peculiarities of some families, and a codec for them."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from kvkeep.models.text.codec import TextCodec
from tests.models.chat_templates import TEMPLATES

CONTROL_TEXTS = ("<s>", "</s>", "<|start|>", "<|stop|>")

# Writes arguments with `tojson`, which escapes them if they are text.
QWEN25 = """\
{%- if tools %}
    {{- '<|start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}{%- endif %}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n<tool_call>\\n</tool_call><|stop|>\\n" }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|start|>system\\n' + messages[0]['content'] + '<|stop|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first)
        or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|start|>' + message.role + '\\n' + message.content + '<|stop|>\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
            {{- tool_call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|stop|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|start|>user\\n<tool_response>\\n' + message.content }}
        {{- '\\n</tool_response><|stop|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant\\n' }}{%- endif %}
"""
# Iterates over arguments, which fails if they are text.
QWEN3_CODER = """\
{%- for tool in tools or [] %}
    {{- '<function><name>' + tool.function.name + '</name>' }}
{%- endfor %}
{%- for message in messages %}
    {{- '<|start|>' + message.role + '\\n' + (message.content or '') }}
    {%- for tool_call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n<function=' + tool_call.function.name + '>\\n' }}
        {%- for name, value in tool_call.function.arguments|items %}
            {{- '<parameter=' + name + '>\\n' }}
            {{- value if value is string else value | tojson }}{{- '\\n</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|stop|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant\\n' }}{%- endif %}
"""
# Has no system role and no tools, and requires that roles alternate.
GEMMA2 = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {{- raise_exception('System role not supported') }}
{%- endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate') }}
    {%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<|start|>' + role + '\\n' + message['content'] | trim + '<|stop|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>model\\n' }}{%- endif %}
"""
# Requires ids of nine letters and digits, no text right behind results, and no empty answer.
MISTRAL_NEMO = """\
{%- if messages[0].role == 'system' %}
    {%- set system, messages = messages[0].content + '\\n\\n', messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{%- set ns = namespace(index=0) %}
{%- set last = messages | selectattr('role', 'equalto', 'user') | list | last %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {%- if (message.role == 'user') != (ns.index % 2 == 0) %}
            {{- raise_exception('After the optional system message, roles must alternate') }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and message == last %}
            {{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' + (system if message == last else '') + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in message.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should be alphanumeric') }}
            {%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
            {%- if not loop.last %}{{- ', ' }}{%- endif %}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message.role == 'assistant' %}
        {%- if not message.content %}
            {{- raise_exception('Assistant message must have content or tool calls') }}
        {%- endif %}
        {{- message.content + eos_token }}
    {%- elif message.role == 'tool' %}
        {%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 %}
            {{- raise_exception('Tool call IDs should be alphanumeric') }}
        {%- endif %}
        {{- '[TOOL_RESULTS]{"content": ' + message.content + ', "call_id": "' }}
        {{- message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""
# Strips the reasoning of all answers, and begins an answer inside its reasoning.
DEEPSEEK_R1 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|start|>assistant\\n' + message.content.split('</think>')[-1] + eos_token }}
    {%- else %}
        {{- '<|start|>' + message.role + '\\n' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant\\n<think>\\n' }}{%- endif %}
"""
# Has tools and results, but takes calls only as the assistant's text.
LFM2 = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system, messages = messages[0].content, messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{%- if tools %}
    {%- set listed = '<|tool_list_start|>' + tools | tojson + '<|tool_list_end|>' %}
    {%- set system = (system + '\\nList of tools: ' + listed) | trim %}
{%- endif %}
{%- if system %}{{- '<|start|>system\\n' + system + '<|stop|>\\n' }}{%- endif %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'tool' %}
        {%- set content = '<|tool_response_start|>' + content + '<|tool_response_end|>' %}
    {%- endif %}
    {{- '<|start|>' + message.role + '\\n' + content + '<|stop|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant\\n' }}{%- endif %}
"""
# Writes a text behind the calls and their results, and opens no turn behind another of the model.
GEMMA4 = """\
{{- bos_token }}
{%- set ns = namespace(role='', answered=false) %}
{%- for tool in tools or [] %}
    {{- '<|tool>declaration:' + tool.function.name + '<tool|>' }}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {%- if not (role == 'model' and ns.role == 'model') %}
        {{- '<|start|>' + role + '\\n' }}
    {%- endif %}
    {%- set ns.role, ns.answered = role, false %}
    {%- if message.reasoning_content and message.tool_calls %}
        {{- '<|channel>thought\\n' + message.reasoning_content + '\\n<channel|>' }}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '<|tool_call>call:' + call.function.name + '{' }}
        {%- for key, value in call.function.arguments | dictsort %}
            {{- key + ':' + ('<|"|>' + value + '<|"|>' if value is string else value | tojson) }}
            {{- '' if loop.last else ',' }}
        {%- endfor %}
        {{- '}<tool_call|>' }}
    {%- endfor %}
    {%- if message.tool_calls %}
        {%- for result in messages[loop.index:] %}
            {%- if result.role != 'tool' %}{% break %}{% endif %}
            {{- '<|tool_response>response{value:' + result.content + '}<tool_response|>' }}
            {%- set ns.answered = true %}
        {%- endfor %}
    {%- endif %}
    {{- message.content | trim }}
    {%- if message.content or not ns.answered %}{{- '<|stop|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.answered %}{{- '<|start|>model\\n' }}{%- endif %}
"""
# The same, but takes results only in the message of their calls, and other roles as they are.
GEMMA4_RESPONSES = (
    GEMMA4.replace("{%- if message.role == 'tool' %}{% continue %}{% endif %}", "")
    .replace("for result in messages[loop.index:]", "for result in message.tool_responses or []")
    .replace("{%- if result.role != 'tool' %}{% break %}{% endif %}", "")
    .replace("result.content", "result.response")
)
# Takes reasoning as a part of the content.
MINISTRAL = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {{- '[SYSTEM_PROMPT]' + messages[0].content + '[/SYSTEM_PROMPT]' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' %}
        {%- if message.content is string %}
            {{- message.content }}
        {%- else %}
            {%- for part in message.content %}
                {%- if part.type == 'text' %}
                    {{- part.text }}
                {%- elif part.type == 'thinking' %}
                    {{- '[THINK]' + part.thinking + '[/THINK]' }}
                {%- endif %}
            {%- endfor %}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('Only user, assistant and tool roles are supported') }}
    {%- endif %}
{%- endfor %}
"""
# Writes a plan before calls, and nothing else that a message with calls says.
COMMAND_A = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start|>' + message.role + '\\n' }}
    {%- if message.tool_calls %}
        {{- '<|START_THINKING|>' + (message.tool_plan or '') + '<|END_THINKING|>' }}
        {{- '<|START_ACTION|>[' }}
        {%- for call in message.tool_calls %}
            {{- '{"tool_name": "' + call.function.name + '", "parameters": ' }}
            {{- call.function.arguments | tojson + ('}' if loop.last else '}, ') }}
        {%- endfor %}
        {{- ']<|END_ACTION|>' }}
    {%- else %}
        {{- message.content }}
    {%- endif %}
    {{- '<|stop|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant\\n' }}{%- endif %}
"""
# Needs contents as lists of parts in a message with calls and in results.
COMMAND_A_REASONING = """\
{{- bos_token }}
{%- for tool in tools or [] %}{{- '{"name": "' + tool.function.name + '"}' }}{%- endfor %}
{%- for message in messages %}
    {{- '<|start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and (message.thinking or message.content[0].thinking) %}
        {{- '<|START_THINKING|>' + message.thinking + '<|END_THINKING|>' }}
    {%- endif %}
    {%- if message.tool_calls %}
        {{- '<|START_ACTION|>[' }}
        {%- for call in message.tool_calls %}
            {{- '{"tool_name": "' + call.function.name + '", "parameters": ' }}
            {{- call.function.arguments | tojson + ('}' if loop.last else '}, ') }}
        {%- endfor %}
        {{- ']<|END_ACTION|>' }}
    {%- elif message.role == 'tool' %}
        {%- for part in message.content %}{{- part | tojson }}{%- endfor %}
    {%- elif message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}{{- part.text }}{%- endfor %}
    {%- endif %}
    {{- '<|stop|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant\\n' }}{%- endif %}
"""
# Needs a description of each parameter, and knows few types.
COMMAND_R_PLUS = """\
{{- bos_token + '<|start|>system\\n' }}
{%- if messages[0].role == 'system' %}
    {{- messages[0].content }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for tool in tools %}
    {{- 'def ' + tool.function.name + '(' }}
    {%- for name, parameter in tool.function.parameters.properties | items %}
        {%- set types = {'string': 'str', 'integer': 'int', 'object': 'Dict[str, '} %}
        {{- name + ': ' + types[parameter.type] }}
        {%- if parameter.type == 'object' %}
            {{- (parameter.additionalProperties.type or 'Any') + ']' }}
        {%- endif %}
        {{- '  # ' + parameter.description + '\\n' }}
    {%- endfor %}
    {{- ')\\n' }}
{%- endfor %}
{{- '<|stop|>\\n' }}
{%- for message in messages %}
    {{- '<|start|>' + message.role + '\\n' + message.content }}
    {%- if message.tool_calls %}
        {{- '\\nAction:\\n```json\\n[' }}
        {%- for call in message.tool_calls %}
            {{- '{"tool_name": "' + call.function.name + '", "parameters": ' }}
            {{- call.function.arguments | tojson + ('}' if loop.last else '}, ') }}
        {%- endfor %}
        {{- ']```' }}
    {%- endif %}
    {{- '<|stop|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant\\n' }}{%- endif %}
"""
# Has tools and any role, but takes calls only as the assistant's text.
GRANITE3 = """\
{%- if tools %}{{- '<|start|>available_tools<|end|>' + tools | tojson + '<|stop|>\\n' }}{%- endif %}
{#- respond only with <|tool_call|> followed by a JSON list of tools used #}
{%- for message in messages %}
    {{- '<|start|>' + message.role + '<|end|>' + message.content + '<|stop|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>' }}{%- endif %}
"""
# Takes a call as a message of its own, whose metadata are the tool's name.
GLM4 = """\
{%- if tools %}{{- '<|system|>\\n' + tools | tojson }}{%- endif %}
{%- for message in messages if message.role in ('system', 'user', 'assistant', 'observation') %}
    {{- '<|' + message.role + '|>' + message.get('metadata', '') + '\\n' + message.content }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""
# Takes tools as a text in the system message, and any role.
PHI4_MINI = """\
{%- for message in messages %}
    {{- '<|' + message.role + '|>' + message.content }}
    {%- if message.role == 'system' and message.tools %}
        {{- '<|tool|>' + message.tools + '<|/tool|>' }}
    {%- endif %}
    {{- '<|stop|>' }}
{%- endfor %}
{{- '<|assistant|>' if add_generation_prompt else eos_token }}
"""
# Takes tools as another field of the system message, and results of a role of its own.
OLMO3 = """\
{%- if messages[0].role != 'system' %}
    {{- '<|start|>system\\nYou have no functions. <functions></functions><|stop|>\\n' }}
{%- endif %}
{%- for message in messages if message.role in ('system', 'user', 'assistant', 'environment') %}
    {{- '<|start|>' + message.role + '\\n' + message.content }}
    {%- if message.role == 'system' %}
        {{- ' <functions>' + message.get('functions', '') + '</functions>' }}
    {%- elif message.get('function_calls') %}
        {{- '<function_calls>' + message.function_calls + '</function_calls>' }}
    {%- endif %}
    {{- '<|stop|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant\\n' }}{%- endif %}
"""
ALL_TEMPLATES = {
    **TEMPLATES,
    "qwen2.5": QWEN25,
    "qwen3-coder": QWEN3_CODER,
    "gemma2": GEMMA2,
    "mistral-nemo": MISTRAL_NEMO,
    "deepseek-r1": DEEPSEEK_R1,
    "lfm2": LFM2,
    "gemma4": GEMMA4,
    "gemma4 responses": GEMMA4_RESPONSES,
    "ministral": MINISTRAL,
    "command-a": COMMAND_A,
    "command-a-reasoning": COMMAND_A_REASONING,
    "command-r+": COMMAND_R_PLUS,
    "granite3": GRANITE3,
    "glm4": GLM4,
    "phi4-mini": PHI4_MINI,
    "olmo3": OLMO3,
}
_GEMMA4_CONTROLS = tuple(
    f"<{start}{part}{end}>"
    for part in ("tool", "tool_call", "tool_response", "channel")
    for start, end in (("|", ""), ("", "|"))
)
# The control tokens that only one model has.
OWN_CONTROLS = {
    "phi4-mini": (
        *("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|/tool|>"),
        *("<|tool_call|>", "<|/tool_call|>", "<|tool_response|>"),
    ),
    "glm4": ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    "granite3": ("<|end|>", "<|tool_call|>"),
    "ministral": (
        *("[INST]", "[/INST]", "[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"),
        *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    ),
    "command-a": tuple(
        f"<|{place}_{part}|>" for part in ("THINKING", "ACTION") for place in ("START", "END")
    ),
    "lfm2": tuple(
        f"<|tool_{part}_{place}|>"
        for part in ("list", "call", "response")
        for place in ("start", "end")
    ),
    "gemma4": _GEMMA4_CONTROLS,
    "gemma4 responses": _GEMMA4_CONTROLS,
}


def write_codec(folder: Path, template: str, *control_texts: str) -> TextCodec:
    """Write a tokenizer of all bytes and control tokens, with a template, and open it."""
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={token: n for n, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    texts = (*CONTROL_TEXTS, *control_texts)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in texts])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)
    return TextCodec.open(folder)

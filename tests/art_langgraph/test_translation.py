"""What providers' classes bind, in OpenAI's words."""

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_google_genai import ChatGoogleGenerativeAI
from langchain_ollama import ChatOllama

from art_langgraph.translation import UntranslatableError, options, plain_messages


def test_messages_in_a_providers_own_form_become_plain():
    given = [
        SystemMessage([{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]),
        HumanMessage("ask"),
        AIMessage(
            [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "Let me look."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}},
            ],
            tool_calls=[{"name": "weather", "args": {"city": "Oslo"}, "id": "t1"}],
        ),
        ToolMessage([{"type": "text", "text": "sunny"}], tool_call_id="t1"),
        HumanMessage([{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:x"}}]),
    ]
    plain = plain_messages(given)
    assert [message.content for message in plain[:4]] == ["Be brief.", "ask", "Let me look.", "sunny"]
    assert plain[2].tool_calls[0]["args"] == {"city": "Oslo"}
    assert plain[4].content == given[4].content
    assert given[2].content[0]["type"] == "thinking"  # the app's own message is as it was


def test_googles_function_declarations_become_tools():
    declared = {
        "name": "weather",
        "description": "The weather.",
        "parameters": {"type": "OBJECT", "properties": {"city": {"type": "STRING"}}, "required": ["city"]},
    }
    config = {"function_calling_config": {"mode": "ANY", "allowed_function_names": ["weather"]}}
    model = ChatGoogleGenerativeAI(model="gemini-3-pro", api_key="k")
    found = options(model, {"tools": [{"function_declarations": [declared]}], "tool_config": config})
    function = found["tools"][0]["function"]
    assert function["parameters"]["type"] == "object"
    assert function["parameters"]["properties"]["city"]["type"] == "string"
    assert found["tool_choice"] == {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("wish", "found"),
    [
        (True, "required"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "function", "function": {"name": "weather"}}, "weather"),
        ({"type": "tool", "name": "weather"}, "weather"),
        (["weather"], "weather"),
        (["weather", "time"], "required"),
        ("weather", "weather"),
        (None, None),
    ],
)
def test_wishes_for_a_tool(wish, found):
    tools = [{"name": name, "input_schema": {"type": "object", "properties": {}}} for name in ("weather", "time")]
    choice = options(ChatOllama(model="m"), {"tools": tools, "tool_choice": wish}).get("tool_choice")
    assert (choice["function"]["name"] if isinstance(choice, dict) else choice) == found


def test_one_tool_at_a_time():
    tools = [{"name": "weather", "input_schema": {"type": "object", "properties": {}}}]
    wish = {"type": "auto", "disable_parallel_tool_use": True}
    found = options(ChatOllama(model="m"), {"tools": tools, "tool_choice": wish})
    assert (found["tool_choice"], found["parallel_tool_calls"]) == ("auto", False)


def test_settings_of_the_call_win_over_the_models():
    model = ChatOllama(model="m", temperature=0.1, num_predict=-1, top_p=0.9)
    found = options(model, {"options": {"temperature": 0.2}, "top_p": 0.8, "stop": ["x"]})
    assert found == {"temperature": 0.2, "top_p": 0.8, "stop": ["x"]}


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        ({"format": "json"}, "json_object"),
        ({"format": {"type": "object"}}, "json_schema"),
        ({"response_mime_type": "application/json"}, "json_object"),
        ({"response_mime_type": "application/json", "response_json_schema": {"type": "OBJECT"}}, "json_schema"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}}, "json_schema"),
        ({}, None),
    ],
)
def test_wishes_for_json(asked, kind):
    found = options(ChatOllama(model="m"), asked).get("response_format")
    assert (found and found["type"]) == kind
    if kind == "json_schema":
        assert found["json_schema"]["schema"] == {"type": "object"}


@pytest.mark.parametrize("tool", [{"google_search": {}}, {"type": "web_search_20250305", "name": "web_search"}])
def test_a_providers_own_tool_has_no_translation(tool):
    with pytest.raises(UntranslatableError, match="own tool"):
        options(ChatOllama(model="m"), {"tools": [tool]})

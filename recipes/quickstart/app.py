"""A shop's support agent: an ordinary LangGraph app. It knows nothing of training.

    OPENAI_API_KEY=... python recipes/quickstart/app.py "Where is order 4417?"

It looks things up in the shop's database with four tools and answers with what it found.
"""

import hashlib
import sqlite3
import sys
from functools import cache

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

COLORS = (
    "amber black blue brass cedar coral cream green grey indigo ivory maple olive pink red silver teal white".split()
)
THINGS = (
    "apron basket bench blanket bottle bowl broom bucket candle chair clock cup desk drill fan fork hammer jar kettle "
    "knife ladder lamp mirror mug pan pillow plate pot rug saw scarf shelf spoon stool table tent towel tray vase"
).split()
FIRST_NAMES = (
    "Ada Ana Ben Carl Clara Dan Elena Emil Eva Finn Greta Hugo Ida Ivan Jana Karl Lena Leo Lucas Maria Marta Max Mia "
    "Nina Noah Olga Oscar Paul Petra Rosa Sara Sofia Tom Vera"
).split()
LAST_NAMES = (
    "Adler Bauer Costa Diaz Ekman Fischer Garcia Hansen Ivanov Jensen Keller Lopez Moreau Novak Olsen Petrov Quinn "
    "Rossi Silva Torres Urban Vega Weber Young"
).split()
CITIES = (
    "Aarhus Athens Basel Berlin Bergen Bilbao Bologna Bremen Bruges Cardiff Cologne Cork Dresden Dublin Genoa Geneva "
    "Ghent Glasgow Graz Hamburg Helsinki Leeds Leipzig Lille Lisbon London Lyon Madrid Malmo Milan Munich Naples Nice "
    "Oslo Padua Paris Porto Prague Riga Rome Seville Sofia Split Turin Vienna Vilnius Warsaw Zagreb Zurich"
).split()
MONTHS = "January February March April May June July August September October November December".split()


def _number(kind: str, key: str, low: int, high: int) -> int:
    """A number from low to high - 1 that is always the same for this key."""
    digest = hashlib.sha256(f"{kind}/{key}".encode()).digest()
    return low + int.from_bytes(digest[:4], "big") % (high - low)


@cache
def database() -> sqlite3.Connection:
    """The shop's database: every product, every customer, the orders 1000 to 9999."""
    base = sqlite3.connect(":memory:", check_same_thread=False)
    base.execute("CREATE TABLE products (name TEXT PRIMARY KEY, stock INTEGER)")
    base.execute("CREATE TABLE customers (name TEXT PRIMARY KEY, phone TEXT, city TEXT)")
    base.execute("CREATE TABLE orders (id TEXT PRIMARY KEY, arrives TEXT)")
    products = [f"{color} {thing}" for color in COLORS for thing in THINGS]
    base.executemany("INSERT INTO products VALUES (?, ?)", [(p, _number("stock", p, 11, 990)) for p in products])
    people = [f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES]
    for person in people:
        phone, city = f"555-{_number('phone', person, 1000, 9999)}", CITIES[_number("city", person, 0, len(CITIES))]
        base.execute("INSERT INTO customers VALUES (?, ?, ?)", (person, phone, city))
    for order in range(1000, 10000):
        day, month = _number("day", str(order), 1, 29), MONTHS[_number("month", str(order), 0, 12)]
        base.execute("INSERT INTO orders VALUES (?, ?)", (str(order), f"{day} {month}"))
    return base


def _lookup(sql: str, key: str) -> str:
    row = database().execute(sql, (key,)).fetchone()
    return str(row[0]) if row else f"nothing found for {key!r}"


@tool
def order_arrival(order: str) -> str:
    """The day an order arrives."""
    return _lookup("SELECT arrives FROM orders WHERE id = ?", order.strip().lstrip("#"))


@tool
def product_stock(product: str) -> str:
    """How many pieces of a product are in stock."""
    return _lookup("SELECT stock FROM products WHERE name = ?", product.strip().lower())


@tool
def customer_phone(name: str) -> str:
    """The phone number of a customer."""
    return _lookup("SELECT phone FROM customers WHERE name = ?", name.strip())


@tool
def customer_city(name: str) -> str:
    """The city where a customer lives."""
    return _lookup("SELECT city FROM customers WHERE name = ?", name.strip())


TOOLS = [order_arrival, product_stock, customer_phone, customer_city]

PROMPT = [
    SystemMessage("You are a shop's assistant with tools. Never answer from memory: call a tool first."),
    HumanMessage("When is order 812 coming?"),
    AIMessage("", tool_calls=[{"name": "order_arrival", "args": {"order": "812"}, "id": "example-1"}]),
    ToolMessage("30 May", tool_call_id="example-1"),
    AIMessage("It arrives on 30 May."),
    HumanMessage("Which number has Kim Doe?"),
    AIMessage("", tool_calls=[{"name": "customer_phone", "args": {"name": "Kim Doe"}, "id": "example-2"}]),
    ToolMessage("555-100", tool_call_id="example-2"),
    AIMessage("The number is 555-100."),
    HumanMessage("How many gold rings do we have?"),
    AIMessage("", tool_calls=[{"name": "product_stock", "args": {"product": "gold ring"}, "id": "example-3"}]),
    ToolMessage("52", tool_call_id="example-3"),
    AIMessage("We have 52."),
    HumanMessage("Where is Jo Roe from?"),
    AIMessage("", tool_calls=[{"name": "customer_city", "args": {"name": "Jo Roe"}, "id": "example-4"}]),
    ToolMessage("Tokyo", tool_call_id="example-4"),
    AIMessage("The city is Tokyo."),
]

model = ChatOpenAI(model="gpt-4o-mini", temperature=0, max_completion_tokens=40).bind_tools(TOOLS)


async def agent(state: MessagesState) -> dict:
    return {"messages": [await model.ainvoke(PROMPT + state["messages"])]}


builder = StateGraph(MessagesState)
builder.add_node("agent", agent)
builder.add_node("tools", ToolNode(TOOLS))
builder.add_edge(START, "agent")
builder.add_conditional_edges("agent", tools_condition)
builder.add_edge("tools", "agent")
graph = builder.compile().with_config(recursion_limit=4)  # one lookup, one answer


if __name__ == "__main__":
    import asyncio

    answer = asyncio.run(graph.ainvoke({"messages": [HumanMessage(sys.argv[1])]}))
    print(answer["messages"][-1].content)

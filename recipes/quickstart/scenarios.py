"""The questions: what the agent is trained on, and what it is measured on.

Values (orders, products, customers) and wordings of the held-out questions never occur in training.
"""

import hashlib
import random
from typing import Any

from app import COLORS, FIRST_NAMES, LAST_NAMES, THINGS, database

TRAIN_WORDINGS = {
    "order_arrival": [
        "When does order {key} arrive?",
        "Where is order {key}?",
        "My order number is {key}. When will it be here?",
        "What day is order {key} due?",
        "I am waiting for order {key}, when do I get it?",
        "Delivery date of order {key}, please.",
        "Tell me the arrival day of order {key}.",
        "Has order {key} a delivery day?",
    ],
    "product_stock": [
        "How many pieces of the {key} are in stock?",
        "Is there a {key} left? How many?",
        "What is our stock of the {key}?",
        "Count the {key} for me.",
        "Number of pieces of {key} we have, please.",
        "Do we still have the {key}, and how many?",
        "Tell me how many {key} are on the shelf.",
        "The {key}: how many remain?",
    ],
    "customer_phone": [
        "What is the phone number of {key}?",
        "How can I call {key}?",
        "I need to ring {key}, which number?",
        "Phone of {key}, please.",
        "Tell me the number to reach {key}.",
        "Give me the telephone number of {key}.",
        "{key} is a customer. What number do I dial?",
        "Which phone does {key} have?",
    ],
    "customer_city": [
        "Where does {key} live?",
        "What is the home town of {key}?",
        "I want to visit {key}, to which city do I go?",
        "City of {key}, please.",
        "Tell me the city that {key} is from.",
        "In what place is {key} at home?",
        "{key} is a customer. Which city is that in?",
        "Which town does {key} come from?",
    ],
}
HELD_OUT_WORDINGS = {
    "order_arrival": [
        "When can I expect order {key}?",
        "On which date will order {key} be delivered?",
        "Please check when order {key} comes.",
        "What is the arrival date for order {key}?",
    ],
    "product_stock": [
        "How many of the {key} do we have left?",
        "Check the stock of {key}, please.",
        "How much stock is there of the {key}?",
        "What quantity of the {key} is available?",
    ],
    "customer_phone": [
        "What is {key}'s phone number?",
        "Please find the phone number for {key}.",
        "Can you look up the telephone of {key}?",
        "At which number can I phone {key}?",
    ],
    "customer_city": [
        "In which city does {key} live?",
        "Please look up the city of {key}.",
        "What town is {key} living in?",
        "Can you tell me where {key} is based?",
    ],
}
ARGUMENT = {"order_arrival": "order", "product_stock": "product", "customer_phone": "name", "customer_city": "name"}
TABLE = {
    "order_arrival": "SELECT arrives FROM orders WHERE id = ?",
    "product_stock": "SELECT stock FROM products WHERE name = ?",
    "customer_phone": "SELECT phone FROM customers WHERE name = ?",
    "customer_city": "SELECT city FROM customers WHERE name = ?",
}


def _keys(tool: str) -> list[str]:
    if tool == "order_arrival":
        return [str(number) for number in range(1000, 10000)]
    if tool == "product_stock":
        return [f"{color} {thing}" for color in COLORS for thing in THINGS]
    return [f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES]


def _held_out(key: str) -> bool:
    """One key in five is kept for the held-out questions."""
    return hashlib.sha256(key.encode()).digest()[0] % 5 == 0


def make(count: int, *, held_out: bool, seed: int = 0) -> list[dict[str, Any]]:
    """``count`` different questions, the tools in turn; the same seed gives the same questions."""
    rng = random.Random(f"{seed}/{held_out}")
    wordings = HELD_OUT_WORDINGS if held_out else TRAIN_WORDINGS
    pools = {}
    for tool in wordings:
        keys = [key for key in _keys(tool) if _held_out(key) == held_out]
        rng.shuffle(keys)
        pools[tool] = keys
    scenarios = []
    for index in range(count):
        tool = list(wordings)[index % len(wordings)]
        key = pools[tool].pop()
        answer = str(database().execute(TABLE[tool], (key,)).fetchone()[0])
        question = rng.choice(wordings[tool]).format(key=key)
        scenarios.append(
            {
                "id": f"{'held-out' if held_out else 'train'}-{index:04d}",
                "messages": [{"role": "user", "content": question}],
                "tool": tool,
                "arguments": {ARGUMENT[tool]: key},
                "answer": answer,
            }
        )
    return scenarios
